//! Queries as the B operand: in f16, with columns in the order in which lanes read those of keys.

use cuda_std::{fence, misc, mma, shared, warp};

use super::{config::CONSUMERS, shared::Shared};
use crate::{
    abi::LatentParams,
    common::{
        cache::{fit_f16, fitted, larger},
        variant::Variant,
    },
    sm90::mla::{
        config::{QUERY_SLABS, SLAB_BYTES, TILE_ROWS},
        shared::{Unit, Units},
        swapped::{NONE, Swapped as _},
        visible::seen,
    },
};

const WARP: u32 = warp::FULL_MASK;

/// Rows per warp, over the eight warps of both consumers; four lanes share a row.
const ROWS: u32 = TILE_ROWS / (4 * CONSUMERS);

/// Converts 8 rows of the queries in place. The first 512 columns become f16, times the power of two that brings a
/// row's largest into range. Rows that the unit does not have keep an earlier unit's data times 0: zeros, or NaN where
/// that was not finite. A NaN stays in its row, and outputs of such a row are not written.
///
/// A step of the product takes 16 columns; a lane has four of a key. It reads 16 columns of a key at a time: of each
/// 128 columns lane `t` reads those from `32 · t` on, of the 64 RoPE columns those from `16 · t` on. Four of them make
/// a step: the first two stand for the fragment's columns `2 · t` and `2 · t + 1`, the others for those 8 further. So
/// each lane here takes the columns of a row that the same lane reads of keys, and `stmatrix` joins the words of four
/// lanes.
///
/// # Safety
/// All warps of both consumers come here, as `warp` 0 to 7, and meet at a barrier before the result is read; the unit's
/// queries have arrived.
#[inline(always)]
pub(super) unsafe fn bring<V: Variant, const STAGES: u32>(
    p: &LatentParams,
    variant: &V,
    s: Shared<STAGES>,
    slot: u32,
    unit: &Unit,
    warp: u32,
) {
    // Opaque: otherwise derived values stay in registers from unit to unit.
    let (lane, warp) = (misc::opaque(warp::lane_id()), misc::opaque(warp));
    let (in_warp, part) = (lane / 4, lane % 4);
    let row = warp * ROWS + in_warp;
    let (token, in_tile) = p.heads.div_rem(row);
    let exists = token < unit.tokens && unit.head + in_tile < p.attention.q_heads;
    // Address of 16 bytes of a swizzled row.
    let chunk = |slab: u32, index: u32| s.slab(slab) + row * 128 + (index ^ row % 8) * 16;
    let own = |group: u32, index: u32| chunk(2 * group + part / 2, part % 2 * 4 + index);
    // Row address for `stmatrix`: four matrices of 8 rows in adjacent chunks.
    let target = |slab: u32, first: u32| {
        let row = lane % 8;
        s.slab(slab) + (warp * ROWS + row) * 128 + ((first + lane / 8) ^ row) * 16
    };
    // SAFETY: whole warps; only this warp accesses these rows.
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
            // Two chunks of a slab make a step.
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
        // The row's visible keys, inverse and initial reference.
        if part == 0 {
            let position = s.load_row(slot, token.min(unit.tokens - 1)).position;
            let seen = seen(variant, unit, position);
            shared::store_u32x2(s.seen(slot, row), seen.map(|key| key as u32));
            shared::store_f32(s.inverse(row), inverse);
            shared::store_f32(s.reference(slot, row), NONE);
        }
    }
    // wgmma reads it through the async proxy.
    fence::proxy_async_shared();
}

const _: () = assert!(ROWS == 8 && QUERY_SLABS == 9 && SLAB_BYTES == TILE_ROWS * 128);
