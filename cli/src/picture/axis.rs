//! Logarithmic axes.

/// A logarithmic axis that covers its values.
pub(super) struct Log {
    pub(super) low: f64,
    pub(super) high: f64,
    start: f64,
    len: f64,
}

impl Log {
    pub(super) fn over(values: impl Iterator<Item = f64>, start: f64, len: f64) -> Self {
        /// Factor of space around the values, and minimum factor between the ends.
        const ROOM: f64 = 1.12;
        const LEAST: f64 = 2.0;
        let (mut low, mut high) = (f64::INFINITY, 0.0f64);
        for value in values {
            (low, high) = (low.min(value), high.max(value));
        }
        let widen = (LEAST / (high / low)).max(1.0).sqrt() * ROOM;
        Self {
            low: low / widen,
            high: high * widen,
            start,
            len,
        }
    }

    pub(super) fn at(&self, value: f64) -> f64 {
        self.start + self.len * (value / self.low).ln() / (self.high / self.low).ln()
    }

    /// Round numbers in the range: at least three, and no more than fit.
    pub(super) fn ticks(&self) -> Vec<f64> {
        const MOST: usize = 11;
        const CHOICES: [&[f64]; 4] = [
            &[1.0],
            &[1.0, 2.0, 5.0],
            &[1.0, 1.5, 2.0, 3.0, 5.0, 7.0],
            &[
                1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0,
            ],
        ];
        let powers = self.low.log10().floor() as i32..=self.high.log10().ceil() as i32;
        let within = |x: &f64| *x >= self.low && *x <= self.high;
        let choices = CHOICES.into_iter().map(|multiples| {
            let all = powers.clone().map(|power| 10f64.powi(power));
            let all = all.flat_map(|power| multiples.iter().map(move |multiple| multiple * power));
            all.filter(within).collect::<Vec<_>>()
        });
        let fitting = choices.filter(|ticks| ticks.len() <= MOST);
        fitting.max_by_key(Vec::len).unwrap_or_default()
    }
}
