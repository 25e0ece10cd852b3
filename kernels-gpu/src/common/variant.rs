//! Attention variants: what may differ between models, as code at named places of one algorithm.
//!
//! A [`Variant`] is compiled into the kernel. Associated constants say which hooks are there, so that a
//! kernel without a soft cap holds no instruction of one. The hooks are generic over [`Real`]: the GPU and
//! the CPU executor run them in f32, the reference runs the very same lines in f64.
//!
//! ```
//! use kernels_gpu::{abi::VariantParams, math::Real, variant::{Pair, Variant}};
//!
//! /// Attention with linear biases: a key that stands further back weighs less.
//! #[derive(Clone, Copy)]
//! struct Alibi {
//!     params: VariantParams,
//!     heads: u32,
//! }
//!
//! impl Variant for Alibi {
//!     const TRANSFORMS_LOGITS: bool = true;
//!
//!     fn params(&self) -> &VariantParams {
//!         &self.params
//!     }
//!
//!     fn logit<R: Real>(&self, dot: R, at: Pair) -> R {
//!         let slope = R::from_f32(-8.0 * (at.head + 1) as f32 / self.heads as f32).exp2();
//!         let distance = R::from_f32(at.distance);
//!         let log2_e = R::from_f32(core::f32::consts::LOG2_E);
//!         dot * R::from_f32(self.params.scale_log2) - slope * distance * log2_e
//!     }
//! }
//! ```

use core::f32::consts::LOG2_E;

use crate::{abi::VariantParams, common::math::Real};

/// A query token and one of its heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Query {
    /// The query token, a row of `q`.
    pub token: u32,
    /// The query head.
    pub head: u32,
    /// Where the query stands among the keys of the table at hand (see [`crate::abi::QueryRow::position`]).
    pub position: i32,
}

/// A key (or value) and its head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    /// Position in the table at hand.
    pub position: u32,
    /// The KV head.
    pub head: u32,
}

/// A query head against a key: one logit.
///
/// Both positions count from the first key of the table at hand; where a batch has several parts, only
/// their distance has a meaning of its own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pair {
    /// The query token, a row of `q`.
    pub token: u32,
    /// The query head.
    pub head: u32,
    /// Where the query stands among the keys.
    pub position: i32,
    /// Position of the key.
    pub key: u32,
    /// How far the key stands behind the query, negative where it stands after it. Kernels have this at hand, while
    /// positions would have to be converted for each key; beyond 2²⁴ it is rounded.
    pub distance: f32,
    /// What the variant says of the query ([`Variant::of_row`]).
    pub of_row: f32,
}

impl Pair {
    /// Of a query and a key.
    #[inline(always)]
    #[must_use]
    pub fn new<V: Variant>(variant: &V, query: Query, key: u32) -> Self {
        let Query {
            token,
            head,
            position,
        } = query;
        Self {
            token,
            head,
            position,
            key,
            distance: position.wrapping_sub(key as i32) as f32,
            of_row: variant.of_row(query),
        }
    }

    /// The query is `self`'s, the key stands `columns` after its key: a constant, as `self` is the same for many.
    #[inline(always)]
    #[must_use]
    pub const fn further(&self, columns: u32) -> Self {
        Self {
            key: self.key.wrapping_add(columns),
            distance: self.distance - columns as f32,
            ..*self
        }
    }
}

/// The places at which models differ.
///
/// Hooks on rows (query, key, value, output) get two neighbouring elements, `dim` and `dim + 1` with an even
/// `dim`: what one register of a tensor-core fragment holds, and enough for rotary embeddings.
pub trait Variant: Copy + Send + Sync {
    /// Weights are a softmax of the logits. Without it [`Variant::logit`] returns the weight itself, which may be of either
    /// sign, partial results are added, and the LSE has no meaning (it is written as 0). Such a variant sets
    /// [`Variant::TRANSFORMS_LOGITS`] as well. Kernels round a weight to the type of the values: in f16 what is below
    /// 2⁻²⁴ is lost.
    const SOFTMAX: bool = true;
    /// [`Variant::logit`] is more than a multiplication by `scale_log2` (which kernels fold into the exp2).
    const TRANSFORMS_LOGITS: bool = false;
    /// [`Variant::logit`] is yet to be multiplied by [`Variant::unit`]: kernels do that for nothing.
    const KEEPS_UNIT: bool = false;
    /// [`Variant::logit`] is `dot + of_row · distance`, in the unit of dot products: kernels then add what belongs to the
    /// row where it costs nothing, and do not call it.
    const LINEAR: bool = false;
    /// [`Variant::visible`] may hide keys within [`Variant::visible_keys`].
    const MASKS: bool = false;
    /// [`Variant::query`] does something.
    const TRANSFORMS_QUERY: bool = false;
    /// [`Variant::key`] does something.
    const TRANSFORMS_KEY: bool = false;
    /// [`Variant::value`] does something.
    const TRANSFORMS_VALUE: bool = false;
    /// [`Variant::output`] does something.
    const TRANSFORMS_OUTPUT: bool = false;

    /// Scale, window and causality.
    fn params(&self) -> &VariantParams;

    /// The first and the last key position that a query at `position` may see, both inclusive; none if the
    /// last is below the first. Whole blocks of keys are skipped, or go unmasked, by this interval.
    #[inline(always)]
    fn visible_keys(&self, position: i32) -> (i32, i32) {
        let params = self.params();
        let first = position.saturating_sub(params.window_left);
        (
            first,
            if params.causal == 0 {
                i32::MAX
            } else {
                position
            },
        )
    }

    /// A number that belongs to a query token and a head, such as a slope. It is computed once for a row, whose keys
    /// then have it ([`Pair::of_row`]).
    #[inline(always)]
    fn of_row(&self, at: Query) -> f32 {
        let _ = at;
        0.0
    }

    /// From the dot product of query and key to the base-2 logit (or to the weight, see
    /// [`Variant::SOFTMAX`]; or to a dot product, see [`Variant::KEEPS_UNIT`]).
    #[inline(always)]
    fn logit<R: Real>(&self, dot: R, at: Pair) -> R {
        let _ = at;
        dot * R::from_f32(self.params().scale_log2)
    }

    /// What a logit that [keeps its unit](Variant::KEEPS_UNIT) is in base 2, where it is 1: that of dot products, unless the
    /// variant has another.
    #[inline(always)]
    fn unit(&self) -> f32 {
        self.params().scale_log2
    }

    /// The base-2 logit (or the weight), whatever the unit of [`Variant::logit`].
    #[inline(always)]
    fn base_2<R: Real>(&self, dot: R, at: Pair) -> R {
        let logit = self.logit(dot, at);
        if Self::KEEPS_UNIT {
            logit * R::from_f32(self.unit())
        } else {
            logit
        }
    }

    /// Whether the query sees the key; asked only for keys within [`Variant::visible_keys`].
    #[inline(always)]
    fn visible(&self, at: Pair) -> bool {
        let _ = at;
        true
    }

    /// Applied to queries as they are loaded.
    #[inline(always)]
    fn query<R: Real>(&self, x: [R; 2], dim: u32, at: Query) -> [R; 2] {
        let _ = (dim, at);
        x
    }

    /// Applied to keys as they are loaded.
    #[inline(always)]
    fn key<R: Real>(&self, x: [R; 2], dim: u32, at: Key) -> [R; 2] {
        let _ = (dim, at);
        x
    }

    /// Applied to values as they are loaded.
    #[inline(always)]
    fn value<R: Real>(&self, x: [R; 2], dim: u32, at: Key) -> [R; 2] {
        let _ = (dim, at);
        x
    }

    /// Applied to the final output, after all merging. The query's position is not known any more: the
    /// hook is given 0.
    #[inline(always)]
    fn output<R: Real>(&self, x: [R; 2], dim: u32, at: Query) -> [R; 2] {
        let _ = (dim, at);
        x
    }
}

/// What is wrong with what a run gives a variant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnDefect {
    /// The number that is wrong.
    pub name: &'static str,
    /// What it is.
    pub got: u64,
    /// What it has to be.
    pub rule: &'static str,
}

/// A variant that kernels of its own are compiled for: see [`variant_kernels!`](crate::variant_kernels).
pub trait FromLaunch: Variant {
    /// What a run gives it beside the standard parameters: numbers, and device addresses of what is larger.
    type Own: bytemuck::Pod;

    /// From what a launch is given.
    fn from_launch(params: VariantParams, own: &Self::Own) -> Self;

    /// Whether a run with so many query heads can be given this. Hosts ask before anything is launched.
    ///
    /// # Errors
    /// The first thing that is wrong.
    fn check(own: &Self::Own, q_heads: u32) -> Result<(), OwnDefect> {
        let _ = (own, q_heads);
        Ok(())
    }

    /// Refuses, while it is compiled, a variant with a hook that no kernel runs.
    const RUNS_ON_GPUS: () = {
        assert!(
            Self::SOFTMAX || Self::TRANSFORMS_LOGITS,
            "weights of no softmax are what `logit` returns: set TRANSFORMS_LOGITS"
        );
        assert!(
            Self::SOFTMAX || !Self::KEEPS_UNIT,
            "weights of no softmax have no unit to keep: leave KEEPS_UNIT out"
        );
        assert!(
            !Self::TRANSFORMS_QUERY && !Self::TRANSFORMS_KEY,
            "kernels on GPUs run no hooks on queries or keys: transform them before attention, keys as they are appended"
        );
        assert!(
            !Self::TRANSFORMS_VALUE && !Self::TRANSFORMS_OUTPUT,
            "kernels on GPUs run no hooks on values or outputs: transform them before and behind attention"
        );
        assert!(
            Self::TRANSFORMS_LOGITS || !Self::KEEPS_UNIT,
            "logits of no hook keep no unit: set TRANSFORMS_LOGITS beside KEEPS_UNIT"
        );
        assert!(
            Self::KEEPS_UNIT || !Self::LINEAR,
            "what is linear is in the unit of dot products: set KEEPS_UNIT beside LINEAR"
        );
    };
}

/// Softmax attention, causal and windowed as [`VariantParams`] say, with a soft cap if `CAP`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Standard<const CAP: bool>(pub VariantParams);

impl<const CAP: bool> Variant for Standard<CAP> {
    const TRANSFORMS_LOGITS: bool = CAP;
    /// A capped logit is a hyperbolic tangent.
    const KEEPS_UNIT: bool = CAP;

    #[inline(always)]
    fn params(&self) -> &VariantParams {
        &self.0
    }

    #[inline(always)]
    fn unit(&self) -> f32 {
        if CAP {
            self.0.soft_cap * LOG2_E
        } else {
            self.0.scale_log2
        }
    }

    #[inline(always)]
    fn logit<R: Real>(&self, dot: R, _at: Pair) -> R {
        let VariantParams {
            scale,
            scale_log2,
            soft_cap,
            ..
        } = self.0;
        if CAP {
            // The factor is the same for all keys: compilers take it out of the loop.
            let inner = R::from_f32(scale) * R::from_f32(soft_cap).recip();
            (dot * inner).tanh()
        } else {
            dot * R::from_f32(scale_log2)
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
    const TRANSFORMS_LOGITS: bool = true;

    #[inline(always)]
    fn params(&self) -> &VariantParams {
        &self.params
    }

    #[inline(always)]
    fn logit<R: Real>(&self, dot: R, _at: Pair) -> R {
        let one = R::from_f32(1.0);
        let bias = R::from_f32(self.bias) * R::from_f32(LOG2_E);
        (one + (-(dot * R::from_f32(self.params.scale_log2) + bias)).exp2()).recip()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at() -> Pair {
        let query = Query {
            token: 0,
            head: 0,
            position: 0,
        };
        Pair::new(&Standard::<false>(params(0.0, i32::MAX, 1)), query, 0)
    }

    fn params(soft_cap: f32, window_left: i32, causal: u32) -> VariantParams {
        let scale = 0.125;
        VariantParams {
            scale_log2: scale * LOG2_E,
            scale,
            soft_cap,
            window_left,
            causal,
            reserved: 0,
        }
    }

    #[test]
    fn the_interval_is_causal_and_windowed() {
        let keys = |window, causal, position| {
            Standard::<false>(params(0.0, window, causal)).visible_keys(position)
        };
        assert_eq!(keys(i32::MAX, 0, 7).1, i32::MAX);
        assert!(keys(i32::MAX, 0, 7).0 <= 0);
        assert_eq!(keys(i32::MAX, 1, 7).1, 7);
        assert_eq!(keys(3, 1, 7), (4, 7));
        assert_eq!(keys(3, 0, 7), (4, i32::MAX));
        assert_eq!(keys(i32::MAX, 1, -7), (i32::MIN, -7));
    }

    #[test]
    fn the_cap_bounds_logits_and_keeps_small_ones() {
        let variant = Standard::<true>(params(50.0, i32::MAX, 1));
        let natural = |dot: f64| variant.base_2(dot, at()) / f64::from(LOG2_E);
        assert!((natural(1e9) - 50.0).abs() < 1e-5);
        assert!((natural(0.8) - 0.1).abs() < 1e-5);
        assert!((natural(800.0) - 50.0 * 2.0f64.tanh()).abs() < 1e-4);
    }

    #[test]
    fn f32_and_f64_run_the_same_formula() {
        let cap = Standard::<true>(params(30.0, i32::MAX, 1));
        let sigmoid = Sigmoid {
            params: params(0.0, i32::MAX, 1),
            bias: -3.0,
        };
        for step in -200..200 {
            let dot = step as f32 * 3.7;
            let close = |x: f32, y: f64| (f64::from(x) - y).abs() <= 1e-5 * y.abs().max(1.0);
            assert!(
                close(cap.base_2(dot, at()), cap.base_2(f64::from(dot), at())),
                "cap at {dot}"
            );
            assert!(
                close(
                    sigmoid.logit(dot, at()),
                    sigmoid.logit(f64::from(dot), at())
                ),
                "sigmoid at {dot}"
            );
        }
    }

    #[test]
    fn what_is_not_there_costs_nothing() {
        const { assert!(!Standard::<false>::TRANSFORMS_LOGITS && Standard::<true>::TRANSFORMS_LOGITS) };
        const { assert!(!Standard::<true>::MASKS && !Standard::<true>::TRANSFORMS_QUERY) };
        const { assert!(!Sigmoid::SOFTMAX) };
    }
}
