//! Loaders that copy key by key with `cp.async`, for pages that no tensor map can describe.

use cuda_std::{async_copy, mbarrier, misc, ptr, warp};

use super::{
    super::{
        PREFETCH_DISTANCE,
        config::QUERY_SLABS,
        shared::{Parts, Unit},
    },
    policy::Policies,
};
use crate::abi::LatentParams;

const WARP: u32 = warp::FULL_MASK;

/// The page, and the place, of a key that does not exist.
const NONE: u32 = u32::MAX;

/// For each key of a share, eight lanes call `copy` with their places in the first slab, in shared memory from `target` on
/// and in the pool, and with 16, or 0 to write zeros. The lanes from `first_lane` on hold the `rows` of the keys, and those of
/// keys 32 later.
///
/// Two keys at a time have addresses of their own, because an address's registers are not free before its last copy has read
/// them.
///
/// The copies of each turn arrive at `full` when they are complete; if a share is copied in two passes, those of every other
/// turn, so that the number of arrivals is the same. That is one for at most 16 copies of a lane. One for all copies of a block
/// would do as well, but racecheck does not track so many copies to an arrival.
///
/// # Safety
/// A whole warp comes here; the barrier counts a lane once for eight keys. With two passes the keys are a multiple of 16.
#[inline(always)]
unsafe fn each_key<S: Parts<STAGES>, const STAGES: u32>(
    share: Share<S>,
    pool: u64,
    rows: [u32; 2],
    first_lane: u32,
    target: u32,
    full: u32,
    two_passes: bool,
    mut copy: impl FnMut(u32, u64, u32),
) {
    let lane = warp::lane_id();
    let pool = pool + u64::from(lane % 8 * 16);
    // Eight keys follow each other by 128 bytes, swizzled as TMA does it.
    let group = S::PART_SLABS * 1024;
    let key = lane / 8;
    let mut target = target + share.keys[0] / 8 * group + key * 128 + (lane ^ key) % 8 * 16;
    // Opaque: otherwise the loop is unrolled completely.
    let mut index = misc::opaque(key);
    while index < share.len() {
        let places = [index, index + 4].map(|index| {
            let row = rows[(share.len() > 32 && index >= 32) as usize];
            // SAFETY: the loop has as many turns for all lanes.
            unsafe { warp::warp_shuffle_idx(WARP, row, (first_lane + index) % 32, 32) }
        });
        let addresses = places.map(|place| misc::opaque_u64(pool + u64::from(place) * 16));
        let valid = places.map(|place| if place == NONE { 0 } else { 16 });
        copy(target, addresses[0], valid[0]);
        copy((target ^ 4 * 16) + 4 * 128, addresses[1], valid[1]);
        if !two_passes || index / 8 % 2 == 1 {
            // SAFETY: the caller's promise.
            unsafe { async_copy::mbarrier_arrive(full) };
        }
        target += group;
        index += 8;
    }
}

/// Where a warp copies to: one part of each block, of which it copies some keys.
#[derive(Clone, Copy)]
pub(in crate::sm90::mla) struct Share<S> {
    parts: S,
    part: u32,
    keys: [u32; 2],
}

impl<S> Share<S> {
    /// The keys from the first one on, up to the second.
    #[inline(always)]
    pub const fn new(parts: S, part: u32, keys: [u32; 2]) -> Self {
        Self { parts, part, keys }
    }

    /// Keys, a multiple of 8.
    const fn len(&self) -> u32 {
        self.keys[1] - self.keys[0]
    }
}

/// Loads its share of all units' blocks.
///
/// # Safety
/// A whole warp comes here, and the barriers are initialised.
#[inline(always)]
pub(in crate::sm90::mla) unsafe fn load_rows<S: Parts<STAGES>, const STAGES: u32>(
    p: &LatentParams,
    share: Share<S>,
) {
    // SAFETY: the caller's promise.
    unsafe { load_shares::<S, S, STAGES>(p, share, None) }
}

/// Loads shares of two parts, whose stages advance alike. Together they have at most 32 keys.
///
/// # Safety
/// As for [`load_rows`].
#[inline(always)]
pub(in crate::sm90::mla) unsafe fn load_rows_of_two<
    S: Parts<STAGES>,
    T: Parts<STAGES>,
    const STAGES: u32,
>(
    p: &LatentParams,
    first: Share<S>,
    second: Share<T>,
) {
    // SAFETY: the caller's promise.
    unsafe { load_shares(p, first, Some(second)) }
}

/// Loads key by key, 16 bytes per lane. Copies arrive at a part's barrier when they are complete, so all free stages are in
/// flight. Consumers pass a proxy fence before they multiply what was copied.
#[inline(always)]
unsafe fn load_shares<S: Parts<STAGES>, T: Parts<STAGES>, const STAGES: u32>(
    p: &LatentParams,
    share: Share<S>,
    second: Option<Share<T>>,
) {
    const { assert!(S::PARTS == T::PARTS) };
    let s = share.parts;
    let lane = warp::lane_id();
    let strides = p.attention.k_strides;
    let strides = [strides.page, strides.token].map(|elements| elements / 8);
    // Whether a lane has two keys of a block.
    let two = share.len() > 32;
    // The first key of a lane in a block.
    let key = |lane: u32| match second {
        Some(second) if lane >= share.len() => second.keys[0] + lane - share.len(),
        _ => share.keys[0] + lane,
    };
    // Registers are scarce here, so stage and parity share one: a number below 2 · STAGES. That of slots is below 4.
    let mut slots = 0;
    let mut stages = STAGES + share.part;
    loop {
        let slot = slots % 2;
        // SAFETY: the full and free barriers order every access to a stage; a whole warp.
        let unit = unsafe {
            mbarrier::wait(s.unit_full(slot), slots / 2);
            Unit::load(s.unit(slot))
        };
        if unit.tokens == 0 {
            return;
        }
        let policy = Policies::new(p).of(unit.flags);
        // Each lane looks up the page of a key, or of two, one block ahead. A page id is not used before its block: that
        // would stall on the load. Keys outside the item become zeros: a weight of 0 times their values could be NaN.
        let look_up = |at: u32, begin: u32| {
            if at < begin || at >= unit.kv_end {
                return NONE;
            }
            let (page, _) = p.page_size.div_rem(at);
            let entry = p.attention.page_ids + u64::from(unit.table + page) * 4;
            // SAFETY: the table has a page for each key of the item.
            unsafe { ptr::load_nc_u32(entry as *const u32) }
        };
        // The place of a key in its pool, in units of 16 bytes.
        let row = |[per_page, per_token]: [u32; 2], page: u32, at: u32| {
            if page == NONE {
                return NONE;
            }
            let (_, in_page) = p.page_size.div_rem(at);
            page * per_page + in_page * per_token
        };
        let find = |strides: [u32; 2], pages: [u32; 2], at: u32| {
            let first = row(strides, pages[0], at);
            let second = if two {
                row(strides, pages[1], at + 32)
            } else {
                NONE
            };
            [first, second]
        };
        let look_up_all = |at: u32, begin: u32| {
            let second = if two { look_up(at + 32, begin) } else { NONE };
            [look_up(at, begin), second]
        };
        // Opaque: a key that is computed for all units takes a register.
        let mut at = unit.first + key(misc::opaque(lane));
        // Only the first block has keys before the item.
        let mut pages = look_up_all(at, unit.kv_begin);
        let mut left = unit.blocks;
        while left != 0 {
            if S::FIRST_SLAB == 0
                && share.part == 0
                && share.keys[0] == 0
                && lane == 0
                && left == PREFETCH_DISTANCE
            {
                // SAFETY: the scheduler warp waits for it.
                unsafe { mbarrier::arrive(s.near_end()) };
            }
            let rows = find(strides, pages, at);
            at += S::KEYS;
            pages = look_up_all(at, 0);
            // The rows of the last slabs, if those have a pool of their own. Page ids are looked up again, in L1: to keep
            // them, or anything computed from the keys' numbers, takes registers that keys in one pool need, too.
            let find_apart = || {
                let at = misc::opaque(at - S::KEYS);
                let strides = [p.rope_page, p.rope_token].map(|elements| elements / 8);
                find(strides, look_up_all(at, 0), at)
            };
            // SAFETY: as above; keys are where the lanes found them.
            unsafe {
                copy(p, share, 0, rows, find_apart, stages, policy);
                if let Some(second) = second {
                    copy(p, second, share.len(), rows, find_apart, stages, policy);
                }
            }
            async_copy::commit_group();
            stages += S::PARTS;
            if stages >= 2 * STAGES {
                stages -= 2 * STAGES;
            }
            left -= 1;
        }
        // SAFETY: as above.
        unsafe { mbarrier::arrive(s.unit_free(slot)) };
        slots = (slots + 1) % 4;
    }
}

/// Copies a share of one block, when its stage is free. The lanes from `first_lane` on have the keys' `rows`.
///
/// # Safety
/// A whole warp comes here; the keys are at their rows.
#[inline(always)]
unsafe fn copy<S: Parts<STAGES>, const STAGES: u32>(
    p: &LatentParams,
    share: Share<S>,
    first_lane: u32,
    rows: [u32; 2],
    find_apart: impl Fn() -> [u32; 2],
    stages: u32,
    policy: u64,
) {
    let s = share.parts;
    let slabs = S::PART_SLABS;
    let first = S::FIRST_SLAB + share.part * slabs;
    let pool = p.attention.k + u64::from(first * 128);
    // Whether the last slab comes from a pool of its own.
    let apart = S::HAS_ROPE && first + slabs == QUERY_SLABS && p.apart != 0;
    let [stage, parity] = [stages % STAGES, stages / STAGES];
    let full = s.full(stage);
    // SAFETY: the stage is free; the caller's promise.
    unsafe {
        // The copies to a stage are complete when it is free. racecheck knows that only from waits of the lanes that copied.
        let same_lanes = const { STAGES.is_multiple_of(S::PARTS) };
        let arrived = same_lanes || mbarrier::test_wait(full, parity);
        mbarrier::wait(s.free(stage), parity);
        if same_lanes {
            match const { STAGES / S::PARTS } {
                3 => async_copy::wait_group::<2>(),
                4 => async_copy::wait_group::<3>(),
                _ => async_copy::wait_group::<0>(),
            }
        } else if !arrived {
            mbarrier::wait(full, parity);
        }
        let target = s.keys(stage);
        // Slab after slab; the loop over them is unrolled.
        each_key(
            share,
            pool,
            rows,
            first_lane,
            target,
            full,
            apart,
            |target, row, valid| {
                let mut slab = 0;
                while slab < slabs {
                    if slab + 1 < slabs || !apart {
                        let source = (row + u64::from(slab * 128)) as *const u8;
                        async_copy::copy_cg_hint_zfill(target + slab * 1024, source, valid, policy);
                    }
                    slab += 1;
                }
            },
        );
        if apart {
            let target = target + (slabs - 1) * 1024;
            let rows = find_apart();
            each_key(
                share,
                p.rope,
                rows,
                first_lane,
                target,
                full,
                true,
                |target, row, valid| {
                    async_copy::copy_cg_hint_zfill(target, row as *const u8, valid, policy);
                },
            );
        }
    }
}
