//! The epilogue of a unit: merges the states of a team's warps and writes the result.

use cuda_std::{prelude::*, shared};

use super::{
    shared::Shared,
    unit::{self, ROW_BLOCKS, Team, Unit},
};
use crate::{
    abi::{GatherDecodeParams, NO_MERGE},
    common::{
        cache::Cache,
        decode::{results::Results, tile::Rows},
        half::Half,
        state::{Merger, State},
        variant::Variant,
    },
};

const WARP: u32 = warp::FULL_MASK;

/// Stores the warp's state, then merges and writes this warp's share of the rows over all warps of the team.
/// `before_end` runs between two barriers of the team.
///
/// # Safety
/// Whole warps, all of the team; no copies to the ring are pending, and no reads of it.
#[inline(always)]
pub(super) unsafe fn finish<
    T: Half,
    V: Variant,
    C: Cache,
    const DIM_BLOCKS: usize,
    const PER_LANE: usize,
>(
    p: &GatherDecodeParams,
    s: Shared,
    team: Team,
    unit: &Unit,
    rows: &Rows<DIM_BLOCKS, ROW_BLOCKS>,
    before_end: impl FnOnce(),
) {
    let (a, lane) = (&p.attention, misc::opaque(warp::lane_id()));
    // SAFETY: the caller's promise.
    unsafe {
        store::<C, DIM_BLOCKS>(s, lane, rows);
        team.sync();
        before_end();
        let mut row = s.warp - team.first;
        while row < unit.tokens * a.group {
            let (token, in_group) = p.group.div_rem(row);
            let mut merger = Merger::<PER_LANE>::EMPTY;
            let mut warp = team.first;
            while warp < team.first + team.size {
                let of = s.of(warp);
                merger.push(State {
                    out: load::<PER_LANE>(of.state_row(row) + lane * PER_LANE as u32 * 4),
                    lse: shared::load_f32(of.state_lse(row)),
                });
                warp += 1;
            }
            let head = unit.head * a.group + in_group;
            // The head dimension is 32 · `PER_LANE`.
            match PER_LANE {
                2 => results::<64>(p, lane).write::<T, V, PER_LANE>(
                    unit::row(s, token),
                    head,
                    merger.finish(),
                ),
                4 => results::<128>(p, lane).write::<T, V, PER_LANE>(
                    unit::row(s, token),
                    head,
                    merger.finish(),
                ),
                _ => results::<256>(p, lane).write::<T, V, PER_LANE>(
                    unit::row(s, token),
                    head,
                    merger.finish(),
                ),
            }
            row += team.size;
        }
        team.sync();
        if a.arrivals != 0 && s.warp == team.first {
            match PER_LANE {
                2 => merge::<T, V, 64>(p, s, lane, unit),
                4 => merge::<T, V, 128>(p, s, lane, unit),
                _ => merge::<T, V, 256>(p, s, lane, unit),
            }
        }
    }
}

#[inline(always)]
const fn results<const DIM: u32>(p: &GatherDecodeParams, lane: u32) -> Results<'_, DIM> {
    Results {
        params: &p.attention,
        lane,
        out_columns: DIM,
    }
}

/// Stores the warp's state to shared memory.
#[inline(always)]
unsafe fn store<C: Cache, const DIM_BLOCKS: usize>(
    s: Shared,
    lane: u32,
    rows: &Rows<DIM_BLOCKS, ROW_BLOCKS>,
) {
    let mut i = 0;
    while i < ROW_BLOCKS * 2 {
        let (block, column) = (i / 2, i % 2);
        let row = block as u32 * 8 + 2 * (lane % 4) + column as u32;
        // Accumulators that are 8 rows apart in a fragment are elements 8 apart; with 8-bit values, neighbouring elements.
        let width = if C::SCALED { 2 } else { 1 };
        let first = s.state_row(row) + lane / 4 * width * 4;
        let mut dim = 0;
        while dim < DIM_BLOCKS {
            let element = first + dim as u32 * 64;
            let [a, b] = [column, 2 + column].map(|i| rows.out[dim][block][i]);
            // SAFETY: inside the state.
            unsafe {
                if C::SCALED {
                    shared::store_f32x2(element, [a, b]);
                } else {
                    shared::store_f32(element, a);
                    shared::store_f32(element + 32, b);
                }
            }
            dim += 1;
        }
        if lane < 4 {
            // SAFETY: inside the state.
            unsafe { shared::store_f32(s.state_lse(row), rows.softmax[block][column].lse()) };
        }
        i += 1;
    }
}

/// Counts the unit's partial states at their merges, and performs the merges that are now complete.
#[inline(always)]
unsafe fn merge<T: Half, V: Variant, const DIM: u32>(
    p: &GatherDecodeParams,
    s: Shared,
    lane: u32,
    unit: &Unit,
) {
    let (results, group) = (results::<DIM>(p, lane), p.attention.group);
    // SAFETY: merges and slots are the plan's; the team's barrier ordered the writes of its warps.
    unsafe {
        let index = if lane < unit.tokens {
            unit::row(s, lane).merge
        } else {
            NO_MERGE
        };
        let merge = results.look_up(index);
        let last = results.arrive(index, merge, unit.head);
        let mut waiting = warp::warp_vote_ballot(WARP, last);
        if waiting != 0 {
            // One lane has acquired the other CTAs' states, and all lanes will read them. A vote does not order memory.
            warp::sync_warp(WARP);
        }
        // After this the rows may be overwritten by the next unit's.
        warp::sync_warp(WARP);
        while waiting != 0 {
            let merge = merge.broadcast(waiting.trailing_zeros());
            waiting &= waiting - 1;
            let mut in_group = 0;
            while in_group < group {
                results.merge::<T, V>(merge, unit.head * group + in_group);
                in_group += 1;
            }
        }
    }
}

/// Loads neighbouring floats from shared memory.
#[inline(always)]
unsafe fn load<const N: usize>(address: u32) -> [f32; N] {
    let mut values = [0.0; N];
    let mut i = 0;
    // SAFETY: the caller's promise: aligned to the size of each load.
    unsafe {
        while i + 4 <= N {
            let four = shared::load_f32x4(address + i as u32 * 4);
            values[i..i + 4].copy_from_slice(&four);
            i += 4;
        }
        if i + 2 <= N {
            let two = shared::load_f32x2(address + i as u32 * 4);
            values[i..i + 2].copy_from_slice(&two);
        }
    }
    values
}
