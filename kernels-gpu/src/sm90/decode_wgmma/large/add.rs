//! The two warpgroups that compute P·V, half of the columns each, and write the results.

use cuda_std::{
    mbarrier, shared, thread, warp,
    wgmma::{self, Descriptor, Swizzle},
};

use super::{
    super::super::{
        mma::{first_float, store_floats, store_halves},
        pipeline::Pipeline,
        uniform,
    },
    config::{VALUE_DIM, VALUE_PIECES, VALUE_SLABS, WEIGHTS_STEP},
    shared::{Shared, Unit, ValueRing},
};
use crate::{
    abi::{DIRECT, DecodeParams},
    common::half::Half,
};

const WARP: u32 = warp::FULL_MASK;

/// Columns per warpgroup, and outputs of a thread in each of two parts of these columns.
const HALF: u32 = VALUE_DIM / 2;
const O: usize = HALF as usize / 4;

/// Works through all units, for half `c` of the columns.
///
/// # Safety
/// A whole warpgroup comes here, and the other one with the other half; the barriers are initialised.
#[inline(always)]
pub(super) unsafe fn add<T: Half, const DIM: u32>(p: &DecodeParams, s: Shared<DIM>, c: u32) {
    // Bytes per group of 8 keys in a piece of values.
    const GROUP: u32 = VALUE_SLABS * 1024;
    let lane = warp::lane_id();
    // SAFETY: whole warps here and in everything below.
    let warp = unsafe { uniform(thread::thread_idx_x() % 128 / 32) };
    let mut slots = Pipeline::<2>::CONSUMER;
    let mut ring = ValueRing::<DIM>::CONSUMER;
    // Parities of the two stages of weights, one bit each. They differ: every unit starts with stage 0, which may be
    // used more often.
    let mut phases = 0;

    // SAFETY: a whole warpgroup; the full and free barriers order every access to a stage.
    unsafe {
        loop {
            let slot = slots.stage;
            mbarrier::wait(s.unit_full(slot), slots.parity);
            let unit = Unit::load(s.unit(slot));
            if unit.tokens == 0 {
                return;
            }
            let mut left = uniform(unit.blocks);
            let mut turn = 0;
            let mut o = [[0.0; O]; 2];
            while left > 0 {
                mbarrier::wait(s.weights_full(turn), phases >> turn & 1);
                phases ^= 1 << turn;
                let grew = shared::load_u32(s.grew(turn, warp)) != 0;
                if warp::warp_vote_any(WARP, grew) {
                    let row = warp * 16 + lane / 4;
                    let factors = [0, 8].map(|h| shared::load_f32(s.factor(turn, row + h)));
                    let mut i = 0;
                    while i < O {
                        o[0][i] *= factors[i / 2 % 2];
                        o[1][i] *= factors[i / 2 % 2];
                        i += 1;
                    }
                }
                let at = s.weights_of(turn, warp * 32 + lane);
                let mut step = 0;
                while step < VALUE_PIECES {
                    let stage = ring.first + step;
                    mbarrier::wait(s.values_full(stage), ring.parity);
                    let values = uniform(s.values(stage) + c * (GROUP / 2));
                    let values = Descriptor::new(values, 1024, GROUP, Swizzle::B128);
                    // One step at a time: there are no registers for the weights of two. Products of the other
                    // warpgroups fill the gaps.
                    let mut weights = shared::load_u32x4(at + step * WEIGHTS_STEP);
                    wgmma::fence_operand(&mut weights);
                    if step == VALUE_PIECES - 1 {
                        // All weights are in registers: their stage may be overwritten.
                        mbarrier::arrive(s.weights_free(turn));
                    }
                    wgmma::fence();
                    // Two products: ptxas compiles for 128 registers per thread (the launch's share), and one
                    // accumulator would take all of them.
                    wgmma::mma_rs::<T, true, true, _>(&mut o[0], weights, values);
                    wgmma::mma_rs::<T, true, true, _>(&mut o[1], weights, values.advance(2 * 1024));
                    wgmma::commit_group();
                    wgmma::wait_group::<0>();
                    wgmma::fence_operand(&mut o[0]);
                    wgmma::fence_operand(&mut o[1]);
                    wgmma::fence_operand(&mut weights);
                    if lane == 0 {
                        mbarrier::arrive(s.values_free(stage));
                    }
                    step += 1;
                }
                ring.advance();
                turn ^= 1;
                left -= 1;
            }
            mbarrier::wait(s.inverses_full(slot), slots.parity);
            write::<T, DIM>(p, s, c, slot, &o, warp);
            mbarrier::arrive(s.unit_free(slot));
            slots.advance();
        }
    }
}

/// Writes half of the columns of the warp's 16 rows, to the output or to partial states.
///
/// # Safety
/// A whole warp comes here; its products are done, and the inverses are stored.
#[inline(always)]
unsafe fn write<T: Half, const DIM: u32>(
    p: &DecodeParams,
    s: Shared<DIM>,
    c: u32,
    slot: u32,
    o: &[[f32; O]; 2],
    warp: u32,
) {
    let a = &p.attention;
    // Opaque: otherwise derived values are computed before the main loop and occupy registers there.
    let mut here = [warp::lane_id(), warp * 16, c];
    wgmma::fence_operand(&mut here);
    let [lane, first_row, c] = here;
    // SAFETY: whole warps; the unit stays until this warp has arrived; only this thread writes its elements.
    unsafe {
        let unit = Unit::load(s.unit(slot));
        let mut h = 0;
        while h < 2 {
            let row = first_row + lane / 4 + 8 * h as u32;
            let inverse = shared::load_f32(s.inverse(slot, row));
            let (token, in_group) = p.group.div_rem(row);
            let head = unit.head * a.group + in_group;
            let there = token < unit.tokens;
            let row = s.load_row(slot, token.min(unit.tokens - 1));
            let direct = there && row.slot == DIRECT;
            let scaled = |i: usize| {
                let i = i + 2 * h;
                o[i / O][i % O] * inverse
            };
            if warp::warp_vote_any(WARP, direct) {
                let element = u64::from(row.token) * u64::from(a.out_token_stride)
                    + u64::from(head * VALUE_DIM + c * HALF + lane % 4 * 8);
                let out = a.out + element * 2;
                store_halves::<{ 2 * O }>(lane, out, direct, |i| T::pack(scaled(i), scaled(i + 1)));
            }
            let partial = there && !direct;
            if warp::warp_vote_any(WARP, partial) {
                let state = u64::from(row.slot) * u64::from(a.q_heads) + u64::from(head);
                let column = c * HALF + first_float(lane);
                let out = a.partial_out + (state * u64::from(VALUE_DIM) + u64::from(column)) * 4;
                store_floats::<{ 2 * O }>(lane, out, partial, scaled);
            }
            h += 1;
        }
    }
}
