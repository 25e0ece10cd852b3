//! `sample`: a token from the logits of each row.
//!
//! Probabilities are whole numbers, so that their sums do not depend on the order in which threads add them: the
//! largest logit weighs [`ONE`].

use crate::math::exp2;

/// The weight of the largest logit.
pub const ONE: u32 = 1 << 31;

/// The weight of a logit `below` the largest, by the scale of the row.
#[inline(always)]
#[must_use]
pub fn weight(logit: f32, largest: f32, scale: f32) -> u32 {
    if logit == largest {
        return ONE;
    }
    // NaN becomes 0.
    (exp2((logit - largest) * scale) * ONE as f32 + 0.5) as u32
}

/// A number that is ordered as the logit: −0 and 0 are one, NaN is the least.
#[inline(always)]
#[must_use]
pub fn key(logit: f32) -> u32 {
    if logit.is_nan() {
        return 0;
    }
    let bits = (logit + 0.0).to_bits();
    if bits >> 31 == 0 {
        bits | 1 << 31
    } else {
        !bits
    }
}

/// The share of a sum, of 2³², but at least 1.
#[inline(always)]
#[must_use]
pub const fn share(sum: u64, of: u32) -> u64 {
    // The sum is below 2⁵⁶: so many tokens do not exist.
    let (high, low) = (sum >> 32, sum & 0xFFFF_FFFF);
    let part = high * of as u64 + ((low * of as u64) >> 32);
    if part == 0 { 1 } else { part }
}

/// Where a random number falls in a sum: below it.
#[inline(always)]
#[must_use]
pub const fn fall(sum: u64, random: u64) -> u64 {
    let (sum_high, sum_low) = (sum >> 32, sum & 0xFFFF_FFFF);
    let (high, low) = (random >> 32, random & 0xFFFF_FFFF);
    let middle = sum_low * high + ((sum_low * low) >> 32);
    let (carry, rest) = (middle >> 32, middle & 0xFFFF_FFFF);
    sum_high * high + carry + ((sum_high * low + rest) >> 32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_ordered_as_logits() {
        let ordered = [
            f32::NEG_INFINITY,
            f32::MIN,
            -1.0,
            -1e-40,
            0.0,
            1e-40,
            1.0,
            f32::MAX,
            f32::INFINITY,
        ];
        for pair in ordered.windows(2) {
            assert!(key(pair[0]) < key(pair[1]), "{pair:?}");
        }
        assert_eq!(key(-0.0), key(0.0));
        assert!(key(f32::NAN) < key(f32::NEG_INFINITY));
    }

    #[test]
    fn shares_and_falls_are_those_of_128_bits() {
        let sums = [
            1,
            77,
            u64::from(ONE),
            u64::from(ONE) * 200_000,
            (1 << 50) + 12_345,
        ];
        for sum in sums {
            for of in [1, 1 << 31, u32::MAX, 0xCCCC_CCCC] {
                let right = (u128::from(sum) * u128::from(of) >> 32) as u64;
                assert_eq!(share(sum, of), right.max(1));
            }
            for random in [0, 1, u64::MAX, 1 << 63, 0x1234_5678_9ABC_DEF0] {
                let right = (u128::from(sum) * u128::from(random) >> 64) as u64;
                assert_eq!(fall(sum, random), right);
                assert!(right < sum);
            }
        }
    }
}
