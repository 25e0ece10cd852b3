//! Random numbers that are equal on every machine, and lengths drawn with them.

use crate::ScheduleError;

/// A small random number generator (SplitMix64). Its numbers do not depend on the machine or on other crates' versions.
#[derive(Clone, Copy, Debug)]
pub struct Random(u64);

impl Random {
    /// A generator with a seed.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    pub const fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = self.0;
        let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in `0..1`.
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Exponential with a mean of 1.
    pub fn exponential(&mut self) -> f64 {
        -(1.0 - self.unit()).ln()
    }
}

/// Lengths between two bounds that follow Zipf's law: the i-th shortest has a probability proportional to 1 / i^θ.
#[derive(Clone, Debug)]
pub struct Zipf {
    min: u32,
    cumulative: Vec<f64>,
}

impl Zipf {
    /// A distribution over the lengths `min..=max`. Each takes 8 bytes.
    ///
    /// # Errors
    /// [`ScheduleError::Lengths`] for no length and for more than 2²⁴ of them, [`ScheduleError::Theta`].
    pub fn new(min: u32, max: u32, theta: f64) -> Result<Self, ScheduleError> {
        let most = 1 << 24;
        if min > max || max - min >= most {
            return Err(ScheduleError::Lengths { min, max, most });
        }
        if !theta.is_finite() {
            return Err(ScheduleError::Theta { got: theta });
        }
        let mut sum = 0.0;
        let cumulative = (1..=max - min + 1)
            .map(|rank| {
                sum += f64::from(rank).powf(-theta);
                sum
            })
            .collect();
        Ok(Self { min, cumulative })
    }

    /// Draws a length.
    pub fn sample(&self, random: &mut Random) -> u32 {
        let total = self.cumulative[self.cumulative.len() - 1];
        let wanted = random.unit() * total;
        let rank = self.cumulative.partition_point(|&sum| sum <= wanted);
        self.min + rank.min(self.cumulative.len() - 1) as u32
    }
}
