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
    common::half::Half,
    common::logits::{hide_after, hide_before, hide_strangers_from, lean, mask, transform},
    common::prefill_tile::Tile,
    common::variant::{Hook, Pair, Query, Variant},
};

const WARP: u32 = warp::FULL_MASK;
/// Named barriers: the second consumer has its first logits; all warps of a consumer have quantised their queries.
const STAGGER: u32 = 1;
const QUANTISED: [u32; 2] = [2, 3];
/// All these kernels support sinks and masks of the last keys.
const EXTRAS: bool = true;

/// Works through all tiles.
///
/// One step handles one block of keys. It issues the block's Q·Kᵀ, then P·V of the previous block, which may belong to
/// the previous tile. The maxima are computed while P·V runs. Then the weights are computed, interleaved with adding
/// the P·V result to the outputs: an exponential takes eight cycles, so those additions are free. Registers hold the
/// outputs, one product's result, one block's logits and one block's weights; with more, ptxas spills.
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
    const PART: usize,
    const Q: usize,
>(
    p: &PrefillParams,
    variant: &V,
    s: Shared,
) where
    [f32; S]: wgmma::Accumulator,
    [f32; PART]: wgmma::Accumulator,
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
    let dim = s.shape.head_dim;
    let slab = s.shape.slab_bytes();

    let mut tiles = Pipeline::<2>::CONSUMER;
    let mut k = Pipeline::<STAGES>::CONSUMER;
    let mut v = Pipeline::<VALUE_STAGES>::CONSUMER;
    const { assert!(!V::LINEAR, "weights take no shift here") };
    let mut _shift;
    let mut logits = [0.0; S];
    let mut weights = [0; P];
    let mut part = [0.0; PART];
    // Factors of the last block's P·V, and of the previous outputs where a row is rescaled.
    let mut factor;
    let mut rescale;
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
    // Opens the next tile: quantises its queries and releases the keys of leading blocks that its rows do not see.
    macro_rules! open {
        () => {{
            let work = Work::open::<V, EXTRAS>(p, variant, s, tiles.stage, consumer);
            // Opaque: otherwise derived values are computed before the main loop and occupy registers there.
            let first = misc::opaque(first_row);
            of_products = quantise::<T, Q>(s, tiles.stage, first);
            mbarrier::arrive(s.queries_rounded(tiles.stage));
            // Constants: with a computed barrier number ptxas reserves all 16 named barriers.
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
            let mut skipped = work.skipped;
            while all_agree!(skipped > 0) {
                mbarrier::wait(s.keys_full(k.stage), k.parity);
                release!(s.keys_free(k.stage));
                k.advance();
                skipped -= 1;
            }
            work
        }};
    }
    macro_rules! skip_values {
        ($work:ident) => {
            while all_agree!($work.skipped > 0) {
                mbarrier::wait(s.values_full(v.stage), v.parity);
                release!(s.values_free(v.stage));
                v.advance();
                $work.skipped -= 1;
            }
        };
    }
    // Without a transform the factors of queries and keys are folded into the softmax scale.
    macro_rules! take_scale {
        () => {
            if !V::TRANSFORMS_LOGITS {
                // Not 0: −∞ · 0 is NaN.
                scale = of_products.map(|factor| (factor * of_logits).max(f32::MIN_POSITIVE));
            }
        };
    }
    // Q·Kᵀ of a block is done: releases its keys. True for the tile's last block.
    macro_rules! keys_done {
        ($work:ident) => {{
            release!(s.keys_free(k.stage));
            k.advance();
            $work.left -= 1;
            all_agree!($work.left == 0)
        }};
    }
    // Turns products into logits and computes the reference of the block's weights.
    macro_rules! refer {
        ($work:ident) => {{
            logits_of_block!(
                p, variant, s, tiles.stage, $work, rows_of_thread, of;
                logits, s.shape.keys, _shift, true, of_products
            );
            $work.begin -= keys;
            state.refer(&logits, scale)
        }};
    }
    macro_rules! weigh {
        ($to:ident) => {
            state.weigh(&logits, scale, &$to, &mut weights);
            factor = $to.factor;
            rescale = $to.rescale;
        };
    }
    // Adds the P·V result to the outputs, with `$beside` in the same branch, so that its exponentials hide the
    // additions. `$beside` is in both branches: with a branch that only rescales ptxas keeps two sets of outputs and
    // copies them.
    macro_rules! add_part {
        ($beside:expr) => {
            let mut i = 0;
            if let Some(others) = rescale {
                while i < PART {
                    let h = i / 2 % 2;
                    o[i] = fma(part[i], factor[h], o[i] * others[h]);
                    i += 1;
                }
                $beside
            } else {
                while i < PART {
                    o[i] = fma(part[i], factor[i / 2 % 2], o[i]);
                    i += 1;
                }
                $beside
            }
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
        mbarrier::wait(s.keys_full(k.stage), k.parity);
        // Ping-pong, as in the 16-bit kernel: each consumer then computes weights during the other's products.
        if consumer == 0 {
            barrier::bar_sync(STAGGER, 256);
        }
        queries_keys::<S>(&mut logits, work.queries, s.keys(k.stage), dim, slab);
        wgmma::wait_group::<0>();
        wgmma::fence_operand(&mut logits);
        if consumer == 1 {
            barrier::bar_arrive(STAGGER, 256);
        }
        let mut turn = keys_done!(work);
        take_scale!();
        let to = refer!(work);
        weigh!(to);
        skip_values!(work);
        // Whether the next keys and values have arrived. Tested before the exponentials, which hide the 40 cycles of a
        // test.
        let (mut keys_there, mut values_there) = (false, false);
        loop {
            if turn {
                tiles.advance();
                mbarrier::wait(s.queries_full(tiles.stage, 0), tiles.parity);
                if shared::load_u32(s.tile(tiles.stage) + 8) == 0 {
                    break;
                }
                work = open!();
                keys_there = false;
            }
            if !keys_there {
                mbarrier::wait(s.keys_full(k.stage), k.parity);
            }
            queries_keys::<S>(&mut logits, work.queries, s.keys(k.stage), dim, slab);
            if !values_there {
                mbarrier::wait(s.values_full(v.stage), v.parity);
            }
            let values = uniform(s.values(v.stage));
            weights_values::<PART, P>(&mut part, &weights, values, dim, 0);
            wgmma::wait_group::<1>();
            wgmma::fence_operand(&mut logits);
            let ended = turn;
            let (rows, old_scale) = (state.rows(), scale);
            if ended {
                take_scale!();
                state = State::EMPTY;
            }
            turn = keys_done!(work);
            let to = refer!(work);
            wgmma::wait_group::<0>();
            wgmma::fence_operand(&mut part);
            wgmma::fence_operand(&mut weights);
            release!(s.values_free(v.stage));
            v.advance();
            keys_there = mbarrier::test_wait(s.keys_full(k.stage), k.parity);
            keys_there = warp::warp_vote_all(WARP, keys_there);
            values_there = mbarrier::test_wait(s.values_full(v.stage), v.parity);
            values_there = warp::warp_vote_all(WARP, values_there);
            add_part!({
                weigh!(to);
            });
            if ended {
                finish_tile::<T, EXTRAS, true, O>(p, s, tiles.stage ^ 1, &o, &rows, old_scale);
                o = [0.0; O];
                skip_values!(work);
                values_there = false;
            }
        }
        mbarrier::wait(s.values_full(v.stage), v.parity);
        weights_values::<PART, P>(&mut part, &weights, s.values(v.stage), dim, 0);
        wgmma::wait_group::<0>();
        wgmma::fence_operand(&mut part);
        add_part!({});
        finish_tile::<T, EXTRAS, true, O>(p, s, tiles.stage ^ 1, &o, &state.rows(), scale);
    }
}
