//! The parts that the decode kernels of all architectures share: the units of work, the products and the softmax of a
//! few rows against a chunk of keys, and the writing and merging of results.

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

/// Keys of a chunk, which a warp processes at a time.
pub const KEYS: u32 = 32;

/// Bytes of shared memory for the sines, cosines and angles of a head dimension. An entry of 16 bytes has the sines and
/// cosines of two pairs, for each key of a chunk, or the angles of two pairs.
#[must_use]
pub const fn turning_bytes(dim: u32) -> u32 {
    dim / 4 * (KEYS + 1) * 16
}

/// Columns of a head in partial states, and in the outputs of runs that have padded heads. Head dimensions 80 and 96
/// have 128 columns, because kernels of head dimension 128 may compute other tiles of the run
/// [padded](crate::passes::pad): elements from the 64th on come after a gap.
#[must_use]
pub const fn output_columns(dim: u32) -> u32 {
    if dim.is_multiple_of(64) { dim } else { 128 }
}
