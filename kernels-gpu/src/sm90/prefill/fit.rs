//! Queries beside 8-bit keys: bf16 becomes f16, and what that takes of the logits.

use cuda_std::{convert, fence, prelude::*};

use super::{epilogue::staged, shared::Shared};
use crate::{
    abi::PrefillParams,
    common::{
        cache::{Cache, fit_f16},
        half::Half,
        prefill_tile::Tile,
    },
};

const WARP: u32 = warp::FULL_MASK;

/// Brings a warp's 16 rows of queries into the type of the products; what the logits of a thread's two rows are then
/// multiplied by, the scale of the keys included.
///
/// # Safety
/// A whole warp comes here; the tile's queries are there, and nobody else reads those rows.
#[inline(always)]
pub(super) unsafe fn fit_queries<C: Cache>(
    p: &PrefillParams,
    s: Shared,
    stage: u32,
    first_row: u32,
) -> [f32; 2] {
    // Opaque: or what follows from it is computed before the main loop and takes its registers.
    let lane = misc::opaque(warp::lane_id());
    // SAFETY: the tile is there.
    let tile = unsafe { Tile::load(s.tile(stage)) };
    // SAFETY: the launch is as the host makes it.
    let of_keys = |row: u32| unsafe { scales_of_row(p, &tile, first_row + row)[0] };
    let rows = [lane / 4, lane / 4 + 8];
    if !C::Query::WIDE {
        return rows.map(of_keys);
    }
    // Two lanes share a row, and take turns with its 16 bytes.
    let place = |step: u32| staged(s, stage, first_row + lane / 2, 2 * step + lane % 2);
    let steps = s.shape.head_dim / 16;
    let mut largest = 0;
    let mut step = 0;
    // SAFETY: inside the rows; a whole warp.
    unsafe {
        while step < steps {
            let words = shared::load_u32x4(place(step));
            let mut i = 0;
            while i < 4 {
                largest = (words[i] & 0x7FFF_0000)
                    .max((words[i] << 16) & 0x7FFF_0000)
                    .max(largest);
                i += 1;
            }
            step += 1;
        }
        largest = largest.max(warp::warp_shuffle_xor(WARP, largest, 1, 32));
        let [fit, inverse] = fit_f16(largest);
        step = 0;
        while step < steps {
            let at = place(step);
            let words = shared::load_u32x4(at).map(|pair| {
                let [first, second] = convert::bf16x2_to_f32(pair);
                convert::f32x2_to_f16x2(first * fit, second * fit)
            });
            shared::store_u32x4(at, words);
            step += 1;
        }
        // The tensor cores read what ordinary stores wrote.
        fence::proxy_async_shared();
        warp::sync_warp(WARP);
        rows.map(|row| warp::warp_shuffle_idx(WARP, inverse, 2 * row, 32) * of_keys(row))
    }
}

/// What keys and values of a tile's row are multiplied by.
///
/// # Safety
/// The tile is one of the launch's.
#[inline(always)]
pub(super) unsafe fn scales_of_row(p: &PrefillParams, tile: &Tile, row: u32) -> [f32; 2] {
    // Rows that do not exist have those of the last.
    let last = tile.rows - 1;
    let (token, _) = tile.place(&p.pack, if row < last { row } else { last });
    // SAFETY: the caller's promise.
    unsafe { p.attention.scales.of(tile.token + token, tile.kv_head) }
}
