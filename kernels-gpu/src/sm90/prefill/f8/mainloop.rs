//! The consumer warpgroups of the 8-bit prefill.

use cuda_std::{barrier, math::fma, mbarrier, misc, prelude::*, wgmma};

use super::{
    super::{
        super::{pipeline::Pipeline, uniform},
        epilogue::{finish_tile, scales_of_row},
        shared::Shared,
        work::{Work, logits_of_block},
    },
    products::{queries_keys, weights_values},
    queries::quantise,
    weights::State,
};
use crate::{
    abi::PrefillParams,
    common::cache::factor_of_products,
    common::half::Half,
    common::logits::{bias_of_first, hide_after, hide_before, hide_masked, lean, mask, transform},
    common::prefill_tile::Tile,
    common::softmax::maxima,
    common::variant::{Hook, Pair, Query, Variant},
};

const WARP: u32 = warp::FULL_MASK;
/// Named barriers: a consumer may issue products; all warps of a consumer have quantised their queries.
const TURN: [u32; 2] = [1, 4];
const QUANTISED: [u32; 2] = [2, 3];
/// All these kernels support sinks and masks of the last keys.
const EXTRAS: bool = true;

/// Works through all tiles.
///
/// One step handles one block of keys, in two halves. It begins with P·V of the previous block, which may belong to the
/// previous tile: some columns at a time, each added to its outputs in f32 when it is done. Then Q·Kᵀ of both halves runs.
/// The first half's maxima are computed while the second half's products run. Registers hold the outputs, and either the
/// weights and one product's result, or the logits; with more, ptxas spills.
///
/// No exponential is computed while products of the same warp run: each would take 16 to 28 cycles instead of 8.
///
/// # Safety
/// Whole warpgroups come here, all consumers of the CTA; the barriers are initialised.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
pub(super) unsafe fn consume<
    T: Half,
    V: Variant,
    const STAGES: u32,
    const VALUE_STAGES: u32,
    const S: usize,
    const P: usize,
    const O: usize,
    const A: usize,
    const B: usize,
    const C: usize,
    const Q: usize,
>(
    p: &PrefillParams,
    variant: &V,
    s: Shared,
) where
    [f32; S]: wgmma::Accumulator,
    [f32; A]: wgmma::Accumulator,
    [f32; B]: wgmma::Accumulator,
    [f32; C]: wgmma::Accumulator,
{
    let lane = warp::lane_id();
    let thread = thread::thread_idx_x() - 128;
    // SAFETY: whole warps here and in everything below.
    let consumer = unsafe { uniform(thread / 128) };
    let first_row = thread / 32 * 16;
    let rows_of_thread = [first_row + lane / 4, first_row + lane / 4 + 8];
    let of_logits = if V::TRANSFORMS_LOGITS && !V::KEEPS_UNIT {
        1.0
    } else {
        variant.unit().plain()
    };
    // Per row of the thread: the softmax scale, of the current tile; and the factor of Q·Kᵀ, from the scales of queries
    // and keys, of the tile being opened.
    let mut scale = [of_logits; 2];
    let mut of_products;
    // The queries of a thread's two rows; read only by variants with a transform or a mask.
    let none = Query {
        token: 0,
        head: 0,
        position: 0,
    };
    let mut of = [Pair::new(variant, none, 0); 2];
    let keys = s.shape.keys as i32;
    let half_keys = s.shape.stage_keys();
    let dim = s.shape.head_dim;
    let slab = s.shape.slab_bytes();

    let mut tiles = Pipeline::<2>::CONSUMER;
    let mut k = Pipeline::<STAGES>::CONSUMER;
    let mut v = Pipeline::<VALUE_STAGES>::CONSUMER;
    const { assert!(!V::LINEAR, "weights take no shift here") };
    let mut _shift;
    // Of the keys of a block the upper half is loaded first.
    let mut upper = [0.0; S];
    let mut lower = [0.0; S];
    let mut weights = [0; P];
    let mut part_a = [0.0; A];
    let mut part_b = [0.0; B];
    let mut part_c = [0.0; C];
    // Factors of the last block's P·V.
    let mut factor;
    // Whether the next values have arrived. Tested before the exponentials, which hide the 40 cycles of a test.
    let mut values_there;
    let mut o = [0.0; O];
    let mut state = State::EMPTY;

    macro_rules! release {
        ($barrier:expr) => {
            if lane == 0 {
                mbarrier::arrive($barrier);
            }
        };
    }
    // A vote: it tells the compiler that the condition is the same in all lanes.
    macro_rules! all_agree {
        ($condition:expr) => {
            warp::warp_vote_any(WARP, $condition)
        };
    }
    // The consumers take turns at issuing products: each then computes weights during the other's products. A tile has the
    // same number of blocks for both. Constants: with a computed barrier number ptxas reserves all 16 named barriers.
    macro_rules! await_turn {
        () => {
            if consumer == 0 {
                barrier::bar_sync(TURN[0], 256);
            } else {
                barrier::bar_sync(TURN[1], 256);
            }
        };
    }
    macro_rules! pass_turn {
        () => {
            if consumer == 0 {
                barrier::bar_arrive(TURN[1], 256);
            } else {
                barrier::bar_arrive(TURN[0], 256);
            }
        };
    }
    // Opens the next tile: quantises its queries.
    macro_rules! open {
        () => {{
            let work = Work::open::<V, EXTRAS, false>(p, variant, s, tiles.stage, consumer);
            // Opaque: otherwise derived values are computed before the main loop and occupy registers there.
            let first = misc::opaque(first_row);
            of_products = quantise::<T, Q>(s, tiles.stage, first);
            mbarrier::arrive(s.queries_rounded(tiles.stage));
            if consumer == 0 {
                barrier::bar_sync(QUANTISED[0], 128);
            } else {
                barrier::bar_sync(QUANTISED[1], 128);
            }
            let tile = Tile::load(s.tile(tiles.stage));
            if p.attention.scales.k != 0 {
                let mut h = 0;
                while h < 2 {
                    let row = first + lane / 4 + 8 * h as u32;
                    of_products[h] *= scales_of_row(p, &tile, row)[0];
                    h += 1;
                }
            }
            if V::TRANSFORMS_LOGITS || V::MASKS {
                of = rows_of_thread.map(|row| tile.query(&p.pack, variant, row));
            }
            work
        }};
    }
    // Without a transform the factors of queries and keys are folded into the softmax scale.
    macro_rules! take_scale {
        () => {
            if !V::TRANSFORMS_LOGITS {
                scale = of_products.map(|factor| factor_of_products(factor * of_logits));
            }
        };
    }
    macro_rules! issue_keys {
        ($logits:ident, $work:ident, $at:ident) => {
            mbarrier::wait(s.keys_full($at.stage), $at.parity);
            queries_keys::<S>(&mut $logits, $work.queries, s.keys($at.stage), dim, slab);
        };
    }
    // Q·Kᵀ of half a block is done: releases its keys, and turns the products into logits.
    macro_rules! logits_of_half {
        ($logits:ident, $work:ident, $begin:expr) => {
            wgmma::fence_operand(&mut $logits);
            release!(s.keys_free(k.stage));
            k.advance();
            let half = Work {
                begin: $work.begin + $begin,
                ..$work
            };
            logits_of_block!(
                p, variant, s, tiles.stage, half, rows_of_thread, of;
                $logits, half_keys, _shift, true, of_products
            );
        };
    }
    // Adds the products of some columns to their outputs.
    macro_rules! add {
        ($part:ident, $first:expr) => {
            let mut i = 0;
            while i < $part.len() && $first + i < O {
                o[$first + i] = fma($part[i], factor[i / 2 % 2], o[$first + i]);
                i += 1;
            }
            // Otherwise LLVM moves the additions behind the next branches, and each product needs registers of its own.
            wgmma::fence_operand(&mut o);
        };
    }
    // Waits for products with values; if they are the last, `$last` issues the next ones before their addition.
    macro_rules! finish {
        ($part:ident, $first:expr, $last:expr) => {
            wgmma::wait_group::<0>();
            wgmma::fence_operand(&mut $part);
            if $first + $part.len() >= O {
                wgmma::fence_operand(&mut weights);
                $last
            }
            add!($part, $first);
        };
    }
    macro_rules! weights_times_values {
        ($values:expr, $last:expr) => {
            weights_values(&mut part_a, &weights, $values, dim, 0);
            finish!(part_a, 0, $last);
            if A < O {
                weights_values(&mut part_b, &weights, $values, dim, 2 * A as u32);
                finish!(part_b, A, $last);
                weights_values(&mut part_c, &weights, $values, dim, 2 * (A + B) as u32);
                finish!(part_c, A + B, $last);
            }
        };
    }
    macro_rules! weigh {
        ($of_upper:ident, $of_lower:ident) => {
            let of_thread = [
                $of_upper[0].max($of_lower[0]),
                $of_upper[1].max($of_lower[1]),
            ];
            let to = state.refer(of_thread, scale);
            if let Some(others) = to.rescale {
                let mut i = 0;
                while i < O {
                    o[i] *= others[i / 2 % 2];
                    i += 1;
                }
            }
            values_there = mbarrier::test_wait(s.values_full(v.stage), v.parity);
            values_there = warp::warp_vote_all(WARP, values_there);
            state.weigh([&lower, &upper], scale, &to, &mut weights);
            factor = to.factor;
        };
    }

    // SAFETY: whole warpgroups; the full and free barriers order every access to a stage.
    unsafe {
        mbarrier::wait(s.queries_full(0, 0), 0);
        // A captured launch may have more CTAs than the current plan has tiles.
        if shared::load_u32(s.tile(0) + 8) == 0 {
            return;
        }
        let mut work = open!();
        if consumer == 1 {
            pass_turn!();
        }
        await_turn!();
        issue_keys!(upper, work, k);
        let mut next = k;
        next.advance();
        issue_keys!(lower, work, next);
        pass_turn!();
        wgmma::wait_group::<1>();
        logits_of_half!(upper, work, half_keys as i32);
        wgmma::wait_group::<0>();
        logits_of_half!(lower, work, 0);
        take_scale!();
        let (of_upper, of_lower) = (maxima(&upper), maxima(&lower));
        weigh!(of_upper, of_lower);
        work.begin -= keys;
        work.left -= 1;
        loop {
            let turn = all_agree!(work.left == 0);
            if turn {
                tiles.advance();
                mbarrier::wait(s.queries_full(tiles.stage, 0), tiles.parity);
                if shared::load_u32(s.tile(tiles.stage) + 8) == 0 {
                    break;
                }
                work = open!();
            }
            let first = v;
            if !values_there {
                mbarrier::wait(s.values_full(first.stage), first.parity);
            }
            v.advance();
            mbarrier::wait(s.values_full(v.stage), v.parity);
            // The lower half's values have arrived last; its weights come first.
            let values = [uniform(s.values(v.stage)), uniform(s.values(first.stage))];
            await_turn!();
            weights_times_values!(values, {
                issue_keys!(upper, work, k);
            });
            release!(s.values_free(first.stage));
            release!(s.values_free(v.stage));
            v.advance();
            let mut next = k;
            next.advance();
            issue_keys!(lower, work, next);
            pass_turn!();
            wgmma::wait_group::<1>();
            logits_of_half!(upper, work, half_keys as i32);
            let of_upper = maxima(&upper);
            wgmma::wait_group::<0>();
            logits_of_half!(lower, work, 0);
            if turn {
                finish_tile::<T, EXTRAS, true, O>(p, s, tiles.stage ^ 1, &o, &state.rows(), scale);
                o = [0.0; O];
                take_scale!();
                state = State::EMPTY;
            }
            let of_lower = maxima(&lower);
            weigh!(of_upper, of_lower);
            work.begin -= keys;
            work.left -= 1;
        }
        let first = v;
        mbarrier::wait(s.values_full(first.stage), first.parity);
        v.advance();
        mbarrier::wait(s.values_full(v.stage), v.parity);
        let values = [uniform(s.values(v.stage)), uniform(s.values(first.stage))];
        weights_times_values!(values, {});
        finish_tile::<T, EXTRAS, true, O>(p, s, tiles.stage ^ 1, &o, &state.rows(), scale);
        // The other consumer passed one turn more than this one took.
        if consumer == 0 {
            await_turn!();
        }
    }
}
