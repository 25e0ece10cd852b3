//! The epilogue of a unit: the consumers combine their sums, normalise and write.

use cuda_std::{misc, ptr, shared};

use super::{products::Outputs, shared::Shared, weigh::Sums};
use crate::{
    abi::{DIRECT, LatentParams},
    common::half::{Bf16, Half},
    sm90::mla::{
        config::VALUE_DIM,
        shared::{Unit, Units as _},
        swapped::{Swapped as _, TILES, normalise},
    },
};

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
        normalise(p, s, consumer, slot, thread, sums, barrier);
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
