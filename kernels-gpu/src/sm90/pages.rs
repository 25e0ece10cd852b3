//! Blocks of keys or values as the tensor memory accelerator brings them: page by page.

use cuda_std::{shared, warp};

/// Sets rows of a block to zero: groups of 8 tokens, in a group 64 columns after the other.
///
/// # Safety
/// A whole warp comes here, and the block is its own.
#[inline(always)]
pub(super) unsafe fn clear(block: u32, first: u32, past: u32, row_bytes: u32) {
    let lane = warp::lane_id();
    let mut row = first;
    while row < past {
        let group = block + row / 8 * (8 * row_bytes) + row % 8 * 128;
        let mut chunk = lane;
        while chunk < row_bytes / 16 {
            // SAFETY: inside the block, which is the loader's. Swizzled or not, it is the row's.
            unsafe { shared::store_u32x4(group + chunk / 8 * 1024 + chunk % 8 * 16, [0; 4]) };
            chunk += 32;
        }
        row += 1;
    }
}
