//! Hybrid batches: prefill and decode on the same SMs at the same time (POD-Attention).
//!
//! Prefill lives on the tensor cores, decode on the memory. Where both are in a batch, the plan says
//! whether they run one after the other, on two streams, or fused; in which configuration; and how CTAs of
//! the two take turns on an SM.

use kernels_gpu::sm80::pod::is_prefill;
use serde::{Deserialize, Serialize};

use super::{DeviceDescription, PlanOptions};

mod forecast;

pub(super) use forecast::PrefillLoad;
pub use forecast::{PodConfig, PodDescription, PodForecast, Share};

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
    /// So, but in one kernel, whose CTAs take turns by tickets of their SM ([`PodConfig::by_tickets`]).
    Tickets,
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

/// How a hybrid batch runs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PodPlan {
    /// Never [`PodMode::Auto`].
    pub mode: PodMode,
    /// Fused: which of the device's configurations.
    pub config: Option<u32>,
    /// Fused: how CTAs of the two take turns on an SM.
    pub tickets: Tickets,
    /// Fused: how many CTAs of each are launched.
    #[serde(default)]
    pub seats: Seats,
    /// What made the choice.
    pub forecast: PodForecast,
}

impl PodPlan {
    /// By the times that the operations take alone.
    pub(super) fn choose(
        device: &DeviceDescription,
        options: &PlanOptions,
        prefill: &PrefillLoad,
        fused: impl Iterator<Item = Option<PrefillLoad>>,
        decode_ns: f64,
    ) -> Self {
        let by_tickets = options.pod == PodMode::Tickets;
        let fused = fused.zip(&device.pod.configs);
        let fused = fused.map(|(load, config)| load.filter(|_| config.by_tickets || !by_tickets));
        let (forecast, choice) = device.pod.forecast(device.sms, prefill, fused, decode_ns);
        let mode = match options.pod {
            PodMode::Auto => forecast.best(),
            PodMode::Fused | PodMode::Tickets if choice.is_none() => PodMode::Streams,
            PodMode::Tickets => PodMode::Fused,
            mode => mode,
        };
        let choice = choice.filter(|_| mode == PodMode::Fused);
        let mut seats = choice.map_or(Seats::default(), |choice| choice.seats);
        if let (Some(ctas), true) = (options.prefill_ctas, seats != Seats::default()) {
            seats = Seats::new(device.sms, ctas.max(1));
        }
        Self {
            mode,
            config: choice.map(|choice| choice.config),
            tickets: Tickets {
                prefill: 0,
                decode: 0,
            },
            seats,
            forecast,
        }
    }
}

/// CTAs of two persistent kernels that share SMs; zero where the kernels are not such.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Seats {
    /// Prefill CTAs, at most one for each SM.
    pub prefill: u32,
    /// Decode CTAs: one for each SM, and a second one where there is no prefill.
    pub decode: u32,
}

impl Seats {
    /// With so many prefill CTAs on a device.
    #[must_use]
    pub const fn new(sms: u32, prefill: u32) -> Self {
        let prefill = if prefill < sms { prefill } else { sms };
        Self {
            prefill,
            decode: 2 * sms - prefill,
        }
    }
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
        if is_prefill(self.prefill, self.decode, ticket) {
            PodOp::Prefill
        } else {
            PodOp::Decode
        }
    }
}

impl From<Tickets> for [u32; 2] {
    fn from(tickets: Tickets) -> Self {
        [tickets.prefill, tickets.decode]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
