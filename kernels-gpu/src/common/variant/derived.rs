//! What follows from a variant's parameters and hooks, and is the same for all variants.

use super::{Hook, Pair, Variant};
use crate::common::math::Real;

/// Methods of every [`Variant`] that no variant can replace: kernels read the window and causality from the launch, too, so
/// another interval would hold on the CPU only. [`Variant::visible`] hides keys within the interval.
///
/// ```compile_fail,E0407
/// # use kernels_gpu::{abi::VariantParams, variant::Variant};
/// #[derive(Clone, Copy)]
/// struct BlockLocal(VariantParams);
///
/// impl Variant for BlockLocal {
///     fn params(&self) -> &VariantParams {
///         &self.0
///     }
///
///     fn visible_keys(&self, position: i32) -> (i32, i32) {
///         (position / 256 * 256, position)
///     }
/// }
/// ```
///
/// ```compile_fail,E0407
/// # use kernels_gpu::{abi::VariantParams, math::Real, variant::{Pair, Variant}};
/// #[derive(Clone, Copy)]
/// struct Doubled(VariantParams);
///
/// impl Variant for Doubled {
///     fn params(&self) -> &VariantParams {
///         &self.0
///     }
///
///     fn base_2<R: Real>(&self, dot: R, _: Pair) -> R {
///         dot + dot
///     }
/// }
/// ```
///
/// ```compile_fail,E0119
/// # use kernels_gpu::{math::Real, variant::{Derived, Pair, Standard}};
/// impl Derived for Standard<false> {
///     fn visible_keys(&self, position: i32) -> (i32, i32) {
///         (0, position)
///     }
///
///     fn base_2<R: Real>(&self, dot: R, _: Pair) -> R {
///         dot
///     }
/// }
/// ```
pub trait Derived {
    /// The first and the last key position that a query at `position` may see, both inclusive; none if the last is
    /// below the first. Kernels skip blocks outside this interval, and do not mask blocks inside it.
    fn visible_keys(&self, position: i32) -> (i32, i32);

    /// The base-2 logit (or the weight), independent of the unit of [`Variant::logit`].
    fn base_2<R: Real>(&self, dot: R, at: Pair) -> R;
}

impl<V: Variant> Derived for V {
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

    #[inline(always)]
    fn base_2<R: Real>(&self, dot: R, at: Pair) -> R {
        let logit = self.logit(dot, at).plain();
        if Self::KEEPS_UNIT {
            logit * R::from_f32(self.unit().plain())
        } else {
            logit
        }
    }
}
