//! The queries of a unit, as those that weigh copy them.

use cuda_std::{async_copy, misc, ptr, warp};

use super::{
    super::super::mma::swap,
    config::{HEAD_DIM, HELD_SLABS, QUERY_SLABS, SLAB_BYTES},
    shared::{Shared, Unit},
};
use crate::abi::DecodeParams;

/// Steps of 16 columns whose queries are in registers, the last ones.
pub(super) const HELD: usize = HELD_SLABS as usize * 4;
/// The queries of those steps, of a warp's rows.
pub(super) type Held = [u32; 4 * HELD];

/// Who a row of the unit is: its token, and its head among the group's. Rows that do not exist have a token that the
/// unit has not.
#[inline(always)]
pub(super) fn row_of(p: &DecodeParams, row: u32) -> (u32, u32) {
    p.group.div_rem(row)
}

/// Copies the first slabs of the queries to shared memory: four rows of a warp at a time, eight lanes each.
///
/// # Safety
/// A whole warp comes here; the unit's rows are listed, and nobody reads the queries of the unit before.
#[inline(always)]
pub(super) unsafe fn copy_queries(p: &DecodeParams, s: Shared, slot: u32, unit: &Unit, warp: u32) {
    let a = &p.attention;
    let lane = misc::opaque(warp::lane_id());
    let mut i = 0;
    while i < 16 {
        let row = warp * 16 + i + lane / 8;
        let (token, in_group) = row_of(p, row);
        let valid = if token < unit.tokens { 16 } else { 0 };
        // SAFETY: the unit has the token, and a query has as many columns.
        unsafe {
            let of = s.load_row(slot, token.min(unit.tokens - 1)).token;
            let head = unit.head * a.group + in_group;
            let element = u64::from(of) * u64::from(a.q_token_stride)
                + u64::from(head * HEAD_DIM + lane % 8 * 8);
            let target = s.queries() + row * 128 + ((lane ^ row) % 8) * 16;
            let mut slab = 0;
            while slab < QUERY_SLABS - HELD_SLABS {
                let source = a.q + element * 2 + u64::from(slab * 128);
                async_copy::copy_cg_zfill(target + slab * SLAB_BYTES, source as *const u8, valid);
                slab += 1;
            }
        }
        i += 4;
    }
}

/// Loads the last slabs of the queries to registers, as the tensor cores want them.
///
/// # Safety
/// A whole warp comes here; the unit's rows are listed.
#[inline(always)]
pub(super) unsafe fn hold_queries(
    p: &DecodeParams,
    s: Shared,
    slot: u32,
    unit: &Unit,
    warp: u32,
) -> Held {
    let a = &p.attention;
    // Opaque: or the addresses are kept in registers from unit to unit.
    let (lane, mut held) = (misc::opaque(warp::lane_id()), [0; 4 * HELD]);
    let mut h = 0;
    while h < 2 {
        let (token, in_group) = row_of(p, warp * 16 + lane / 4 + 8 * h as u32);
        // Rows that the tile does not have are zero.
        let exists = token < unit.tokens;
        // SAFETY: the row is listed; a query has as many columns, and vectors of 16 bytes are aligned.
        unsafe {
            let of = s.load_row(slot, token.min(unit.tokens - 1)).token;
            let head = unit.head * a.group + in_group;
            let column = head * HEAD_DIM + (QUERY_SLABS - HELD_SLABS) * 64 + lane % 4 * 8;
            let element = u64::from(of) * u64::from(a.q_token_stride) + u64::from(column);
            let from = a.q + element * 2;
            // Two steps at a time: the four lanes of a row have 16 bytes each, and each wants a word of all four.
            let mut i = 0;
            while i < HELD / 2 {
                let mut words = [0; 4];
                if exists {
                    words = ptr::load_nc_u32x4((from + 64 * i as u64) as *const u32);
                }
                let mut j = 0;
                while j < 4 {
                    held[8 * i + 4 * (j / 2) + 2 * (j % 2) + h] = words[j];
                    j += 1;
                }
                i += 1;
            }
        }
        h += 1;
    }
    // All loads are under way before the first is waited for.
    let mut i = 0;
    while i < HELD / 2 {
        h = 0;
        while h < 2 {
            let at = |j: usize| 8 * i + 4 * (j / 2) + 2 * (j % 2) + h;
            let mut words = [0, 1, 2, 3].map(|j| held[at(j)]);
            // SAFETY: a whole warp.
            unsafe {
                swap(&mut words, [(0, 1), (2, 3)], lane & 1 != 0, 1);
                swap(&mut words, [(0, 2), (1, 3)], lane & 2 != 0, 2);
            }
            let mut j = 0;
            while j < 4 {
                held[at(j)] = words[j];
                j += 1;
            }
            h += 1;
        }
        i += 1;
    }
    held
}
