//! One entry per wrapper of `cuda_std`, with the PTX that it must compile to.
//!
//! The entry itself states the expectation, in a comment line that the compiler passes on:
//! `// expect <text>`, or `// expect 3* <text>` for three occurrences. The tests read it from the PTX.
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

/// Writes a value to memory, so that its computation is not removed.
#[inline(always)]
unsafe fn keep<T>(out: *mut u8, value: T) {
    // SAFETY: the caller's promise.
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
