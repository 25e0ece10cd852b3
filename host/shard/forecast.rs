//! Predicted times of ranks: each runs its plan, then the exchange.

use serde::{Deserialize, Serialize};

use super::Share;
use crate::{
    plan::{DeviceDescription, Plan},
    problem::Spec,
};

/// The link between the GPUs of a host.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Bandwidth at which a GPU reads from all other GPUs together.
    pub read_bytes_per_ns: f64,
    /// Time of an exchange without data: a launch, a signal to the others, and a read of their signals.
    pub exchange_ns: f64,
}

impl Link {
    /// NVLink 4 with direct reads, as measured on two H200.
    pub const NVLINK: Self = Self {
        read_bytes_per_ns: 394.0,
        exchange_ns: 5_000.0,
    };

    /// The time of an exchange, in which a rank reads the results of this number of tokens from all other ranks of its
    /// group.
    #[must_use]
    pub fn exchange_ns(&self, spec: &Spec, tokens: u64, ranks: u32) -> f64 {
        if ranks < 2 {
            return 0.0;
        }
        let heads = u64::from(spec.q_heads);
        let state = u64::from(spec.head_dim_v) * u64::from(spec.out_dtype.bytes()) + 4;
        let read = tokens * heads * state * u64::from(ranks - 1);
        self.exchange_ns + read as f64 / self.read_bytes_per_ns
    }
}

/// Results of up to this many query tokens are small enough that every rank merges all of them.
pub const MERGED_WHOLE: u32 = 512;

/// Predicted times of the ranks of a batch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Forecast {
    /// Time of each rank's attention.
    pub attention_ns: Vec<f64>,
    /// Time of each rank's exchange, which starts when the last rank of its group is done.
    pub exchange_ns: Vec<f64>,
    /// When the last rank is done.
    pub total_ns: f64,
}

impl Forecast {
    /// The forecast for plans of shares, one plan for each share. With `merge_all`, every rank of a group merges all
    /// tokens; otherwise each merges an equal part of them.
    #[must_use]
    pub fn new(
        shares: &[Share],
        plans: &[Plan],
        device: &DeviceDescription,
        link: &Link,
        merge_all: bool,
    ) -> Self {
        let attention_ns: Vec<f64> = plans.iter().map(|plan| attention(plan, device)).collect();
        let exchange = |share: &Share| {
            let ranks = share.group.len() as u32;
            let tokens = u64::from(share.batch.total_q());
            let merged = match merge_all {
                true => tokens,
                false => tokens.div_ceil(ranks.into()),
            };
            link.exchange_ns(&share.spec, merged, ranks)
        };
        let exchange_ns: Vec<f64> = shares.iter().map(exchange).collect();
        let done = shares.iter().zip(&exchange_ns).map(|(share, exchange)| {
            let group = share.group.start as usize..share.group.end as usize;
            attention_ns[group].iter().copied().fold(0.0, f64::max) + exchange
        });
        Self {
            total_ns: done.fold(0.0, f64::max),
            attention_ns,
            exchange_ns,
        }
    }

    /// The balance of the ranks: the mean of their attention times divided by the longest.
    #[must_use]
    pub fn balance(&self) -> f64 {
        let longest = self
            .attention_ns
            .iter()
            .copied()
            .fold(f64::MIN_POSITIVE, f64::max);
        let sum: f64 = self.attention_ns.iter().sum();
        sum / self.attention_ns.len() as f64 / longest
    }
}

/// Time of a run alone on a stream, between two events, in addition to its units and its first launch: 8 µs in all
/// decodes that were measured on an H200.
const ALONE_NS: f64 = 8_000.0;

/// Long computations reach a GPU's power limit and become slower by up to `POWER_LOSS`: by half of it after
/// `POWER_HALF_NS`. Measured on one H200: 1.5 % at 1.5 ms, 3.4 % at 3 ms, 6.2 % at 24 ms.
const POWER_LOSS: f64 = 0.07;
const POWER_HALF_NS: f64 = 3e6;

/// Time of a plan alone: its units, its launches and its merges.
fn attention(plan: &Plan, device: &DeviceDescription) -> f64 {
    let merges = match plan.merges.is_empty() {
        true => 0.0,
        false => device.merge_ns,
    };
    let units = plan.schedule(device).makespan_ns;
    let products = (plan.traffic().flops as f64 / device.flops_per_ns).min(units);
    let loss = POWER_LOSS * products / (units + POWER_HALF_NS);
    units * (1.0 + loss) + ALONE_NS + device.launch_ns + merges
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        plan::{PlanOptions, Planner},
        problem::{Batch, PageTable},
        shard::{Keys, Sharding},
    };

    #[test]
    fn more_ranks_take_less_until_the_exchange_is_all() {
        let (pages, spec) = (1 << 14, Spec::new(32, 8, 128));
        let mut table = PageTable::new(16, pages);
        table.push(&(0..pages).collect::<Vec<_>>(), 16 * pages);
        let batch = Batch::new(vec![0, 1], table);
        let device = DeviceDescription::named("h200").unwrap();
        let total = |ranks| {
            let sharding = Sharding::one().over_keys(ranks, Keys::RoundRobin { pages: 1 });
            let shares = sharding.shares(&spec, &batch).unwrap();
            let mut planner = Planner::new();
            let plans: Vec<_> = shares
                .iter()
                .map(|share| {
                    let options = PlanOptions::default();
                    planner
                        .plan(&share.spec, &share.batch, &device, &options)
                        .unwrap()
                })
                .collect();
            let forecast = Forecast::new(&shares, &plans, &device, &Link::NVLINK, true);
            assert!(forecast.balance() > 0.95, "{forecast:?}");
            forecast.total_ns
        };
        let [one, two, eight, many] = [1, 2, 8, 64].map(total);
        assert!(two < 0.6 * one && eight < 0.5 * two, "{one} {two} {eight}");
        assert!(many > Link::NVLINK.exchange_ns && many < eight, "{many}");
    }
}
