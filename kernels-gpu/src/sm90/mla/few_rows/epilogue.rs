//! The epilogue of a unit: the consumers combine their sums, normalise and write.

use core::f32::consts::LN_2;

use cuda_std::{
    math::{lg2, rcp},
    misc, mma, ptr, shared, warp,
};

use super::shared::Shared;
use crate::{
    abi::{DIRECT, LatentParams},
    common::{
        half::Half,
        state::{sink_of, with_sink},
    },
    sm90::mla::{
        config::VALUE_DIM,
        pieces::{Factors, Pieces, Said, VECTOR, load},
        shared::{Unit, Units as _},
        swapped::{Outputs, Swapped as _, TILES, normalise, total_of},
    },
};

const WARP: u32 = warp::FULL_MASK;

/// Writes half of the columns of a unit's rows, to the output or to partial states.
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
        let unit = Unit::load(s.unit(slot));
        let pieces = Pieces::claim(p, s, slot, &unit, consumer * 4 + warp, 0);
        normalise(
            p,
            s,
            consumer,
            slot,
            thread,
            sums,
            barrier,
            pieces.is_piece(),
        );
        let unit = Unit::load(s.unit(slot));
        let mut merged = false;
        if pieces.is_piece() {
            if !settle(p, s, consumer, slot, thread, &unit, &pieces, o) {
                return;
            }
            merged = true;
        }
        // Opaque: otherwise the stores below are compiled twice.
        let merged = misc::opaque(u32::from(merged)) != 0;
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
            let inverses = match merged {
                true => [1.0; 2],
                false => shared::load_f32x2(s.factor(consumer, first + lane % 4 * 2)),
            };
            let of =
                |tile: usize, h: usize| [0, 1].map(|e| o[tile][4 * j + 2 * h + e] * inverses[e]);
            // Direct rows: transposed, each lane has two neighbouring columns of one row.
            let (there, head, query) = row_of(first + lane / 4);
            let direct = there && (query.slot == DIRECT || merged);
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
                if there && query.slot != DIRECT && !merged {
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

/// Writes a warp's share of a unit's state in the order of the registers, and returns false. Or, if the other pieces of its
/// rows have ended, merges them into its outputs, with the sink.
///
/// # Safety
/// A whole warp, once for a unit that is a piece, with a `thread` of its consumer; the sums of all warps are stored.
#[inline(always)]
unsafe fn settle<const ROWS: u32, const STAGES: u32, const N: usize>(
    p: &LatentParams,
    s: Shared<ROWS, STAGES>,
    consumer: u32,
    slot: u32,
    thread: u32,
    unit: &Unit,
    pieces: &Pieces,
    o: &mut Outputs<N>,
) -> bool {
    const { assert!(TILES == 4 && ROWS <= 32) };
    /// Bytes between the vectors that all threads of both consumers store together.
    const STRIDE: u64 = 256 * 16;
    let a = &p.attention;
    let lane = thread % 32;
    let rows = unit.tokens * p.heads.get();
    // SAFETY: the caller's promise.
    unsafe {
        // A lane for each row.
        let mut said = Said {
            lse: f32::NEG_INFINITY,
            inverse: 0.0,
        };
        if lane < rows {
            let total = total_of(s, slot, lane);
            if total != 0.0 {
                said = Said {
                    lse: shared::load_f32(s.reference(slot, lane)) + lg2(total),
                    inverse: rcp(total),
                };
            }
        }
        // Of each 8 rows a lane has outputs of two.
        let of_row = |value: f32, j: usize, e: usize| {
            let row = 8 * j as u32 + lane % 4 * 2 + e as u32;
            warp::warp_shuffle_idx(WARP, value, row, 32)
        };
        let empty = lane < rows && said.lse == f32::NEG_INFINITY;
        if warp::warp_vote_any(WARP, empty) {
            let mut j = 0;
            while j < N / 4 {
                let lses = [of_row(said.lse, j, 0), of_row(said.lse, j, 1)];
                let mut i = 0;
                while i < TILES * VECTOR {
                    if lses[i % 2] == f32::NEG_INFINITY {
                        o[i / VECTOR][4 * j + i % VECTOR] = 0.0;
                    }
                    i += 1;
                }
                j += 1;
            }
        }
        let own = u64::from((consumer * 128 + thread) * 16);
        if !pieces.is_last() {
            let mut j = 0;
            while j < N / 4 {
                if 8 * (j as u32) < rows {
                    let mut tile = 0;
                    while tile < TILES {
                        let at = pieces.state + own + (TILES * j + tile) as u64 * STRIDE;
                        let words = [0, 1, 2, 3].map(|i| o[tile][4 * j + i]);
                        ptr::store_f32x4(at as *mut f32, words);
                        tile += 1;
                    }
                }
                j += 1;
            }
            if lane < rows {
                pieces.say(lane, said);
            }
            pieces.written();
            return false;
        }
        let from = own + pieces.state_of_other();
        let of_eight = |j: usize| match 8 * (j as u32) < rows {
            true => load::<TILES>(from, TILES * j, STRIDE),
            false => [[0.0; VECTOR]; TILES],
        };
        let mut next = [of_eight(0), of_eight(1)];
        let mut factors = Factors {
            of: [0.0; 2],
            lse: f32::NEG_INFINITY,
        };
        if lane < rows {
            factors = Factors::new(said, pieces.other_says(lane));
            let (token, in_tile) = p.heads.div_rem(lane);
            let head = unit.head + in_tile;
            if a.sinks != 0 {
                let (factor, with) = with_sink(factors.lse, sink_of(a.sinks, head));
                factors.lse = with;
                factors.of = factors.of.map(|of| of * factor);
            }
            if thread < 32 && consumer == 0 && a.lse != 0 {
                let token = s.load_row(slot, token).token;
                let at = u64::from(token) * u64::from(a.q_heads) + u64::from(head);
                ptr::store_f32((a.lse + at * 4) as *mut f32, factors.lse * LN_2);
            }
        }
        let mut j = 0;
        while j < N / 4 {
            let of = [0, 1].map(|e| [0, 1].map(|which: usize| of_row(factors.of[which], j, e)));
            let now = next[j % 2];
            if j + 2 < N / 4 {
                next[j % 2] = of_eight(j + 2);
            }
            let mut i = 0;
            while i < TILES * VECTOR {
                let (tile, in_tile) = (i / VECTOR, i % VECTOR);
                let [own, other] = of[i % 2];
                let at = 4 * j + in_tile;
                o[tile][at] = o[tile][at] * own + now[tile][in_tile] * other;
                i += 1;
            }
            j += 1;
        }
        true
    }
}
