//! The kernels of tandem-attn, and the plain parts that the host shares with them.
//!
//! Built for `nvptx64-nvidia-cuda` this crate is the device code, a module for each family of kernels (a feature
//! each). For the host it is [`abi`] (the only contract between the two sides), [`registry`] (a row for every
//! kernel), and what [`common`] has of plain code, so that the CPU executor and the reference run the very lines
//! that the GPU runs.
#![cfg_attr(target_arch = "nvptx64", no_std)]
// A module is one family of kernels, which uses a part of what they share.
#![cfg_attr(target_arch = "nvptx64", allow(dead_code))]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx, asm_experimental_arch))]

// Brings the panic handler.
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

pub use common::{divisor, math, state, tree, variant};
#[cfg(not(target_arch = "nvptx64"))]
pub use hooks::{CheckOwn, Hooks, HooksName};

/// Whether the flags of a table's row have this one in them.
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
