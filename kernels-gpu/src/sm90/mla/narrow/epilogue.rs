//! The epilogue of a unit: merges the two teams' states of each row, normalises and writes.

use core::f32::consts::LN_2;

use cuda_std::{
    math::{lg2, rcp},
    ptr, shared,
};

use super::{
    config::{TEAMS, WARPS, WEIGHTS_OF_BLOCK},
    places::Place,
    shared::{BOTH, Outputs, Shared},
    weigh::{Rows, of_four},
};
use crate::{
    abi::{DIRECT, LatentParams},
    common::{
        half::{Bf16, Half},
        math::exp2,
        state::{Softmax, sink_of, with_sink},
    },
    sm90::{
        meet,
        mla::{
            config::VALUE_DIM,
            shared::{Unit, Units},
        },
    },
};

/// Merges both teams' outputs of a unit. Each lane writes 16 columns of one row: team 0 the upper 8 rows, team 1 the
/// lower
/// 8. Each team hands over the other rows through the memory of its weights.
///
/// # Safety
/// All warps of both teams come here for every unit, and meet at a barrier before the next unit's weights are stored.
#[inline(always)]
pub(super) unsafe fn finish<const STAGES: u32>(
    p: &LatentParams,
    s: Shared<STAGES>,
    slot: u32,
    place: Place,
    o: Outputs,
    of_team: &Rows,
) {
    let a = &p.attention;
    let Place { team, warp, lane } = place;
    // SAFETY: whole warps; the unit stays until they have arrived; only this lane writes its columns of a row.
    unsafe {
        let mut h = 0;
        while h < 2 {
            let sum = of_four(of_team.sums[h], |a, b| a + b);
            if lane % 4 == 0 {
                let at = s.said(team, lane / 4 + 8 * h as u32, 0);
                shared::store_f32(at + warp * 4, sum);
            }
            h += 1;
        }
        meet(BOTH, TEAMS * WARPS);
        let mut rows = [Softmax::EMPTY; 2];
        let mut own = [0.0; 2];
        h = 0;
        while h < 2 {
            let row = lane / 4 + 8 * h as u32;
            let references = [0, 1].map(|team| shared::load_f32(s.state(team, row)));
            let sums = [0, 1].map(|team| sum_of(s.said(team, row, 0)));
            let _ = rows[h].raise(references[0]);
            let _ = rows[h].raise(references[1]);
            // A team that saw no key has the lowest possible reference: its factor is 0.
            let factors = references.map(|of| exp2(of - rows[h].offset()));
            rows[h].sum = sums[0] * factors[0] + sums[1] * factors[1];
            let of_team = if team == 0 {
                references[0]
            } else {
                references[1]
            };
            let shift = shared::load_f32(s.shifts(team, row) + place.group() * 4);
            own[h] = exp2(of_team - rows[h].offset() - shift);
            h += 1;
        }
        // Team 0 keeps the upper row of each fragment, team 1 the lower one.
        let keeps = |h: u32| h == team;
        let at = |team: u32| s.weights(team, 0, 0) + warp * 2048 + lane * 16;
        // Even and odd columns are in separate fragments.
        let of = |i: usize, h: usize| {
            let [even, odd] = [&o[2 * i], &o[2 * i + 1]];
            [even[2 * h], odd[2 * h], even[2 * h + 1], odd[2 * h + 1]]
        };
        let mut i = 0;
        while i < 4 {
            let given = if keeps(0) {
                of(i, 1).map(|x| x * own[1])
            } else {
                of(i, 0).map(|x| x * own[0])
            };
            shared::store_f32x4(at(team) + i as u32 * 512, given);
            i += 1;
        }
        meet(BOTH, TEAMS * WARPS);
        let mut out = [0.0; 16];
        i = 0;
        while i < 4 {
            let kept = if keeps(0) {
                of(i, 0).map(|x| x * own[0])
            } else {
                of(i, 1).map(|x| x * own[1])
            };
            let taken = shared::load_f32x4(at(1 - team) + i as u32 * 512);
            let mut j = 0;
            while j < 4 {
                out[4 * i + j] = kept[j] + taken[j];
                j += 1;
            }
            i += 1;
        }

        let unit = Unit::load(s.unit(slot));
        let of = if keeps(0) { rows[0] } else { rows[1] };
        let (token, in_tile) = p.heads.div_rem(lane / 4 + 8 * team);
        let head = unit.head + in_tile;
        // `!= 0.0` keeps NaN: with an LSE of −∞ a merge would drop the state.
        let (mut inverse, mut lse) = if of.sum != 0.0 {
            (rcp(of.sum), of.offset() + lg2(of.sum))
        } else {
            (0.0, f32::NEG_INFINITY)
        };
        if token >= unit.tokens || head >= a.q_heads {
            return;
        }
        // The lane has four of each 16 of the warp's 64 columns.
        let column = warp * 64 + lane % 4 * 4;
        let says_lse = warp == 0 && lane % 4 == 0;
        let row = s.load_row(slot, token);
        if row.slot == DIRECT {
            if a.sinks != 0 {
                let (factor, with) = with_sink(lse, sink_of(a.sinks, head));
                (inverse, lse) = (inverse * factor, with);
            }
            if says_lse && a.lse != 0 {
                let at = u64::from(row.token) * u64::from(a.q_heads) + u64::from(head);
                ptr::store_f32((a.lse + at * 4) as *mut f32, lse * LN_2);
            }
            let element = u64::from(row.token) * u64::from(a.out_token_stride)
                + u64::from(head * VALUE_DIM + column);
            i = 0;
            while i < 4 {
                let four = [0, 1, 2, 3].map(|j| out[4 * i + j] * inverse);
                let words = [Bf16::pack(four[0], four[1]), Bf16::pack(four[2], four[3])];
                let at = a.out + (element + 16 * i as u64) * 2;
                ptr::store_u32x2(at as *mut u32, words);
                i += 1;
            }
        } else {
            let state = u64::from(row.slot) * u64::from(a.q_heads) + u64::from(head);
            if says_lse {
                ptr::store_f32((a.partial_lse + state * 4) as *mut f32, lse);
            }
            let at = a.partial_out + (state * u64::from(VALUE_DIM) + u64::from(column)) * 4;
            i = 0;
            while i < 4 {
                let four = [0, 1, 2, 3].map(|j| out[4 * i + j] * inverse);
                ptr::store_f32x4((at + 64 * i as u64) as *mut f32, four);
                i += 1;
            }
        }
    }
}

/// A row's sum over the warps of a team, in a fixed order.
#[inline(always)]
unsafe fn sum_of(at: u32) -> f32 {
    // SAFETY: all warps have stored their sums, before a barrier.
    let [a, b] = unsafe { [shared::load_f32x4(at), shared::load_f32x4(at + 16)] };
    let four = [0, 1, 2, 3].map(|i| a[i] + b[i]);
    (four[0] + four[1]) + (four[2] + four[3])
}

const _: () = assert!(
    WARPS * 2048 <= 2 * WEIGHTS_OF_BLOCK,
    "halves of the rows have room where weights are"
);
