//! Division by a launch constant: a multiplication and a shift in the kernel.

use bytemuck::{Pod, Zeroable};

/// Divides numbers below 2³¹ by a fixed divisor.
///
/// ```
/// use kernels_gpu::divisor::Divisor;
///
/// let by_seven = Divisor::new(7);
/// assert_eq!(by_seven.div_rem(100), (14, 2));
/// ```
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Divisor {
    divisor: u32,
    multiplier: u32,
    shift: u32,
}

impl Divisor {
    /// One past the largest dividend.
    pub const LIMIT: u32 = 1 << 31;

    /// A divisor between 1 and 2³¹.
    ///
    /// # Panics
    /// If `divisor` is outside this range.
    #[must_use]
    pub const fn new(divisor: u32) -> Self {
        assert!(
            divisor > 0 && divisor <= Self::LIMIT,
            "a divisor is between 1 and 2^31"
        );
        // The smallest shift with 2^shift >= divisor. Then multiplier = ⌈2^(31 + shift) / divisor⌉ fits
        // 32 bits and is too large by less than 2^shift / divisor, which a dividend below 2^31 cannot
        // blow up to a whole unit.
        let shift = divisor.next_power_of_two().trailing_zeros();
        let multiplier = (1_u64 << (31 + shift)).div_ceil(divisor as u64) as u32;
        Self {
            divisor,
            multiplier,
            shift,
        }
    }

    /// The divisor itself.
    #[inline(always)]
    #[must_use]
    pub const fn get(self) -> u32 {
        self.divisor
    }

    /// `dividend / divisor`, for dividends below [`Divisor::LIMIT`].
    #[inline(always)]
    #[must_use]
    pub const fn div(self, dividend: u32) -> u32 {
        debug_assert!(dividend < Self::LIMIT);
        (((dividend * 2) as u64 * self.multiplier as u64) >> 32) as u32 >> self.shift
    }

    /// Quotient and remainder, for dividends below [`Divisor::LIMIT`].
    #[inline(always)]
    #[must_use]
    pub const fn div_rem(self, dividend: u32) -> (u32, u32) {
        let quotient = self.div(dividend);
        (quotient, dividend - quotient * self.divisor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn right_around_every_edge() {
        let powers = (0..31).map(|bits| 1_u32 << bits);
        let edges = powers.flat_map(|p| [p.saturating_sub(1), p, p + 1]);
        let divisors: Vec<u32> = edges.clone().filter(|&d| d > 0).chain([1 << 31]).collect();
        for &divisor in &divisors {
            let fast = Divisor::new(divisor);
            let multiples = (0..4).map(|i| {
                (u64::from(Divisor::LIMIT - 1) / u64::from(divisor)).saturating_sub(i)
                    * u64::from(divisor)
            });
            let near = multiples
                .flat_map(|m| [m.saturating_sub(1), m, m + 1])
                .filter_map(|n| u32::try_from(n).ok());
            for dividend in edges.clone().chain(near).chain([0, Divisor::LIMIT - 1]) {
                if dividend < Divisor::LIMIT {
                    assert_eq!(
                        fast.div_rem(dividend),
                        (dividend / divisor, dividend % divisor),
                        "{dividend} / {divisor}"
                    );
                }
            }
        }
    }

    proptest! {
        #[test]
        fn right_anywhere(divisor in 1..=Divisor::LIMIT, dividend in 0..Divisor::LIMIT, small in 1..5000_u32) {
            for divisor in [divisor, small] {
                prop_assert_eq!(Divisor::new(divisor).div_rem(dividend), (dividend / divisor, dividend % divisor));
            }
        }
    }
}
