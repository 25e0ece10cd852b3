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
    pieces::{Factors, Pieces, STRIDE, Said, VECTOR, load},
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

/// Writes half of the columns of the warp's 16 rows, to the output or to partial states.
///
/// # Safety
/// Both consumers come here for every unit, each with its half `c` of the columns; their products are done.
#[inline(always)]
pub(super) unsafe fn finish<T: Half, const KEYS: u32, const STAGES: u32>(
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
        let warp = c * 4 + first_row / 16;
        let pieces = Pieces::claim(p, s, slot, unit, warp, first_row);
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
        let mut said = [Said {
            lse: f32::NEG_INFINITY,
            inverse: 0.0,
        }; 2];
        h = 0;
        while h < 2 {
            let row = first_row + lane / 4 + 8 * h as u32;
            // The same order in both consumers, for bit-identical totals.
            let total =
                shared::load_f32(s.total(slot, 0, row)) + shared::load_f32(s.total(slot, 1, row));
            // `!= 0.0` keeps NaN: with an LSE of −∞ a merge would drop the state.
            if total != 0.0 {
                said[h] = Said {
                    lse: rows.reference[h] * scale + lg2(total),
                    inverse: rcp(total),
                };
            }
            h += 1;
        }
        let mut merged = false;
        if pieces.is_piece() {
            let state = pieces.state + u64::from((first_row / 16 * 2 + c) * WARP_BYTES + lane * 16);
            if !settle(&pieces, state, lane, o, &mut said) {
                return;
            }
            merged = true;
        }
        // Opaque: otherwise the stores below are compiled twice.
        let merged = misc::opaque(u32::from(merged)) != 0;
        h = 0;
        while h < 2 {
            let row = first_row + lane / 4 + 8 * h as u32;
            let (token, in_tile) = p.heads.div_rem(row);
            let head = unit.head + in_tile;
            let Said {
                mut inverse,
                mut lse,
            } = said[h];
            let there = token < unit.tokens && head < a.q_heads;
            let row = s.load_row(slot, token.min(unit.tokens - 1));
            let direct = there && (row.slot == DIRECT || merged);
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

/// Bytes of a warp's share of a state: 16 rows, half of the columns.
const WARP_BYTES: u32 = 16 * VALUE_DIM / 2 * 4;

/// Writes a warp's share of a unit's state to `state`, in the order of the registers, and returns false. Or, if the other
/// pieces of its rows have ended, merges them into its outputs.
///
/// # Safety
/// A whole warp whose 16 rows all exist, once for a unit.
#[inline(always)]
unsafe fn settle(
    pieces: &Pieces,
    state: u64,
    lane: u32,
    o: &mut [f32; O],
    said: &mut [Said; 2],
) -> bool {
    const VECTORS: usize = O / VECTOR;
    /// Vectors that are loaded together.
    const BATCH: usize = 8;
    /// Such loads in flight.
    const AHEAD: usize = 2;
    // SAFETY: the caller's promise.
    unsafe {
        let empty = said.map(|said| said.lse == f32::NEG_INFINITY);
        // The output of a row without keys is ignored.
        if warp::warp_vote_any(warp::FULL_MASK, empty[0] | empty[1]) {
            let mut i = 0;
            while i < O {
                if empty[i / 2 % 2] {
                    o[i] = 0.0;
                }
                i += 1;
            }
        }
        if !pieces.is_last() {
            let mut i = 0;
            while i < VECTORS {
                let words = [0, 1, 2, 3].map(|j| o[VECTOR * i + j]);
                ptr::store_f32x4((state + i as u64 * STRIDE) as *mut f32, words);
                i += 1;
            }
            if lane % 4 == 0 {
                pieces.say(lane / 4, said[0]);
                pieces.say(lane / 4 + 8, said[1]);
            }
            pieces.written();
            return false;
        }
        let from = state - pieces.state + pieces.state_of_other();
        let mut next: [_; AHEAD] = [0, 1].map(|i| load::<BATCH>(from, i * BATCH, STRIDE));
        let factors = [0, 1].map(|h| {
            let other = pieces.other_says(lane / 4 + 8 * h as u32);
            Factors::new(said[h], other)
        });
        // All bits. ptxas does not know that, and keeps each turn to itself: otherwise it issues all loads first, and spills.
        let turns = warp::warp_vote_ballot(warp::FULL_MASK, true);
        let mut i = 0;
        while i < VECTORS {
            if turns >> (i / BATCH) & 1 != 0 {
                let now = next[i / BATCH % AHEAD];
                let mut j = 0;
                while j < BATCH * VECTOR {
                    let (at, h) = (VECTOR * i + j, j / 2 % 2);
                    let [own, other] = factors[h].of;
                    o[at] = o[at] * own + now[j / VECTOR][j % VECTOR] * other;
                    j += 1;
                }
                if i + AHEAD * BATCH < VECTORS {
                    next[i / BATCH % AHEAD] = load::<BATCH>(from, i + AHEAD * BATCH, STRIDE);
                }
            }
            i += BATCH;
        }
        let mut h = 0;
        while h < 2 {
            said[h] = Said {
                lse: factors[h].lse,
                inverse: 1.0,
            };
            h += 1;
        }
        true
    }
}
