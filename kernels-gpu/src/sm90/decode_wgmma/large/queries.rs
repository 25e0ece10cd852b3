//! The queries of a unit, as those that weigh copy them.

use cuda_std::{async_copy, misc, warp};

use super::{
    super::super::mma::load_fragments,
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
    let row_of = |row: u32| {
        let (token, in_group) = row_of(p, warp * 16 + row);
        // SAFETY: the row is listed.
        let of = unsafe { s.load_row(slot, token.min(unit.tokens - 1)).token };
        let head = unit.head * a.group + in_group;
        let element = u64::from(of) * u64::from(a.q_token_stride)
            + u64::from(head * HEAD_DIM + (QUERY_SLABS - HELD_SLABS) * 64);
        (a.q + element * 2, token < unit.tokens)
    };
    // SAFETY: a query has as many columns, and vectors of 16 bytes are aligned.
    unsafe { load_fragments(row_of) }
}
