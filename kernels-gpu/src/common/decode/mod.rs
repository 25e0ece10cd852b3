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
