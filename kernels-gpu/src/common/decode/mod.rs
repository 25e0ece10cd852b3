//! What the decode kernels of all architectures share: what a unit of work is, the products and the softmax of few
//! rows against a chunk of keys, and what leaves a CTA.

#[cfg(target_arch = "nvptx64")]
pub mod produce;
#[cfg(target_arch = "nvptx64")]
pub mod products;
#[cfg(target_arch = "nvptx64")]
pub mod results;
#[cfg(target_arch = "nvptx64")]
pub mod tile;
#[cfg(target_arch = "nvptx64")]
pub mod turn;

/// Keys of a chunk: what a warp takes at a time.
pub const KEYS: u32 = 32;

/// Bytes of shared memory that sines and turns take, for heads of so many elements: 16 for two pairs of each key of a chunk,
/// and for two pairs' turns.
#[must_use]
pub const fn turning_bytes(dim: u32) -> u32 {
    dim / 4 * (KEYS + 1) * 16
}

/// Columns of a head in partial states, and in outputs unless a run has none that are padded. Heads of 80 and 96 have those of 128, for
/// kernels of heads of 128 may have [padded](crate::passes::pad) others of the run: columns from the 64th on lie behind a gap.
#[must_use]
pub const fn output_columns(dim: u32) -> u32 {
    if dim.is_multiple_of(64) { dim } else { 128 }
}
