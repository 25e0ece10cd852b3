//! The end of a unit: the teams' states of each row become one, which is normalised and written.

use core::f32::consts::LN_2;

use cuda_std::{
    barrier,
    math::{lg2, rcp},
    ptr, shared,
};

use super::{
    config::{TEAMS, WARPS},
    mainloop::{Outputs, Place},
    shared::Shared,
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

/// Both teams have come here: their states are there; halves of their rows; those have been read.
const BOTH: u32 = 1 + 2 * TEAMS;

/// Adds up what both teams have of a unit, and writes 16 columns of one row a lane: the first team the upper 8 rows, the
/// second the lower ones. Each team hands the others over in the place of its logits.
///
/// # Safety
/// All warps of both teams come here for every unit; each lane has the sum of its row.
#[inline(always)]
pub(super) unsafe fn finish<const STAGES: u32>(
    p: &LatentParams,
    s: Shared<STAGES>,
    slot: u32,
    place: Place,
    o: Outputs,
    softmax: &Softmax,
) {
    let a = &p.attention;
    let Place { team, warp, lane } = place;
    // SAFETY: whole warps; the unit stays until they have arrived; a row's columns are this lane's alone.
    unsafe {
        let (row, pair) = place.row_and_pair();
        if pair == 0 {
            shared::store_f32x2(s.state(team, row), [softmax.max, softmax.sum]);
        }
        meet(BOTH, TEAMS * WARPS);
        let mut rows = [Softmax::EMPTY; 2];
        let mut own = [0.0; 2];
        let mut h = 0;
        while h < 2 {
            let row = lane / 4 + 8 * h as u32;
            let [first, second] = [0, 1].map(|team| shared::load_f32x2(s.state(team, row)));
            let _ = rows[h].raise(first[0]);
            let _ = rows[h].raise(second[0]);
            // A team that saw no key has −∞: its factor is 0.
            let factors = [first, second].map(|of| exp2(of[0] - rows[h].offset()));
            rows[h].sum = first[1] * factors[0] + second[1] * factors[1];
            own[h] = if team == 0 { factors[0] } else { factors[1] };
            h += 1;
        }
        // Of each fragment the upper row is the first team's, the lower one the second's.
        let keeps = |h: u32| h == team;
        let at = |team: u32| s.partial(team, warp) + lane * 16;
        let mut i = 0;
        while i < 4 {
            let of = |h: usize| {
                [
                    o[2 * i][2 * h],
                    o[2 * i][2 * h + 1],
                    o[2 * i + 1][2 * h],
                    o[2 * i + 1][2 * h + 1],
                ]
            };
            let given = if keeps(0) {
                of(1).map(|x| x * own[1])
            } else {
                of(0).map(|x| x * own[0])
            };
            shared::store_f32x4(at(team) + i as u32 * 512, given);
            i += 1;
        }
        meet(BOTH, TEAMS * WARPS);
        let mut out = [0.0; 16];
        i = 0;
        while i < 4 {
            let of = |h: usize| {
                [
                    o[2 * i][2 * h],
                    o[2 * i][2 * h + 1],
                    o[2 * i + 1][2 * h],
                    o[2 * i + 1][2 * h + 1],
                ]
            };
            let kept = if keeps(0) {
                of(0).map(|x| x * own[0])
            } else {
                of(1).map(|x| x * own[1])
            };
            let taken = shared::load_f32x4(at(1 - team) + i as u32 * 512);
            let mut j = 0;
            while j < 4 {
                out[4 * i + j] = kept[j] + taken[j];
                j += 1;
            }
            i += 1;
        }
        // Behind it the next unit's logits take the place.
        barrier::bar_sync(BOTH, TEAMS * WARPS * 32);

        let unit = Unit::load(s.unit(slot));
        let of = if keeps(0) { rows[0] } else { rows[1] };
        let (token, in_tile) = p.heads.div_rem(lane / 4 + 8 * team);
        let head = unit.head + in_tile;
        // NaN is not nothing: a merge would leave such a state out.
        let (mut inverse, mut lse) = if of.sum != 0.0 {
            (rcp(of.sum), of.offset() + lg2(of.sum))
        } else {
            (0.0, f32::NEG_INFINITY)
        };
        if token >= unit.tokens || head >= a.q_heads {
            return;
        }
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
                + u64::from(head * VALUE_DIM + place.column());
            let words = [0, 1, 2, 3, 4, 5, 6, 7]
                .map(|i| Bf16::pack(out[2 * i] * inverse, out[2 * i + 1] * inverse));
            let at = a.out + element * 2;
            ptr::store_u32x4(at as *mut u32, [words[0], words[1], words[2], words[3]]);
            ptr::store_u32x4(
                (at + 16) as *mut u32,
                [words[4], words[5], words[6], words[7]],
            );
        } else {
            let state = u64::from(row.slot) * u64::from(a.q_heads) + u64::from(head);
            if says_lse {
                ptr::store_f32((a.partial_lse + state * 4) as *mut f32, lse);
            }
            let at = a.partial_out + (state * u64::from(VALUE_DIM) + u64::from(place.column())) * 4;
            i = 0;
            while i < 4 {
                let four = [0, 1, 2, 3].map(|j| out[4 * i + j] * inverse);
                ptr::store_f32x4((at + 16 * i as u64) as *mut f32, four);
                i += 1;
            }
        }
    }
}
