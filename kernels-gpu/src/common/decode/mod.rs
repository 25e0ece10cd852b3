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

/// Keys of a chunk: what a warp takes at a time.
pub const KEYS: u32 = 32;

/// Bytes from one key of 16 bits to the next in shared memory, where a head has no whole slabs of 64 elements: its rows lie
/// there as they are. They are 16 bytes apart, so that a row has an odd number of 16-byte units, and eight rows at a
/// column lie in all banks.
#[must_use]
pub const fn row_pitch(dim: u32) -> u32 {
    (dim + crate::abi::DecodeParams::BEHIND_ROW) * 2
}

/// Whether a head has whole slabs of 64 elements.
#[must_use]
pub const fn has_slabs(dim: u32) -> bool {
    dim.is_multiple_of(64)
}
