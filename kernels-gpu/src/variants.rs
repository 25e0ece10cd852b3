//! Variants whose kernels come with the library, beside the standard one.

use bytemuck::{Pod, Zeroable};

use crate::{
    abi::VariantParams,
    common::{
        math::{Real, recip},
        variant::{FromLaunch, Pair, Query, Variant},
    },
};

/// Attention with linear biases: a key that stands `d` positions before the query weighs as if its logit were smaller by
/// the head's slope times `d` (Press et al., 2022).
#[derive(Clone, Copy, Debug)]
pub struct Alibi {
    params: VariantParams,
    slopes: Slopes,
}

/// Where the slopes of [`Alibi`] are.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Slopes {
    /// Address of an f32 for each query head, in the memory of whoever computes; natural logits per position.
    pub address: u64,
}

impl Variant for Alibi {
    const TRANSFORMS_LOGITS: bool = true;
    const KEEPS_UNIT: bool = true;

    #[inline(always)]
    fn params(&self) -> &VariantParams {
        &self.params
    }

    /// In the unit of dot products, so that a key costs two instructions.
    #[inline(always)]
    fn of_row(&self, at: Query) -> f32 {
        // SAFETY: whoever made the variant vouches for the slopes.
        let slope = unsafe { *(self.slopes.address as *const f32).add(at.head as usize) };
        -slope * recip(self.params.scale)
    }

    #[inline(always)]
    fn logit<R: Real>(&self, dot: R, at: Pair) -> R {
        R::from_f32(at.of_row).mul_add(R::from_f32(at.distance), dot)
    }
}

impl FromLaunch for Alibi {
    type Own = Slopes;

    #[inline(always)]
    fn from_launch(params: VariantParams, own: &Slopes) -> Self {
        Self {
            params,
            slopes: *own,
        }
    }
}

#[cfg(any(not(target_arch = "nvptx64"), feature = "variants"))]
crate::variant_kernels! {
    /// The kernels of [`Alibi`].
    pub const ALIBI: "alibi" = [Prefill, DecodeMma, DecodeWgmma, Sm80Prefill, Sm80Decode] of Alibi
        where heads [64, 128], elements [Bf16, F16];
}

/// Those that come with the library.
#[cfg(not(target_arch = "nvptx64"))]
pub const BUILT_IN: &[crate::Hooks] = &[ALIBI];
