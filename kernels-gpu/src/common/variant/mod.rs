//! Attention variants: hooks for what differs between models.
//!
//! A [`Variant`] is compiled into the kernel, with the hooks that it implements: a kernel without a soft cap contains no
//! instruction for one. Hooks are generic over [`Real`]: the GPU and the CPU executor run them in f32, the reference
//! runs the same code in f64.
//!
//! ```
//! use kernels_gpu::{abi::VariantParams, math::Real, variant::{Hook, Pair, Variant}};
//!
//! /// Attention with linear biases: a key that stands further back weighs less.
//! #[derive(Clone, Copy)]
//! struct Alibi {
//!     params: VariantParams,
//!     heads: u32,
//! }
//!
//! impl Variant for Alibi {
//!     fn params(&self) -> &VariantParams {
//!         &self.params
//!     }
//!
//!     fn logit<R: Real>(&self, dot: R, at: Pair) -> impl Hook<R> {
//!         let slope = R::from_f32(-8.0 * (at.head + 1) as f32 / self.heads as f32).exp2();
//!         let distance = R::from_f32(at.distance);
//!         let log2_e = R::from_f32(core::f32::consts::LOG2_E);
//!         dot * R::from_f32(self.params.scale_log2) - slope * distance * log2_e
//!     }
//! }
//! ```

mod built_in;
mod derived;
mod from_launch;
mod hook;

pub use built_in::{Sigmoid, Standard};
pub use derived::Derived;
pub use from_launch::{FromLaunch, OwnDefect};
pub use hook::Hook;

use hook::{Unused, own_0, own_1, own_2, own_3};

use crate::{abi::VariantParams, common::math::Real};

/// A query token and one of its heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Query {
    /// The query token, a row of `q`. On GPUs it may be past the last one: see [`Variant`].
    pub token: u32,
    /// The query head.
    pub head: u32,
    /// The query's position among the keys of the current page table (see [`crate::abi::QueryRow::position`]).
    pub position: i32,
}

/// A key (or value) and its head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    /// Position in the current page table.
    pub position: u32,
    /// The KV head.
    pub head: u32,
}

/// A query head and a key: the coordinates of one logit.
///
/// Both positions count from the first key of the current page table; where a batch has several parts, only their
/// difference is meaningful.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pair {
    /// The query token, a row of `q`. On GPUs it may be past the last one: see [`Variant`].
    pub token: u32,
    /// The query head.
    pub head: u32,
    /// The query's position among the keys.
    pub position: i32,
    /// Position of the key. On GPUs it may be past the last one, or wrapped below 0: see [`Variant`].
    pub key: u32,
    /// Query position minus key position. Kernels have it as f32, whereas positions would have to be converted for each
    /// key; beyond 2²⁴ it is rounded.
    pub distance: f32,
    /// The variant's number for the query ([`Variant::of_row`]).
    pub of_row: f32,
}

impl Pair {
    /// The pair of a query and a key.
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

    /// The pair of the same query and the key `columns` after `self`'s. `columns` is a constant: a thread derives all
    /// its columns from one pair.
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

/// The hooks of an attention variant.
///
/// A hook that a variant implements runs; there is nothing else to declare. Hooks return `impl Hook<T>`, and a method
/// returns a plain `T`: the [return type](Hook) says whether the hook is the variant's own. A variant whose constant
/// parameters decide this sets the hook's constant itself, and one that passes hooks on to another variant passes on its
/// constants, too.
///
/// Hooks on rows (query, key, value, output) get two neighbouring elements, `dim` and `dim + 1` with even `dim`: that
/// is one register of a tensor-core fragment, and enough for rotary embeddings of neighbouring pairs.
///
/// The CPU executor and the reference call [`logit`](Self::logit) and [`visible`](Self::visible) only for keys within
/// [`Derived::visible_keys`]. Kernels on GPUs call them for whole blocks of keys, and prefills for whole tiles of rows, and discard what
/// is returned for others. There `key` may be past the request's keys, or before key 0 (as a wrapped number), and the `token` of
/// these hooks and of [`of_row`](Self::of_row) may be past the last query token. A hook that reads memory by them has to check them
/// against the size of that memory.
pub trait Variant: Copy + Send + Sync + Derived {
    /// Weights are a softmax of the logits. Without it [`Variant::logit`] returns the weight itself, of either sign;
    /// partial results are added, and the LSE is meaningless (it is written as 0). Kernels round a weight to the type of
    /// the values: in f16, weights below 2⁻²⁴ are lost.
    const SOFTMAX: bool = true;
    /// [`Variant::logit`] still has to be multiplied by [`Variant::unit`]: kernels fold that into the exp2 at no cost.
    /// A variant without a unit of its own, whose logits are in the unit of dot products, has to say so.
    const KEEPS_UNIT: bool = own_0(&Self::unit);
    /// [`Variant::logit`] is `dot + of_row · distance`, in the unit of dot products. Kernels then do not call it: they
    /// fold the row's part into the offset of the exp2, at no cost.
    const LINEAR: bool = false;
    /// [`Variant::logit`] is more than a multiplication by `scale_log2` (which kernels fold into the exp2).
    const TRANSFORMS_LOGITS: bool = own_2(&Self::logit::<f32>);
    /// Hopper's prefills call [`Variant::logits`] instead of [`Variant::logit`].
    const MIXES_KEYS: bool = own_2(&Self::logits);
    /// [`Variant::visible`] may hide keys within [`Derived::visible_keys`].
    const MASKS: bool = own_1(&Self::visible);
    /// [`Variant::query`] is not the identity.
    const TRANSFORMS_QUERY: bool = own_3(&Self::query::<f32>);
    /// [`Variant::key`] is not the identity.
    const TRANSFORMS_KEY: bool = own_3(&Self::key::<f32>);
    /// [`Variant::value`] is not the identity.
    const TRANSFORMS_VALUE: bool = own_3(&Self::value::<f32>);
    /// [`Variant::output`] is not the identity.
    const TRANSFORMS_OUTPUT: bool = own_3(&Self::output::<f32>);

    /// Rejects at compile time hooks and constants that contradict each other, with which a hook would not run. Executors,
    /// the reference and kernels evaluate it.
    ///
    /// ```compile_fail
    /// # use kernels_gpu::{abi::VariantParams, variant::{Hook, Variant}};
    /// #[derive(Clone, Copy)]
    /// struct UnitWithoutLogit(VariantParams);
    ///
    /// impl Variant for UnitWithoutLogit {
    ///     fn params(&self) -> &VariantParams {
    ///         &self.0
    ///     }
    ///
    ///     fn unit(&self) -> impl Hook<f32> {
    ///         2.0
    ///     }
    /// }
    ///
    /// const _: () = UnitWithoutLogit::AGREES;
    /// ```
    #[doc(hidden)]
    const AGREES: () = {
        assert!(
            Self::SOFTMAX || Self::TRANSFORMS_LOGITS,
            "weights of no softmax are what `logit` returns: implement `logit`"
        );
        assert!(
            Self::SOFTMAX || !Self::KEEPS_UNIT,
            "weights of no softmax have no unit to keep: leave KEEPS_UNIT and `unit` out"
        );
        assert!(
            Self::TRANSFORMS_LOGITS || !Self::KEEPS_UNIT,
            "logits of no hook keep no unit: implement `logit`, or leave KEEPS_UNIT and `unit` out"
        );
        assert!(
            Self::TRANSFORMS_LOGITS || !Self::MIXES_KEYS,
            "only Hopper's prefills call `logits`: implement `logit` beside it"
        );
        assert!(
            Self::KEEPS_UNIT || !Self::LINEAR,
            "what is linear is in the unit of dot products: set KEEPS_UNIT beside LINEAR"
        );
        assert!(
            !Self::LINEAR || !Self::MIXES_KEYS,
            "kernels do not call `logits` of what is linear: leave LINEAR or `logits` out"
        );
    };

    /// Scale, window and causality, as the variant was given them: GPU kernels also read them from the launch.
    fn params(&self) -> &VariantParams;

    /// A number for a query token and head, such as a slope. It is computed once per row and passed on in
    /// [`Pair::of_row`].
    #[inline(always)]
    fn of_row(&self, at: Query) -> f32 {
        let _ = at;
        0.0
    }

    /// Maps the dot product of query and key to the base-2 logit (or to the weight, see [`Variant::SOFTMAX`]; or to a
    /// logit in the unit of dot products, see [`Variant::KEEPS_UNIT`]).
    #[inline(always)]
    fn logit<R: Real>(&self, dot: R, at: Pair) -> impl Hook<R> {
        let _ = at;
        Unused(dot * R::from_f32(self.params().scale_log2))
    }

    /// [`Variant::logit`] of four keys, which may share work. Dot products of hidden keys are −∞; what is returned for them does not
    /// matter, but must not make the other logits NaN.
    #[inline(always)]
    fn logits(&self, dots: [f32; 4], at: [Pair; 4]) -> impl Hook<[f32; 4]> {
        Unused([0, 1, 2, 3].map(|i| self.logit(dots[i], at[i]).plain()))
    }

    /// The factor that turns a logit that [keeps its unit](Variant::KEEPS_UNIT) into base 2. By default the unit is
    /// that of dot products.
    #[inline(always)]
    fn unit(&self) -> impl Hook<f32> {
        Unused(self.params().scale_log2)
    }

    /// Whether the query sees the key, which may only hide keys within [`Derived::visible_keys`].
    #[inline(always)]
    fn visible(&self, at: Pair) -> impl Hook<bool> {
        let _ = at;
        Unused(true)
    }

    /// Applied to queries as they are loaded.
    #[inline(always)]
    fn query<R: Real>(&self, x: [R; 2], dim: u32, at: Query) -> impl Hook<[R; 2]> {
        let _ = (dim, at);
        Unused(x)
    }

    /// Applied to keys as they are loaded.
    #[inline(always)]
    fn key<R: Real>(&self, x: [R; 2], dim: u32, at: Key) -> impl Hook<[R; 2]> {
        let _ = (dim, at);
        Unused(x)
    }

    /// Applied to values as they are loaded.
    #[inline(always)]
    fn value<R: Real>(&self, x: [R; 2], dim: u32, at: Key) -> impl Hook<[R; 2]> {
        let _ = (dim, at);
        Unused(x)
    }

    /// Applied to the final output, after all merges. The query's position is no longer known there: the hook gets 0.
    #[inline(always)]
    fn output<R: Real>(&self, x: [R; 2], dim: u32, at: Query) -> impl Hook<[R; 2]> {
        let _ = (dim, at);
        Unused(x)
    }
}

#[cfg(test)]
mod tests;
