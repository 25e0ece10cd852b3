//! How a hybrid batch runs.

use serde::{Deserialize, Serialize};

/// How the prefills and the decodes of a hybrid batch run.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[non_exhaustive]
pub enum PodMode {
    /// The way that is predicted to be fastest (in options only).
    #[default]
    Auto,
    /// One after the other.
    Serial,
    /// On two streams, with the kernels that run alone. A CPU has no streams: its threads take all items in one order.
    Streams,
    /// Side by side on every SM, with co-resident kernels, or in one kernel (`Tickets`) on devices that have only that. On two
    /// streams if the device has neither for the heads; [`PodPlan::mode`] says what was planned.
    Fused,
    /// Side by side in one kernel, whose CTAs take prefill or decode work by a ticket of their SM
    /// (`PodConfig::by_tickets`). On two streams if the device has no such kernel for the heads.
    Tickets,
}

/// How a hybrid batch runs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PodPlan {
    /// Never [`PodMode::Auto`].
    pub mode: PodMode,
    /// Fused: the index of the device's configuration.
    pub config: Option<u32>,
    /// Fused: how CTAs of the two alternate on an SM.
    pub tickets: Tickets,
    /// Fused: how many CTAs of each are launched.
    #[serde(default)]
    pub ctas: CtaSplit,
    /// The predicted times on which the choice is based.
    pub forecast: PodForecast,
}

/// CTAs of two persistent kernels that share SMs; zero for other kernels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CtaSplit {
    /// Prefill CTAs, at most one for each SM.
    pub prefill: u32,
    /// Decode CTAs: one for each SM, and a second one on SMs without a prefill CTA.
    pub decode: u32,
}

impl CtaSplit {
    /// With this number of prefill CTAs on a device.
    #[must_use]
    pub const fn new(sms: u32, prefill: u32) -> Self {
        let prefill = if prefill < sms { prefill } else { sms };
        Self {
            prefill,
            decode: 2 * sms - prefill,
        }
    }
}

/// The mix of prefill CTAs and decode CTAs that start on an SM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Tickets {
    /// Prefill CTAs.
    pub prefill: u32,
    /// Decode CTAs.
    pub decode: u32,
}

impl From<Tickets> for [u32; 2] {
    fn from(tickets: Tickets) -> Self {
        [tickets.prefill, tickets.decode]
    }
}

/// Predicted times of a hybrid batch, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PodForecast {
    /// Prefill alone, in its best shape.
    pub prefill_ns: f64,
    /// Decode alone.
    pub decode_ns: f64,
    /// One after the other.
    pub serial_ns: f64,
    /// On two streams.
    pub streams_ns: f64,
    /// In the best fused configuration; `f64::MAX` if there is none.
    pub fused_ns: f64,
    /// When the prefills and the decodes end in that configuration.
    #[serde(default)]
    pub fused_done_ns: [f64; 2],
}

impl PodForecast {
    /// The mode with the shortest time; the simpler one if times are equal.
    #[must_use]
    pub fn best(&self) -> PodMode {
        let Self {
            serial_ns,
            streams_ns,
            fused_ns,
            ..
        } = *self;
        if fused_ns < serial_ns.min(streams_ns) {
            PodMode::Fused
        } else if streams_ns < serial_ns {
            PodMode::Streams
        } else {
            PodMode::Serial
        }
    }

    /// The time of the batch in a mode; `f64::MAX` if the device does not support it.
    #[must_use]
    pub fn of(&self, mode: PodMode) -> f64 {
        match mode {
            PodMode::Serial => self.serial_ns,
            PodMode::Streams => self.streams_ns,
            PodMode::Fused | PodMode::Tickets => self.fused_ns,
            PodMode::Auto => self.of(self.best()),
        }
    }

    /// When the prefills and the decodes finish in a mode, if they begin at the same time or run one after the other.
    pub(in crate::plan) fn done(&self, mode: PodMode) -> [f64; 2] {
        let alone = [self.prefill_ns, self.decode_ns];
        match mode {
            PodMode::Fused | PodMode::Tickets => self.fused_done_ns,
            PodMode::Streams => alike(self.streams_ns, alone),
            PodMode::Serial | PodMode::Auto => alone,
        }
    }
}

/// When both operations finish if they take `time` together and slow down alike.
pub fn alike(time: f64, alone: [f64; 2]) -> [f64; 2] {
    let longer = alone[0].max(alone[1]);
    alone.map(|ns| match ns == longer {
        true => time, // to the last bit
        false => time * ns / longer,
    })
}
