//! Kernels for Ampere and later, with `mma.sync`, `ldmatrix` and `cp.async`.
//!
//! They are compiled for Hopper too, to be compared with its own kernels there.

#[cfg(any(
    not(target_arch = "nvptx64"),
    feature = "sm80_decode",
    feature = "pod",
    feature = "hooks"
))]
pub mod decode;
#[cfg(any(not(target_arch = "nvptx64"), feature = "pod"))]
pub mod pod;
#[cfg(any(
    not(target_arch = "nvptx64"),
    feature = "sm80_prefill",
    feature = "pod",
    feature = "hooks"
))]
pub mod prefill;
