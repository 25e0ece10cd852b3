//! Stands in for `libcuda.so.1`: one GPU whose kernels run on the CPU, that of [`ptx_gpu`].
//!
//! A program that takes the driver's functions from a file of its user's choice (`TANDEM_LIBCUDA` for this
//! workspace) runs on it unchanged. `PTX_DRIVER` says which GPU is played: see [`ptx_gpu`].
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

/// Each function under its name, as a jump: it has the arguments of the one that it jumps to.
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
