//! Conversion of 8-bit blocks to 16 bits, in shared memory.
//!
//! wgmma takes keys and values from shared memory, in 16 bits. A warpgroup converts each block: a lane reads 16
//! elements, converts them and stores 32 bytes in the layout of [`Slabs`](crate::sm90::mma::Slabs). Neighbouring lanes
//! have neighbouring keys and the same columns: with the swizzles of both layouts, neither loads nor stores have bank
//! conflicts. There is one converted block of keys and one of values. Keys are converted while consumers compute the
//! softmax of the block before; its values follow.

use cuda_std::{fence, mbarrier, shared, thread};

use super::{
    super::super::pipeline::Pipeline,
    scales,
    shared::{Shared, Unit},
};
use crate::common::cache::{self, Cache};

/// Threads that convert.
const THREADS: u32 = 128;

/// The most vectors of 16 elements that a thread has of a block.
const MOST: usize = 8;

/// Converts the blocks of all units.
///
/// # Safety
/// The converting warpgroup comes here; the barriers are initialised.
#[inline(always)]
pub(super) unsafe fn convert<C: Cache, const STAGES: u32, const DIM: u32>(s: Shared) {
    let mut slots = Pipeline::<2>::CONSUMER;
    let mut k = Pipeline::<STAGES>::CONSUMER;
    let mut v = Pipeline::<STAGES>::CONSUMER;
    // The parity to wait for until the converted keys are free. That of the values, one block later, is the next one.
    let mut free = 1;
    let (mut mask, mut has_values) = (0, false);
    // SAFETY: the full and free barriers order every access.
    unsafe {
        loop {
            mbarrier::wait(s.unit_full(slots.stage), slots.parity);
            let unit = Unit::load(s.unit(slots.stage));
            mbarrier::arrive(s.unit_free(slots.stage));
            slots.advance();
            let mut left = unit.blocks;
            if unit.tokens == 0 {
                break;
            }
            while left > 0 {
                mbarrier::wait(s.keys_full(k.stage), k.parity);
                if cache::by_token(s.shape.cache) {
                    scales::convert(s, s.token_scales(mask));
                    mask = s.shape.next_mask(mask);
                }
                let (narrow, read) = (s.keys(k.stage), s.keys_free(k.stage));
                block::<C, DIM>(s, false, narrow, read, free);
                k.advance();
                free ^= 1;
                // Values come one block later: those of the block before are free last.
                if has_values {
                    mbarrier::wait(s.values_full(v.stage), v.parity);
                    let (narrow, read) = (s.values(v.stage), s.values_free(v.stage));
                    block::<C, DIM>(s, true, narrow, read, free);
                    v.advance();
                }
                has_values = true;
                left -= 1;
            }
        }
        if has_values {
            mbarrier::wait(s.values_full(v.stage), v.parity);
            let (narrow, read) = (s.values(v.stage), s.values_free(v.stage));
            block::<C, DIM>(s, true, narrow, read, free ^ 1);
        }
    }
}

/// Converts a block of keys, or of values, from `narrow`, as TMA loads it. Arrives at `read` once all is
/// converted.
///
/// # Safety
/// The converting warpgroup comes here; the block is loaded.
#[inline(always)]
unsafe fn block<C: Cache, const DIM: u32>(
    s: Shared,
    values: bool,
    narrow: u32,
    read: u32,
    free: u32,
) {
    // Vectors of 16 elements in a row, and in a line of `narrow`, which has 128 bytes or a whole row.
    let row = const { DIM / 16 };
    let line = const { if DIM < 128 { DIM / 16 } else { 8 } };
    let thread = thread::thread_idx_x() % THREADS;
    let (key, vector) = (thread % 8, thread / 8 % row);
    // The swizzle of a line permutes its vectors by bits 7 and up of their address.
    let in_line = (vector % line) ^ (key * line / 8);
    let from = narrow + vector / line * 1024 + key * (line * 16) + in_line * 16;
    let to = vector / 4 * 1024 + key * 128 + ((vector % 4 * 2) ^ key) * 16;
    let to = s.converted(values) + to;
    let group = |i: usize| thread / 8 / row + i as u32 * (THREADS / 8 / row);
    let count = (s.shape.keys * row / THREADS) as usize;
    let mut vectors = [[0; 4]; MOST];
    // SAFETY: the caller's promise; each vector is converted by one lane, once the previous block is free.
    unsafe {
        let mut i = 0;
        while i < count {
            vectors[i] = shared::load_u32x4(from + group(i) * (8 * DIM));
            i += 1;
        }
        mbarrier::wait(s.converted_free(values), free);
        i = 0;
        while i < count {
            let to = to + group(i) * (16 * DIM);
            let [a, b, c, d] = vectors[i].map(C::widen);
            shared::store_u32x4(to, [a[0], a[1], b[0], b[1]]);
            shared::store_u32x4(to ^ 16, [c[0], c[1], d[0], d[1]]);
            i += 1;
        }
        // wgmma reads these ordinary stores through the async proxy.
        fence::proxy_async_shared();
        // Not before: the next block may overtake loads of this one that are still in flight.
        mbarrier::arrive(read);
        mbarrier::arrive(s.converted_full(values));
    }
}
