//! The epilogue of a unit: the consumers combine their sums, normalise and write.

use core::f32::consts::LN_2;

use cuda_std::{
    barrier,
    math::{lg2, rcp},
    misc, mma, ptr, shared, warp,
};

use super::{products::Outputs, shared::Shared};
use crate::{
    abi::{DIRECT, LatentParams},
    common::{
        half::Half,
        state::{sink_of, with_sink},
    },
    sm90::{
        meet,
        mla::{
            config::VALUE_DIM,
            shared::{Unit, Units as _},
        },
    },
};

/// Named barrier of both consumers: sums are stored.
const BOTH: u32 = 5;

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
        // Sum over the warp's keys: 8 lanes share each row.
        let said = s.said(slot, consumer, warp, lane % 4 * 2);
        let mut j = 0;
        while j < N / 4 {
            let mut of_two = [sums[2 * j], sums[2 * j + 1]];
            let mut distance = 4;
            while distance < 32 {
                of_two = of_two.map(|x| x + warp::warp_shuffle_xor(WARP, x, distance, 32));
                distance *= 2;
            }
            if lane < 4 {
                shared::store_f32x2(said + j as u32 * 32, of_two);
            }
            j += 1;
        }
        meet(BOTH, 8);
        let unit = Unit::load(s.unit(slot));
        let row_of = |row: u32| {
            let (token, in_tile) = p.heads.div_rem(row);
            let head = unit.head + in_tile;
            let there = token < unit.tokens && head < a.q_heads;
            (there, head, s.load_row(slot, token.min(unit.tokens - 1)))
        };
        if thread < ROWS {
            let row = thread;
            let of = |of: u32, warp: u32| shared::load_f32(s.said(slot, of, warp, row));
            let of_all =
                |of_one: u32| (of(of_one, 0) + of(of_one, 1)) + (of(of_one, 2) + of(of_one, 3));
            // The same order in both consumers, for bit-identical totals.
            let total = of_all(0) + of_all(1);
            // `!= 0.0` keeps NaN: with an LSE of −∞ a merge would drop the state.
            let (mut inverse, mut lse) = if total != 0.0 {
                (
                    rcp(total),
                    shared::load_f32(s.reference(slot, row)) + lg2(total),
                )
            } else {
                (0.0, f32::NEG_INFINITY)
            };
            let (there, head, query) = row_of(row);
            if there && query.slot == DIRECT {
                if a.sinks != 0 {
                    let (factor, with) = with_sink(lse, sink_of(a.sinks, head));
                    (inverse, lse) = (inverse * factor, with);
                }
                if consumer == 0 && a.lse != 0 {
                    let at = u64::from(query.token) * u64::from(a.q_heads) + u64::from(head);
                    ptr::store_f32((a.lse + at * 4) as *mut f32, lse * LN_2);
                }
            } else if there && consumer == 0 {
                let state = u64::from(query.slot) * u64::from(a.q_heads) + u64::from(head);
                ptr::store_f32((a.partial_lse + state * 4) as *mut f32, lse);
            }
            shared::store_f32(s.factor(consumer, row), inverse);
        }
        barrier::bar_sync(barrier, 128);
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
                for tile in 0..o.len() {
                    for h in 0..2 {
                        let [first, second] = of(tile, h);
                        let word = mma::movmatrix_trans(T::pack(first, second));
                        if direct {
                            let to = out + (128 * tile + 16 * h) as u64;
                            ptr::store_u32(to as *mut u32, word);
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
                    for tile in 0..o.len() {
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
