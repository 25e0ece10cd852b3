//! `qkv_step`: from a fused projection to queries that are ready, and keys and values in their pages.
//!
//! Memory-bound, and every byte is moved once. A thread has two vectors of 16 bytes of a head, so that the pairs that
//! are turned together are its own: where pairs are halves of the head apart, one vector of each half; where they are
//! neighbours, two vectors in a row. The threads of a head are a part of a warp and neighbours in memory.
//!
//! Sine and cosine are computed, not looked up (`common/rotary.rs`). A thread uses them for all of its heads: two where there
//! is much to do, and one where waiting decides.

/// Threads of a block where threads have two heads.
pub const THREADS: u32 = 256;

/// Threads of a block where they have one: SMs share few tokens evenly.
pub const FEW_THREADS: u32 = 64;

/// The kernels, each for each 16-bit float, by the heads of a thread and the blocks of an SM:
/// `qkv_step_<heads>_<element>`, and with pages of 8 bits `qkv_step_<heads>_<element>_e4m3`.
macro_rules! table {
    ($as:ident $then:ident) => {
        $crate::each_half! { $as $then {
            1, 8;
            2, 3;
        }}
    };
}

/// Threads of a block, by the heads of a thread.
#[must_use]
pub const fn threads(heads: u32) -> u32 {
    if heads == 1 { FEW_THREADS } else { THREADS }
}

#[cfg(not(target_arch = "nvptx64"))]
mod rows;
#[cfg(not(target_arch = "nvptx64"))]
pub use rows::{QUANTISING_ROWS, ROWS};

#[cfg(all(target_arch = "nvptx64", any(feature = "step", feature = "quantise")))]
mod device;
#[cfg(all(target_arch = "nvptx64", any(feature = "step", feature = "quantise")))]
mod page;
