//! `qkv_step`: turns a fused QKV projection into final queries, and appends keys and values to their pages. Applies
//! bias, RMS norm and rotary embedding.
//!
//! Memory-bound: every byte is moved once. A thread has two vectors of 16 bytes of a head, chosen so that both elements
//! of each rotary pair are its own: one vector of each half of the head, or two consecutive vectors if pairs are
//! neighbouring elements. The threads of a head are part of one warp and access neighbouring memory.
//!
//! Sine and cosine are computed, not looked up (`common/rotary.rs`). For large inputs a thread has two heads, and a
//! block computes the sines of each of its tokens once. For small, latency-bound inputs a thread has one head and
//! computes its own.

/// Threads of a block if threads have two heads.
pub const THREADS: u32 = 128;

/// Threads of a block if threads have one head: small blocks spread few tokens evenly over the SMs.
pub const FEW_THREADS: u32 = 64;

/// The kernels, one per row and 16-bit float type; rows are heads per thread, blocks per SM:
/// `qkv_step_<heads>_<element>`, and `qkv_step_<heads>_<element>_e4m3` for 8-bit pages.
macro_rules! table {
    ($as:ident $then:ident) => {
        $crate::each_half! { $as $then {
            1, 8;
            2, 8;
        }}
    };
}

/// Threads of a block, by the heads of a thread.
#[must_use]
pub const fn threads(heads: u32) -> u32 {
    if heads == 1 { FEW_THREADS } else { THREADS }
}

/// Shared memory of a block whose threads have two heads, for the sines of its tokens: if a token has so many groups of
/// heads, and so many lanes of a head are rotated.
#[must_use]
pub const fn sine_bytes(lanes_log: u32, groups: u32, lanes: u32) -> u32 {
    let tokens = ((THREADS >> lanes_log) - 1).div_ceil(groups) + 1;
    tokens * lanes * 64
}

#[cfg(not(target_arch = "nvptx64"))]
mod rows;
#[cfg(not(target_arch = "nvptx64"))]
pub use rows::{QUANTISING_ROWS, ROWS};

#[cfg(all(target_arch = "nvptx64", any(feature = "step", feature = "quantise")))]
mod arithmetic;
#[cfg(all(target_arch = "nvptx64", any(feature = "step", feature = "quantise")))]
mod device;
#[cfg(all(target_arch = "nvptx64", any(feature = "step", feature = "quantise")))]
mod page;
#[cfg(all(target_arch = "nvptx64", any(feature = "step", feature = "quantise")))]
mod sines;
