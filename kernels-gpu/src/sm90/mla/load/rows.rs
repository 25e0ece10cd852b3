//! Loaders that copy key by key with `cp.async`, for pages that no tensor map can describe.

use cuda_std::{async_copy, fence, mbarrier, misc, ptr, warp};

use super::{
    super::{super::pipeline::Pipeline, PREFETCH_DISTANCE, config::QUERY_SLABS, shared::Unit},
    parts::Parts,
    policy::Policies,
};
use crate::abi::LatentParams;

const WARP: u32 = warp::FULL_MASK;

/// Blocks that [`load_rows`] has in flight before it signals the first. Consumers of a ring of three blocks free a block
/// only after they have seen the next one full, and a ring of seven or eight thirds has no room for a third block: more than one
/// unsignalled block would deadlock.
const UNSIGNALLED: u32 = 1;

/// For each key of `from..to`, four at a time: eight lanes call `copy` with the key, their source address in its first slab,
/// and 16, or 0 to write zeros. The lanes' `rows` are the addresses of the keys from `from` on, and of those 32 later; 0: there
/// is no such key.
///
/// # Safety
/// A whole warp comes here, with a multiple of four keys.
#[inline(always)]
unsafe fn each_key(rows: [u64; 2], [from, to]: [u32; 2], mut copy: impl FnMut(u32, u64, u32)) {
    let lane = warp::lane_id();
    // Opaque: otherwise the loop is unrolled completely.
    let mut index = misc::opaque(lane / 8);
    while index < to - from {
        let row = rows[(to - from > 32 && index >= 32) as usize];
        // SAFETY: the loop has as many turns for all lanes.
        let [low, high] = [row as u32, (row >> 32) as u32]
            .map(|word| unsafe { warp::warp_shuffle_idx(WARP, word, index % 32, 32) });
        let row = u64::from(high) << 32 | u64::from(low);
        let valid = if row == 0 { 0 } else { 16 };
        copy(from + index, row + u64::from(lane % 8 * 16), valid);
        index += 4;
    }
}

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
    let first = S::FIRST_SLAB + part * slabs;
    let pool = p.attention.k + u64::from(first * 128);
    let strides = p.attention.k_strides;
    let strides = [strides.page, strides.token];
    // Whether a lane has two keys of a block.
    let two = to - from > 32;
    // Whether the last slab comes from a pool of its own.
    let apart = S::HAS_ROPE && first + slabs == QUERY_SLABS && p.apart != 0;
    let policies = Policies::new(p);
    let mut slots = Pipeline::<2>::CONSUMER;
    let mut stages = Pipeline::<STAGES> {
        stage: part,
        ..Pipeline::PRODUCER
    };
    // Eight lanes copy 128 bytes of a key.
    let in_group = |key: u32| key % 8 * 128 + (lane ^ key) % 8 * 16;
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
        // Each lane looks up the page of a key, or of two, one block ahead. A page id is not used before its block: that
        // would stall on the load. Keys past the end become zeros.
        let look_up = |at: u32| {
            if at >= unit.kv_end {
                return 0;
            }
            let (page, _) = p.page_size.div_rem(at);
            let entry = p.attention.page_ids + u64::from(unit.table + page) * 4;
            // SAFETY: the table has a page for each key of the item.
            unsafe { ptr::load_nc_u32(entry as *const u32) }
        };
        let row = |pool: u64, [per_page, per_token]: [u32; 2], page: u32, at: u32| {
            if at >= unit.kv_end {
                return 0;
            }
            let (_, in_page) = p.page_size.div_rem(at);
            let element =
                u64::from(page) * u64::from(per_page) + u64::from(in_page) * u64::from(per_token);
            pool + element * 2
        };
        let find = |pool: u64, strides: [u32; 2], pages: [u32; 2], at: u32| {
            let first = row(pool, strides, pages[0], at);
            let second = if two {
                row(pool, strides, pages[1], at + 32)
            } else {
                0
            };
            [first, second]
        };
        let look_up_all = |at: u32| [look_up(at), if two { look_up(at + 32) } else { 0 }];
        let mut at = unit.first + from + lane;
        let mut pages = look_up_all(at);
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
            let rows = find(pool, strides, pages, at);
            at += S::KEYS;
            pages = look_up_all(at);
            if block > UNSIGNALLED {
                async_copy::wait_group::<UNSIGNALLED>();
                announce(stages.stage, 1 + UNSIGNALLED);
            }
            // SAFETY: the stage is free; keys are where the lanes found them.
            unsafe {
                mbarrier::wait(s.free(stages.stage), stages.parity);
                let target = s.keys(stages.stage);
                // Slab after slab; the loop over them is unrolled.
                each_key(rows, [from, to], |key, row, valid| {
                    let target = target + key / 8 * slabs * 1024 + in_group(key);
                    let mut slab = 0;
                    while slab < slabs {
                        if slab + 1 < slabs || !apart {
                            let source = (row + u64::from(slab * 128)) as *const u8;
                            async_copy::copy_cg_hint_zfill(
                                target + slab * 1024,
                                source,
                                valid,
                                policy,
                            );
                        }
                        slab += 1;
                    }
                });
                if apart {
                    // Look up the page ids again, which are in L1: to keep them, or anything computed from the keys' numbers,
                    // takes registers that keys in one pool need, too.
                    let at = misc::opaque(at - S::KEYS);
                    let strides = [p.rope_page, p.rope_token];
                    let rows = find(p.rope, strides, look_up_all(at), at);
                    let target = target + (slabs - 1) * 1024;
                    each_key(rows, [from, to], |key, row, valid| {
                        let target = target + key / 8 * slabs * 1024 + in_group(key);
                        async_copy::copy_cg_hint_zfill(target, row as *const u8, valid, policy);
                    });
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
