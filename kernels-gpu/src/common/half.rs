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

/// The registry row of a kernel that has an entry for each 16-bit type and no other variants: its name up to the type, family,
/// architecture and operation, threads, resident CTAs per SM, and the type of its 8-bit keys if it has any.
#[cfg(not(target_arch = "nvptx64"))]
macro_rules! half_row {
    ($half:ident $element:literal {
        $prefix:literal, $family:ident $arch:ident $op:ident, $threads:ident, $ctas:ident $(, $cache:ident)?
    }) => {
        $crate::registry::KernelInfo {
            element: $crate::registry::Element::$half,
            $(cache: Some($crate::registry::Element::$cache),)?
            threads: $threads,
            registers: $crate::registry::registers($threads, $ctas),
            ..$crate::registry::KernelInfo::new(
                concat!($prefix, $element),
                $crate::registry::Family::$family,
                $crate::registry::Arch::$arch,
                $crate::registry::Op::$op,
            )
        }
    };
}
#[cfg(not(target_arch = "nvptx64"))]
pub(crate) use half_row;

/// The entry of such a kernel: a call of a function that is generic over the type.
#[cfg(target_arch = "nvptx64")]
#[allow(unused_macros, reason = "most families have no such kernels")]
macro_rules! half_entry {
    ($half:ident $element:literal { $prefix:literal, $threads:ident, $ctas:ident, $function:ident($params:ident) }) => {
        const _: () = {
            /// See the module's documentation.
            ///
            /// # Safety
            /// The parameters describe memory as their type says; tensors have the type in the name.
            #[kernel(name = [$prefix, $element], max_threads = $threads, min_blocks = $ctas)]
            pub unsafe fn entry(params: $params) {
                // SAFETY: the launch's promise.
                unsafe { $function::<$crate::common::half::$half>(&params) }
            }
        };
    };
}
#[cfg(target_arch = "nvptx64")]
#[allow(unused_imports, reason = "as above")]
pub(crate) use half_entry;

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
