//! Device library of kernels: rust-cuda's `cuda_std`, rewritten for rustc's own NVPTX backend.
//!
//! Names and signatures follow [rust-cuda](https://github.com/Rust-GPU/Rust-CUDA) where it has them
//! ([`thread`], [`warp`], [`shared`], [`ptr`], [`misc`]). Beyond that, there is a thin layer over the
//! instructions of Ampere and Hopper: one function per PTX instruction, without policy. Each wrapper
//! documents its instruction (`# PTX`) and the caller's duties (`# Safety`).
//!
//! | module | contents |
//! |---|---|
//! | [`thread`], [`warp`], [`special`], [`cluster`] | indices; votes, shuffles, barriers |
//! | [`shared`], [`ptr`], [`atomic`], [`fence`] | memory: spaces, cache hints, ordering |
//! | [`async_copy`], [`tma`], [`mbarrier`] | asynchronous copies |
//! | [`mma`], [`wgmma`], [`convert`], [`math`] | arithmetic |
//! | [`barrier`], [`setmaxnreg`], [`griddep`], [`misc`] | named barriers, register pools, launches |
//!
//! # Device and host
//! Wrappers of instructions exist for `nvptx64` only. The other parts (descriptor encoders,
//! [`tma::TensorMap`], [`convert`]'s bit patterns) exist everywhere, so that host code and tests can
//! share them. Build the documentation of the wrappers for the device:
//!
//! ```text
//! cargo +nightly doc --no-deps --target nvptx64-nvidia-cuda -Zbuild-std=core
//! ```
//!
//! # Differences from rust-cuda
//! - Shuffles return only the value, not whether its lane was in range.
//! - Indices in two and three dimensions are arrays, and reductions are a function per operation.
//! - Atomics name their ordering and scope by types ([`atomic`]).
//! - There is no `GpuFloat`, `print!` or allocator.
//!
//! # A kernel crate
//! ```text
//! #![no_std]
//! #![feature(abi_ptx, asm_experimental_arch)]
//! use cuda_std::prelude::*;
//!
//! #[kernel(max_threads = 256)]
//! pub unsafe fn scale(factor: f32, x: &[f32], y: *mut f32) {
//!     let i = thread::index_1d() as usize;
//!     if i < x.len() {
//!         unsafe { *y.add(i) = factor * *x.get_unchecked(i) }
//!     }
//! }
//! ```
//!
//! # Addresses in shared memory
//! Instructions on shared memory take 32-bit addresses in the shared window, here plain `u32`s.
//! [`shared::dynamic_shared_address`] returns the first one, [`shared::address_of`] that of a pointer.
//!
//! # What the compiler may do with a wrapper
//! Barriers, votes, shuffles and the like are LLVM intrinsics, because these are `convergent`: LLVM
//! never copies them into the arms of a branch. Inline `asm!` has no such attribute, so it is used only
//! where there is no intrinsic. Asm that accesses memory is neither `pure` nor `nomem` and keeps its
//! order with other memory accesses. Arithmetic is `pure, nomem` and may be moved, merged or dropped.
#![no_std]
#![cfg_attr(
    target_arch = "nvptx64",
    feature(asm_experimental_arch, link_llvm_intrinsics)
)]
#![cfg_attr(
    all(target_arch = "nvptx64", not(llvm_intrinsic_abi)),
    feature(abi_unadjusted)
)]
#![cfg_attr(target_arch = "nvptx64", allow(internal_features))]
#![cfg_attr(not(target_arch = "nvptx64"), allow(rustdoc::broken_intra_doc_links))]

#[cfg(target_arch = "nvptx64")]
pub mod async_copy;
#[cfg(target_arch = "nvptx64")]
pub mod atomic;
#[cfg(target_arch = "nvptx64")]
pub mod barrier;
#[cfg(target_arch = "nvptx64")]
pub mod cluster;
pub mod convert;
#[cfg(target_arch = "nvptx64")]
pub mod fence;
#[cfg(target_arch = "nvptx64")]
pub mod griddep;
#[cfg(target_arch = "nvptx64")]
pub mod math;
#[cfg(target_arch = "nvptx64")]
pub mod mbarrier;
#[cfg(target_arch = "nvptx64")]
pub mod misc;
#[cfg(target_arch = "nvptx64")]
pub mod mma;
#[cfg(target_arch = "nvptx64")]
pub mod ptr;
#[cfg(target_arch = "nvptx64")]
pub mod setmaxnreg;
pub mod shared;
#[cfg(target_arch = "nvptx64")]
pub mod special;
#[cfg(target_arch = "nvptx64")]
pub mod thread;
pub mod tma;
#[cfg(target_arch = "nvptx64")]
pub mod warp;
pub mod wgmma;

#[doc(hidden)]
pub use cuda_std_macros::__shared_array;
pub use cuda_std_macros::kernel;

/// The imports of nearly every kernel.
#[cfg(target_arch = "nvptx64")]
pub mod prelude {
    pub use crate::{barrier, kernel, misc, ptr, shared, thread, warp};
}

/// Device code cannot print a message: a panic ends the launch with an error that the host sees.
#[cfg(target_arch = "nvptx64")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    misc::trap()
}
