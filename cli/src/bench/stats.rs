//! Statistics of repeated measurements of one quantity.

use serde::{Deserialize, Serialize};

use crate::workload::json::positive;

/// Quartiles of repeated measurements, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stats {
    /// The median.
    #[serde(deserialize_with = "positive")]
    pub median_us: f64,
    /// The first quartile.
    #[serde(deserialize_with = "positive")]
    pub q1_us: f64,
    /// The third quartile.
    #[serde(deserialize_with = "positive")]
    pub q3_us: f64,
    /// The minimum.
    #[serde(deserialize_with = "positive")]
    pub min_us: f64,
    /// Number of runs.
    pub runs: u32,
}

impl Stats {
    /// Statistics of at least one measurement.
    ///
    /// # Panics
    /// If there is no measurement.
    #[must_use]
    pub fn of(mut times_us: Vec<f64>) -> Self {
        assert!(!times_us.is_empty(), "at least one measurement");
        times_us.sort_by(f64::total_cmp);
        let quantile = |q: f64| {
            let at = q * (times_us.len() - 1) as f64;
            let (below, above) = (times_us[at.floor() as usize], times_us[at.ceil() as usize]);
            below + (above - below) * at.fract()
        };
        Self {
            median_us: quantile(0.5),
            q1_us: quantile(0.25),
            q3_us: quantile(0.75),
            min_us: times_us[0],
            runs: times_us.len() as u32,
        }
    }

    /// Minimum number of runs for a useful error of the median. With fewer, the quartiles are single runs.
    pub const TELLING: u32 = 7;

    /// Half the interquartile range as a fraction of the median.
    #[must_use]
    pub fn spread(&self) -> f64 {
        (self.q3_us - self.q1_us) / 2.0 / self.median_us
    }

    /// Half the width of the notch of a box plot: medians whose notches do not touch differ with about
    /// 95 % confidence (McGill, Tukey and Larsen, 1978).
    #[must_use]
    pub fn notch_us(&self) -> f64 {
        1.57 * (self.q3_us - self.q1_us) / f64::from(self.runs).sqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quartiles_interpolate() {
        let stats = Stats::of(vec![4.0, 1.0, 3.0, 2.0]);
        assert_eq!(
            (stats.q1_us, stats.median_us, stats.q3_us),
            (1.75, 2.5, 3.25)
        );
        assert_eq!((stats.min_us, stats.runs), (1.0, 4));
        let one = Stats::of(vec![7.0]);
        assert_eq!((one.q1_us, one.median_us, one.spread()), (7.0, 7.0, 0.0));
    }
}
