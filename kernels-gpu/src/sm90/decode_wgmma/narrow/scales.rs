//! Scales of 8-bit keys and values, if each token has its own.

use cuda_std::{
    async_copy,
    math::{lg2, rcp},
    mbarrier, ptr, shared, warp,
};

use super::{
    super::super::pipeline::Pipeline,
    config::SCALE_STAGES,
    products::{Tile, at},
    shared::{Shared, Unit},
};
use crate::{abi::DecodeParams, common::cache::scale_of_value};

/// Loads the scales of the blocks of all units, from the last block of a unit to the first.
///
/// # Safety
/// A whole warp comes here; the barriers are initialised.
#[inline(always)]
pub(super) unsafe fn load_scales(p: &DecodeParams, s: Shared) {
    let a = &p.attention;
    let lane = warp::lane_id();
    let keys = s.shape.keys;
    let mut slots = Pipeline::<2>::CONSUMER;
    let mut blocks = Pipeline::<SCALE_STAGES>::PRODUCER;
    // SAFETY: a whole warp; the full and free barriers order every access to a slot or stage; the table has a page for
    // each key of the item.
    unsafe {
        loop {
            mbarrier::wait(s.unit_full(slots.stage), slots.parity);
            let unit = Unit::load(s.unit(slots.stage));
            mbarrier::arrive(s.unit_free(slots.stage));
            slots.advance();
            if unit.tokens == 0 {
                return;
            }
            let mut begin = unit.end as i32;
            let mut left = unit.blocks;
            while left > 0 {
                left -= 1;
                begin -= keys as i32;
                mbarrier::wait(s.scales_free(blocks.stage), blocks.parity);
                let mut key = lane;
                while key < keys {
                    let at = begin + key as i32;
                    if at >= unit.kv_begin as i32 && at < unit.kv_end as i32 {
                        let (page, token) = p.page_size.div_rem(at as u32);
                        let entry = (a.page_ids + u64::from(unit.table + page) * 4) as *const u32;
                        let page = ptr::load_nc_u32(entry);
                        let [k, v] = a.scales.places(page, token, unit.head);
                        let target = s.scales(blocks.stage) + key * 4;
                        async_copy::copy_ca::<4>(target, k as *const u8);
                        async_copy::copy_ca::<4>(target + keys * 4, v as *const u8);
                    }
                    key += 32;
                }
                async_copy::mbarrier_arrive(s.scales_full(blocks.stage));
                blocks.advance();
            }
        }
    }
}

/// Multiplies a thread's logits by the scales of its keys, and by those of the values as powers of two. Returns the
/// inverses of the latter.
///
/// # Safety
/// The scales at `scales` have arrived. The thread's keys are `mine` and every eighth up to two of each 64; the block
/// begins with key `begin`, and if it is `masked`, some of its keys may have no scales.
#[inline(always)]
pub(super) unsafe fn take_scales<const KEYS: usize, const N: usize>(
    s: Shared,
    unit: &Unit,
    logits: &mut [Tile<N>; KEYS],
    scales: u32,
    mine: u32,
    begin: i32,
    masked: bool,
) -> [[f32; 2]; KEYS] {
    let mut inverses = [[1.0; 2]; KEYS];
    let mut i = 0;
    while i < 2 * KEYS {
        let (tile, half) = (i / 2, i % 2);
        let key = (tile * 64 + half * 8) as u32 + mine;
        let position = begin + key as i32;
        // SAFETY: the caller's promise.
        let [mut k, mut v] =
            [0, s.shape.keys * 4].map(|part| unsafe { shared::load_f32(scales + part + key * 4) });
        if masked && (position < unit.kv_begin as i32 || position >= unit.kv_end as i32) {
            [k, v] = [1.0; 2];
        }
        let v = scale_of_value(v);
        let log = lg2(v);
        inverses[tile][half] = rcp(v);
        let mut column = 0;
        while column < N / 2 {
            let logit = &mut logits[tile][at(half, column)];
            *logit = *logit * k + log;
            column += 1;
        }
        i += 1;
    }
    inverses
}
