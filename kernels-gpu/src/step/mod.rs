//! The step around attention: what a model computes between its matrix products.

pub mod sample;

use crate::math::{exp2, recip};

/// `x · σ(x)`.
#[inline(always)]
#[must_use]
pub fn silu(x: f32) -> f32 {
    x * recip(1.0 + exp2(x * -core::f32::consts::LOG2_E))
}

/// `x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³)))`, which is `x · σ(2 √(2/π) · (x + 0.044715 x³))`.
#[inline(always)]
#[must_use]
pub fn gelu_tanh(x: f32) -> f32 {
    // -2 √(2/π) log₂e.
    const SCALE: f32 = -2.302_208_2;
    x * recip(1.0 + exp2(x * (SCALE + SCALE * 0.044_715 * (x * x))))
}
