//! One entry per wrapper of `cuda_std`, with the PTX that it must become.
//!
//! The expectation stands in the entry itself, as a comment line that goes through the compiler:
//! `// expect <text>`, or `// expect 3* <text>` for three of them. The tests read it back.
#![no_std]
#![feature(abi_ptx, asm_experimental_arch)]
#![allow(improper_ctypes_definitions)]

/// `name(parameters) value => "text", …;` becomes an entry that writes the value to `out`.
macro_rules! probes {
    ($($name:ident($($argument:ident: $type:ty),*) $value:expr => $($ptx:literal),+;)*) => {$(
        #[cuda_std::kernel]
        pub unsafe fn $name($($argument: $type,)* out: *mut u8) {
            unsafe {
                $(::core::arch::asm!(concat!("// expect ", $ptx), options(nomem, nostack));)+
                crate::keep(out, $value);
            }
        }
    )*};
}

/// What is computed must reach memory, or nothing is computed.
#[inline(always)]
unsafe fn keep<T>(out: *mut u8, value: T) {
    // SAFETY: as the caller says.
    unsafe { out.cast::<T>().write(value) }
}

mod ampere;
mod features;
#[cfg(target_feature = "sm_90a")]
mod hopper;
#[cfg(target_feature = "sm_90a")]
mod softmax;
#[cfg(target_feature = "sm_90a")]
mod wgmma;
