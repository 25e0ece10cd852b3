//! Measurements of a simulation or a replay.

mod recorder;

pub use recorder::Recorder;

use serde::Serialize;

/// A gap between two tokens above this many seconds is a stall; there are two usual bounds.
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

    /// The least sample that so large a part of all does not exceed; 0 without samples.
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

    /// The quantiles of a table.
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

/// A distribution in a line of a table, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Summary {
    /// Mean.
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// What one in a hundred exceeds.
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
    /// Prompt tokens in it.
    pub prompt_tokens: u32,
    /// Decodes in it.
    pub decodes: u32,
    /// When it begins.
    pub begin_s: f64,
    /// When it ends.
    pub end_s: f64,
}

/// All that a simulation measured, or a replay.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// Name of the policy.
    pub policy: String,
    /// Requests that finished.
    pub finished: usize,
    /// Requests that were refused: above a limit, or too large for the pool.
    pub refused: usize,
    /// Requests left over because no step could be composed any more; 0 unless a policy is at fault.
    pub stuck: usize,
    /// From the first arrival to the last token, or to the end of what was looked at.
    pub makespan_s: f64,
    /// Time to the first token, for each request that came meanwhile.
    pub ttft: Distribution,
    /// Time between tokens, for each token after a request's first.
    pub tbt: Distribution,
    /// From arrival to last token, for each request that came and finished meanwhile.
    pub latency: Distribution,
    /// Time that stages stood still before steps of a request, for each request.
    pub bubble: Distribution,
    /// The part of the requests with a gap above 200 and 500 ms.
    pub stalled: [f64; 2],
    /// Prompt tokens of the requests that finished, or had a token by the end, cached or computed.
    pub prompt_tokens: u64,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Prompt tokens that the prefix cache had.
    pub cached_tokens: u64,
    /// Tokens that were computed again after preemption.
    pub recomputed_tokens: u64,
    /// Times that a request lost its pages.
    pub preemptions: u64,
    /// Steps.
    pub steps: u64,
    /// Tokens computed in steps.
    pub computed_tokens: u64,
    /// The part of the time in which stages computed.
    pub busy: f64,
    /// The steps that were asked for.
    pub timeline: Vec<StageSpan>,
}

impl Report {
    /// Requests finished per second.
    #[must_use]
    pub fn requests_per_s(&self) -> f64 {
        self.finished as f64 / self.makespan_s
    }

    /// Tokens generated per second.
    #[must_use]
    pub fn generated_per_s(&self) -> f64 {
        self.generated_tokens as f64 / self.makespan_s
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
