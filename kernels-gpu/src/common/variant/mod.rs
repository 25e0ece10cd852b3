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

mod built_in;
mod from_launch;

pub use built_in::{Sigmoid, Standard};
pub use from_launch::{FromLaunch, OwnDefect};

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

#[cfg(test)]
mod tests;
