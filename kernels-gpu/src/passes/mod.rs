//! Kernels around attention: merging partial states and results, also across GPUs; appending keys and values; converting them;
//! rounding queries; padding heads; applying rotary embeddings to keys.

#[cfg(any(not(target_arch = "nvptx64"), feature = "passes"))]
pub mod append;
#[cfg(any(
    not(target_arch = "nvptx64"),
    all(feature = "quantise", target_feature = "sm_90a")
))]
pub mod latent_656;
#[cfg(any(not(target_arch = "nvptx64"), feature = "passes"))]
pub mod merge;
#[cfg(any(not(target_arch = "nvptx64"), feature = "passes"))]
pub mod narrow;
#[cfg(any(not(target_arch = "nvptx64"), feature = "passes"))]
pub mod pad;
#[cfg(any(not(target_arch = "nvptx64"), feature = "quantise"))]
pub mod quantise;
#[cfg(any(not(target_arch = "nvptx64"), feature = "passes"))]
pub mod ranks;
#[cfg(any(not(target_arch = "nvptx64"), feature = "passes"))]
pub mod results;
#[cfg(any(
    not(target_arch = "nvptx64"),
    all(feature = "quantise", target_feature = "sm_90a")
))]
pub mod turn;
#[cfg(any(not(target_arch = "nvptx64"), feature = "quantise"))]
pub mod widen;

/// The tables of all these kernels.
#[cfg(not(target_arch = "nvptx64"))]
pub const ROWS: &[&[crate::registry::KernelInfo]] = &[
    append::ROWS,
    quantise::ROWS,
    latent_656::ROWS,
    widen::ROWS,
    merge::ROWS[0],
    merge::ROWS[1],
    merge::F32_ROWS,
    narrow::ROWS,
    pad::ROWS,
    turn::ROWS,
    ranks::ROWS,
    results::ROWS[0],
    results::ROWS[1],
];
