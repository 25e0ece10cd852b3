//! The epilogue of a unit: the consumers combine their sums, normalise and write.

use core::f32::consts::LN_2;

use cuda_std::{
    barrier,
    math::{lg2, rcp},
    misc, ptr, shared, warp, wgmma,
};

use super::{
    super::mma::{first_float, store_floats, store_halves},
    config::VALUE_DIM,
    pieces::{Piece, Share},
    products::O,
    shared::{BOTH, Shared, Unit, Units},
};
use crate::{
    abi::{DIRECT, LatentParams},
    common::{
        half::Half,
        softmax::Rows,
        state::{sink_of, with_sink},
    },
};

/// A barrier of both consumers; this is consumer `c`. Each waits at a named barrier of its own, at which the other arrives:
/// so none waits for a barrier that it has left.
///
/// # Safety
/// All threads of both consumers come here, with `time` 0 and 1 alternately: a thread may still be in one barrier when
/// another thread arrives at the next.
#[inline(always)]
unsafe fn meet(c: u32, time: u32) {
    // SAFETY: the caller's promise.
    unsafe {
        barrier::bar_arrive(BOTH + 2 * time + (c ^ 1), 256);
        barrier::bar_sync(BOTH + 2 * time + c, 256);
    }
}

/// Writes half of the columns of the warp's 16 rows, to the output or to partial states. With `PIECES` units may be pieces of
/// the same rows, and of these the last writes the output.
///
/// # Safety
/// Both consumers come here for every unit, each with its half `c` of the columns; their products are done.
#[inline(always)]
pub(super) unsafe fn finish<T: Half, const KEYS: u32, const STAGES: u32, const PIECES: bool>(
    p: &LatentParams,
    s: Shared<KEYS, STAGES>,
    c: u32,
    slot: u32,
    unit: &Unit,
    o: &mut [f32; O],
    rows: &Rows,
    scale: f32,
    first_row: u32,
) {
    const HALF: u32 = VALUE_DIM / 2;
    let a = &p.attention;
    // Opaque: otherwise derived values are computed before the main loop and occupy registers there.
    let mut here = [warp::lane_id(), first_row, c];
    wgmma::fence_operand(&mut here);
    let [lane, first_row, c] = here;
    // SAFETY: whole warps; the unit stays until this warp has arrived; only this thread writes its elements.
    unsafe {
        let piece = PIECES.then(|| Piece::claim(p, s, slot, unit, Share::of_rows(c, first_row)));
        let own = rows.totals();
        let mut h = 0;
        while h < 2 {
            if lane % 4 == 0 {
                let row = first_row + lane / 4 + 8 * h as u32;
                shared::store_f32(s.total(slot, c, row), own[h]);
            }
            h += 1;
        }
        // Two barriers because of racecheck of CUDA 13.0: see `sm90::meet`.
        meet(c, 0);
        meet(c, 1);
        // The normalisation factor and the LSE of a row. With a closure the machine code of other kernels changes.
        macro_rules! sums_of {
            ($h:expr, $row:expr) => {{
                // The same order in both consumers, for bit-identical totals.
                let total = shared::load_f32(s.total(slot, 0, $row))
                    + shared::load_f32(s.total(slot, 1, $row));
                // `!= 0.0` keeps NaN: with an LSE of −∞ a merge would drop the state.
                if total != 0.0 {
                    (rcp(total), rows.reference[$h] * scale + lg2(total))
                } else {
                    (0.0, f32::NEG_INFINITY)
                }
            }};
        }
        let (mut merged, mut inverses, mut lses) = (false, [0.0; 2], [0.0; 2]);
        if let Some(piece) = piece {
            h = 0;
            while h < 2 {
                let row = first_row + lane / 4 + 8 * h as u32;
                (inverses[h], lses[h]) = sums_of!(h, row);
                h += 1;
            }
            if piece.is_piece() {
                if !piece.settle(lane, o, inverses, &mut lses) {
                    return;
                }
                (merged, inverses) = (true, [1.0; 2]);
            }
            // Opaque: otherwise the stores below are compiled twice.
            merged = misc::opaque(u32::from(merged)) != 0;
        }
        h = 0;
        while h < 2 {
            let row = first_row + lane / 4 + 8 * h as u32;
            let (token, in_tile) = p.heads.div_rem(row);
            let head = unit.head + in_tile;
            let (mut inverse, mut lse) = match PIECES {
                true => (inverses[h], lses[h]),
                false => sums_of!(h, row),
            };
            let there = token < unit.tokens && head < a.q_heads;
            let row = s.load_row(slot, token.min(unit.tokens - 1));
            let direct = match PIECES {
                true => there && (row.slot == DIRECT || merged),
                false => there && row.slot == DIRECT,
            };
            if a.sinks != 0 && direct {
                let (factor, with) = with_sink(lse, sink_of(a.sinks, head));
                (inverse, lse) = (inverse * factor, with);
            }
            if warp::warp_vote_any(warp::FULL_MASK, direct) {
                let at = u64::from(row.token) * u64::from(a.q_heads) + u64::from(head);
                if c == 0 && direct && a.lse != 0 && lane % 4 == 0 {
                    ptr::store_f32((a.lse + at * 4) as *mut f32, lse * LN_2);
                }
                let element = u64::from(row.token) * u64::from(a.out_token_stride)
                    + u64::from(head * VALUE_DIM + c * HALF + lane % 4 * 8);
                let out = a.out + element * 2;
                let packed = |i: usize| T::pack(o[i] * inverse, o[i + 1] * inverse);
                store_halves::<O>(lane, out, direct, |i| packed(i + 2 * h));
            }
            let partial = there && !direct;
            if warp::warp_vote_any(warp::FULL_MASK, partial) {
                let state = u64::from(row.slot) * u64::from(a.q_heads) + u64::from(head);
                if c == 0 && partial && lane % 4 == 0 {
                    ptr::store_f32((a.partial_lse + state * 4) as *mut f32, lse);
                }
                let column = c * HALF + first_float(lane);
                let out = a.partial_out + (state * u64::from(VALUE_DIM) + u64::from(column)) * 4;
                store_floats::<O>(lane, out, partial, |i| o[i + 2 * h] * inverse);
            }
            h += 1;
        }
    }
}
