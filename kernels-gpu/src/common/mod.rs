//! Code shared by several kernel families. The parts without GPU instructions also run on the host.

pub mod cache;
pub mod decode;
pub mod divisor;
pub mod eight_bits;
pub mod half;
#[cfg(target_arch = "nvptx64")]
pub mod logits;
pub mod masks;
pub mod math;
#[cfg(target_arch = "nvptx64")]
pub mod policy;
#[cfg(target_arch = "nvptx64")]
pub mod prefill_tile;
#[cfg(target_arch = "nvptx64")]
pub mod rotary;
#[cfg(target_arch = "nvptx64")]
pub mod softmax;
pub mod state;
#[cfg(target_arch = "nvptx64")]
pub mod tile_counter;
pub mod variant;
