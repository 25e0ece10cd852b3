//! The kernels of tandem-attn, and the plain parts that the host shares with them.
//!
//! Built twice: for `nvptx64-nvidia-cuda` this crate is the device code; for the host it is
//! [`abi`] (the only contract between the two sides), [`state`], [`variant`] and [`layout`],
//! so that the CPU executor and the reference run the very lines that the GPU runs.
#![cfg_attr(target_arch = "nvptx64", no_std, feature(asm_experimental_arch))]

pub mod abi;
pub mod divisor;
pub mod math;
pub mod state;
pub mod variant;

/// Device code has nobody to tell: the launch fails, and the host reports that.
#[cfg(target_arch = "nvptx64")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    // SAFETY: ends the kernel; nothing runs after it.
    unsafe { core::arch::asm!("trap;", options(noreturn)) }
}
