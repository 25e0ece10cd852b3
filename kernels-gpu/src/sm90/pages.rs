//! Blocks of keys or values as TMA loads them, page by page.

use cuda_std::{shared, warp};

/// Zeroes rows `first..past` of a block. A block consists of groups of 8 tokens; within a group the slabs of 128 bytes of
/// each row follow each other. A shorter row is a slab.
///
/// # Safety
/// A whole warp comes here, and no other warp accesses the block.
#[inline(always)]
pub(super) unsafe fn clear(block: u32, first: u32, past: u32, row_bytes: u32) {
    let lane = warp::lane_id();
    let line = row_bytes.min(128);
    let mut row = first;
    while row < past {
        let group = block + row / 8 * (8 * row_bytes) + row % 8 * line;
        let mut chunk = lane;
        while chunk < row_bytes / 16 {
            // SAFETY: inside the block, which only the loader accesses. The swizzle only permutes chunks within a row.
            unsafe { shared::store_u32x4(group + chunk / 8 * 1024 + chunk % 8 * 16, [0; 4]) };
            chunk += 32;
        }
        row += 1;
    }
}
