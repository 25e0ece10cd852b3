//! Conversion of 8-bit blocks to 16 bits, in shared memory.
//!
//! wgmma takes keys and values from shared memory, in 16 bits. A warpgroup converts each block: a lane reads 16
//! elements, converts them and stores 32 bytes in the layout of [`Slabs`](crate::sm90::mma::Slabs). Neighbouring lanes
//! have neighbouring keys and the same columns: with the swizzles of both layouts, neither loads nor stores have bank
//! conflicts. For one warpgroup of consumers there is one converted block of keys and one of values: keys are converted while
//! consumers compute the softmax of the block before; its values follow. For two there are two of each, and half of the
//! converting warps has the keys, the other half the values.

use cuda_std::{fence, mbarrier, shared, thread};

use super::{
    super::super::pipeline::Pipeline,
    scales,
    shared::{Converted, Shared, Unit},
};
use crate::common::cache::{self, Cache};

/// Threads of the converting warpgroup.
const THREADS: u32 = 128;

/// Threads of half of it. Constants: with numbers that the compiler folds later, loaders of tiles of 64 rows spill more.
const HALF: u32 = THREADS / 2;

/// The most vectors of 16 elements that a thread has of a block.
const MOST: usize = 8;

/// Converts the blocks of all units.
///
/// # Safety
/// The converting warpgroup comes here; the barriers are initialised.
#[inline(always)]
pub(super) unsafe fn convert<C: Cache, const STAGES: u32, const DIM: u32>(s: Shared) {
    // SAFETY: the caller's promise; a half is two warps.
    unsafe {
        if s.shape.converted_stages() == 1 {
            alternate::<C, STAGES, DIM>(s);
        } else if thread::thread_idx_x() % THREADS < HALF {
            one_kind::<C, STAGES, DIM>(s, false);
        } else {
            one_kind::<C, STAGES, DIM>(s, true);
        }
    }
}

/// Converts the keys, or the values, of all units.
///
/// # Safety
/// Half of the converting warpgroup comes here; the barriers are initialised.
#[inline(always)]
unsafe fn one_kind<C: Cache, const STAGES: u32, const DIM: u32>(s: Shared, values: bool) {
    let mut slots = Pipeline::<2>::CONSUMER;
    let mut from = Pipeline::<STAGES>::CONSUMER;
    let mut to = Converted::first(1);
    let mut mask = 0;
    // SAFETY: the full and free barriers order every access.
    unsafe {
        loop {
            mbarrier::wait(s.unit_full(slots.stage), slots.parity);
            let unit = Unit::load(s.unit(slots.stage));
            mbarrier::arrive(s.unit_free(slots.stage));
            slots.advance();
            if unit.tokens == 0 {
                return;
            }
            let mut left = unit.blocks;
            while left > 0 {
                let stage = from.stage;
                let (full, narrow, read) = match values {
                    false => (s.keys_full(stage), s.keys(stage), s.keys_free(stage)),
                    true => (s.values_full(stage), s.values(stage), s.values_free(stage)),
                };
                mbarrier::wait(full, from.parity);
                if cache::by_token(s.shape.cache) && !values {
                    scales::convert(s, s.token_scales(mask));
                    mask = s.shape.next_mask(mask);
                }
                block::<C, DIM, HALF>(s, values, narrow, read, to);
                from.advance();
                to = to.next(&s.shape);
                left -= 1;
            }
        }
    }
}

/// Converts keys and values in turns: values one block behind.
///
/// # Safety
/// The converting warpgroup comes here; the barriers are initialised.
#[inline(always)]
unsafe fn alternate<C: Cache, const STAGES: u32, const DIM: u32>(s: Shared) {
    let mut slots = Pipeline::<2>::CONSUMER;
    let mut k = Pipeline::<STAGES>::CONSUMER;
    let mut v = Pipeline::<STAGES>::CONSUMER;
    // The place of the next keys. Values are one block behind.
    let mut to = Converted::first(1);
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
                block::<C, DIM, THREADS>(s, false, narrow, read, to);
                k.advance();
                let of_values = to.before(&s.shape);
                to = to.next(&s.shape);
                // Values come one block later: those of the block before are free last.
                if has_values {
                    mbarrier::wait(s.values_full(v.stage), v.parity);
                    let (narrow, read) = (s.values(v.stage), s.values_free(v.stage));
                    block::<C, DIM, THREADS>(s, true, narrow, read, of_values);
                    v.advance();
                }
                has_values = true;
                left -= 1;
            }
        }
        if has_values {
            mbarrier::wait(s.values_full(v.stage), v.parity);
            let (narrow, read) = (s.values(v.stage), s.values_free(v.stage));
            block::<C, DIM, THREADS>(s, true, narrow, read, to.before(&s.shape));
        }
    }
}

/// Converts a block of keys, or of values, from `narrow`, as TMA loads it. Arrives at `read` once all is
/// converted.
///
/// # Safety
/// All `BY` threads come here, [as many as convert a block](super::config::Shape::converting_threads); the block is loaded.
#[inline(always)]
unsafe fn block<C: Cache, const DIM: u32, const BY: u32>(
    s: Shared,
    values: bool,
    narrow: u32,
    read: u32,
    place: Converted,
) {
    // Vectors of 16 elements in a row, and in a line of `narrow`, which has 128 bytes or a whole row.
    let row = const { DIM / 16 };
    let line = const { if DIM < 128 { DIM / 16 } else { 8 } };
    let thread = thread::thread_idx_x() % BY;
    let (key, vector) = (thread % 8, thread / 8 % row);
    // The swizzle of a line permutes its vectors by bits 7 and up of their address.
    let in_line = (vector % line) ^ (key * line / 8);
    let from = narrow + vector / line * 1024 + key * (line * 16) + in_line * 16;
    let to = vector / 4 * 1024 + key * 128 + ((vector % 4 * 2) ^ key) * 16;
    let to = s.converted(values, place.stage) + to;
    let group = |i: usize| thread / 8 / row + i as u32 * (BY / 8 / row);
    let count = (s.shape.keys * row / BY) as usize;
    // Halves have twice the vectors, and few registers; their place is mostly free.
    let at_once = const { if BY < THREADS { MOST / 2 } else { MOST } };
    let mut vectors = [[0; 4]; MOST];
    // SAFETY: the caller's promise; each vector is converted by one lane, once the previous block is free.
    unsafe {
        let mut first = 0;
        while first < count {
            let some = if count < at_once { count } else { at_once };
            let mut i = 0;
            while i < some {
                vectors[i] = shared::load_u32x4(from + group(first + i) * (8 * DIM));
                i += 1;
            }
            if first == 0 {
                mbarrier::wait(s.converted_free(values, place.stage), place.parity);
            }
            i = 0;
            while i < some {
                let to = to + group(first + i) * (16 * DIM);
                let [a, b, c, d] = vectors[i].map(C::widen);
                shared::store_u32x4(to, [a[0], a[1], b[0], b[1]]);
                shared::store_u32x4(to ^ 16, [c[0], c[1], d[0], d[1]]);
                i += 1;
            }
            first += some;
        }
        // wgmma reads these ordinary stores through the async proxy.
        fence::proxy_async_shared();
        // Not before: the next block may overtake loads of this one that are still in flight.
        mbarrier::arrive(read);
        mbarrier::arrive(s.converted_full(values, place.stage));
    }
}
