//! Loaders that copy key by key with `cp.async`, for pages that no tensor map can describe.

use cuda_std::{async_copy, fence, mbarrier, misc, ptr, warp};

use super::{
    super::{super::pipeline::Pipeline, PREFETCH_DISTANCE, shared::Unit},
    parts::Parts,
    policy::Policies,
};
use crate::abi::LatentParams;

const WARP: u32 = warp::FULL_MASK;

/// Blocks that [`load_rows`] has in flight before it signals the first. Consumers of a ring of three blocks free a block
/// only after they have seen the next one full, and a ring of seven or eight thirds has no room for a third block: more than one
/// unsignalled block would deadlock.
const UNSIGNALLED: u32 = 1;

/// Loads one part of all units' blocks, key by key, 16 bytes per lane; of each block the keys `from..to`.
///
/// # Safety
/// A whole warp comes here, and the barriers are initialised.
#[inline(always)]
pub(in crate::sm90::mla) unsafe fn load_rows<S: Parts<STAGES>, const STAGES: u32>(
    p: &LatentParams,
    s: S,
    part: u32,
    [from, to]: [u32; 2],
) {
    const { assert!((1 + UNSIGNALLED) * S::PARTS <= STAGES) };
    let lane = warp::lane_id();
    let slabs = S::PART_SLABS;
    let pool = p.attention.k + u64::from((S::FIRST_SLAB + part * slabs) * 128);
    let strides = p.attention.k_strides;
    let policies = Policies::new(p);
    let mut slots = Pipeline::<2>::CONSUMER;
    let mut stages = Pipeline::<STAGES> {
        stage: part,
        ..Pipeline::PRODUCER
    };
    // Signals that this lane's copies to a stage, that of its part so many blocks before the next one, are done and
    // visible to wgmma.
    let announce = |next: u32, before: u32| {
        let stage = (next + STAGES - before * S::PARTS) % STAGES;
        fence::proxy_async_shared();
        // SAFETY: the barrier counts all lanes.
        unsafe { mbarrier::arrive(s.full(stage)) };
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
        let policy = policies.of(unit.flags);
        // Each lane looks up the pages of two keys, one block ahead. A page id is not used before its block: that would
        // stall on the load. Keys past the end become zeros.
        let look_up = |at: u32| {
            if at >= unit.kv_end {
                return 0;
            }
            let (page, _) = p.page_size.div_rem(at);
            let entry = p.attention.page_ids + u64::from(unit.table + page) * 4;
            // SAFETY: the table has a page for each key of the item.
            unsafe { ptr::load_nc_u32(entry as *const u32) }
        };
        let row = |page: u32, at: u32| {
            if at >= unit.kv_end {
                return 0;
            }
            let (_, in_page) = p.page_size.div_rem(at);
            let element = u64::from(page) * u64::from(strides.page)
                + u64::from(in_page) * u64::from(strides.token);
            pool + element * 2
        };
        let mut at = unit.first + lane;
        let mut pages = [look_up(at), look_up(at + 32)];
        let mut block = 0;
        while block < unit.blocks {
            if S::FIRST_SLAB == 0
                && part == 0
                && lane == 0
                && block + PREFETCH_DISTANCE == unit.blocks
            {
                // SAFETY: the scheduler warp waits for it.
                unsafe { mbarrier::arrive(s.near_end()) };
            }
            let rows = [row(pages[0], at), row(pages[1], at + 32)];
            at += S::KEYS;
            pages = [look_up(at), look_up(at + 32)];
            if block > UNSIGNALLED {
                async_copy::wait_group::<UNSIGNALLED>();
                announce(stages.stage, 1 + UNSIGNALLED);
            }
            // SAFETY: the stage is free; keys are where the lanes found them.
            unsafe {
                mbarrier::wait(s.free(stages.stage), stages.parity);
                let target = s.keys(stages.stage);
                // Eight lanes copy 128 bytes of a key, slab after slab. Opaque: otherwise the loop is unrolled
                // completely.
                let mut key = misc::opaque(lane / 8) + from;
                while key < to {
                    let row = rows[(key >= 32) as usize];
                    let low = warp::warp_shuffle_idx(WARP, row as u32, key % 32, 32);
                    let high = warp::warp_shuffle_idx(WARP, (row >> 32) as u32, key % 32, 32);
                    let row = u64::from(high) << 32 | u64::from(low);
                    let valid = if row == 0 { 0 } else { 16 };
                    let in_group = key % 8 * 128 + (lane ^ key) % 8 * 16;
                    let target = target + key / 8 * slabs * 1024 + in_group;
                    let source = row + u64::from(lane % 8 * 16);
                    let mut slab = 0;
                    while slab < slabs {
                        async_copy::copy_cg_hint_zfill(
                            target + slab * 1024,
                            (source + u64::from(slab * 128)) as *const u8,
                            valid,
                            policy,
                        );
                        slab += 1;
                    }
                    key += 4;
                }
            }
            async_copy::commit_group();
            let mut passed = 0;
            while passed < S::PARTS {
                stages.advance();
                passed += 1;
            }
            block += 1;
        }
        // Signal the last blocks now: the next unit may only come after the end of this one.
        if block > 1 {
            async_copy::wait_group::<1>();
            announce(stages.stage, 2);
        }
        async_copy::wait_group::<0>();
        announce(stages.stage, 1);
        // SAFETY: as above.
        unsafe { mbarrier::arrive(s.unit_free(slots.stage)) };
        slots.advance();
    }
}
