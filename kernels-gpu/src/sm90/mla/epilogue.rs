//! The epilogue of a unit: the consumers combine their sums, normalise and write.

use core::f32::consts::LN_2;

use cuda_std::{
    math::{lg2, rcp},
    ptr, shared, warp, wgmma,
};

use super::{
    super::mma::swap,
    config::VALUE_DIM,
    mainloop::meet,
    products::O,
    shared::{Shared, Unit, Units},
};
use crate::{
    abi::{DIRECT, LatentParams},
    common::{
        half::Half,
        softmax::Rows,
        state::{sink_of, with_sink},
    },
};

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
    o: &[f32; O],
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
        h = 0;
        while h < 2 {
            let row = first_row + lane / 4 + 8 * h as u32;
            let (token, in_tile) = p.heads.div_rem(row);
            let head = unit.head + in_tile;
            // The same order in both consumers, for bit-identical totals.
            let total =
                shared::load_f32(s.total(slot, 0, row)) + shared::load_f32(s.total(slot, 1, row));
            // `!= 0.0` keeps NaN: with an LSE of −∞ a merge would drop the state.
            let (mut inverse, mut lse) = if total != 0.0 {
                (rcp(total), rows.reference[h] * scale + lg2(total))
            } else {
                (0.0, f32::NEG_INFINITY)
            };
            let there = token < unit.tokens && head < a.q_heads;
            let row = s.load_row(slot, token.min(unit.tokens - 1));
            let direct = there && row.slot == DIRECT;
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
                let mut j = 0;
                while j < O / 16 {
                    // The four lanes of a row exchange words until each has 16 contiguous bytes.
                    let mut words = [0, 4, 8, 12].map(|i| packed(16 * j + i + 2 * h));
                    swap(&mut words, [(0, 1), (2, 3)], lane & 1 != 0, 1);
                    swap(&mut words, [(0, 2), (1, 3)], lane & 2 != 0, 2);
                    if direct {
                        ptr::store_u32x4((out + 64 * j as u64) as *mut u32, words);
                    }
                    j += 1;
                }
            }
            let partial = there && !direct;
            if warp::warp_vote_any(warp::FULL_MASK, partial) {
                let state = u64::from(row.slot) * u64::from(a.q_heads) + u64::from(head);
                if c == 0 && partial && lane % 4 == 0 {
                    ptr::store_f32((a.partial_lse + state * 4) as *mut f32, lse);
                }
                // Two lanes of a row exchange pairs, so that each has four columns of every other 8: even lanes of the
                // first 8, odd lanes of the next.
                let column = c * HALF + lane % 2 * 8 + lane % 4 / 2 * 4;
                let out = a.partial_out + (state * u64::from(VALUE_DIM) + u64::from(column)) * 4;
                let mut j = 0;
                while j < O / 8 {
                    let mut words =
                        [0, 1, 4, 5].map(|i| (o[8 * j + 2 * h + i] * inverse).to_bits());
                    swap(&mut words, [(0, 2), (1, 3)], lane & 1 != 0, 1);
                    if partial {
                        ptr::store_u32x4((out + 64 * j as u64) as *mut u32, words);
                    }
                    j += 1;
                }
            }
            h += 1;
        }
    }
}
