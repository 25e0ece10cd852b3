//! The kernels of tandem-attn, and the code that the host shares with them.
//!
//! Built for `nvptx64-nvidia-cuda` this crate is the device code: one module per family of kernels, each a feature.
//! Built for the host it is [`abi`] (the contract between host and device), [`registry`] (one row per kernel) and the
//! portable part of [`common`], so the CPU executor and the reference run the same code as the GPU.
#![cfg_attr(target_arch = "nvptx64", no_std)]
// A module is one family of kernels, and each uses only some of the shared code.
#![cfg_attr(target_arch = "nvptx64", allow(dead_code))]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx, asm_experimental_arch))]

// Provides the panic handler.
#[cfg(target_arch = "nvptx64")]
use cuda_std as _;

pub mod abi;
pub mod common;
#[cfg(any(not(target_arch = "nvptx64"), feature = "measure"))]
pub mod measure;
#[cfg(any(not(target_arch = "nvptx64"), feature = "passes", feature = "quantise"))]
pub mod passes;
#[cfg(not(target_arch = "nvptx64"))]
pub mod registry;
pub mod sm80;
pub mod sm90;
#[cfg(any(not(target_arch = "nvptx64"), feature = "step", feature = "quantise"))]
pub mod step;

mod hooks;
pub mod variants;

pub use common::{divisor, masks, math, state, variant};
#[cfg(not(target_arch = "nvptx64"))]
pub use hooks::{CheckOwn, Hooks, HooksName};

/// Whether a table row's flags contain this one.
const fn has(flags: &[&str], flag: &str) -> bool {
    let mut i = 0;
    while i < flags.len() {
        if equal(flags[i].as_bytes(), flag.as_bytes()) {
            return true;
        }
        i += 1;
    }
    false
}

const fn equal(a: &[u8], b: &[u8]) -> bool {
    let mut i = 0;
    while i < a.len() && i < b.len() {
        if a[i] != b[i] {
            return false;
        }
        i += 1;
    }
    a.len() == b.len()
}
