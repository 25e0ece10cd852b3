//! Measurements of a simulation or a replay.

mod recorder;

pub use recorder::Recorder;

use serde::Serialize;

/// A gap between two tokens above this many seconds is a stall. Two thresholds are in common use.
pub const STALLS_S: [f64; 2] = [0.2, 0.5];

/// Sorted samples, in seconds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Distribution {
    sorted: Vec<f32>,
    sum: f64,
}

impl Distribution {
    /// From samples in any order.
    #[must_use]
    pub fn new(mut samples: Vec<f32>) -> Self {
        samples.sort_unstable_by(f32::total_cmp);
        let sum = samples.iter().copied().map(f64::from).sum();
        Self {
            sorted: samples,
            sum,
        }
    }

    /// The smallest sample such that a fraction `part` of all samples does not exceed it; 0 without samples.
    #[must_use]
    pub fn quantile(&self, part: f64) -> f64 {
        let rank = (part * self.sorted.len() as f64).ceil() as usize;
        let sample = self.sorted.get(rank.saturating_sub(1));
        sample.or(self.sorted.last()).copied().unwrap_or(0.0).into()
    }

    /// The mean; 0 without samples.
    #[must_use]
    pub fn mean(&self) -> f64 {
        self.sum / self.sorted.len().max(1) as f64
    }

    /// The samples, ascending.
    #[must_use]
    pub fn samples(&self) -> &[f32] {
        &self.sorted
    }

    /// The statistics that tables show.
    #[must_use]
    pub fn summary(&self) -> Summary {
        Summary {
            mean: self.mean(),
            p50: self.quantile(0.5),
            p99: self.quantile(0.99),
            max: self.quantile(1.0),
        }
    }
}

/// A distribution as a row of a table, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Summary {
    /// Mean.
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// 99th percentile.
    pub p99: f64,
    /// The largest.
    pub max: f64,
}

/// A step in a pipeline stage.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct StageSpan {
    /// The stage.
    pub stage: u32,
    /// The step, from 0.
    pub step: u64,
    /// Prompt tokens in the step.
    pub prompt_tokens: u32,
    /// Decodes in the step.
    pub decodes: u32,
    /// Time at which it begins.
    pub begin_s: f64,
    /// Time at which it ends.
    pub end_s: f64,
}

/// All measurements of a simulation or a replay.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// Name of the policy.
    pub policy: String,
    /// Number of finished requests.
    pub finished: usize,
    /// Number of refused requests: above a limit, or too large for the pool.
    pub refused: usize,
    /// Number of requests left when no step could be composed any more; 0 unless a policy is faulty.
    pub stuck: usize,
    /// Time from the first arrival to the last token, or to the end of the period examined.
    pub makespan_s: f64,
    /// Time to the first token, for each request that arrived in the period.
    pub ttft: Distribution,
    /// Time between tokens, for each token after a request's first.
    pub tbt: Distribution,
    /// Time from arrival to last token, for each request that arrived and finished in the period.
    pub latency: Distribution,
    /// Idle time of stages before steps of a request, for each request.
    pub bubble: Distribution,
    /// Fraction of the requests with a gap above 200 ms, and above 500 ms.
    pub stalled: [f64; 2],
    /// Prompt tokens, cached or computed, of the requests that finished or had a token by the end.
    pub prompt_tokens: u64,
    /// Number of generated tokens.
    pub generated_tokens: u64,
    /// Number of prompt tokens found in the prefix cache.
    pub cached_tokens: u64,
    /// Number of tokens computed again after preemption.
    pub recomputed_tokens: u64,
    /// Number of preemptions.
    pub preemptions: u64,
    /// Number of steps.
    pub steps: u64,
    /// Number of tokens computed in steps.
    pub computed_tokens: u64,
    /// Fraction of the time in which stages computed.
    pub busy: f64,
    /// Spans of the requested steps.
    pub timeline: Vec<StageSpan>,
}

impl Report {
    /// Requests finished per second.
    #[must_use]
    pub fn requests_per_s(&self) -> f64 {
        self.finished as f64 / self.makespan_s
    }

    /// Prompt and generated tokens per second.
    #[must_use]
    pub fn tokens_per_s(&self) -> f64 {
        (self.prompt_tokens + self.generated_tokens) as f64 / self.makespan_s
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_samples() {
        let distribution = Distribution::new((1..=100).rev().map(|i| i as f32).collect());
        let Summary {
            mean,
            p50,
            p99,
            max,
        } = distribution.summary();
        assert_eq!((mean, p50, p99, max), (50.5, 50.0, 99.0, 100.0));
        assert_eq!(Distribution::default().summary(), Summary::default());
        assert_eq!(Distribution::new(vec![3.0]).quantile(0.0), 3.0);
    }
}
