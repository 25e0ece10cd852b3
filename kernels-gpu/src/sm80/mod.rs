//! Kernels for Ampere and everything after it: `mma.sync`, `ldmatrix`, `cp.async`.
//!
//! They are compiled for Hopper too, where they do what tensor maps cannot: pages of any number of tokens.

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
