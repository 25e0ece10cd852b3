//! Variants whose kernels come with the library, beside the standard one.

use bytemuck::{Pod, Zeroable};

use crate::{
    abi::VariantParams,
    common::{
        math::{Real, recip},
        variant::{FromLaunch, Pair, Query, Sigmoid, Variant},
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
    const LINEAR: bool = true;

    #[inline(always)]
    fn params(&self) -> &VariantParams {
        &self.params
    }

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

/// What a run gives [`Sigmoid`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct SigmoidBias {
    /// Added to the scaled dot product, usually −ln(number of keys).
    pub bias: f32,
}

impl FromLaunch for Sigmoid {
    type Own = SigmoidBias;

    #[inline(always)]
    fn from_launch(params: VariantParams, own: &SigmoidBias) -> Self {
        Self {
            params,
            bias: own.bias,
        }
    }
}

#[cfg(any(not(target_arch = "nvptx64"), feature = "variants"))]
crate::variant_kernels! {
    /// The kernels of [`Alibi`].
    pub const ALIBI: "alibi" = [Prefill, DecodeMma, DecodeWgmma, Sm80Prefill, Sm80Decode] of Alibi
        where heads [64, 128], elements [Bf16, F16];
}

#[cfg(any(not(target_arch = "nvptx64"), feature = "variants"))]
crate::variant_kernels! {
    /// The kernels of [`Sigmoid`]. Those for other heads and for f16 are a line in a crate of one's own.
    pub const SIGMOID: "sigmoid" = [Prefill, DecodeMma, DecodeWgmma, Sm80Prefill, Sm80Decode] of Sigmoid
        where heads [128], elements [Bf16];
}

/// Those that come with the library.
#[cfg(not(target_arch = "nvptx64"))]
pub const BUILT_IN: &[crate::Hooks] = &[ALIBI, SIGMOID];
