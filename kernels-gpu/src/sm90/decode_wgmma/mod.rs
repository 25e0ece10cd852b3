//! Decode on Hopper whose products are `wgmma`: queries are gathered from anywhere, keys and values come by the
//! tensor memory accelerator.
//!
//! [`wide`] tiles have their rows on the 64-wide side of the instruction, [`narrow`] ones on the other, which goes
//! down to 8 (`swap_ab`). [`large`] heads are of 512.

#[cfg(any(not(target_arch = "nvptx64"), feature = "decode_wgmma"))]
pub mod large;
#[cfg(any(not(target_arch = "nvptx64"), feature = "decode_wgmma"))]
pub mod narrow;
#[cfg(target_arch = "nvptx64")]
mod rows;
pub mod wide;
