//! Queries, as B wants them: in f16, and in the order in which lanes read a key's columns.

use cuda_std::{fence, misc, mma, shared, warp};

use super::{config::CONSUMERS, shared::Shared, weigh::NONE};
use crate::{
    abi::LatentParams,
    common::{
        cache::{fit_f16, fitted, larger},
        variant::Variant,
    },
    sm90::mla::{
        config::{QUERY_SLABS, SLAB_BYTES, TILE_ROWS},
        shared::{Unit, Units},
        visible::seen,
    },
};

const WARP: u32 = warp::FULL_MASK;

/// Rows of a warp, of both consumers' eight: four lanes have one.
const ROWS: u32 = TILE_ROWS / (4 * CONSUMERS);

/// Converts 8 rows of the queries in their place. Columns of values become f16, times the power of two that brings the largest of
/// a row into its range. Rows that the unit has not hold what an earlier unit left there, times 0: zeros, or NaN where it was not
/// finite. A NaN stays in its row, and outputs of such a row are not written.
///
/// A step of the product takes 16 columns, of which a lane of a key has four. A lane reads 16 columns of a key at a time: of
/// each 128 lane `t` has those from `32 · t` on, and of the 64 that only keys have those from `16 · t`. Four of them make a step:
/// the first two are columns `2 · t` and the next, the others 8 further on. So each lane takes from a row what its like
/// reads of keys, and `stmatrix` puts the words of four lanes side by side.
///
/// # Safety
/// All warps of both consumers come here, `warp` of eight, and meet before they read; the unit's queries are there.
#[inline(always)]
pub(super) unsafe fn bring<V: Variant, const STAGES: u32>(
    p: &LatentParams,
    variant: &V,
    s: Shared<STAGES>,
    slot: u32,
    unit: &Unit,
    warp: u32,
) {
    // Opaque: or what follows from them is kept in registers from unit to unit.
    let (lane, warp) = (misc::opaque(warp::lane_id()), misc::opaque(warp));
    let (in_warp, part) = (lane / 4, lane % 4);
    let row = warp * ROWS + in_warp;
    let (token, in_tile) = p.heads.div_rem(row);
    let exists = token < unit.tokens && unit.head + in_tile < p.attention.q_heads;
    // 16 bytes of a row, which is swizzled.
    let chunk = |slab: u32, index: u32| s.slab(slab) + row * 128 + (index ^ row % 8) * 16;
    let own = |group: u32, index: u32| chunk(2 * group + part / 2, part % 2 * 4 + index);
    // Four matrices of 8 rows: chunks side by side.
    let target = |slab: u32, first: u32| {
        let row = lane % 8;
        s.slab(slab) + (warp * ROWS + row) * 128 + ((first + lane / 8) ^ row) * 16
    };
    // SAFETY: whole warps; the rows are the warp's own.
    unsafe {
        let mut largest = 0;
        let mut i = 0;
        while i < 16 {
            let words = shared::load_u32x4(own(i / 4, i % 4));
            let mut j = 0;
            while j < 4 {
                largest = larger(largest, words[j]);
                j += 1;
            }
            i += 1;
        }
        largest = largest.max(warp::warp_shuffle_xor(WARP, largest, 1, 32));
        largest = largest.max(warp::warp_shuffle_xor(WARP, largest, 2, 32));
        let [fit, inverse] = fit_f16(largest);
        let fit = if exists { fit } else { 0.0 };
        let mut group = 0;
        while group < 4 {
            let words = [0, 1, 2, 3]
                .map(|i| shared::load_u32x4(own(group, i)).map(|pair| fitted(pair, fit)));
            warp::sync_warp(WARP);
            // Chunks of a slab: two of a step.
            let mut i = 0;
            while i < 4 {
                let four = words[i];
                mma::stmatrix_x4(target(2 * group + i as u32 / 2, i as u32 % 2 * 4), four);
                i += 1;
            }
            group += 1;
        }
        let last = QUERY_SLABS - 1;
        let words = [0, 1].map(|i| {
            let words = shared::load_u32x4(chunk(last, 2 * part + i));
            if exists { words } else { [0; 4] }
        });
        warp::sync_warp(WARP);
        mma::stmatrix_x4(target(last, 0), words[0]);
        mma::stmatrix_x4(target(last, 4), words[1]);
        // What is known of the row.
        if part == 0 {
            let position = s.load_row(slot, token.min(unit.tokens - 1)).position;
            let seen = seen(variant, unit, position);
            shared::store_u32x2(s.seen(row), seen.map(|key| key as u32));
            shared::store_f32(s.inverse(row), inverse);
            shared::store_f32(s.reference(slot, row), NONE);
        }
    }
    // The tensor cores read it.
    fence::proxy_async_shared();
}

const _: () = assert!(ROWS == 8 && QUERY_SLABS == 9 && SLAB_BYTES == TILE_ROWS * 128);
