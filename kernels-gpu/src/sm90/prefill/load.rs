//! The loader warps for keys and values: one TMA box per page or part of a page.

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

/// Waits for the next tile and reads its description.
///
/// # Safety
/// A whole warp comes here, once for each tile.
#[inline(always)]
pub(super) unsafe fn next_tile(s: Shared, tiles: &mut Pipeline<2>) -> Tile {
    // SAFETY: the full and free barriers order every access to a stage.
    unsafe {
        mbarrier::wait(s.tile_full(tiles.stage), tiles.parity);
        let tile = Tile::load(s.tile(tiles.stage));
        mbarrier::arrive(s.tile_free(tiles.stage));
        tiles.advance();
        tile
    }
}

/// The page id of a key, and the key's place in that page.
///
/// # Safety
/// The table has the page.
#[inline(always)]
unsafe fn page_of(ids: u64, table: u32, (page, in_page): (u32, u32)) -> (u32, u32) {
    // A table of converted pages starts at the first visible key. If that is not key 0, `table` may have wrapped.
    let entry = ids + u64::from(table.wrapping_add(page)) * 4;
    // SAFETY: the caller's promise.
    (unsafe { ptr::load_nc_u32(entry as *const u32) }, in_page)
}

/// The start of the page table that a converted page was made from. Its values are in that table's pages.
///
/// # Safety
/// The item sees the key.
#[inline(always)]
unsafe fn table_of_values(p: &PrefillParams, tile: &Tile, key: u32) -> u32 {
    // As in `page_of`: the table may start behind key 0.
    let entry = tile.table.wrapping_add(key / ConvertedPage::KEYS);
    // SAFETY: the caller's promise.
    unsafe {
        let page = ptr::load_nc_u32((p.attention.page_ids + u64::from(entry) * 4) as *const u32);
        let made_of = p.convert.list + u64::from(page) * size_of::<ConvertedPage>() as u64;
        ptr::load_nc_u32(made_of as *const u32)
    }
}

/// Loads the blocks of all tiles, values or keys, from the last block of a tile to the first. `turns`, a constant of
/// the kernel, says whether a preceding launch may have applied rotary embeddings to keys.
///
/// # Safety
/// A whole warp comes here; `map` is the tensor map of the values or keys, and the barriers are initialised.
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
    // Rotated keys are in converted pages; their values may still be in the original ones.
    let apart = VALUES && turns;
    let pages = if apart { &p.value_pages } else { &p.pages };
    // Pages are never converted for head dimensions with a cut slab.
    let converts = !s.shape.is_cut() && p.convert.pages != 0;
    let epoch = match converts {
        false => 0,
        // SAFETY: `convert::init` stored it before the CTA-wide barrier.
        true => unsafe { shared::load_u32(s.epoch()) },
    };
    // Dependent launch: wait for the kernel that widens keys and values, or rotates keys and may copy values.
    griddep::wait();
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
                // SAFETY: the tile's description stays until its output is written; the scheduler waits for this.
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
                    // Kernels that may rotate have no register left to keep it in.
                    let epoch = if turns {
                        shared::load_u32(s.epoch())
                    } else {
                        epoch
                    };
                    converted_from(p, epoch, &tile, converted, VALUES)
                };
            }
            // Find the page of this lane's box before waiting for the stage.
            let at = begin + (lane * p.box_tokens) as i32;
            let mut corner = [0, 0, 0, 0, pages.outside as i32];
            if mine && at >= tile.lowest as i32 && at < tile.kv_end as i32 {
                // SAFETY: the table has a page for each key of the item.
                let (id, in_page) = unsafe {
                    // Opaque: otherwise ptxas spills more registers.
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
            // With a cut slab a box holds one slab of 64 columns, and the head is a coordinate of its own.
            let cut = s.shape.is_cut();
            let slabs = row_bytes / 128;
            let per_head = if cut { 1 } else { slabs };
            corner[2] = (tile.kv_head * pages.step_in_token * per_head) as i32;

            let (full, free, target) = s.stage_of(VALUES, blocks.stage);
            // This block reaches past the item's last key. The values there may be anything, and 0 · NaN is NaN: they
            // have to be zeroed before the consumers see the block.
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
