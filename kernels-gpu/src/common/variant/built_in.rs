//! The variants that come with the library: softmax with an optional soft cap, and sigmoid.

use core::f32::consts::LOG2_E;

use super::{Hook, Pair, Variant};
use crate::{
    abi::VariantParams,
    common::math::{self, Real},
};

/// Softmax attention, causal and windowed as [`VariantParams`] say, with a soft cap if `CAP`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Standard<const CAP: bool>(pub VariantParams);

impl<const CAP: bool> Variant for Standard<CAP> {
    const TRANSFORMS_LOGITS: bool = CAP;
    /// A capped logit is a hyperbolic tangent.
    const KEEPS_UNIT: bool = CAP;
    /// Four hyperbolic tangents share a reciprocal.
    const MIXES_KEYS: bool = CAP;

    #[inline(always)]
    fn params(&self) -> &VariantParams {
        &self.0
    }

    #[inline(always)]
    fn unit(&self) -> impl Hook<f32> {
        if CAP {
            self.0.soft_cap * LOG2_E
        } else {
            self.0.scale_log2
        }
    }

    #[inline(always)]
    fn logit<R: Real>(&self, dot: R, _at: Pair) -> impl Hook<R> {
        let VariantParams {
            scale,
            scale_log2,
            soft_cap,
            ..
        } = self.0;
        if CAP {
            // The same for all keys: compilers hoist it out of the loop.
            let inner = R::from_f32(scale) * R::from_f32(soft_cap).recip();
            (dot * inner).tanh()
        } else {
            dot * R::from_f32(scale_log2)
        }
    }

    #[inline(always)]
    fn logits(&self, dots: [f32; 4], at: [Pair; 4]) -> impl Hook<[f32; 4]> {
        if CAP {
            let inner = self.0.scale * math::recip(self.0.soft_cap) * (2.0 * LOG2_E);
            // Not 0: hidden keys are −∞, and −∞ · 0 is NaN.
            let inner = inner.max(f32::MIN_POSITIVE);
            math::tanh_of_four(dots.map(|dot| dot * inner))
        } else {
            [0, 1, 2, 3].map(|i| self.logit(dots[i], at[i]).plain())
        }
    }
}

/// Attention without softmax: a key weighs `sigmoid(scale · dot + bias)` (FlashSigmoid).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sigmoid {
    /// Scale, window and causality; no soft cap.
    pub params: VariantParams,
    /// Added to the scaled dot product, usually −ln(number of keys).
    pub bias: f32,
}

impl Variant for Sigmoid {
    const SOFTMAX: bool = false;

    #[inline(always)]
    fn params(&self) -> &VariantParams {
        &self.params
    }

    #[inline(always)]
    fn logit<R: Real>(&self, dot: R, _at: Pair) -> impl Hook<R> {
        let one = R::from_f32(1.0);
        let bias = R::from_f32(self.bias) * R::from_f32(LOG2_E);
        (one + (-(dot * R::from_f32(self.params.scale_log2) + bias)).exp2()).recip()
    }
}
