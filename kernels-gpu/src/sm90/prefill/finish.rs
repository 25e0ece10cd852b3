//! The end of a tile: normalise and store.

use core::f32::consts::LN_2;

use cuda_std::{
    fence,
    math::{div_u32, lg2, rcp},
    mbarrier, mma,
    prelude::*,
    wgmma,
};

use super::tile::{Dtype, Shared, Tile};
use crate::{
    abi::{DIRECT, PrefillParams},
    softmax::Rows,
};

const WARP: u32 = !0;

/// Normalises 16 rows of a warp and writes them: to the output through the warp's part of the
/// queries, which are not needed any more, or to a partial state.
#[inline(always)]
pub(super) unsafe fn finish_tile<T: Dtype, const O: usize>(
    p: &PrefillParams,
    s: Shared,
    stage: u32,
    o: &[f32; O],
    rows: &Rows,
    scale: f32,
    first_row: u32,
) {
    let a = &p.attention;
    // Opaque here: or what follows from them is computed before the main loop and takes its registers.
    let mut here = [warp::lane_id(), first_row];
    wgmma::fence_operand(&mut here);
    let [lane, first_row] = here;
    // SAFETY: whole warps; the tile stays until this warp has arrived.
    let tile = unsafe { Tile::load(s.tile(stage)) };
    let totals = unsafe { rows.totals() };
    let inverse = totals.map(|total| if total > 0.0 { rcp(total) } else { 0.0 });
    let head_dim = s.shape.head_dim;
    // Token and head of a row of the tile.
    let place = |row: u32| {
        let token = div_u32(row, p.pack);
        (token, tile.head + row - token * p.pack)
    };

    let mut h = 0;
    while h < 2 {
        let row = first_row + lane / 4 + 8 * h as u32;
        if row < tile.rows {
            let lse = if totals[h] > 0.0 {
                rows.reference[h] * scale + lg2(totals[h])
            } else {
                f32::NEG_INFINITY
            };
            let (token, head) = place(row);
            if tile.slot == DIRECT {
                let at = u64::from((tile.token + token) * a.q_heads + head) * 4;
                if a.lse != 0 && lane % 4 == 0 {
                    // SAFETY: the row is this thread's alone.
                    unsafe { ptr::store_f32((a.lse + at) as *mut f32, lse * LN_2) };
                }
            } else {
                let state = u64::from((tile.slot + token) * a.q_heads + head);
                let out =
                    a.partial_out + (state * u64::from(head_dim) + u64::from(lane % 4 * 2)) * 4;
                // SAFETY: the slot is this tile's alone, its row this thread's.
                unsafe {
                    if lane % 4 == 0 {
                        ptr::store_f32((a.partial_lse + state * 4) as *mut f32, lse);
                    }
                    let mut j = 0;
                    while j < O / 4 {
                        let pair = [
                            o[4 * j + 2 * h] * inverse[h],
                            o[4 * j + 2 * h + 1] * inverse[h],
                        ];
                        ptr::store_f32x2((out + 32 * j as u64) as *mut f32, pair);
                        j += 1;
                    }
                }
            }
        }
        h += 1;
    }

    if tile.slot == DIRECT {
        // Swizzled like the queries, so that neither the columns of 8 rows nor a row's chunks meet in
        // a bank.
        let slab = s.shape.slab_bytes();
        let staged = s.queries(stage) + first_row * 128;
        let at = |row: u32, chunk: u32| {
            staged + chunk / 8 * slab + row * 128 + ((chunk % 8) ^ (row % 8)) * 16
        };
        // SAFETY: 16 rows that only this warp reads and writes.
        unsafe {
            let mut j = 0;
            while j < O / 8 {
                let quarter = |i: usize| {
                    T::pack(
                        o[8 * j + i] * inverse[i / 2 % 2],
                        o[8 * j + i + 1] * inverse[i / 2 % 2],
                    )
                };
                let fragments = [quarter(0), quarter(2), quarter(4), quarter(6)];
                mma::stmatrix_x4(at(lane % 16, 2 * j as u32 + lane / 16), fragments);
                j += 1;
            }
            warp::sync_warp(WARP);
            let chunks = head_dim / 8;
            let mut i = lane;
            while i < 16 * chunks {
                let (row, chunk) = (i / chunks, i % chunks);
                let vector = shared::load_u32x4(at(row, chunk));
                if first_row + row < tile.rows {
                    let (token, head) = place(first_row + row);
                    let element = u64::from(tile.token + token) * u64::from(a.out_token_stride)
                        + u64::from(head * head_dim + chunk * 8);
                    ptr::store_u32x4((a.out + element * 2) as *mut u32, vector);
                }
                i += 32;
            }
        }
        // The next queries come by TMA to where ordinary stores went.
        fence::proxy_async_shared();
    }
    // SAFETY: whole warps.
    unsafe {
        warp::sync_warp(WARP);
        if lane == 0 {
            mbarrier::arrive(s.tile_free(stage));
        }
    }
}
