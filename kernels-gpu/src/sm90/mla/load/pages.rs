//! Loaders of keys by TMA: one box per piece of a page.

use cuda_std::{
    mbarrier, ptr,
    tma::{self, TensorMap},
    warp,
};

use super::{
    super::{
        super::pipeline::Pipeline,
        PREFETCH_DISTANCE,
        config::{SLABS, half_bytes},
        shared::{Shared, Unit, Units},
    },
    policy::Policies,
};
use crate::abi::LatentParams;

const CAP32: u32 = 2;
const CAP48: u32 = 1;
const WARP: u32 = warp::FULL_MASK;

/// Loads one half of the columns of all units' blocks, one lane per piece of a page.
///
/// # Safety
/// A whole warp comes here; `map` is the half's tensor map, and the barriers are initialised.
#[inline(always)]
pub(in crate::sm90::mla) unsafe fn load<const RIGHT: bool, const KEYS: u32, const STAGES: u32>(
    p: &LatentParams,
    map: *const TensorMap,
    s: Shared<KEYS, STAGES>,
) {
    let (lane, half) = (warp::lane_id(), RIGHT as u32);
    let CAP: u32 = if KEYS == 32 { CAP32 } else { CAP48 };
    let tokens = p.piece_tokens;
    let per_block = KEYS >> tokens.trailing_zeros();
    let mine = lane < per_block;
    let bytes = const { half_bytes(KEYS, RIGHT as u32) };
    let piece_bytes = tokens * const { SLABS[RIGHT as usize] * 128 };
    // Both policies are created before the loop; each unit selects one.
    let policies = Policies::new(p);
    let (own, kept) = (policies.own(), ptr::evict_last_policy());
    let mut slots = Pipeline::<2>::CONSUMER;
    let mut stages = Pipeline::<STAGES>::PRODUCER;
    // Blocks so far.
    let mut number = 0;
    loop {
        // SAFETY: the full and free barriers order every access to a stage; a whole warp.
        let unit = unsafe {
            mbarrier::wait(s.unit_full(slots.stage), slots.parity);
            Unit::load(s.unit(slots.stage))
        };
        if unit.tokens == 0 {
            return;
        }
        let policy = match policies.is_shared(unit.flags) {
            true => kept,
            false => own,
        };
        let mut at = unit.first + lane * tokens;
        let mut block = 0;
        while block < unit.blocks {
            if !RIGHT && lane == 0 && block + PREFETCH_DISTANCE == unit.blocks {
                // SAFETY: the scheduler warp waits for it.
                unsafe { mbarrier::arrive(s.near_end()) };
            }
            // Look up the page before waiting for the stage.
            let mut corner = [
                0,
                0,
                if RIGHT { SLABS[0] as i32 } else { 0 },
                0,
                p.outside as i32,
            ];
            if mine && at < unit.kv_end {
                let (page, in_page) = p.page_size.div_rem(at);
                let entry = p.attention.page_ids + u64::from(unit.table + page) * 4;
                corner[3] = (in_page / 8) as i32;
                // SAFETY: the table has a page for each key of the item.
                corner[4] = unsafe { ptr::load_nc_u32(entry as *const u32) } as i32;
            }
            // SAFETY: as above.
            unsafe {
                if CAP < STAGES && number >= CAP {
                    let before = number - CAP;
                    mbarrier::wait(s.full(before % STAGES, half), before / STAGES & 1);
                }
                mbarrier::wait(s.free(stages.stage, half), stages.parity);
                let full = s.full(stages.stage, half);
                if lane == 0 {
                    mbarrier::arrive_expect_tx(full, bytes);
                }
                warp::sync_warp(WARP);
                if mine {
                    let target = s.half(stages.stage, half) + lane * piece_bytes;
                    tma::load_tensor_hint(target, map, corner, full, policy);
                }
            }
            stages.advance();
            number += 1;
            at += KEYS;
            block += 1;
        }
        // SAFETY: as above.
        unsafe { mbarrier::arrive(s.unit_free(slots.stage)) };
        slots.advance();
    }
}
