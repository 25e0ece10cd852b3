//! The epilogue of a unit: the consumers combine their sums, normalise and write.

use core::f32::consts::LN_2;

use cuda_std::{
    barrier,
    math::{lg2, rcp},
    misc, ptr, shared, warp,
};

use super::{
    products::{Outputs, TILES},
    shared::Shared,
    weigh::Sums,
};
use crate::{
    abi::{DIRECT, LatentParams},
    common::{
        half::{Bf16, Half},
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

/// Named barrier of both consumers: queries are converted; sums are stored.
pub(super) const BOTH: u32 = 5;

const WARP: u32 = warp::FULL_MASK;

/// Writes half of the columns of a unit's rows, to the output or to partial states.
///
/// # Safety
/// Both consumers come here for every unit, each with half of the columns; their products are done.
#[inline(always)]
pub(super) unsafe fn finish<const STAGES: u32>(
    p: &LatentParams,
    s: Shared<STAGES>,
    consumer: u32,
    slot: u32,
    thread: u32,
    o: &Outputs,
    sums: &Sums,
    barrier: u32,
) {
    let a = &p.attention;
    // Opaque: otherwise derived values are computed before the main loop and occupy registers there.
    let thread = misc::opaque(thread);
    let (warp, lane) = (thread / 32, thread % 32);
    // SAFETY: whole warps; the unit stays until this warp has arrived; only this thread writes its elements.
    unsafe {
        // Sum over the warp's keys: 8 lanes share each row.
        let said = s.said(consumer, warp, lane % 4 * 2);
        let mut j = 0;
        while j < 8 {
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
        if thread < 64 {
            let row = thread;
            let of = |of: u32, warp: u32| shared::load_f32(s.said(of, warp, row));
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
            let unit = Unit::load(s.unit(slot));
            let (token, in_tile) = p.heads.div_rem(row);
            let head = unit.head + in_tile;
            if token < unit.tokens && head < a.q_heads {
                let row = s.load_row(slot, token);
                if row.slot == DIRECT {
                    if a.sinks != 0 {
                        let (factor, with) = with_sink(lse, sink_of(a.sinks, head));
                        (inverse, lse) = (inverse * factor, with);
                    }
                    if consumer == 0 && a.lse != 0 {
                        let at = u64::from(row.token) * u64::from(a.q_heads) + u64::from(head);
                        ptr::store_f32((a.lse + at * 4) as *mut f32, lse * LN_2);
                    }
                } else if consumer == 0 {
                    let state = u64::from(row.slot) * u64::from(a.q_heads) + u64::from(head);
                    ptr::store_f32((a.partial_lse + state * 4) as *mut f32, lse);
                }
            }
            shared::store_f32(s.factor(consumer, row), inverse);
        }
        barrier::bar_sync(barrier, 128);
        let unit = Unit::load(s.unit(slot));
        let column = consumer * (VALUE_DIM / 2) + warp * 16 + lane / 4 * 2;
        let mut at = 0;
        while at < 16 {
            let (j, e) = (at / 2, at % 2);
            let row = lane % 4 * 2 + 8 * j as u32 + e as u32;
            let (token, in_tile) = p.heads.div_rem(row);
            let head = unit.head + in_tile;
            if token < unit.tokens && head < a.q_heads {
                let inverse = shared::load_f32(s.factor(consumer, row));
                let row = s.load_row(slot, token);
                let of = |tile: usize| {
                    [
                        o[tile][4 * j + e] * inverse,
                        o[tile][4 * j + 2 + e] * inverse,
                    ]
                };
                let mut tile = 0;
                if row.slot == DIRECT {
                    let element = u64::from(row.token) * u64::from(a.out_token_stride)
                        + u64::from(head * VALUE_DIM + column);
                    let out = a.out + element * 2;
                    while tile < TILES {
                        let [first, second] = of(tile);
                        let to = out + 128 * tile as u64;
                        ptr::store_u32(to as *mut u32, Bf16::pack(first, second));
                        tile += 1;
                    }
                } else {
                    let state = u64::from(row.slot) * u64::from(a.q_heads) + u64::from(head);
                    let element = state * u64::from(VALUE_DIM) + u64::from(column);
                    let out = a.partial_out + element * 4;
                    while tile < TILES {
                        ptr::store_f32x2((out + 256 * tile as u64) as *mut f32, of(tile));
                        tile += 1;
                    }
                }
            }
            at += 1;
        }
    }
}
