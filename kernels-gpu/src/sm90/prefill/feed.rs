//! The warpgroup that feeds: the scheduler and the loaders.

use cuda_std::{
    fence,
    math::div_u32,
    mbarrier,
    prelude::*,
    tma::{self, TensorMap},
};

use super::{super::ring::Ring, CLAIM_AHEAD, LATE_ROUNDS, tile::Shared};
use crate::{
    abi::{AttentionParams, PrefillParams},
    prefill::{Place, Tile},
    variant::Variant,
};

const WARP: u32 = !0;

// ---- The scheduler -----------------------------------------------------------------------------

/// Describes unit `unit` of the launch whose work `a` is.
#[inline(always)]
unsafe fn describe<V: Variant>(
    p: &PrefillParams,
    a: &AttentionParams,
    variant: &V,
    unit: u32,
    keys: u32,
) -> Tile {
    // All heads of an item before the next one: neighbours read the same pages at the same time, and
    // the longest items of the whole launch come first.
    let per_kv_head = p.pack.div(a.group);
    let heads = a.kv_heads * per_kv_head;
    let item = div_u32(unit, heads);
    let head = unit - item * heads;
    let kv_head = div_u32(head, per_kv_head);
    let place = Place {
        item,
        from: 0,
        most: u32::MAX,
        kv_head,
        in_group: head - kv_head * per_kv_head,
    };
    // SAFETY: the unit is one of the launch's.
    let mut tile = unsafe { Tile::at(a, variant, &place, p.pack.get()) };
    tile.lowest -= tile.lowest % p.box_tokens;
    tile.end = tile.end.next_multiple_of(p.box_tokens);
    let past_blocks = tile.end.saturating_sub(tile.lowest) + keys - 1;
    // A tile that sees nothing walks one block, all of it masked.
    tile.blocks = div_u32(past_blocks, keys).max(1);
    tile
}

/// Claims tile after tile, the last ones when the one before comes to its end, tells what it is and brings its
/// queries.
///
/// # Safety
/// One thread of the CTA comes here; `maps` begin with that of the queries, and the barriers are initialised.
#[inline(always)]
pub(super) unsafe fn schedule<V: Variant>(
    p: &PrefillParams,
    maps: *const TensorMap,
    variant: &V,
    s: Shared,
) {
    let slabs = s.shape.head_dim / 64;
    let tokens = p.pack.div(s.shape.rows());
    let ctas = thread::grid_dim_x();
    let mut unit = thread::block_idx_x();
    let mut ring = Ring::<2>::PRODUCER;
    let mut ends = Ring::<1>::CONSUMER;
    loop {
        // Read again for every unit: there are few registers here.
        // SAFETY: as the launch is.
        let a = &unsafe { p.attention.of_this_plan() };
        let more = unit < a.units;
        let mut tile = Tile::NONE;
        // SAFETY: one thread; the ring's barriers say what belongs to whom.
        unsafe {
            if more {
                tile = describe(p, a, variant, unit, s.shape.keys);
            }
            mbarrier::wait(s.tile_free(ring.stage), ring.parity);
            // Beside decodes CTAs differ in pace all the time, and there are fewer registers.
            let last = s.shape.beside || unit + LATE_ROUNDS * ctas >= a.units;
            let late = tile.blocks >= CLAIM_AHEAD && last;
            tile.store(s.tile(ring.stage));
            shared::store_u32(s.late(ring.stage), u32::from(late));
            mbarrier::arrive(s.tile_full(ring.stage));
            let (full, target) = (s.queries_full(ring.stage), s.queries(ring.stage));
            if !more {
                mbarrier::arrive(full);
                return;
            }
            ring.advance();
            if s.shape.query_stages == 1 {
                // A phase for each tile, and the ring is one ahead: 1, 0, 1, … as of one that begins free.
                mbarrier::wait(s.queries_free(), ring.stage);
            }
            mbarrier::arrive_expect_tx(full, slabs * 128 * p.pack.get() * tokens);
            let mut slab = 0;
            while slab < slabs {
                let head = p.pack.div(tile.head) as i32;
                let corner = [0, 0, tile.token as i32, slab as i32, head];
                tma::load_tensor(target + slab * s.shape.slab_bytes(), maps, corner, full);
                slab += 1;
            }
            if late {
                mbarrier::wait(s.ends_soon(), ends.parity);
                ends.advance();
            }
            unit = ctas + a.ticket();
        }
    }
}

// ---- The loaders -------------------------------------------------------------------------------

/// The next tile.
///
/// # Safety
/// A whole warp comes here, once for each tile.
#[inline(always)]
pub(super) unsafe fn next_tile(s: Shared, tiles: &mut Ring<2>) -> Tile {
    // SAFETY: the ring's barriers say what belongs to whom.
    unsafe {
        mbarrier::wait(s.tile_full(tiles.stage), tiles.parity);
        let tile = Tile::load(s.tile(tiles.stage));
        mbarrier::arrive(s.tile_free(tiles.stage));
        tiles.advance();
        tile
    }
}

/// Brings the blocks of all tiles, from the last to the first of each: values or keys.
///
/// # Safety
/// A whole warp comes here; `map` is that of the values or of the keys, and the barriers are initialised.
#[inline(always)]
pub(super) unsafe fn load<const VALUES: bool, const STAGES: u32>(
    p: &PrefillParams,
    map: *const TensorMap,
    s: Shared,
) {
    let a = &p.attention;
    let lane = warp::lane_id();
    let (keys, row_bytes) = (s.shape.keys, s.shape.row_bytes(VALUES));
    let mine = lane < div_u32(keys, p.box_tokens);
    let mut tiles = Ring::<2>::CONSUMER;
    let mut blocks = Ring::<STAGES>::PRODUCER;
    let mut tail_parity = 0;
    loop {
        // SAFETY: a whole warp.
        let tile = unsafe { next_tile(s, &mut tiles) };
        if tile.rows == 0 {
            return;
        }
        let mut begin = tile.end as i32;
        let mut left = tile.blocks;
        while left > 0 {
            if !VALUES && left == CLAIM_AHEAD && lane == 0 {
                // SAFETY: the tile stays until its output is written; who waits is the scheduler.
                unsafe {
                    if s.claims_late(tiles.stage ^ 1) {
                        mbarrier::arrive(s.ends_soon());
                    }
                }
            }
            left -= 1;
            begin -= keys as i32;
            // Which page this lane's box lies in: looked up before the stage is free.
            let at = begin + (lane * p.box_tokens) as i32;
            let mut corner = [0, 0, 0, 0, p.pages.outside as i32];
            if mine && at >= tile.lowest as i32 && at < tile.kv_end as i32 {
                let (page, in_page) = p.page_size.div_rem(at as u32);
                let entry = (a.page_ids + u64::from(tile.table + page) * 4) as *const u32;
                // SAFETY: the table has a page for each key of the item.
                let id = unsafe { ptr::load_nc_u32(entry) };
                corner[3] = (in_page / 8) as i32;
                corner[4] =
                    (id * p.pages.step_per_page + tile.kv_head * p.pages.step_per_head) as i32;
            }
            corner[2] = (tile.kv_head * p.pages.step_in_token * (row_bytes / 128)) as i32;

            let (full, free, target) = s.stage_of(VALUES, blocks.stage);
            // A box that reaches past the item's keys: those values may be anything, and their
            // weight 0 does not keep a NaN out.
            let past = tile.kv_end as i32;
            let tail = VALUES && begin + keys as i32 > past && tile.kv_end % p.box_tokens != 0;
            // SAFETY: as above.
            unsafe {
                mbarrier::wait(free, blocks.parity);
                let arrival = if tail { s.tail() } else { full };
                if lane == 0 {
                    mbarrier::arrive_expect_tx(arrival, keys * row_bytes);
                }
                warp::sync_warp(WARP);
                if mine {
                    let offset = lane * p.box_tokens * row_bytes;
                    tma::load_tensor(target + offset, map, corner, arrival);
                }
                if tail {
                    mbarrier::wait(s.tail(), tail_parity);
                    tail_parity ^= 1;
                    let first = (past - begin) as u32;
                    clear(
                        target,
                        first,
                        first.next_multiple_of(p.box_tokens),
                        row_bytes,
                    );
                    fence::proxy_async_shared();
                    warp::sync_warp(WARP);
                    if lane == 0 {
                        mbarrier::arrive(full);
                    }
                }
            }
            blocks.advance();
        }
    }
}

/// Sets rows of a block to zero: groups of 8 tokens, in a group 64 columns after the other.
///
/// # Safety
/// A whole warp comes here, and the block is its own.
#[inline(always)]
pub(in crate::sm90) unsafe fn clear(block: u32, first: u32, past: u32, row_bytes: u32) {
    let lane = warp::lane_id();
    let mut row = first;
    while row < past {
        let group = block + row / 8 * (8 * row_bytes) + row % 8 * 128;
        let mut chunk = lane;
        while chunk < row_bytes / 16 {
            // SAFETY: inside the block, which is the loader's. Swizzled or not, it is the row's.
            unsafe { shared::store_u32x4(group + chunk / 8 * 1024 + chunk % 8 * 16, [0; 4]) };
            chunk += 32;
        }
        row += 1;
    }
}
