//! A substitute for `libcuda.so.1`: one GPU, that of [`ptx_gpu`], whose kernels run on the CPU.
//!
//! A program that lets its user choose the driver library (`TANDEM_LIBCUDA` in this workspace) runs on it unchanged.
//! `PTX_DRIVER` selects the emulated GPU: see [`ptx_gpu`].
#![allow(non_snake_case, missing_docs)]

#[cfg(target_arch = "x86_64")]
macro_rules! jump {
    ($function:path) => {
        std::arch::naked_asm!("jmp {}", sym $function)
    };
}
#[cfg(target_arch = "aarch64")]
macro_rules! jump {
    ($function:path) => {
        std::arch::naked_asm!("b {}", sym $function)
    };
}

/// Exports each function under its name, as a jump, so that it has the arguments of its target.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! export {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub extern "C" fn $name() {
            jump!(ptx_gpu::$name)
        }
    )*};
}
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
ptx_gpu::functions!(export);
