//! The epilogue of a unit: the consumers combine their sums, normalise and write.

use cuda_std::{misc, mma, ptr, shared, warp};

use super::shared::Shared;
use crate::{
    abi::{DIRECT, LatentParams},
    common::half::Half,
    sm90::mla::{
        config::VALUE_DIM,
        shared::{Unit, Units as _},
        swapped::{Outputs, Swapped as _, TILES, normalise},
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
    o: &Outputs<N>,
    sums: &[f32; H],
    barrier: u32,
) {
    let a = &p.attention;
    // Opaque: otherwise derived values are computed before the main loop and occupy registers there.
    let thread = misc::opaque(thread);
    let (warp, lane) = (thread / 32, thread % 32);
    // SAFETY: whole warps; the unit stays until this warp has arrived; only this thread writes its elements.
    unsafe {
        normalise(p, s, consumer, slot, thread, sums, barrier);
        let unit = Unit::load(s.unit(slot));
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
            let inverses = shared::load_f32x2(s.factor(consumer, first + lane % 4 * 2));
            let of =
                |tile: usize, h: usize| [0, 1].map(|e| o[tile][4 * j + 2 * h + e] * inverses[e]);
            // Direct rows: transposed, each lane has two neighbouring columns of one row.
            let (there, head, query) = row_of(first + lane / 4);
            let direct = there && query.slot == DIRECT;
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
                if there && query.slot != DIRECT {
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
