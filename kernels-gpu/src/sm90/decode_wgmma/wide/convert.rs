//! Conversion of 8-bit blocks to 16 bits, in shared memory.
//!
//! wgmma takes keys and values from shared memory, in 16 bits. The consumer warps convert each block: a lane reads 16
//! elements, converts them and stores 32 bytes in the layout of [`Slabs`](crate::sm90::mma::Slabs). Neighbouring lanes
//! have neighbouring keys and the same columns: with the swizzles of both layouts, neither loads nor stores have bank
//! conflicts.

use cuda_std::shared;

use crate::common::cache::Cache;

/// Converts the part of thread `thread` of `threads` of a block of `keys` keys from `narrow`, as TMA loads it, to
/// `wide`. Once all is read, `read` is called.
///
/// # Safety
/// Whole warps come here, all `threads` of them; `narrow` is loaded and `wide` is not in use.
#[inline(always)]
pub(super) unsafe fn convert<C: Cache, const DIM: u32>(
    narrow: u32,
    wide: u32,
    keys: u32,
    thread: u32,
    threads: u32,
    read: impl FnOnce(),
) {
    // Vectors of 16 elements in a row, and in a line of `narrow`, which has 128 bytes or a whole row.
    let row = const { DIM / 16 };
    let line = const { if DIM < 128 { DIM / 16 } else { 8 } };
    let (key, vector) = (thread % 8, thread / 8 % row);
    // The swizzle of a line permutes its vectors by bits 7 and up of their address.
    let in_line = (vector % line) ^ (key * line / 8);
    let from = narrow + vector / line * 1024 + key * (line * 16) + in_line * 16;
    let to = wide + vector / 4 * 1024 + key * 128 + ((vector % 4 * 2) ^ key) * 16;
    let group = |i: usize| thread / 8 / row + i as u32 * (threads / 8 / row);
    /// The most vectors of a thread.
    const MOST: usize = 8;
    let count = (keys * row / threads) as usize;
    let mut vectors = [[0; 4]; MOST];
    // SAFETY: the caller's promise; each vector is converted by one lane.
    unsafe {
        let mut i = 0;
        while i < count {
            vectors[i] = shared::load_u32x4(from + group(i) * (8 * DIM));
            i += 1;
        }
        read();
        i = 0;
        while i < count {
            let to = to + group(i) * (16 * DIM);
            let [a, b, c, d] = vectors[i].map(C::widen);
            shared::store_u32x4(to, [a[0], a[1], b[0], b[1]]);
            shared::store_u32x4(to ^ 16, [c[0], c[1], d[0], d[1]]);
            i += 1;
        }
    }
}
