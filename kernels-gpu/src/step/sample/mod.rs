//! `sample`: draws a token from the logits of each row.
//!
//! Every rule is a lower limit of the logit: tokens below it are dropped. The weights that rules refer to are integers, so
//! their sums do not depend on the order in which threads add them; the largest logit has weight [`ONE`]. Of the kept
//! tokens one is drawn by the Gumbel-max trick ([`race`]).
//!
//! A row is processed by a cluster of [`CLUSTER`] CTAs on Hopper, elsewhere by one CTA. Each warp has neighbouring
//! tokens, in registers as far as they fit. CTAs exchange results through distributed shared memory, once per step:
//!
//! 1. If there is a rule: the largest logit.
//! 2. If a rule needs a limit (`limit.rs`): the candidate tokens for it, and the sum of all weights.
//! 3. The best token of each warp: that with the largest logit (greedy), or of the group with the largest score. The first
//!    CTA writes the best of all.

use crate::{
    common::{math::Real, state::log2},
    math::exp2,
};

pub mod adjust;
#[cfg(all(target_arch = "nvptx64", feature = "step"))]
mod draw;
#[cfg(all(target_arch = "nvptx64", feature = "step"))]
mod histogram;
#[cfg(all(target_arch = "nvptx64", feature = "step"))]
mod limit;
pub mod log_probs;
#[cfg(all(target_arch = "nvptx64", feature = "step"))]
mod logits;
#[cfg(all(target_arch = "nvptx64", feature = "step"))]
mod part;
pub mod race;
#[cfg(all(target_arch = "nvptx64", feature = "step"))]
mod team;

pub use log_probs::{LOG_PROBS, MOST_TOP};

/// The weight of the largest logit. The sum of eight weights fits 32 bits.
pub const ONE: u32 = 1 << 28;

/// Threads of a block.
pub const THREADS: u32 = 512;

/// CTAs per row on Hopper.
pub const CLUSTER: u32 = 8;

/// The largest number of tokens of a row.
pub const MOST: u32 = 40 * 8192;

/// Warps of a CTA.
const WARPS: u32 = THREADS / 32;

/// Tokens that a warp reads together, a *round*.
#[cfg(target_arch = "nvptx64")]
const ROUND: u32 = 32 * super::VECTOR;

/// The largest number of candidate tokens for a limit. Every CTA of a row holds all of them, `OF_THREAD` per thread.
const CANDIDATES: u32 = OF_THREAD as u32 * THREADS;
const OF_THREAD: usize = 8;

/// Offsets in a CTA's shared memory.
#[cfg_attr(not(target_arch = "nvptx64"), allow(dead_code))]
mod at {
    use super::{CANDIDATES, CLUSTER, THREADS, WARPS};

    /// One number per warp of the row, double-buffered.
    pub const TABLES: u32 = 0;
    pub const TABLE_BYTES: u32 = CLUSTER * WARPS * 8;
    /// Two words per thread.
    pub const BINS: u32 = 2 * TABLE_BYTES;
    /// The sum of each warp's bins.
    pub const SUMS: u32 = BINS + THREADS * 8;
    /// Keys of the CTA's candidates.
    pub const LIST: u32 = SUMS + WARPS * 8;
    /// Their number.
    pub const COUNT: u32 = LIST + CANDIDATES * 4;
    /// A bin, and the sum before it.
    pub const FOUND: u32 = COUNT + 16;
    /// The key of a score that each warp of the CTA reaches.
    pub const REACHED: u32 = FOUND + 16;
    /// An mbarrier: the numbers of all warps have arrived.
    pub const ARRIVED: u32 = REACHED + WARPS * 4;
    pub const END: u32 = ARRIVED + 8;
}

/// Shared memory of a CTA.
pub const SHARED_BYTES: u32 = at::END;

/// The weight of a logit with the scale of the row, rounded down. `largest` is finite.
#[inline(always)]
#[must_use]
pub fn weight(logit: f32, largest: f32, scale: f32) -> u32 {
    weight_of(exp2((logit - largest) * scale).to_bits())
}

/// The least logit with at least this weight; −∞ for the weight 0. The largest logit of the row is finite.
#[inline(always)]
#[must_use]
pub fn least_of(weight: u32, largest: f32, inverse_scale: f32) -> f32 {
    if weight == 0 {
        return f32::NEG_INFINITY;
    }
    let below = log2(weight as f32) - ONE.ilog2() as f32;
    Real::mul_add(below.min(0.0), inverse_scale, largest)
}

/// The weight of a power of two, given as f32 bits: at most 1, or NaN.
#[inline(always)]
fn weight_of(bits: u32) -> u32 {
    // The significand, shifted right by as much as the exponent is below that of 1. It becomes 0 for 0 and for NaN.
    let fraction = (bits & 0x007F_FFFF | 0x0080_0000) << 5;
    shifted(fraction, 127_u32.wrapping_sub(bits >> 23))
}

/// The weights of eight logits. All exponentials come first, so that several are in flight.
#[cfg(target_arch = "nvptx64")]
#[inline(always)]
fn weights(x: &super::Vector, largest: f32, scale: f32) -> [u32; 8] {
    x.map(|logit| cuda_std::misc::opaque(exp2((logit - largest) * scale).to_bits()))
        .map(weight_of)
}

/// Right shift; 0 for 32 places or more.
#[inline(always)]
fn shifted(x: u32, places: u32) -> u32 {
    #[cfg(target_arch = "nvptx64")]
    return cuda_std::math::shift_right(x, places);
    #[cfg(not(target_arch = "nvptx64"))]
    x.checked_shr(places).unwrap_or(0)
}

/// An integer that is ordered like the logit. −0 and 0 have the same key; NaN has the smallest.
#[inline(always)]
#[must_use]
pub fn key(logit: f32) -> u32 {
    let bits = (logit + 0.0).to_bits();
    // Negative: all bits are flipped, otherwise the sign.
    let flipped = bits ^ ((bits.cast_signed() >> 31).cast_unsigned() | 1 << 31);
    if logit.is_nan() { 0 } else { flipped }
}

/// The share `of` / 2³² of a sum, at least 1.
#[inline(always)]
#[must_use]
pub const fn share(sum: u64, of: u32) -> u64 {
    let part = ((sum as u128 * of as u128) >> 32) as u64;
    if part == 0 { 1 } else { part }
}

/// The kernels: `sample_<element>`.
#[cfg(not(target_arch = "nvptx64"))]
mod rows {
    use super::{SHARED_BYTES, THREADS};
    use crate::registry::{Arch, Element, Family, KernelInfo, Op, registers};

    macro_rules! rows {
        ($($element:ident $name:literal;)*) => {
            &[$(KernelInfo {
                element: Element::$element,
                threads: THREADS,
                registers: registers(THREADS, 2),
                shared_bytes: SHARED_BYTES,
                ..KernelInfo::new(concat!("sample_", $name), Family::Step, Arch::Sm80, Op::Sample)
            }),*]
        };
    }

    /// One kernel per type of logits.
    pub const ROWS: &[KernelInfo] = rows! {
        Bf16 "bf16";
        F16 "f16";
        F32 "f32";
    };
}
#[cfg(not(target_arch = "nvptx64"))]
pub use rows::ROWS;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_powers_of_two_rounded_down() {
        assert_eq!(weight(3.0, 3.0, 1.0), ONE);
        assert_eq!(weight(2.0, 3.0, 1.0), ONE / 2);
        assert_eq!(weight(-25.0, 3.0, 1.0), 1);
        assert_eq!(weight(-26.0, 3.0, 1.0), 0);
        assert_eq!(weight(f32::NEG_INFINITY, 3.0, 1.0), 0);
        assert_eq!(weight(f32::NAN, 3.0, 1.0), 0);
        for step in 1..4000_u16 {
            let below = f32::from(step) / 128.0;
            let (got, right) = (weight(-below, 0.0, 1.0), (28.0 - f64::from(below)).exp2());
            let off = (f64::from(got) - right).abs();
            assert!(
                off <= 1.0 + right * 3e-7,
                "{got} instead of {right} at {below}"
            );
        }
    }

    #[test]
    fn the_least_logit_of_a_weight() {
        for (temperature, largest) in [(1.0, 3.0), (0.01, -2.0), (50.0, 20.0)] {
            let (scale, inverse) = (
                core::f32::consts::LOG2_E / temperature,
                temperature * core::f32::consts::LN_2,
            );
            assert_eq!(least_of(ONE, largest, inverse), largest);
            assert_eq!(least_of(0, largest, inverse), f32::NEG_INFINITY);
            for least in [1, 2, 1000, ONE / 20, ONE / 3, ONE - 1] {
                let logit = least_of(least, largest, inverse);
                let step = 2e-6 * (logit.abs() + largest.abs() + inverse);
                assert!(weight(logit + step, largest, scale) >= least, "{least}");
                assert!(weight(logit - step, largest, scale) < least, "{least}");
            }
        }
    }

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
}
