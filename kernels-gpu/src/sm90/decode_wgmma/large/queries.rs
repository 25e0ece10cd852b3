//! The softmax warpgroup's copies of a unit's queries, to shared memory and to registers.

use cuda_std::{async_copy, misc, warp};

use super::{
    super::super::mma::load_fragments,
    config::{Keys, SLAB_BYTES},
    shared::{Shared, Unit},
};
use crate::abi::DecodeParams;

/// The token of a row, and its head in the group. For rows that do not exist the token is past the unit's last.
#[inline(always)]
pub(super) fn row_of(p: &DecodeParams, row: u32) -> (u32, u32) {
    p.group.div_rem(row)
}

/// Copies the first slabs of the queries to shared memory: four rows at a time, eight lanes per row.
///
/// # Safety
/// A whole warp comes here; the unit's rows are written, and no warp reads the previous unit's queries any more.
#[inline(always)]
pub(super) unsafe fn copy_queries<const DIM: u32>(
    p: &DecodeParams,
    s: Shared<DIM>,
    slot: u32,
    unit: &Unit,
    warp: u32,
) {
    let a = &p.attention;
    let lane = misc::opaque(warp::lane_id());
    let mut i = 0;
    while i < 16 {
        let row = warp * 16 + i + lane / 8;
        let (token, in_group) = row_of(p, row);
        let valid = if token < unit.tokens { 16 } else { 0 };
        // SAFETY: the unit has the token, and a query has these columns.
        unsafe {
            let of = s.load_row(slot, token.min(unit.tokens - 1)).token;
            let head = unit.head * a.group + in_group;
            let element =
                u64::from(of) * u64::from(a.q_token_stride) + u64::from(head * DIM + lane % 8 * 8);
            let target = s.queries() + row * 128 + ((lane ^ row) % 8) * 16;
            let mut slab = 0;
            while slab < Keys::<DIM>::SLABS - Keys::<DIM>::HELD_SLABS {
                let source = a.q + element * 2 + u64::from(slab * 128);
                async_copy::copy_cg_zfill(target + slab * SLAB_BYTES, source as *const u8, valid);
                slab += 1;
            }
        }
        i += 4;
    }
}

/// Loads the last slabs of the queries to registers, as `HELD` / 4 A fragments of 16 columns.
///
/// # Safety
/// A whole warp comes here; the unit's rows are written.
#[inline(always)]
pub(super) unsafe fn hold_queries<const DIM: u32, const HELD: usize>(
    p: &DecodeParams,
    s: Shared<DIM>,
    slot: u32,
    unit: &Unit,
    warp: u32,
) -> [u32; HELD] {
    let a = &p.attention;
    let row_of = |row: u32| {
        let (token, in_group) = row_of(p, warp * 16 + row);
        // SAFETY: the unit's rows are written.
        let of = unsafe { s.load_row(slot, token.min(unit.tokens - 1)).token };
        let head = unit.head * a.group + in_group;
        let element = u64::from(of) * u64::from(a.q_token_stride)
            + u64::from(head * DIM + (Keys::<DIM>::SLABS - Keys::<DIM>::HELD_SLABS) * 64);
        (a.q + element * 2, token < unit.tokens)
    };
    // SAFETY: a query has these columns, and queries are aligned to 16 bytes.
    unsafe { load_fragments(row_of) }
}
