//! Conversion of 8-bit keys and values to 16-bit pages, once for all tiles of a launch.
//!
//! The tensor cores multiply 16-bit operands here, and every query tile of a head rereads its keys. So each key is
//! converted once, in *pieces*: 64 keys of one KV head, or their values. Each consumer warp converts one piece before
//! its first product. The store warps convert the rest while they have nothing to write. Pieces are claimed from a
//! counter of the launch, in the order in which tiles need them; each has a flag that says it is converted. Loaders
//! wait for the flags of the pieces they are about to load. A warp that has claimed a piece waits for nothing else, so
//! the launch makes progress however many of its CTAs are resident.
//!
//! A flag holds the epoch of its conversion, so flags are never cleared. The last CTA that finds no piece left starts a
//! new epoch.

use cuda_std::{
    atomic::{self, Acquire, Gpu, Relaxed},
    fence,
    math::div_u32,
    prelude::*,
};

pub(super) use self::{
    converter::Converter,
    piece::{NOWHERE, Piece},
};
use super::{f8::lay_out, shared::Shared};
use crate::{
    abi::{ConvertParams, ConvertedPage, PrefillParams},
    common::{half::Half, prefill_tile::Tile},
};

const WARP: u32 = warp::FULL_MASK;

/// Keys of a piece, and tokens of a converted page.
const PAGE: u32 = ConvertedPage::KEYS;

/// The first key of a tile from which on all keys, or values, are converted; `known` is the previous answer. Each call
/// reads the flags of 32 pieces, one per lane.
///
/// # Safety
/// A whole warp comes here; the launch converts what the tile sees; `epoch` is that of the launch.
#[inline(always)]
pub(super) unsafe fn converted_from(
    p: &PrefillParams,
    epoch: u32,
    tile: &Tile,
    known: i32,
    values: bool,
) -> i32 {
    let key = known - (PAGE * (warp::lane_id() + 1)) as i32;
    let mut there = true;
    // SAFETY: the caller's promise.
    unsafe {
        if key + PAGE as i32 > tile.lowest as i32 {
            let entry = tile.table.wrapping_add(key as u32 / PAGE);
            let entry = p.attention.page_ids + u64::from(entry) * 4;
            let page = ptr::load_nc_u32(entry as *const u32);
            let flag = (page * p.attention.kv_heads + tile.kv_head) * 2 + u32::from(values);
            let flag = p.convert.done + u64::from(flag) * 4;
            there = atomic::load::<Acquire, Gpu, _>(flag as *const u32) == epoch + 1;
        }
        let missing = !warp::warp_vote_ballot(WARP, there);
        warp::sync_warp(WARP);
        // TMA is about to read what other CTAs wrote with ordinary stores.
        fence::proxy_async_global();
        known - (PAGE * missing.trailing_zeros()) as i32
    }
}

/// The largest number of 8-bit pieces that a consumer warp lays out before its first product.
const MOST_LAID_OUT: u32 = 16;

/// How many 8-bit pieces each consumer warp lays out before its first product: its share of all, at most
/// [`MOST_LAID_OUT`]. The store warps alone would take longer for the rest than the first tiles do: there are eight times as
/// many consumer warps.
#[inline(always)]
unsafe fn laid_out_first(p: &PrefillParams, s: Shared) -> u32 {
    // SAFETY: the launch's parameters are valid.
    let [_, pages] = unsafe { p.convert.of_this_plan(p.attention.record) };
    let warps = 4 * s.shape.consumers * thread::grid_dim_x();
    let share = div_u32(pieces(p, pages) + warps - 1, warps);
    if share < MOST_LAID_OUT {
        share
    } else {
        MOST_LAID_OUT
    }
}

/// Stores the epoch in shared memory and claims pieces for the consumer warps.
///
/// # Safety
/// One thread comes here, before a CTA-wide barrier.
#[inline(always)]
pub(super) unsafe fn init(p: &PrefillParams, s: Shared) {
    let control = p.convert.control;
    if p.convert.pages != 0 {
        // SAFETY: the launch's parameters are valid. The epoch cannot end before all CTAs have claimed.
        unsafe {
            let epoch = atomic::load::<Relaxed, Gpu, _>((control + 4) as *const u32);
            let mut claims = 4 * s.shape.consumers;
            if s.shape.bytes == 1 {
                claims *= laid_out_first(p, s);
            }
            let claim = atomic::fetch_add::<Relaxed, Gpu, _>(control as *mut u32, claims);
            shared::store_u32(s.epoch(), epoch);
            shared::store_u32(s.epoch() + 4, claim);
        }
    }
}

/// Converts the pieces that [`init`] claimed for consumer warp `warp`.
///
/// # Safety
/// A whole warp comes here, after [`init`] and a barrier; the parameters describe memory as [`ConvertParams`] says.
#[inline(always)]
pub(super) unsafe fn first<T: Half, const TOGETHER: usize>(
    p: &PrefillParams,
    s: Shared,
    warp: u32,
) {
    if !s.shape.converts() || p.convert.pages == 0 {
        return;
    }
    // SAFETY: the caller's promise.
    unsafe {
        let [first, pages] = p.convert.of_this_plan(p.attention.record);
        let pieces = pieces(p, pages);
        let mut claimed = shared::load_u32(s.epoch() + 4) + warp;
        if s.shape.bytes == 1 {
            let mut left = laid_out_first(p, s);
            while claimed < pieces && left > 0 {
                lay_out(p, s, Piece::find(p, first, claimed));
                claimed += 4 * s.shape.consumers;
                left -= 1;
            }
        } else if claimed < pieces {
            let piece = Piece::find(p, first, claimed);
            let mut narrow = [[0; 4]; TOGETHER];
            piece.load(p, s, 0, &mut narrow);
            piece.convert::<T, TOGETHER>(p, s, narrow);
        }
    }
}

mod converter;
mod piece;

/// The pieces of `pages` converted pages.
#[inline(always)]
fn pieces(p: &PrefillParams, pages: u32) -> u32 {
    pages * p.attention.kv_heads * 2
}

/// Claims a piece; the result is valid in lane 0 only.
#[inline(always)]
unsafe fn claim(c: &ConvertParams) -> u32 {
    if warp::lane_id() != 0 {
        return 0;
    }
    // SAFETY: the counter is the launch's.
    unsafe { atomic::fetch_add::<Relaxed, Gpu, _>(c.control as *mut u32, 1) }
}
