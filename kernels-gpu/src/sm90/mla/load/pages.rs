//! Loaders of keys by TMA: one box per piece of a page, or two for each 8 keys in two pools.

use cuda_std::{
    mbarrier, ptr,
    tma::{self, TensorMap},
    warp,
};

use super::{
    super::{
        super::pipeline::Pipeline,
        PREFETCH_DISTANCE,
        shared::{Parts, Unit},
    },
    policy::Policies,
};
use crate::abi::LatentParams;

const WARP: u32 = warp::FULL_MASK;

/// Loads the parts of all units' blocks, one lane per piece of a page.
///
/// In shared memory the slabs of 8 keys follow each other. So if the last slab has a pool of its own, the last part is
/// loaded by two boxes for each 8 keys: what a box loads is contiguous.
///
/// # Safety
/// A whole warp comes here; `maps` are the launch's tensor maps, and the barriers are initialised.
#[inline(always)]
pub(in crate::sm90::mla) unsafe fn load<S: Parts<STAGES>, const STAGES: u32>(
    p: &LatentParams,
    maps: *const TensorMap,
    s: S,
) {
    const { assert!(S::UNDER_WAY < STAGES) };
    let lane = warp::lane_id();
    let apart = S::HAS_ROPE && p.apart != 0;
    let tokens = if apart { 8 } else { p.piece_tokens };
    let per_block = S::KEYS >> tokens.trailing_zeros();
    let mine = lane < per_block;
    // Parts before the last are loaded by whole pieces in any case.
    let begins_piece = mine && lane * tokens & (p.piece_tokens - 1) == 0;
    let lane_bytes = tokens * const { S::PART_SLABS * 128 };
    // SAFETY: the launch has these maps.
    let [map, last_map, rope_map] = unsafe {
        [
            maps.add(S::MAP),
            maps.add(if apart { 2 } else { S::MAP }),
            maps.add(3),
        ]
    };
    // Both policies are created before the loop; each unit selects one.
    let policies = Policies::new(p);
    let (own, kept) = (policies.own(), ptr::evict_last_policy());
    let mut slots = Pipeline::<2>::CONSUMER;
    let mut stages = Pipeline::<STAGES>::PRODUCER;
    // The oldest part that may be under way. The first waits are for stages that no part has filled, and return at once.
    let mut oldest = Pipeline::<STAGES> {
        stage: STAGES - S::UNDER_WAY,
        ..Pipeline::PRODUCER
    };
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
            if S::FIRST_SLAB == 0 && lane == 0 && block + PREFETCH_DISTANCE == unit.blocks {
                // SAFETY: the scheduler warp waits for it.
                unsafe { mbarrier::arrive(s.near_end()) };
            }
            // Look up the page before waiting for the stage.
            let mut corner = [0, 0, S::FIRST_SLAB as i32, 0, p.outside as i32];
            if mine && at < unit.kv_end {
                let (page, in_page) = p.page_size.div_rem(at);
                let entry = p.attention.page_ids + u64::from(unit.table + page) * 4;
                corner[3] = (in_page / 8) as i32;
                // SAFETY: the table has a page for each key of the item.
                corner[4] = unsafe { ptr::load_nc_u32(entry as *const u32) } as i32;
            }
            let mut part = 0;
            while part < S::PARTS {
                // SAFETY: as above. The stage of the oldest part is filled again only by this warp, so its phase is not
                // missed.
                unsafe {
                    mbarrier::wait(s.full(oldest.stage), oldest.parity);
                    oldest.advance();
                    mbarrier::wait(s.free(stages.stage), stages.parity);
                    let full = s.full(stages.stage);
                    if lane == 0 {
                        let bytes = const { S::KEYS * S::PART_SLABS * 128 };
                        mbarrier::arrive_expect_tx(full, bytes);
                    }
                    warp::sync_warp(WARP);
                    let target = s.keys(stages.stage) + lane * lane_bytes;
                    let last = part + 1 == S::PARTS;
                    let (map, issues) = match last {
                        true => (last_map, mine),
                        false => (map, begins_piece),
                    };
                    if issues {
                        tma::load_tensor_hint(target, map, corner, full, policy);
                    }
                    if last && apart && mine {
                        let target = target + const { (S::PART_SLABS - 1) * 1024 };
                        let corner = [0, 0, 0, corner[3], corner[4]];
                        tma::load_tensor_hint(target, rope_map, corner, full, policy);
                    }
                }
                stages.advance();
                corner[2] += S::PART_SLABS as i32;
                part += 1;
            }
            at += S::KEYS;
            block += 1;
        }
        // SAFETY: as above.
        unsafe { mbarrier::arrive(s.unit_free(slots.stage)) };
        slots.advance();
    }
}
