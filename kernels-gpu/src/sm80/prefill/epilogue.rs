//! The epilogue of a tile: normalise and store.

use core::f32::consts::LN_2;

use cuda_std::{
    math::{lg2, rcp},
    prelude::*,
};

use super::{factors::scales_of_rows, load::here, tile::Shared};
use crate::{
    abi::{DIRECT, GatherPrefillParams},
    common::half::Half,
    common::prefill_tile::Tile,
    common::softmax::Rows,
    common::state::{sink_of_row, with_sink},
    common::variant::Variant,
};

const WARP: u32 = warp::FULL_MASK;

/// Normalises the warp's rows and writes them: to the output, staged over the warp's queries, or to a partial state.
///
/// # Safety
/// Whole warps come here, after their last reads of queries; the tile's description is stored.
#[inline(always)]
pub(super) unsafe fn finish<
    T: Half,
    V: Variant,
    const O: usize,
    const HALVES: usize,
    const GENERAL: bool,
>(
    p: &GatherPrefillParams,
    s: Shared,
    o: &[[f32; O]; HALVES],
    rows: &[Rows; HALVES],
    scale: f32,
) {
    let (lane, warp) = here();
    let first_row = warp * s.shape.warp_rows();
    // SAFETY: whole warps; the tile's description stays until the next barrier.
    unsafe {
        let tile = Tile::load(s.tile());
        let scale = scales_of_rows::<V, HALVES, GENERAL>(s, scale);
        let mut half = 0;
        while half < HALVES {
            let first = first_row + 16 * half as u32;
            let totals = rows[half].totals();
            // `!= 0.0` keeps NaN: with an LSE of −∞ a merge would drop the state.
            let mut inverse = totals.map(|total| if total != 0.0 { rcp(total) } else { 0.0 });
            let mut h = 0;
            while h < 2 {
                let row = first + lane / 4 + 8 * h as u32;
                if row < tile.rows {
                    let mut lse = if totals[h] != 0.0 {
                        rows[half].reference[h] * scale[half][h] + lg2(totals[h])
                    } else {
                        f32::NEG_INFINITY
                    };
                    let a = &p.attention;
                    if GENERAL && a.scales.v != 0 {
                        let (token, _) = tile.place(&p.pack, row);
                        inverse[h] *= a.scales.of(tile.token + token, tile.kv_head)[1];
                    }
                    if a.sinks != 0 && tile.slot == DIRECT {
                        let (token, head) = tile.place(&p.pack, row);
                        let sink = sink_of_row(a, tile.token + token, head);
                        let (factor, with) = with_sink(lse, sink);
                        inverse[h] *= factor;
                        lse = with;
                    }
                    let of = &o[half];
                    let pair = |j: usize| {
                        [
                            of[4 * j + 2 * h] * inverse[h],
                            of[4 * j + 2 * h + 1] * inverse[h],
                        ]
                    };
                    if tile.slot == DIRECT {
                        direct::<T, O>(p, s, &tile, lane, row, lse, pair);
                    } else {
                        partial::<O>(p, &tile, lane, row, lse, pair);
                    }
                }
                h += 1;
            }
            half += 1;
        }
        if tile.slot == DIRECT {
            warp::sync_warp(WARP);
            store_rows(p, s, &tile, lane, first_row);
        }
    }
}

/// Writes a row's LSE, and stages a lane's part of its output in shared memory.
#[inline(always)]
unsafe fn direct<T: Half, const O: usize>(
    p: &GatherPrefillParams,
    s: Shared,
    tile: &Tile,
    lane: u32,
    row: u32,
    lse: f32,
    pair: impl Fn(usize) -> [f32; 2],
) {
    let a = &p.attention;
    let (token, head) = tile.place(&p.pack, row);
    // SAFETY: only this thread and the row's other three lanes write the row.
    unsafe {
        if a.lse != 0 && lane % 4 == 0 {
            let at = u64::from((tile.token + token) * a.q_heads + head) * 4;
            ptr::store_f32((a.lse + at) as *mut f32, lse * LN_2);
        }
        let mut j = 0;
        while j < O / 4 {
            let [even, odd] = pair(j);
            let at = staged(s, row, j as u32) + lane % 4 * 4;
            shared::store_u32(at, T::pack(even, odd));
            j += 1;
        }
    }
}

/// Writes a row's partial state.
#[inline(always)]
unsafe fn partial<const O: usize>(
    p: &GatherPrefillParams,
    tile: &Tile,
    lane: u32,
    row: u32,
    lse: f32,
    pair: impl Fn(usize) -> [f32; 2],
) {
    let a = &p.attention;
    let (token, head) = tile.place(&p.pack, row);
    let state = u64::from((tile.slot + token) * a.q_heads + head);
    let out = a.partial_out + (state * 2 * O as u64 + u64::from(lane % 4 * 2)) * 4;
    // SAFETY: only this tile writes the slot, and only the row's four lanes its row.
    unsafe {
        if lane % 4 == 0 {
            ptr::store_f32((a.partial_lse + state * 4) as *mut f32, lse);
        }
        let mut j = 0;
        while j < O / 4 {
            ptr::store_f32x2((out + 32 * j as u64) as *mut f32, pair(j));
            j += 1;
        }
    }
}

/// Shared address of 8 staged elements of an output row.
#[inline(always)]
fn staged(s: Shared, row: u32, chunk: u32) -> u32 {
    s.queries() + chunk / 8 * s.shape.query_slab() + row * 128 + ((chunk % 8) ^ (row % 8)) * 16
}

/// Copies the warp's staged rows to the output, 16 bytes per lane.
#[inline(always)]
unsafe fn store_rows(p: &GatherPrefillParams, s: Shared, tile: &Tile, lane: u32, first_row: u32) {
    let (a, head_dim) = (&p.attention, s.shape.head_dim);
    let chunks = head_dim / 8;
    let mut i = lane;
    while i < s.shape.warp_rows() * chunks {
        let (row, chunk) = (first_row + i / chunks, i % chunks);
        if row < tile.rows {
            let (token, head) = tile.place(&p.pack, row);
            let element = u64::from(tile.token + token) * u64::from(a.out_token_stride)
                + u64::from(head * head_dim + chunk * 8);
            // SAFETY: rows that only this warp writes.
            unsafe {
                let vector = shared::load_u32x4(staged(s, row, chunk));
                ptr::store_u32x4((a.out + element * 2) as *mut u32, vector);
            }
        }
        i += 32;
    }
}
