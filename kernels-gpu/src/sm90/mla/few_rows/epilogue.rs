//! The epilogue of a unit: the consumers combine their sums, normalise and write.

use core::f32::consts::LN_2;

use cuda_std::{misc, mma, ptr, shared, warp};

use super::{
    pieces::{LANE_ROWS, lses_of, settle, share},
    shared::Shared,
};
use crate::{
    abi::{DIRECT, LatentParams},
    common::{
        half::Half,
        state::{sink_of, with_sink},
    },
    sm90::mla::{
        config::VALUE_DIM,
        pieces::Piece,
        shared::{Unit, Units as _},
        swapped::{Outputs, Swapped as _, TILES, normalise},
    },
};

const WARP: u32 = warp::FULL_MASK;

/// Writes half of the columns of a unit's rows, to the output or to partial states. With `PIECES` units may be pieces of the same
/// rows, and of these the last writes the output.
///
/// # Safety
/// Both consumers come here for every unit, each with half of the columns; their products are done.
#[inline(always)]
pub(super) unsafe fn finish<
    T: Half,
    const ROWS: u32,
    const STAGES: u32,
    const N: usize,
    const H: usize,
    const PIECES: bool,
>(
    p: &LatentParams,
    s: Shared<ROWS, STAGES>,
    consumer: u32,
    slot: u32,
    thread: u32,
    o: &mut Outputs<N>,
    sums: &[f32; H],
    barrier: u32,
) {
    let a = &p.attention;
    // Opaque: otherwise derived values are computed before the main loop and occupy registers there.
    let thread = misc::opaque(thread);
    let (warp, lane) = (thread / 32, thread % 32);
    // SAFETY: whole warps; the unit stays until this warp has arrived; only this thread writes its elements.
    unsafe {
        // Counted before both consumers meet.
        let piece = PIECES.then(|| {
            let unit = Unit::load(s.unit(slot));
            Piece::claim(p, s, slot, &unit, share(consumer, warp))
        });
        normalise(p, s, consumer, slot, thread, sums, barrier);
        let unit = Unit::load(s.unit(slot));
        let (mut merged, mut inverses) = (false, [0.0; LANE_ROWS]);
        if let Some(piece) = piece {
            let mut i = 0;
            while i < LANE_ROWS {
                let factors = s.factor(consumer, 4 * i as u32 + lane % 4 * 2);
                [inverses[i], inverses[i + 1]] = shared::load_f32x2(factors);
                i += 2;
            }
            if piece.is_piece() {
                let mut lses = lses_of(s, slot, lane);
                if !settle(&piece, lane, o, &inverses, &mut lses) {
                    return;
                }
                // Sinks and LSEs of the merged rows, which are all of the tile's.
                i = 0;
                while i < LANE_ROWS {
                    let row = 4 * (i - i % 2) as u32 + lane % 4 * 2 + (i % 2) as u32;
                    let (token, in_tile) = p.heads.div_rem(row);
                    let head = unit.head + in_tile;
                    inverses[i] = 1.0;
                    if a.sinks != 0 {
                        (inverses[i], lses[i]) = with_sink(lses[i], sink_of(a.sinks, head));
                    }
                    if consumer == 0 && warp == 0 && a.lse != 0 && lane < 4 {
                        let token = s.load_row(slot, token).token;
                        let at = u64::from(token) * u64::from(a.q_heads) + u64::from(head);
                        ptr::store_f32((a.lse + at * 4) as *mut f32, lses[i] * LN_2);
                    }
                    i += 1;
                }
                merged = true;
            }
            // Opaque: otherwise the stores below are compiled twice.
            merged = misc::opaque(u32::from(merged)) != 0;
        }
        let row_of = |row: u32| {
            let (token, in_tile) = p.heads.div_rem(row);
            let head = unit.head + in_tile;
            let there = token < unit.tokens && head < a.q_heads;
            (there, head, s.load_row(slot, token.min(unit.tokens - 1)))
        };
        let column = consumer * (VALUE_DIM / 2) + warp * 16;
        let mut j = 0;
        while j < N / 4 {
            let first = 8 * j as u32;
            let inverses = match PIECES {
                true => [inverses[2 * j], inverses[2 * j + 1]],
                false => shared::load_f32x2(s.factor(consumer, first + lane % 4 * 2)),
            };
            let of =
                |tile: usize, h: usize| [0, 1].map(|e| o[tile][4 * j + 2 * h + e] * inverses[e]);
            // Direct rows: transposed, each lane has two neighbouring columns of one row.
            let (there, head, query) = row_of(first + lane / 4);
            let direct = there && (query.slot == DIRECT || PIECES && merged);
            if warp::warp_vote_any(WARP, direct) {
                let element = u64::from(query.token) * u64::from(a.out_token_stride)
                    + u64::from(head * VALUE_DIM + column + lane % 4 * 2);
                let out = a.out + element * 2;
                // All transposed before the stores: in one loop with them, LLVM makes a copy of the loop for lanes that
                // store and one for those that do not, and the instruction needs all lanes.
                let words = [0, 1, 2, 3].map(|tile| {
                    [0, 1].map(|h| {
                        let [first, second] = of(tile, h);
                        mma::movmatrix_trans(T::pack(first, second))
                    })
                });
                if direct {
                    for tile in 0..TILES {
                        for h in 0..2 {
                            let to = out + (128 * tile + 16 * h) as u64;
                            ptr::store_u32(to as *mut u32, words[tile][h]);
                        }
                    }
                }
            }
            // Partial states: eight lanes have neighbouring columns of a row.
            for e in 0..2 {
                let (there, head, query) = row_of(first + lane % 4 * 2 + e as u32);
                if there && query.slot != DIRECT && !(PIECES && merged) {
                    let state = u64::from(query.slot) * u64::from(a.q_heads) + u64::from(head);
                    let element = state * u64::from(VALUE_DIM) + u64::from(column + lane / 4);
                    let out = a.partial_out + element * 4;
                    for tile in 0..TILES {
                        for h in 0..2 {
                            let to = out + (256 * tile + 32 * h) as u64;
                            ptr::store_f32(to as *mut f32, of(tile, h)[e]);
                        }
                    }
                }
            }
            j += 1;
        }
    }
}
