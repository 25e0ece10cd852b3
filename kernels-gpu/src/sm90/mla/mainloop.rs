//! The consumer warpgroups: products, softmax, and the exchange of weights between them.

use cuda_std::{barrier, fence, mbarrier, mma, setmaxnreg, shared, thread, warp, wgmma};

use super::{
    super::{
        pipeline::{Pipeline, stage_of_block},
        uniform,
    },
    config::{CONSUMERS, FEEDERS, QUERY_SLABS, REGISTERS, query_slabs},
    epilogue::finish,
    products::{HELD, O, add_handed, add_own, hold, hold_from_memory, multiply, slabs},
    shared::{CONSUMER, QueryPlace as _, Shared, Unit, Units, WEIGHTS_CHUNK, WEIGHTS_READY},
    visible::{clear, hide, is_whole},
};
use crate::{
    abi::LatentParams,
    common::{
        half::Half,
        softmax::{Rows, largest_sum},
        variant::Variant,
    },
};

const WARP: u32 = warp::FULL_MASK;

#[inline(always)]
fn scale_by(o: &mut [f32; O], factors: [f32; 2]) {
    let mut i = 0;
    while i < O {
        o[i] *= factors[i / 2 % 2];
        i += 1;
    }
}

/// Works through all units, as the consumer of half of the columns and the owner of every other block. `S` and `P` are a
/// thread's logits and packed weight words of a block. `BY_ROWS`: keys were copied one by one, with zeros outside of items.
/// `PIECES`: units may be pieces of the same rows.
///
/// # Safety
/// All warps of both consumers come here; the barriers are initialised.
#[inline(always)]
pub(super) unsafe fn consume<
    T: Half,
    V: Variant,
    const KEYS: u32,
    const STAGES: u32,
    const S: usize,
    const P: usize,
    const BY_ROWS: bool,
    const PIECES: bool,
>(
    p: &LatentParams,
    variant: &V,
    s: Shared<KEYS, STAGES>,
) where
    [f32; S]: wgmma::Accumulator,
{
    const { assert!(!V::TRANSFORMS_LOGITS && !V::MASKS) };
    const { assert!(S as u32 == KEYS / 2 && P == S / 2) };
    // SAFETY: whole warpgroups. One code for both halves `c`: instructions that are in no cache arrive at about one in
    // 2 ns.
    let c = unsafe {
        setmaxnreg::increase::<{ REGISTERS[1] }>();
        uniform((thread::thread_idx_x() - FEEDERS) / (CONSUMERS / 2))
    };
    let lane = warp::lane_id();
    let thread = thread::thread_idx_x() % 128;
    // SAFETY: whole warps here and in everything below.
    let warp = unsafe { uniform(thread / 32) };
    let first_row = warp * 16 + lane / 4;
    let scale = variant.params().scale_log2;
    let other = c ^ 1;
    let mut slots = Pipeline::<2>::CONSUMER;
    // Number of blocks of all units so far. The lowest bit of a block's number is its owner.
    let mut next = 0;

    macro_rules! arrived {
        ($barrier:expr, $parity:expr) => {
            mbarrier::wait($barrier, $parity);
            if BY_ROWS {
                fence::proxy_async_shared();
            }
        };
    }
    macro_rules! release {
        ($barrier:expr) => {
            if lane == 0 {
                mbarrier::arrive($barrier);
            }
        };
    }

    // SAFETY: a whole warpgroup; the full and free barriers order every access to a stage.
    unsafe {
        loop {
            let slot = slots.stage;
            mbarrier::wait(s.unit_full(slot), slots.parity);
            let unit = Unit::load(s.unit(slot));
            if unit.tokens == 0 {
                return;
            }
            let end = next + uniform(unit.blocks);
            let mut o = [0.0; O];
            let mut rows = Rows::EMPTY;
            let mut logits = [0.0; S];
            let mut weights = [0; P];

            // Takes the other consumer's block: its references, if they changed, and P·V with its weights.
            macro_rules! take {
                ($block:expr) => {
                    barrier::bar_sync(WEIGHTS_READY + other, 256);
                    let grew = shared::load_u32(s.grew(other, warp)) != 0;
                    if warp::warp_vote_any(WARP, grew) {
                        let mut factors = [1.0; 2];
                        let mut h = 0;
                        while h < 2 {
                            let row = first_row + 8 * h as u32;
                            factors[h] = shared::load_f32(s.factor(other, row));
                            let reference = shared::load_f32(s.reference(other, row));
                            rows.adopt(h, reference, factors[h]);
                            h += 1;
                        }
                        scale_by(&mut o, factors);
                    }
                    add_handed::<T, _, _>(s, &mut o, $block % STAGES, c);
                };
            }
            macro_rules! taken {
                ($block:expr) => {
                    wgmma::wait_group::<0>();
                    wgmma::fence_operand(&mut o);
                    release!(s.free($block % STAGES, c));
                    if c == 0 {
                        // The weights are in the right half.
                        release!(s.free($block % STAGES, 1));
                    }
                };
            }

            mbarrier::wait(s.rows_full(slot), slots.parity);
            let mut held = [0; 4 * HELD];
            let from_memory = const { query_slabs(KEYS) < QUERY_SLABS };
            if from_memory {
                held = hold_from_memory(p, s, slot, warp);
            }
            // One phase per unit, so its parity is that of the unit's slot.
            mbarrier::wait(s.queries_full(), slot);
            if !from_memory {
                held = hold(s, warp);
                // One lane will arrive at `queries_free` for its whole warp.
                warp::sync_warp(WARP);
            }
            wgmma::fence_operand(&mut held);
            let mut block = next + ((next ^ c) & 1);
            let mut begin = unit.first + (block - next) * KEYS;
            if block >= end {
                release!(s.queries_free());
            }
            // A block that this consumer owns. `$first`: the unit's first block, with no other consumer's block before
            // it.
            macro_rules! own {
                ($first:literal) => {{
                    let (stage, parity) = stage_of_block(block, STAGES);
                    // Which consumer owns a block depends on timing. Both use this order of halves, so results are
                    // bit-identical.
                    arrived!(s.full(stage, 0), parity);
                    multiply::<T, false, _, _, _>(s, &held, &mut logits, stage, 0);
                    arrived!(s.full(stage, 1), parity);
                    multiply::<T, true, _, _, _>(s, &held, &mut logits, stage, 1);
                    wgmma::commit_group();
                    // Reloaded from shared memory for each block, to save registers.
                    let unit = Unit::load(s.unit(slot));
                    let not_all = !is_whole(variant, &unit, begin as i32, KEYS as i32);
                    if $first {
                        wgmma::wait_group::<0>();
                    } else {
                        take!(block - 1);
                        wgmma::wait_group::<1>();
                    }
                    wgmma::fence_operand(&mut logits);
                    if block + 2 >= end {
                        release!(s.queries_free());
                    }
                    if not_all {
                        let unit = Unit::load(s.unit(slot));
                        hide(p, variant, s, slot, &unit, &mut logits, begin, first_row);
                    }
                    // Weights relative to the old references; their sums tell whether those are still large enough. The
                    // vote also keeps ptxas from moving the wait for the other product before the weights.
                    let mut sums = [f32::INFINITY; 4];
                    let mut good = false;
                    if !$first {
                        sums = rows.weigh_with_stale_max(&logits, None, [scale; 2], &mut weights, T::pack);
                        good = !warp::warp_vote_any(WARP, Rows::needs_rescale(&sums, largest_sum::<T>()));
                        taken!(block - 1);
                    }
                    if !good {
                        let (factors, _) = rows.rescale_late::<T, _>(&logits, None, [scale; 2]);
                        if !$first {
                            scale_by(&mut o, factors);
                        }
                        sums = rows.weigh_seen(&logits, None, [scale; 2], &mut weights, T::pack);
                        if lane % 4 == 0 {
                            let mut h = 0;
                            while h < 2 {
                                let row = first_row + 8 * h as u32;
                                shared::store_f32(s.factor(c, row), factors[h]);
                                shared::store_f32(s.reference(c, row), rows.reference[h]);
                                h += 1;
                            }
                        }
                    }
                    rows.add(&sums);
                    if lane == 0 {
                        shared::store_u32(s.grew(c, warp), u32::from(!good));
                    }
                    // All four warps have read the keys that the weights overwrite.
                    barrier::bar_sync(CONSUMER + c, 128);
                    let target = s.weights(stage) + (warp * 16 + lane % 16) * 16;
                    let mut step = 0;
                    while step < P / 4 {
                        let chunk = 2 * step as u32 + lane / 16;
                        let fragments = [
                            weights[4 * step],
                            weights[4 * step + 1],
                            weights[4 * step + 2],
                            weights[4 * step + 3],
                        ];
                        mma::stmatrix_x4(target + chunk * WEIGHTS_CHUNK, fragments);
                        step += 1;
                    }
                    // Zero the values of keys outside the item: 0 · NaN is NaN.
                    if not_all && !BY_ROWS {
                        let unit = Unit::load(s.unit(slot));
                        let past = unit.kv_end.saturating_sub(begin);
                        let first = unit.kv_begin.saturating_sub(begin);
                        clear(s, stage, thread, first, past);
                    }
                    fence::proxy_async_shared();
                    if not_all && !BY_ROWS {
                        barrier::bar_sync(CONSUMER + c, 128);
                    }
                    barrier::bar_arrive(WEIGHTS_READY + c, 256);
                    let values = uniform(s.half(stage, c));
                    add_own::<T, P>(&mut o, &weights, values, slabs(c));
                    wgmma::wait_group::<0>();
                    wgmma::fence_operand(&mut o);
                    wgmma::fence_operand(&mut weights);
                    release!(s.free(stage, c));
                    if c == 0 {
                        // Its weights are in the right half.
                        release!(s.free(stage, 1));
                    }
                    block += 2;
                    begin += 2 * KEYS;
                }};
            }
            if block == next {
                own!(true);
            }
            while block < end {
                own!(false);
            }
            if (end - 1) & 1 != c {
                take!(end - 1);
                taken!(end - 1);
            }
            let unit = Unit::load(s.unit(slot));
            finish::<T, _, _, PIECES>(p, s, c, slot, &unit, &mut o, &rows, scale, warp * 16);
            mbarrier::arrive(s.unit_free(slot));
            slots.advance();
            next = end;
        }
    }
}
