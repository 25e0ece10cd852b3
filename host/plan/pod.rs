//! Hybrid batches: prefill and decode on the same SMs at the same time (POD-Attention).
//!
//! Prefill lives on the tensor cores, decode on the memory. Where both are in a batch, the plan says
//! whether they run one after the other, on two streams, or fused; in which configuration; and how CTAs of
//! the two take turns on an SM.

use serde::{Deserialize, Serialize};

use super::Tile;

/// How the prefills and the decodes of a hybrid batch run.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[non_exhaustive]
pub enum PodMode {
    /// As is predicted to take the shortest (in options only).
    #[default]
    Auto,
    /// One after the other.
    Serial,
    /// On two streams, with the kernels that run alone.
    Streams,
    /// Side by side on every SM, with tiles that leave room for each other.
    Fused,
}

/// In which proportion CTAs of the two operations start on an SM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum TicketPolicy {
    /// As many of each as there is work, evenly mixed: both end at about the same time.
    #[default]
    Proportional,
    /// In turns.
    FiftyFifty,
}

/// What a device can do with hybrid batches, and what it costs there.
///
/// By default nothing overlaps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PodDescription {
    /// The part of the shorter operation's time that two plain streams do not hide.
    pub streams_loss: f64,
    /// Configurations of the fused form; none: it is not used on this device.
    pub configs: Vec<PodConfig>,
}

/// One shape of the fused form.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PodConfig {
    /// Short name.
    pub name: String,
    /// CTAs on an SM, of both operations.
    pub ctas_per_sm: u32,
    /// Tile of the prefills.
    pub prefill: Tile,
    /// Query heads of a KV head that it holds at most, as in [`QueryStep::pack`](super::QueryStep::pack).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefill_pack: Option<u32>,
    /// Tile of the decodes; none: as they have alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decode: Option<Tile>,
    /// Decode units that one CTA runs side by side.
    pub virtual_decodes: u32,
    /// Bytes of keys and values that the decodes of an SM keep in flight beside prefill.
    pub decode_bytes_in_flight: u32,
    /// What prefill alone takes in this shape, in parts of what it takes in its best.
    pub prefill_slowdown: f64,
    /// The same for decode.
    pub decode_slowdown: f64,
    /// The part of the shorter operation's time that is not hidden.
    pub overlap_loss: f64,
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
    /// In the best fused configuration; `f64::MAX` where there is none.
    pub fused_ns: f64,
}

/// How a hybrid batch runs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PodPlan {
    /// Never [`PodMode::Auto`].
    pub mode: PodMode,
    /// Fused: which of the device's configurations.
    pub config: Option<u32>,
    /// Fused: how CTAs of the two take turns on an SM.
    pub tickets: Tickets,
    /// What made the choice.
    pub forecast: PodForecast,
}

/// An operation of a hybrid batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum PodOp {
    /// Compute.
    Prefill,
    /// Memory.
    Decode,
}

/// A mix of so many prefill CTAs and so many decode CTAs, exact over their sum and even in between.
///
/// ```
/// use tandem_attn::plan::pod::{PodOp, Tickets};
///
/// let tickets = Tickets { prefill: 2, decode: 5 };
/// let ops: Vec<_> = (0..7).map(|ticket| tickets.op(ticket)).collect();
/// use PodOp::{Decode as D, Prefill as P};
/// assert_eq!(ops, [P, D, D, P, D, D, D]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Tickets {
    /// Prefill CTAs.
    pub prefill: u32,
    /// Decode CTAs.
    pub decode: u32,
}

impl Tickets {
    /// The mix for so many CTAs of each, in lowest terms.
    #[must_use]
    pub const fn new(policy: TicketPolicy, prefill: u32, decode: u32) -> Self {
        match policy {
            TicketPolicy::FiftyFifty if prefill > 0 && decode > 0 => Self {
                prefill: 1,
                decode: 1,
            },
            _ => {
                let divisor = super::balance::gcd(prefill, decode);
                if divisor == 0 {
                    return Self {
                        prefill: 0,
                        decode: 0,
                    };
                }
                Self {
                    prefill: prefill / divisor,
                    decode: decode / divisor,
                }
            }
        }
    }

    /// What the CTA with a ticket of its SM does. A line of Bresenham's: of the first `t` tickets
    /// `⌈t · prefill / (prefill + decode)⌉` are for prefill, whatever `t`.
    #[must_use]
    pub const fn op(&self, ticket: u32) -> PodOp {
        let (prefill, all) = (
            self.prefill as u64,
            self.prefill as u64 + self.decode as u64,
        );
        if all == 0 {
            return PodOp::Decode;
        }
        // Only the place within a period matters; the product then fits 64 bits.
        let before = (ticket as u64 % all * prefill).div_ceil(all);
        let after = ((ticket as u64 % all + 1) * prefill).div_ceil(all);
        if after > before {
            PodOp::Prefill
        } else {
            PodOp::Decode
        }
    }
}

impl Default for PodDescription {
    fn default() -> Self {
        Self {
            streams_loss: 1.0,
            configs: Vec::new(),
        }
    }
}

impl PodDescription {
    /// Predicts the times of a hybrid batch, and the best configuration of the fused form.
    #[must_use]
    pub fn forecast(&self, prefill_ns: f64, decode_ns: f64) -> (PodForecast, Option<u32>) {
        let overlapped = |p: f64, d: f64, loss: f64| p.max(d) + loss * p.min(d);
        let fused = |config: &PodConfig| {
            let (p, d) = (
                prefill_ns * config.prefill_slowdown,
                decode_ns * config.decode_slowdown,
            );
            overlapped(p, d, config.overlap_loss)
        };
        let times = self.configs.iter().map(fused).zip(0..);
        let best = times.min_by(|a, b| a.0.total_cmp(&b.0));
        let forecast = PodForecast {
            prefill_ns,
            decode_ns,
            serial_ns: prefill_ns + decode_ns,
            streams_ns: overlapped(prefill_ns, decode_ns, self.streams_loss),
            fused_ns: best.map_or(f64::MAX, |(time, _)| time),
        };
        (forecast, best.map(|(_, config)| config))
    }
}

impl PodForecast {
    /// The mode with the shortest time; the simpler one where they are equal.
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

    /// The paper's bound on what overlap can bring: both at their best, a tenth of the shorter not hidden.
    #[must_use]
    pub fn peak_ns(&self) -> f64 {
        self.prefill_ns.max(self.decode_ns) + 0.1 * self.prefill_ns.min(self.decode_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::DeviceDescription;

    #[test]
    fn tickets_are_exact_over_a_period_and_even_within() {
        for (prefill, decode) in [
            (1, 1),
            (1, 2),
            (100, 199),
            (7, 3),
            (1, 1000),
            (0, 4),
            (4, 0),
            (u32::MAX, u32::MAX - 1),
        ] {
            let tickets = Tickets::new(TicketPolicy::Proportional, prefill, decode);
            let all = u64::from(tickets.prefill) + u64::from(tickets.decode);
            let mut prefills = 0u64;
            for ticket in 0..all.min(5000) {
                prefills += u64::from(tickets.op(ticket as u32) == PodOp::Prefill);
                let exact = (ticket + 1) as f64 * f64::from(prefill)
                    / (f64::from(prefill) + f64::from(decode));
                assert!(
                    (prefills as f64 - exact).abs() <= 1.0,
                    "{prefill}:{decode} at {ticket}: {prefills} of {exact}"
                );
            }
            if all <= 5000 {
                assert_eq!(prefills, u64::from(tickets.prefill));
            }
        }
    }

    #[test]
    fn policies() {
        let proportional = Tickets::new(TicketPolicy::Proportional, 100, 199);
        assert_eq!(
            proportional,
            Tickets {
                prefill: 100,
                decode: 199
            }
        );
        assert_eq!(
            Tickets::new(TicketPolicy::Proportional, 64, 128),
            Tickets {
                prefill: 1,
                decode: 2
            }
        );
        assert_eq!(
            Tickets::new(TicketPolicy::FiftyFifty, 100, 199),
            Tickets {
                prefill: 1,
                decode: 1
            }
        );
        assert_eq!(
            Tickets::new(TicketPolicy::FiftyFifty, 0, 9),
            Tickets {
                prefill: 0,
                decode: 1
            }
        );
        assert_eq!(
            Tickets::new(TicketPolicy::Proportional, 0, 0).op(3),
            PodOp::Decode
        );
    }

    #[test]
    fn the_shortest_forecast_wins() {
        let mut pod = DeviceDescription::named("h200").unwrap().pod;
        let config = &mut pod.configs[0];
        (config.prefill_slowdown, config.decode_slowdown) = (1.05, 1.02);
        config.overlap_loss = 0.2;
        let (even, config) = pod.forecast(400e3, 400e3);
        assert_eq!((even.best(), config), (PodMode::Fused, Some(0)));
        assert!(even.fused_ns < 0.7 * even.serial_ns && even.fused_ns > even.peak_ns());
        // Hardly any decode: the fused shape costs prefill more than there is to hide.
        let (lopsided, _) = pod.forecast(1000e3, 5e3);
        assert_ne!(lopsided.best(), PodMode::Fused);
        let none = PodDescription::default();
        assert_eq!(none.forecast(1.0, 1.0).0.best(), PodMode::Serial);
    }
}
