//! The mathematical functions that attention needs. Code that is generic over [`Real`] runs on the GPU, in vectorised
//! CPU code and in the f64 reference.

use core::{
    f32::consts::{LN_2, LOG2_E},
    ops::{Add, Mul, Neg, Sub},
};

/// A floating-point number: f32 in kernels and in the CPU executor, f64 in the reference.
pub trait Real:
    Copy
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Neg<Output = Self>
{
    /// The nearest number.
    fn from_f32(x: f32) -> Self;
    /// 2ˣ; zero for −∞.
    fn exp2(self) -> Self;
    /// 1/x.
    fn recip(self) -> Self;
    /// Hyperbolic tangent.
    fn tanh(self) -> Self;
    /// `self · factor + more`, rounded once on GPUs.
    fn mul_add(self, factor: Self, more: Self) -> Self;
}

impl Real for f32 {
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        x
    }

    #[inline(always)]
    fn exp2(self) -> Self {
        exp2(self)
    }

    #[inline(always)]
    fn recip(self) -> Self {
        recip(self)
    }

    #[inline(always)]
    fn tanh(self) -> Self {
        // Exact at both ends (exp2 saturates to 0 and ∞), absolute error about 1e-7 between them.
        1.0 - 2.0 * recip(1.0 + exp2(self * (2.0 * LOG2_E)))
    }

    #[inline(always)]
    fn mul_add(self, factor: Self, more: Self) -> Self {
        #[cfg(target_arch = "nvptx64")]
        {
            cuda_std::math::fma(self, factor, more)
        }
        // Not `f32::mul_add`: without an FMA instruction that is a library call.
        #[cfg(not(target_arch = "nvptx64"))]
        {
            self * factor + more
        }
    }
}

#[cfg(not(target_arch = "nvptx64"))]
impl Real for f64 {
    fn from_f32(x: f32) -> Self {
        x.into()
    }

    fn exp2(self) -> Self {
        Self::exp2(self)
    }

    fn recip(self) -> Self {
        Self::recip(self)
    }

    fn tanh(self) -> Self {
        Self::tanh(self)
    }

    fn mul_add(self, factor: Self, more: Self) -> Self {
        Self::mul_add(self, factor, more)
    }
}

/// 2ˣ; zero for −∞.
#[inline(always)]
#[must_use]
pub fn exp2(x: f32) -> f32 {
    #[cfg(target_arch = "nvptx64")]
    {
        cuda_std::math::ex2(x)
    }
    #[cfg(not(target_arch = "nvptx64"))]
    {
        exp2_with(x, |a, b, c| a * b + c)
    }
}

/// 1/x; on the GPU approximate, to about 1 ulp, because an exact division is a subroutine there.
#[inline(always)]
#[must_use]
pub fn recip(x: f32) -> f32 {
    #[cfg(target_arch = "nvptx64")]
    {
        cuda_std::math::rcp(x)
    }
    #[cfg(not(target_arch = "nvptx64"))]
    {
        1.0 / x
    }
}

/// tanh(x · ln 2 / 2) of four x with one reciprocal: 1 / a = b · 1 / (a · b). If one x is NaN, all results are.
///
/// Four tangents on their own take four powers of two and four reciprocals, of which the special-function unit of an SM
/// computes 16 a cycle.
#[inline(always)]
#[must_use]
pub fn tanh_of_four(x: [f32; 4]) -> [f32; 4] {
    // |tanh| = 2 / (1 + 2^−|x|) − 1. Half of the denominators, between 1/2 and 1: no product overflows.
    let halves = x.map(|x| Real::mul_add(exp2(-x.abs()), 0.5, 0.5));
    let pairs = [halves[0] * halves[1], halves[2] * halves[3]];
    let of_all = recip(pairs[0] * pairs[1]);
    let of_pairs = [of_all * pairs[1], of_all * pairs[0]];
    [0, 1, 2, 3].map(|i| {
        let tanh = Real::mul_add(of_pairs[i / 2], halves[i ^ 1], -1.0);
        f32::from_bits(tanh.to_bits() ^ x[i].to_bits() & SIGN)
    })
}

/// The sign bit.
const SIGN: u32 = 0x8000_0000;

/// At and below this, 2ˣ counts as zero in [`exp2_with`].
pub const EXP2_LOWEST: f32 = -127.0;

/// 1.5 · 2²³ + 127: adding it rounds `x` to an integer and leaves that integer + 127 in the low bits.
pub const EXP2_ROUND: f32 = 12_583_039.0;

/// Coefficients of 2ˣ on [-½, ½], highest power first; error 4e-9.
pub const EXP2_POLYNOMIAL: [f32; 7] = [
    0.000_154_697_3,
    0.001_341,
    0.009_618_031,
    0.055_502_97,
    0.240_226_5,
    LN_2,
    1.0,
];

/// 2ˣ as straight-line code that vectorises, with the caller's `a · b + c` (fused where the CPU has it).
///
/// Relative error below 2e-7 for results that are normal numbers below 2¹²⁷. Zero for x ≤ −127 and ∞ for x ≥ 128; in
/// the half a power before these limits the result may already be 0 or ∞. NaN stays NaN.
#[inline(always)]
#[must_use]
pub fn exp2_with(x: f32, mul_add: impl Fn(f32, f32, f32) -> f32) -> f32 {
    // Comparisons that let NaN through.
    let x = if x < EXP2_LOWEST { EXP2_LOWEST } else { x };
    let x = if x > 128.0 { 128.0 } else { x };
    let rounded = x + EXP2_ROUND;
    let f = x - (rounded - EXP2_ROUND);
    let mut y = EXP2_POLYNOMIAL[0];
    let mut i = 1;
    while i < EXP2_POLYNOMIAL.len() {
        y = mul_add(y, f, EXP2_POLYNOMIAL[i]);
        i += 1;
    }
    // The integer becomes the exponent field: −127 gives field 0, that is zero; 128 gives 255, infinity.
    y * f32::from_bits(rounded.to_bits() << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sweep(mut check: impl FnMut(f32)) {
        for step in -130_000..=130_000 {
            check(step as f32 * 1e-3 + 1.7e-4);
        }
    }

    #[test]
    fn exp2_is_close_everywhere() {
        for mul_add in [|a: f32, b: f32, c: f32| a * b + c, f32::mul_add] {
            let mut worst = 0.0f64;
            sweep(|x| {
                let (got, right) = (exp2_with(x, mul_add), f64::from(x).exp2());
                if (-126.0..127.4999).contains(&x) {
                    worst = worst.max((f64::from(got) / right - 1.0).abs());
                } else if x < -126.0 {
                    assert!((0.0..1.2e-38).contains(&got), "{got} at {x}");
                    assert!(got == 0.0 || x > -127.0, "{got} at {x}");
                } else if x >= 128.0 {
                    assert_eq!(got, f32::INFINITY, "at {x}");
                }
            });
            assert!(worst < 2e-7, "relative error {worst:e}");
        }
    }

    #[test]
    fn exp2_at_the_ends() {
        assert_eq!(exp2(0.0), 1.0);
        assert_eq!(exp2(-1.0), 0.5);
        assert_eq!(exp2(127.0), 2.0f32.powi(127));
        assert_eq!(exp2(-126.0), f32::MIN_POSITIVE);
        assert_eq!(exp2(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp2(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp2(-1e30), 0.0);
        assert!(exp2(f32::NAN).is_nan());
    }

    #[test]
    fn tanh_is_close_and_saturates() {
        sweep(|x| {
            let error = f64::from(Real::tanh(x)) - f64::from(x).tanh();
            assert!(error.abs() < 3e-7, "{error:e} at {x}");
        });
        assert_eq!(Real::tanh(f32::INFINITY), 1.0);
        assert_eq!(Real::tanh(f32::NEG_INFINITY), -1.0);
    }

    /// `tanh_of_four` of exponents of which tanh is a function of `x` without scaling.
    fn four(x: [f32; 4]) -> [f32; 4] {
        tanh_of_four(x.map(|x| x * (2.0 * LOG2_E)))
    }

    #[test]
    fn four_tangents_are_close_and_saturate() {
        sweep(|x| {
            let x = [x, x * 0.01, -x * 0.1, 3.0];
            for (got, x) in four(x).into_iter().zip(x) {
                let error = f64::from(got) - f64::from(x).tanh();
                assert!(error.abs() < 6e-7, "{error:e} at {x}");
            }
        });
        let [above, below, zero, less] = four([f32::INFINITY, f32::NEG_INFINITY, 0.0, -1e-6]);
        assert!((above - 1.0).abs() < 3e-7 && (below + 1.0).abs() < 3e-7);
        assert!(zero.abs() < 3e-7 && (less + 1e-6).abs() < 3e-7);
    }

    #[test]
    fn a_nan_makes_four_tangents_nan() {
        for at in 0..4 {
            let mut x = [0.3, -2.0, f32::INFINITY, 0.0];
            x[at] = f32::NAN;
            assert!(four(x).into_iter().all(f32::is_nan), "at {at}");
        }
    }
}
