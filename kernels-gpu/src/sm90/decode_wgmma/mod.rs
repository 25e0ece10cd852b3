//! Decode on Hopper with `wgmma`. Queries are gathered row by row; keys and values are loaded by TMA or, from pools that no
//! tensor map describes, one by one.
//!
//! [`wide`] has the rows on the 64-wide M side of the instruction, [`narrow`] on the N side, which goes down to 8
//! (`swap_ab`). [`large`] is for values of 512 elements.

#[cfg(any(not(target_arch = "nvptx64"), feature = "decode_wgmma"))]
pub mod large;
#[cfg(any(not(target_arch = "nvptx64"), feature = "decode_wgmma"))]
pub mod narrow;
#[cfg(target_arch = "nvptx64")]
mod rows;
pub mod wide;
