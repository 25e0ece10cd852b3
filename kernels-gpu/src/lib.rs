//! The kernels of tandem-attn, and the plain parts that the host shares with them.
//!
//! Built twice: for `nvptx64-nvidia-cuda` this crate is the device code; for the host it is
//! [`abi`] (the only contract between the two sides), [`state`], [`variant`] and the kernels' shapes,
//! so that the CPU executor and the reference run the very lines that the GPU runs.
#![cfg_attr(target_arch = "nvptx64", no_std)]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx, asm_experimental_arch))]

// Brings the panic handler.
#[cfg(target_arch = "nvptx64")]
use cuda_std as _;

pub mod abi;
pub mod append;
pub mod ceilings;
pub mod decode;
pub mod divisor;
pub mod loops;
pub mod math;
pub mod merge;
#[cfg(target_arch = "nvptx64")]
pub mod prefill;
pub mod sm80;
pub mod sm90;
#[cfg(target_arch = "nvptx64")]
// The kernels of Ampere need a part of it.
#[cfg_attr(not(target_feature = "sm_90a"), allow(dead_code))]
mod softmax;
pub mod state;
pub mod variant;
#[cfg(target_arch = "nvptx64")]
pub mod work;
