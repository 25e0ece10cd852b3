//! What a kernel needs: rust-cuda's `cuda_std`, written anew for rustc's own NVPTX backend.
//!
//! Names and signatures follow [rust-cuda](https://github.com/Rust-GPU/Rust-CUDA) where it has them
//! ([`thread`], [`warp`], [`shared`], [`ptr`], [`misc`]); beyond it there is a thin layer over what
//! Ampere and Hopper brought: one function per PTX instruction, without policy. Every wrapper says
//! which instruction it is (`# PTX`) and what the caller owes (`# Safety`).
//!
//! | module | what |
//! |---|---|
//! | [`thread`], [`warp`], [`special`], [`cluster`] | who am I; votes, shuffles, barriers |
//! | [`shared`], [`ptr`], [`atomic`], [`fence`] | memory: spaces, cache hints, ordering |
//! | [`async_copy`], [`tma`], [`mbarrier`] | copies that run beside the threads |
//! | [`mma`], [`wgmma`], [`convert`], [`math`] | arithmetic |
//! | [`barrier`], [`setmaxnreg`], [`griddep`], [`misc`] | named barriers, register pools, launches |
//!
//! # Device and host
//! Functions that are instructions exist for `nvptx64` only. The plain parts (descriptor encoders,
//! [`tma::TensorMap`], [`convert`]'s bit patterns) exist everywhere, so that host code and tests
//! share them. The documentation of the others is built for the device:
//!
//! ```text
//! cargo +nightly doc --no-deps --target nvptx64-nvidia-cuda -Zbuild-std=core
//! ```
//!
//! # Where it differs from rust-cuda
//! - Shuffles give the value alone, not whether its lane was in range.
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
//! Instructions on shared memory take 32-bit addresses inside the shared window, here plain `u32`s:
//! [`shared::dynamic_shared_address`] gives the first one, [`shared::address_of`] that of a pointer.
//!
//! # What the compiler may do with a wrapper
//! Barriers, votes, shuffles and the like are LLVM intrinsics, because those are `convergent`: LLVM
//! never copies them into the arms of a branch. Inline `asm!` has no such mark, so it is used only
//! where there is no intrinsic. Asm that touches memory is neither `pure` nor `nomem` and keeps its
//! place among other memory accesses; arithmetic is `pure, nomem` and may be moved, merged or dropped.
#![no_std]
#![cfg_attr(
    target_arch = "nvptx64",
    feature(abi_unadjusted, asm_experimental_arch, link_llvm_intrinsics)
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

/// What nearly every kernel imports.
#[cfg(target_arch = "nvptx64")]
pub mod prelude {
    pub use crate::{barrier, kernel, misc, ptr, shared, thread, warp};
}

/// Device code has no one to tell: a panic ends the launch with an error that the host sees.
#[cfg(target_arch = "nvptx64")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    misc::trap()
}
