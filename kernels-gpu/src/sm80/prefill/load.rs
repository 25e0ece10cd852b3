//! Copies to shared memory: queries, and blocks of keys and values from their pages.

use cuda_std::{async_copy, prelude::*};

use super::tile::Shared;
use crate::{abi::GatherPrefillParams, common::prefill_tile::Tile};

const WARP: u32 = warp::FULL_MASK;

/// The thread's lane and warp. Opaque: otherwise derived values are computed before the main loop, which has no
/// registers for them.
#[inline(always)]
pub(super) fn here() -> (u32, u32) {
    let thread = misc::opaque(thread::thread_idx_x());
    (thread % 32, thread / 32)
}

/// Copies the warp's rows of queries; rows that do not exist become zero.
///
/// # Safety
/// Whole warps come here; the memory of the queries is free.
#[inline(always)]
pub(super) unsafe fn queries(p: &GatherPrefillParams, s: Shared, tile: &Tile) {
    let a = &p.attention;
    let (lane, warp) = here();
    let (chunk, head_dim) = (lane % 8, s.shape.head_dim);
    let mut i = 0;
    while i < s.shape.warp_rows() / 4 {
        let row = warp * s.shape.warp_rows() + 4 * i + lane / 8;
        let exists = row < tile.rows;
        let (token, head) = tile.place(&p.pack, if exists { row } else { 0 });
        let element = u64::from(tile.token + token) * u64::from(a.q_token_stride)
            + u64::from(head * head_dim + chunk * 8);
        let source = (a.q + element * 2) as *const u8;
        let target = s.queries() + row * 128 + (chunk ^ (row % 8)) * 16;
        let mut slab = 0;
        while slab < head_dim / 64 {
            // SAFETY: the row exists, or nothing is read; only this warp writes the target.
            unsafe {
                async_copy::copy_cg_zfill(
                    target + slab * s.shape.query_slab(),
                    source.add(slab as usize * 128),
                    if exists { 16 } else { 0 },
                );
            }
            slab += 1;
        }
        i += 1;
    }
}

/// The page, and the token in it, of the row that this lane looked up.
#[derive(Clone, Copy)]
pub(super) struct Found {
    page: u32,
    in_page: u32,
}

/// Looks up the page of one row of the block at `begin`. A warp copies 4 neighbouring rows of those that are copied at
/// once; lane `l` looks up row `l % 4` of these in group `l / 4`.
///
/// # Safety
/// Whole warps come here; the tile's description is stored.
#[inline(always)]
pub(super) unsafe fn look_up(p: &GatherPrefillParams, s: Shared, begin: i32) -> Found {
    let (lane, warp) = here();
    let at_once = s.shape.rows_at_once();
    let row = warp * 4 + lane % 4 + lane / 4 % (s.shape.keys / at_once) * at_once;
    let position = begin + row as i32;
    // SAFETY: the tile's description stays while the tile is computed.
    let [table, lowest, end, _] = unsafe { shared::load_u32x4(s.tile() + 32) };
    let mut found = Found {
        page: 0,
        in_page: 0,
    };
    if position >= lowest as i32 && position < end as i32 {
        let (page, in_page) = p.page_size.div_rem(position as u32);
        let entry = (p.attention.page_ids + u64::from(table + page) * 4) as *const u32;
        // SAFETY: the table has a page for each key of the item.
        found.page = unsafe { ptr::load_nc_u32(entry) };
        found.in_page = in_page;
    }
    found
}

/// Copies this warp's rows of the block at `begin`, values or keys, to `target`. Rows that the tile does not see become
/// zero, whatever the pool holds. So do the columns of padded heads that the pool does not have, of which nothing is read.
///
/// # Safety
/// Whole warps come here; `found` is of this block, and no thread reads `target` before the copies were waited for.
#[inline(always)]
pub(super) unsafe fn block<const VALUES: bool, const GENERAL: bool>(
    p: &GatherPrefillParams,
    s: Shared,
    found: Found,
    begin: i32,
    target: u32,
) {
    let a = &p.attention;
    let (pool, strides) = if VALUES {
        (a.v, &p.v_vectors)
    } else {
        (a.k, &p.k_vectors)
    };
    let (lane, warp) = here();
    let (chunk, first) = (lane % 8, warp * 4 + lane / 8);
    // SAFETY: the tile's description stays while the tile is computed; whole warps.
    unsafe {
        let kv_head = shared::load_u32(s.tile() + 16);
        let [_, lowest, end, _] = shared::load_u32x4(s.tile() + 32);
        let vector =
            found.page * strides.page + found.in_page * strides.token + kv_head * strides.head;
        let pool = pool + u64::from(chunk) * 16;
        let target = target + first * 128 + (chunk ^ (first % 8)) * 16;
        let (from, count) = (
            lowest as i32 - begin - first as i32,
            end as i32 - lowest as i32,
        );
        let mut i = 0;
        while i < s.shape.keys / s.shape.rows_at_once() {
            let of = warp::warp_shuffle_idx(WARP, vector, 4 * i + lane / 8, 32);
            let above = (s.shape.rows_at_once() * i) as i32 - from;
            let exists = above >= 0 && above < count;
            let source = (pool + u64::from(of) * 16) as *const u8;
            let mut slab = 0;
            while slab < s.shape.head_dim / 64 {
                let mut column = slab * 128;
                let mut there = exists;
                if GENERAL {
                    let [columns, slabs, step] = p.columns;
                    column = slab * step;
                    there = exists && slab < slabs && column + chunk * 16 < columns;
                }
                async_copy::copy_cg_zfill(
                    target + i * (s.shape.rows_at_once() * 128) + slab * s.shape.block_slab(),
                    source.add(column as usize),
                    if there { 16 } else { 0 },
                );
                slab += 1;
            }
            i += 1;
        }
    }
}
