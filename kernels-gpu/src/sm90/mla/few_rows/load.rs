//! The producer warps: the scheduler prepares rows and loads queries; a loader brings the keys.

use cuda_std::{
    mbarrier, ptr, shared,
    tma::{self, TensorMap},
    warp,
};

use super::{
    config::{KEYS, PART_BYTES, PART_SLABS, PARTS},
    shared::Shared,
    weigh::NONE,
};
use crate::{
    abi::LatentParams,
    common::variant::Variant,
    sm90::{
        mla::{
            PREFETCH_DISTANCE,
            load::{Policies, QueryPlace as _, bring_queries, claim},
            shared::{Unit, Units as _},
            visible::seen,
        },
        pipeline::Pipeline,
    },
};

const WARP: u32 = warp::FULL_MASK;

/// Claims units; stores each row's visible keys and first reference, and loads the queries.
///
/// # Safety
/// A whole warp comes here; `map` is the tensor map of the queries, and the barriers are initialised.
#[inline(always)]
pub(super) unsafe fn claim_rows<V: Variant, const ROWS: u32, const STAGES: u32>(
    p: &LatentParams,
    variant: &V,
    map: *const TensorMap,
    s: Shared<ROWS, STAGES>,
) {
    let mut queries = Pipeline::<1>::PRODUCER;
    // SAFETY: the caller's promises; the unit's rows were written.
    unsafe {
        claim(p, s, |slot, unit| {
            // Lanes read rows that other lanes have written.
            warp::sync_warp(WARP);
            let row = warp::lane_id();
            if row < ROWS {
                let (token, _) = p.heads.div_rem(row);
                let position = s.load_row(slot, token.min(unit.tokens - 1)).position;
                let seen = seen(variant, unit, position);
                shared::store_u32x2(s.seen(slot, row), seen.map(|key| key as u32));
                shared::store_f32(s.reference(slot, row), NONE);
            }
            mbarrier::wait(s.queries_free(), queries.parity);
            queries.advance();
            warp::sync_warp(WARP);
            bring_queries(p, map, s, slot, unit);
        });
    }
}

/// Parts under way at most: more of them make memory slower.
const UNDER_WAY: u32 = 3;

/// Loads the keys of all blocks, part after part, one lane per piece of a page.
///
/// # Safety
/// A whole warp comes here; `map` is the tensor map of the keys, and the barriers are initialised.
#[inline(always)]
pub(super) unsafe fn load<const ROWS: u32, const STAGES: u32>(
    p: &LatentParams,
    map: *const TensorMap,
    s: Shared<ROWS, STAGES>,
) {
    let lane = warp::lane_id();
    let tokens = p.piece_tokens;
    let per_block = KEYS >> tokens.trailing_zeros();
    let mine = lane < per_block;
    let piece_bytes = tokens * const { PART_SLABS * 128 };
    // Both policies are created before the loop; each unit selects one.
    let policies = Policies::new(p);
    let (own, kept) = (policies.own(), ptr::evict_last_policy());
    let mut slots = Pipeline::<2>::CONSUMER;
    // Parts of all blocks so far.
    let mut index = 0;
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
            if lane == 0 && block + PREFETCH_DISTANCE == unit.blocks {
                // SAFETY: the scheduler warp waits for it.
                unsafe { mbarrier::arrive(s.near_end()) };
            }
            // Look up the page before waiting for the stage.
            let mut corner = [0, 0, 0, 0, p.outside as i32];
            if mine && at < unit.kv_end {
                let (page, in_page) = p.page_size.div_rem(at);
                let entry = p.attention.page_ids + u64::from(unit.table + page) * 4;
                corner[3] = (in_page / 8) as i32;
                // SAFETY: the table has a page for each key of the item.
                corner[4] = unsafe { ptr::load_nc_u32(entry as *const u32) } as i32;
            }
            let mut part = 0;
            while part < PARTS {
                let (stage, parity) = (index % STAGES, index / STAGES & 1);
                // SAFETY: as above.
                unsafe {
                    if UNDER_WAY < STAGES && index >= UNDER_WAY {
                        let before = index - UNDER_WAY;
                        mbarrier::wait(s.full(before % STAGES), before / STAGES & 1);
                    }
                    mbarrier::wait(s.free(stage), parity ^ 1);
                    let full = s.full(stage);
                    if lane == 0 {
                        mbarrier::arrive_expect_tx(full, PART_BYTES);
                    }
                    warp::sync_warp(WARP);
                    if mine {
                        let target = s.keys(stage) + lane * piece_bytes;
                        tma::load_tensor_hint(target, map, corner, full, policy);
                    }
                }
                corner[2] += PART_SLABS as i32;
                index += 1;
                part += 1;
            }
            at += KEYS;
            block += 1;
        }
        // SAFETY: as above.
        unsafe { mbarrier::arrive(s.unit_free(slots.stage)) };
        slots.advance();
    }
}
