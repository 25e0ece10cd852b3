//! The 16-bit floats of queries, keys, values and outputs.

use cuda_std::{convert, mma};

/// A 16-bit float that tensor cores multiply.
pub trait Half {
    /// D += A·B, fragments as in [`cuda_std::mma`].
    ///
    /// # Safety
    /// All 32 lanes come here together.
    unsafe fn mma(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]);

    /// Two of them, rounded to nearest even, the first in the low half.
    fn pack(first: f32, second: f32) -> u32;
}

/// bfloat16.
pub struct Bf16;

/// IEEE half precision.
pub struct F16;

impl Half for Bf16 {
    #[inline(always)]
    unsafe fn mma(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
        // SAFETY: the caller's promise.
        unsafe { mma::m16n8k16_bf16(d, a, b) }
    }

    #[inline(always)]
    fn pack(first: f32, second: f32) -> u32 {
        convert::f32x2_to_bf16x2(first, second)
    }
}

impl Half for F16 {
    #[inline(always)]
    unsafe fn mma(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
        // SAFETY: the caller's promise.
        unsafe { mma::m16n8k16_f16(d, a, b) }
    }

    #[inline(always)]
    fn pack(first: f32, second: f32) -> u32 {
        convert::f32x2_to_f16x2(first, second)
    }
}
