//! Queries as f16 fragments, each row multiplied by a power of two.

use cuda_std::{ptr, shared, warp};

use super::{
    config::{FRAGMENT_BYTES, FRAGMENTS_OF_HALF},
    places::Place,
    shared::Shared,
};
use crate::{
    abi::LatentParams,
    common::cache::{fit_f16, fitted, larger},
    sm90::mla::{
        config::{HEAD_DIM, VALUE_DIM},
        shared::{Unit, Units},
    },
};

/// The address of a row's query, if the unit has the row.
#[inline(always)]
unsafe fn query_of<const STAGES: u32>(
    p: &LatentParams,
    s: Shared<STAGES>,
    slot: u32,
    unit: &Unit,
    row: u32,
) -> Option<u64> {
    let (token, in_tile) = p.heads.div_rem(row);
    let head = unit.head + in_tile;
    if token < unit.tokens && head < p.attention.q_heads {
        // SAFETY: the unit's rows are written.
        let of = unsafe { s.load_row(slot, token) }.token;
        let element = u64::from(of) * u64::from(p.attention.q_token_stride);
        Some(p.attention.q + (element + u64::from(head * HEAD_DIM)) * 2)
    } else {
        None
    }
}

/// Loads the query of one row per warp; rows that the unit does not have become zeros. The first 512 columns are
/// multiplied by the power of two that fits the largest into f16 ([`fit_f16`]); the RoPE columns stay bf16.
///
/// A fragment covers 16 columns; a lane has four neighbouring columns of two rows, 8 rows apart. Which four is
/// determined by how keys are read: of each 128 columns lane `t` of a row reads 32, from `32 · t` on, in two chunks of
/// 16.
///
/// # Safety
/// All warps of both teams come here; the unit's rows are written, and no warp reads queries meanwhile.
#[inline(always)]
pub(super) unsafe fn bring<const STAGES: u32>(
    p: &LatentParams,
    s: Shared<STAGES>,
    slot: u32,
    unit: &Unit,
    place: Place,
) {
    let Place { team, warp, lane } = place;
    let row = team * 8 + warp;
    let mut columns = [[0; 4]; 2];
    let mut rope = [0; 4];
    // SAFETY: queries are 576 elements, and vectors of 16 bytes are aligned; whole warps.
    unsafe {
        if let Some(query) = query_of(p, s, slot, unit, row) {
            let at = query + u64::from(lane * 16);
            columns = [0, 512].map(|piece| ptr::load_u32x4((at + piece) as *const u32));
            if lane < 8 {
                rope = ptr::load_u32x4((at + u64::from(VALUE_DIM * 2)) as *const u32);
            }
        }
        let mut largest = 0;
        let mut i = 0;
        while i < 8 {
            largest = larger(largest, columns[i / 4][i % 4]);
            i += 1;
        }
        let mut distance = 1;
        while distance < 32 {
            let other = warp::warp_shuffle_xor(warp::FULL_MASK, largest, distance, 32);
            largest = largest.max(other);
            distance *= 2;
        }
        let [fit, inverse] = fit_f16(largest);
        if lane == 0 {
            shared::store_f32(s.inverse(row), inverse);
        }
        // This lane has 8 columns of each half of 256.
        let (group, t, half, four) = (lane / 16, lane % 16 / 4, lane % 4 / 2, lane % 2 * 2);
        let target = s.queries(warp * 4 + t) + team * 4;
        let target = target + (group * 8 + half * 4 + four) * FRAGMENT_BYTES;
        i = 0;
        while i < 4 {
            let of = columns[i / 2];
            let at = target + (i / 2 * FRAGMENTS_OF_HALF + i % 2) as u32 * FRAGMENT_BYTES;
            shared::store_u32(at, fitted(of[i % 2 * 2], fit));
            shared::store_u32(at + 8, fitted(of[i % 2 * 2 + 1], fit));
            i += 1;
        }
        if lane < 8 {
            let target = s.queries(warp * 4 + lane / 2) + team * 4;
            let first = FRAGMENTS_OF_HALF as u32 * (lane % 2) + 16;
            let target = target + first * FRAGMENT_BYTES;
            i = 0;
            while i < 4 {
                let at = target + i as u32 / 2 * FRAGMENT_BYTES + i as u32 % 2 * 8;
                shared::store_u32(at, rope[i]);
                i += 1;
            }
        }
    }
}

const _: () = {
    use super::config::{ROWS_OF_TILE, TEAMS, WARPS};
    assert!(TEAMS * WARPS == ROWS_OF_TILE && VALUE_DIM == 512 && HEAD_DIM - VALUE_DIM == 64);
};
