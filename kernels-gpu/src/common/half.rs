//! The 16-bit floats of queries, keys, values and outputs.

/// Passes the rows of a table of kernels to the macro `$then`, once for each 16-bit float type; this is the only list
/// of these types. `items` makes the invocations items, `list` a slice of their results. `with` passes extra arguments,
/// for invocations of a macro of this crate from another crate.
#[doc(hidden)]
#[macro_export]
macro_rules! each_half {
    (with $then:ident $arguments:tt $rows:tt) => {
        $crate::$then! { $arguments Bf16 "bf16" $rows }
        $crate::$then! { $arguments F16 "f16" $rows }
    };
    ($as:ident $then:ident $rows:tt) => {
        $crate::each_half! { @$as $then [Bf16 "bf16", F16 "f16"] $rows }
    };
    (@items $then:ident [$($half:ident $name:literal),*] $rows:tt) => {
        $($then! { $half $name $rows })*
    };
    (@list $then:ident [$($half:ident $name:literal),*] $rows:tt) => {
        &[$($then! { $half $name $rows }),*]
    };
}
#[cfg(target_arch = "nvptx64")]
pub use device::*;

#[cfg(target_arch = "nvptx64")]
mod device {
    use cuda_std::{convert, math, mma, wgmma};

    pub use wgmma::{Bf16, F16};

    /// A 16-bit float that tensor cores multiply.
    pub trait Half: wgmma::Element {
        /// Whether its range is that of f32.
        const WIDE: bool;

        /// D += A·B, fragments as in [`cuda_std::mma`].
        ///
        /// # Safety
        /// All 32 lanes come here together.
        unsafe fn mma(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]);

        /// Packs two numbers, rounded to nearest even, the first in the low half.
        fn pack(first: f32, second: f32) -> u32;

        /// Both numbers of a pair. Exact.
        fn unpack(pair: u32) -> [f32; 2];

        /// The elementwise maximum of two pairs; of a number and NaN, the number.
        fn larger(a: u32, b: u32) -> u32;
    }

    impl Half for Bf16 {
        const WIDE: bool = true;

        #[inline(always)]
        unsafe fn mma(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
            // SAFETY: the caller's promise.
            unsafe { mma::m16n8k16_bf16(d, a, b) }
        }

        #[inline(always)]
        fn pack(first: f32, second: f32) -> u32 {
            convert::f32x2_to_bf16x2(first, second)
        }

        #[inline(always)]
        fn unpack(pair: u32) -> [f32; 2] {
            convert::bf16x2_to_f32(pair)
        }

        #[inline(always)]
        fn larger(a: u32, b: u32) -> u32 {
            math::max_bf16x2(a, b)
        }
    }

    impl Half for F16 {
        const WIDE: bool = false;

        #[inline(always)]
        unsafe fn mma(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
            // SAFETY: the caller's promise.
            unsafe { mma::m16n8k16_f16(d, a, b) }
        }

        #[inline(always)]
        fn pack(first: f32, second: f32) -> u32 {
            convert::f32x2_to_f16x2(first, second)
        }

        #[inline(always)]
        fn unpack(pair: u32) -> [f32; 2] {
            convert::f16x2_to_f32(pair)
        }

        #[inline(always)]
        fn larger(a: u32, b: u32) -> u32 {
            math::max_f16x2(a, b)
        }
    }
}
