//! A variant, for the host and as kernels: queries see their own chunk of the text, and far keys weigh less.
#![cfg_attr(target_arch = "nvptx64", no_std)]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx, asm_experimental_arch))]

use bytemuck::{Pod, Zeroable};
use kernels_gpu::{
    abi::VariantParams,
    math::Real,
    variant::{FromLaunch, Hook, Pair, Variant},
    variant_kernels,
};

/// What a run gives it. Addresses of device memory can be among such numbers.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Chunks {
    /// Tokens of a chunk.
    pub tokens: u32,
    /// What a logit loses for each position that its key stands back, in base 2.
    pub loss: f32,
    /// Keys that stand further back lose no more.
    pub most: f32,
}

/// The variant.
#[derive(Clone, Copy, Debug)]
pub struct Chunked {
    params: VariantParams,
    chunks: Chunks,
}

impl Variant for Chunked {
    #[inline(always)]
    fn params(&self) -> &VariantParams {
        &self.params
    }

    #[inline(always)]
    fn logit<R: Real>(&self, dot: R, at: Pair) -> impl Hook<R> {
        let loss = at.distance.min(self.chunks.most) * self.chunks.loss;
        dot * R::from_f32(self.params.scale_log2) - R::from_f32(loss)
    }

    #[inline(always)]
    fn visible(&self, at: Pair) -> impl Hook<bool> {
        at.key / self.chunks.tokens == at.position as u32 / self.chunks.tokens
    }
}

impl FromLaunch for Chunked {
    type Own = Chunks;

    #[inline(always)]
    unsafe fn from_launch(params: VariantParams, chunks: &Chunks) -> Self {
        let chunks = *chunks;
        Self { params, chunks }
    }
}

variant_kernels! {
    /// Kernels for a Hopper GPU; those of the last two families are for all others from Ampere on.
    pub const CHUNKED: "chunked" = [Prefill, DecodeMma, DecodeWgmma, Sm80Prefill, Sm80Decode] of Chunked
        where heads [128], elements [Bf16];
}
