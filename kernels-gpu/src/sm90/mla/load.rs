//! The warps that load: one claims units and brings their queries, two bring the halves of the keys.

use cuda_std::{
    async_copy, fence, mbarrier, misc, ptr, shared, thread,
    tma::{self, TensorMap},
    warp,
};

use super::{
    super::pipeline::Pipeline,
    PREFETCH_DISTANCE,
    config::{SLAB_BYTES, SLABS, half_bytes, query_slabs},
    shared::{Shared, Unit, Units},
};
use crate::{
    abi::{LatentParams, QueryRow, WorkItem},
    common::{decode::produce::Header, tile_counter},
};

const WARP: u32 = warp::FULL_MASK;

/// Claims unit after unit, each when the one before comes to its end, and publishes what it is and who its rows are;
/// then `ready` is told of the unit's place and of the unit.
///
/// # Safety
/// A whole warp comes here; the barriers are initialised.
#[inline(always)]
pub(super) unsafe fn claim<U: Units>(p: &LatentParams, s: U, mut ready: impl FnMut(u32, &Unit)) {
    // SAFETY: as the launch is.
    let a = &unsafe { p.attention.of_this_plan() };
    let lane = warp::lane_id();
    let ctas = thread::grid_dim_x();
    let mut unit = thread::block_idx_x();
    let mut slots = Pipeline::<2>::PRODUCER;
    let mut ends = Pipeline::<1>::CONSUMER;
    // SAFETY: a whole warp; the barriers say what belongs to whom.
    unsafe {
        while unit < a.units {
            let header = Header::load(a, p.tiles, unit);
            let item = &header.item;
            let shift = p.piece_tokens.trailing_zeros();
            let first = item.kv_begin >> shift << shift;
            let described = Unit {
                tokens: item.rows,
                head: header.head * p.heads.get(),
                position: item.position,
                table: item.table,
                first,
                kv_begin: item.kv_begin,
                kv_end: item.kv_end,
                // A unit without keys walks one block, all of it masked.
                blocks: ((item.kv_end - first + U::KEYS - 1) / U::KEYS).max(1),
                flags: item.flags,
            };
            mbarrier::wait(s.unit_free(slots.stage), slots.parity);
            if lane == 0 {
                described.store(s.unit(slots.stage));
            }
            // The loaders begin while the rows are looked up.
            mbarrier::arrive(s.unit_full(slots.stage));
            let mut token = lane;
            while token < item.rows {
                let QueryRow {
                    token: of,
                    position,
                    slot,
                    merge,
                } = header.load_row(a, token);
                let row = [of, position as u32, slot, merge];
                shared::store_u32x4(s.row(slots.stage, token), row);
                token += 32;
            }
            mbarrier::arrive(s.rows_full(slots.stage));
            ready(slots.stage, &described);
            slots.advance();
            if described.blocks >= PREFETCH_DISTANCE {
                mbarrier::wait(s.near_end(), ends.parity);
                ends.advance();
            }
            let ticket = if lane == 0 { a.ticket() } else { 0 };
            unit = ctas + warp::warp_shuffle_idx(WARP, ticket, 0, 32);
        }
        mbarrier::wait(s.unit_free(slots.stage), slots.parity);
        if lane == 0 {
            Unit::NONE.store(s.unit(slots.stage));
        }
        mbarrier::arrive(s.unit_full(slots.stage));
    }
}

/// [`claim`], and brings each unit's queries.
///
/// # Safety
/// A whole warp comes here; `map` is that of the queries, and the barriers are initialised.
#[inline(always)]
pub(super) unsafe fn claim_with_queries<
    const KEYS: u32,
    const STAGES: u32,
    const CONVERTED: bool,
>(
    p: &LatentParams,
    map: *const TensorMap,
    s: Shared<KEYS, STAGES, CONVERTED>,
) {
    let mut queries = Pipeline::<1>::PRODUCER;
    // SAFETY: the caller's promises; the unit's rows were listed.
    unsafe {
        claim(p, s, |slot, unit| {
            // Lanes read the rows of others.
            warp::sync_warp(WARP);
            mbarrier::wait(s.queries_free(), queries.parity);
            queries.advance();
            bring_queries(p, map, s, slot, unit);
        });
    }
}

/// A box for each token and slab, a lane each.
#[inline(always)]
unsafe fn bring_queries<const KEYS: u32, const STAGES: u32, const CONVERTED: bool>(
    p: &LatentParams,
    map: *const TensorMap,
    s: Shared<KEYS, STAGES, CONVERTED>,
    slot: u32,
    unit: &Unit,
) {
    let (lane, heads) = (warp::lane_id(), p.heads.get());
    let slabs = const { query_slabs(KEYS) };
    let boxes = unit.tokens * slabs;
    // SAFETY: the rows are listed, and their place is free.
    unsafe {
        if lane == 0 {
            mbarrier::arrive_expect_tx(s.queries_full(), boxes * heads * 128);
        }
        warp::sync_warp(WARP);
        let mut index = lane;
        while index < boxes {
            let (token, slab) = (index / slabs, index % slabs);
            let of = shared::load_u32(s.row(slot, token));
            let target = s.queries() + slab * SLAB_BYTES + token * heads * 128;
            let corner = [0, unit.head as i32, slab as i32, of as i32, 0];
            tma::load_tensor(target, map, corner, s.queries_full());
            index += 32;
        }
    }
}

/// Brings a half of the blocks of all units, a lane per piece.
///
/// # Safety
/// A whole warp comes here; `map` is that of the half, and the barriers are initialised.
#[inline(always)]
pub(super) unsafe fn load<
    const RIGHT: bool,
    const KEYS: u32,
    const STAGES: u32,
    const CONVERTED: bool,
>(
    p: &LatentParams,
    map: *const TensorMap,
    s: Shared<KEYS, STAGES, CONVERTED>,
) {
    let (lane, half) = (warp::lane_id(), RIGHT as u32);
    let tokens = p.piece_tokens;
    let per_block = KEYS >> tokens.trailing_zeros();
    let mine = lane < per_block;
    let bytes = const { half_bytes(KEYS, RIGHT as u32) };
    let piece_bytes = tokens * const { SLABS[RIGHT as usize] * 128 };
    // Keys that other CTAs read, too, are kept for them.
    let shared_by_tiles = p.tiles.get() > 1;
    // SAFETY: as the launch is.
    let long = unsafe { tile_counter::is_long(p.long, p.attention.record) };
    let own = match long {
        true => ptr::evict_unchanged_policy(),
        false => ptr::evict_first_policy(),
    };
    let kept = ptr::evict_last_policy();
    let mut slots = Pipeline::<2>::CONSUMER;
    let mut stages = Pipeline::<STAGES>::PRODUCER;
    loop {
        // SAFETY: the barriers say what belongs to whom; a whole warp.
        let unit = unsafe {
            mbarrier::wait(s.unit_full(slots.stage), slots.parity);
            Unit::load(s.unit(slots.stage))
        };
        if unit.tokens == 0 {
            return;
        }
        let policy = match shared_by_tiles || unit.flags & WorkItem::SHARED_KEYS != 0 {
            true => kept,
            false => own,
        };
        let mut at = unit.first + lane * tokens;
        let mut block = 0;
        while block < unit.blocks {
            if !RIGHT && lane == 0 && block + PREFETCH_DISTANCE == unit.blocks {
                // SAFETY: the claiming warp waits for it.
                unsafe { mbarrier::arrive(s.near_end()) };
            }
            // The page is looked up before the place is free.
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
            at += KEYS;
            block += 1;
        }
        // SAFETY: as above.
        unsafe { mbarrier::arrive(s.unit_free(slots.stage)) };
        slots.advance();
    }
}

/// Blocks that [`load_rows`] has under way before it says that the first is there. A consumer gives a block back when
/// it has seen the one behind it: with three stages, a place is waited for only where no more than one is not announced.
const UNDER_WAY: u32 = 1;

/// Brings a half of the columns of all units' blocks key by key, a lane for 16 bytes: of the keys of a block from one to
/// another.
///
/// # Safety
/// A whole warp comes here, and the barriers are initialised.
#[inline(always)]
pub(super) unsafe fn load_rows<
    const RIGHT: bool,
    const KEYS: u32,
    const STAGES: u32,
    const CONVERTED: bool,
>(
    p: &LatentParams,
    s: Shared<KEYS, STAGES, CONVERTED>,
    [from, to]: [u32; 2],
) {
    let (lane, half) = (warp::lane_id(), RIGHT as u32);
    let slabs = const { SLABS[RIGHT as usize] };
    let pool = p.attention.k + u64::from(if RIGHT { SLABS[0] } else { 0 } * 128);
    let strides = p.attention.k_strides;
    let shared_by_tiles = p.tiles.get() > 1;
    // SAFETY: as the launch is.
    let long = unsafe { tile_counter::is_long(p.long, p.attention.record) };
    let mut slots = Pipeline::<2>::CONSUMER;
    let mut stages = Pipeline::<STAGES>::PRODUCER;
    // The lane's copies to a stage are there, and may be read by the tensor cores.
    let announce = |stage: u32| {
        fence::proxy_async_shared();
        // SAFETY: the barrier counts all lanes.
        unsafe { mbarrier::arrive(s.full(stage % STAGES, half)) };
    };
    loop {
        // SAFETY: the barriers say what belongs to whom; a whole warp.
        let unit = unsafe {
            mbarrier::wait(s.unit_full(slots.stage), slots.parity);
            Unit::load(s.unit(slots.stage))
        };
        if unit.tokens == 0 {
            return;
        }
        let policy = match shared_by_tiles || unit.flags & WorkItem::SHARED_KEYS != 0 {
            true => ptr::evict_last_policy(),
            false if long => ptr::evict_unchanged_policy(),
            false => ptr::evict_first_policy(),
        };
        // Each lane looks up two keys, a block ahead; behind the last there are zeros. Nothing is computed with a page
        // before its block: that would wait for the load.
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
            if !RIGHT && lane == 0 && block + PREFETCH_DISTANCE == unit.blocks {
                // SAFETY: the claiming warp waits for it.
                unsafe { mbarrier::arrive(s.near_end()) };
            }
            let rows = [row(pages[0], at), row(pages[1], at + 32)];
            at += KEYS;
            pages = [look_up(at), look_up(at + 32)];
            if block > UNDER_WAY {
                async_copy::wait_group::<UNDER_WAY>();
                announce(stages.stage + STAGES - 1 - UNDER_WAY);
            }
            // SAFETY: the stage is free; keys are where the lanes found them.
            unsafe {
                mbarrier::wait(s.free(stages.stage, half), stages.parity);
                let target = s.half(stages.stage, half);
                // Eight lanes have 128 bytes of a key, of one slab after the other. Opaque: or all copies of a block are
                // one piece of code.
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
            stages.advance();
            block += 1;
        }
        // The next unit may wait for the end of this one.
        if block > 1 {
            async_copy::wait_group::<1>();
            announce(stages.stage + STAGES - 2);
        }
        async_copy::wait_group::<0>();
        announce(stages.stage + STAGES - 1);
        // SAFETY: as above.
        unsafe { mbarrier::arrive(s.unit_free(slots.stage)) };
        slots.advance();
    }
}
