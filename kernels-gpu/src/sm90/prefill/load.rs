//! The loaders: keys and values, page by page.

use cuda_std::{
    fence, griddep,
    math::div_u32,
    mbarrier, misc,
    prelude::*,
    tma::{self, TensorMap},
};

use super::{
    super::{pages::clear, pipeline::Pipeline},
    convert::converted_from,
    scheduler::PREFETCH_DISTANCE,
    shared::Shared,
};
use crate::{
    abi::{ConvertedPage, PrefillParams},
    common::prefill_tile::Tile,
};

const WARP: u32 = warp::FULL_MASK;

/// The next tile.
///
/// # Safety
/// A whole warp comes here, once for each tile.
#[inline(always)]
pub(super) unsafe fn next_tile(s: Shared, tiles: &mut Pipeline<2>) -> Tile {
    // SAFETY: the ring's barriers say what belongs to whom.
    unsafe {
        mbarrier::wait(s.tile_full(tiles.stage), tiles.parity);
        let tile = Tile::load(s.tile(tiles.stage));
        mbarrier::arrive(s.tile_free(tiles.stage));
        tiles.advance();
        tile
    }
}

/// The page of a key by its place, and its place there.
///
/// # Safety
/// The table has the page.
#[inline(always)]
unsafe fn page_of(ids: u64, table: u32, (page, in_page): (u32, u32)) -> (u32, u32) {
    // Tables of converted pages begin with the first key that is seen, perhaps behind key 0.
    let entry = ids + u64::from(table.wrapping_add(page)) * 4;
    // SAFETY: the caller's promise.
    (unsafe { ptr::load_nc_u32(entry as *const u32) }, in_page)
}

/// Where the table begins that a converted page was made of, in which its values are.
///
/// # Safety
/// The item sees the key.
#[inline(always)]
unsafe fn table_of_values(p: &PrefillParams, tile: &Tile, key: u32) -> u32 {
    // Tables of converted pages begin with the first key that is seen, perhaps behind key 0.
    let entry = tile.table.wrapping_add(key / ConvertedPage::KEYS);
    // SAFETY: the caller's promise.
    unsafe {
        let page = ptr::load_nc_u32((p.attention.page_ids + u64::from(entry) * 4) as *const u32);
        let made_of = p.convert.list + u64::from(page) * size_of::<ConvertedPage>() as u64;
        ptr::load_nc_u32(made_of as *const u32)
    }
}

/// Brings the blocks of all tiles, from the last to the first of each: values or keys. `turns` says whether keys may have been
/// turned by a launch in front, a constant of the kernel.
///
/// # Safety
/// A whole warp comes here; `map` is that of the values or of the keys, and the barriers are initialised.
#[inline(always)]
pub(super) unsafe fn load<const VALUES: bool, const STAGES: u32>(
    p: &PrefillParams,
    map: *const TensorMap,
    s: Shared,
    turns: bool,
) {
    let a = &p.attention;
    let lane = warp::lane_id();
    let (keys, row_bytes) = (s.shape.keys, s.shape.row_bytes(VALUES));
    let mine = lane < div_u32(keys, p.box_tokens);
    let mut tiles = Pipeline::<2>::CONSUMER;
    let mut blocks = Pipeline::<STAGES>::PRODUCER;
    let mut tail_parity = 0;
    // Where keys were turned their values may be in other pages.
    let apart = VALUES && turns;
    let pages = if apart { &p.value_pages } else { &p.pages };
    // Of heads with a cut slab no pages are converted.
    let converts = !s.shape.is_cut() && p.convert.pages != 0;
    let epoch = match converts {
        false => 0,
        // SAFETY: it was put there.
        true => unsafe { shared::load_u32(s.epoch()) },
    };
    // Behind what turns keys, and may bring values along.
    if turns {
        griddep::wait();
    }
    loop {
        // SAFETY: a whole warp.
        let tile = unsafe { next_tile(s, &mut tiles) };
        if tile.rows == 0 {
            return;
        }
        let mut begin = tile.end as i32;
        let mut left = tile.blocks;
        let mut converted = tile.end.next_multiple_of(64) as i32;
        while left > 0 {
            if !VALUES && left == PREFETCH_DISTANCE && lane == 0 {
                // SAFETY: the tile stays until its output is written; who waits is the scheduler.
                unsafe {
                    if s.claims_late(tiles.stage ^ 1) {
                        mbarrier::arrive(s.near_end());
                    }
                }
            }
            left -= 1;
            begin -= keys as i32;
            while converts && begin.max(tile.lowest as i32) < converted {
                // SAFETY: a whole warp; the launch converts what its tiles see.
                converted = unsafe {
                    // Such kernels have no register left for it.
                    let epoch = if turns {
                        shared::load_u32(s.epoch())
                    } else {
                        epoch
                    };
                    converted_from(p, epoch, &tile, converted, VALUES)
                };
            }
            // Which page this lane's box lies in: looked up before the stage is free.
            let at = begin + (lane * p.box_tokens) as i32;
            let mut corner = [0, 0, 0, 0, pages.outside as i32];
            if mine && at >= tile.lowest as i32 && at < tile.kv_end as i32 {
                // SAFETY: the table has a page for each key of the item.
                let (id, in_page) = unsafe {
                    // Opaque, or ptxas spills more.
                    if apart && misc::opaque(p.values_apart) != 0 {
                        let table = table_of_values(p, &tile, at as u32);
                        page_of(
                            p.convert.page_ids,
                            table,
                            p.value_page_size.div_rem(at as u32),
                        )
                    } else {
                        page_of(a.page_ids, tile.table, p.page_size.div_rem(at as u32))
                    }
                };
                corner[3] = (in_page / 8) as i32;
                corner[4] = (id * pages.step_per_page + tile.kv_head * pages.step_per_head) as i32;
            }
            // Where a slab is cut a box has one, and the head a coordinate of its own.
            let cut = s.shape.is_cut();
            let slabs = row_bytes / 128;
            let per_head = if cut { 1 } else { slabs };
            corner[2] = (tile.kv_head * pages.step_in_token * per_head) as i32;

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
                if mine && cut {
                    let mut slab = 0;
                    while slab < slabs {
                        corner[0] = 64 * slab as i32;
                        let offset = (slab * keys + lane * p.box_tokens) * 128;
                        tma::load_tensor(target + offset, map, corner, arrival);
                        slab += 1;
                    }
                } else if mine {
                    let offset = lane * p.box_tokens * row_bytes;
                    tma::load_tensor(target + offset, map, corner, arrival);
                }
                if tail {
                    mbarrier::wait(s.tail(), tail_parity);
                    tail_parity ^= 1;
                    let first = (past - begin) as u32;
                    let past = first.next_multiple_of(p.box_tokens);
                    if cut {
                        let mut slab = 0;
                        while slab < slabs {
                            clear(target + slab * keys * 128, first, past, 128);
                            slab += 1;
                        }
                    } else {
                        clear(target, first, past, row_bytes);
                    }
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
