//! The consumer warpgroups: the order of products, masks, softmax and rescaling.

use cuda_std::{barrier, mbarrier, misc, prelude::*, wgmma};

use super::{
    super::{
        mma::{queries_keys, queries_keys_with_bias, slopes, weights_values},
        pipeline::Pipeline,
        uniform,
    },
    epilogue::{finish_tile, scales_of_row},
    shared::Shared,
    turn::{turn_queries, turns_queries},
    work::{Work, logits_of_block},
};
use crate::{
    abi::PrefillParams,
    common::cache::factor_of_products,
    common::half::Half,
    common::logits::{
        bias_of_first, hide_after, hide_before, hide_masked, lean, mask, transform, transform_fours,
    },
    common::prefill_tile::Tile,
    common::softmax::{Rows, largest_sum, weights_as_they_are},
    common::variant::{Hook, Pair, Query, Variant},
};

const WARP: u32 = warp::FULL_MASK;
/// Named barrier of two consumers: the second one has its first logits.
const STAGGER: u32 = 1;

/// Works through all tiles.
///
/// One step (`step!`) handles one block of keys. Its Q·Kᵀ is issued together with P·V of the previous block, whose
/// weights are in registers. While the tensor cores run P·V, the weights of this block are computed into a second set
/// of registers. A tile's last P·V and the next tile's first block are one turn (`turn!`). `turns`, a constant of the
/// kernel, says whether rotary embeddings may have to be applied to queries.
///
/// # Safety
/// Whole warpgroups come here, all consumers of the CTA; the barriers are initialised.
#[inline(always)]
pub(super) unsafe fn consume<
    T: Half,
    V: Variant,
    const EXTRAS: bool,
    const SCALED: bool,
    const STAGES: u32,
    const VALUE_STAGES: u32,
    const S: usize,
    const P: usize,
    const O: usize,
>(
    p: &PrefillParams,
    variant: &V,
    s: Shared,
    turns: bool,
) where
    [f32; S]: wgmma::Accumulator,
    [f32; O]: wgmma::Accumulator,
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
    // Per row of the thread: the softmax scale, of the current tile; and the factor of its 8-bit keys' scales, of the
    // tile being opened.
    let mut scale = [of_logits; 2];
    let mut of_products = [1.0; 2];
    // The queries of the rows; used only by variants with a transform or a mask.
    let nobody = Query {
        token: 0,
        head: 0,
        position: 0,
    };
    let mut of = [Pair::new(variant, nobody, 0); 2];
    // Whether products add the bias of a linear variant, and the slopes of the thread's rows for that.
    let multiplies_bias = V::LINEAR && !SCALED && s.shape.multiplies_bias();
    let mut of_bias = [0; 4];
    let keys = s.shape.keys as i32;
    let dim = s.shape.head_dim;
    let (key_slabs, value_slabs) = (s.shape.slabs(false), s.shape.slabs(true));
    let slab = s.shape.slab_bytes();
    let two_weights = s.shape.two_weights();

    let mut tiles = Pipeline::<2>::CONSUMER;
    let mut k = Pipeline::<STAGES>::CONSUMER;
    let mut v = Pipeline::<VALUE_STAGES>::CONSUMER;
    let mut shift = None;
    let mut logits = [0.0; S];
    let mut weights = [0; P];
    let mut other_weights = [0; P];
    let mut o;
    let mut rows;
    // For this many tiles, the current one included, the warp computes maxima before weights. Once a row has exceeded
    // its reference others are likely to: until the end of the next tile no weights are then computed twice.
    let mut maxima_first = 0_u32;

    macro_rules! release {
        ($barrier:expr) => {
            if lane == 0 {
                mbarrier::arrive($barrier);
            }
        };
    }
    // A vote on conditions that are the same in all lanes. It tells the compiler that they, and what depends on them,
    // are uniform: wgmma takes its descriptors from uniform registers.
    macro_rules! all_agree {
        ($condition:expr) => {
            warp::warp_vote_any(WARP, $condition)
        };
    }
    // Recomputes `consumer`, to save a register in the main loop.
    macro_rules! consumer_anew {
        () => {
            uniform(misc::opaque(thread::thread_idx_x()) / 128 - 1)
        };
    }
    // Reads the next tile and releases the keys of its leading blocks that this warpgroup's rows do not see.
    macro_rules! open {
        () => {{
            let consumer = consumer_anew!();
            let work = Work::open::<V, EXTRAS, true>(p, variant, s, tiles.stage, consumer);
            // Opaque: otherwise ptxas spills in the producer warps.
            if turns && misc::opaque_u64(p.rotary.turns) != 0 {
                turn_queries::<T>(p, s, tiles.stage, first_row);
            }
            if SCALED && p.attention.scales.k != 0 {
                let tile = Tile::load(s.tile(tiles.stage));
                // Opaque: otherwise it is computed before the main loop and occupies registers there.
                let first = misc::opaque(first_row) + lane / 4;
                of_products = [first, first + 8].map(|row| scales_of_row(p, &tile, row)[0]);
            }
            if V::TRANSFORMS_LOGITS || V::MASKS {
                let tile = Tile::load(s.tile(tiles.stage));
                of = rows_of_thread.map(|row| tile.query(&p.pack, variant, row));
                if multiplies_bias {
                    of_bias = slopes(of.map(|of| -of.of_row));
                    // Otherwise its zeros are constants, in registers that have other uses while a product reads them.
                    wgmma::fence_operand(&mut of_bias);
                }
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
    macro_rules! finish_logits {
        ($work:ident) => {
            logits_of_block!(
                p, variant, s, tiles.stage, $work, rows_of_thread, of;
                logits, s.shape.keys, shift, SCALED && p.attention.scales.k != 0, of_products,
                mixes V::MIXES_KEYS, multiplied multiplies_bias
            );
        };
    }
    // Without a transform the factor of the keys' scales is folded into the softmax scale.
    macro_rules! take_scale {
        () => {
            if SCALED && !V::TRANSFORMS_LOGITS {
                scale = of_products.map(|factor| factor_of_products(factor * of_logits));
            }
        };
    }
    macro_rules! issue_keys {
        ($work:ident) => {
            if multiplies_bias {
                queries_keys_with_bias::<T, S>(
                    &mut logits,
                    (of_bias, s.columns()),
                    $work.queries,
                    s.keys(k.stage),
                    dim,
                    slab,
                    key_slabs,
                );
            } else {
                queries_keys::<T, S>(
                    &mut logits,
                    $work.queries,
                    s.keys(k.stage),
                    dim,
                    slab,
                    key_slabs,
                );
            }
        };
    }
    // Q·Kᵀ of a block is done: releases its keys. True for the tile's last block, whose queries are then released too.
    macro_rules! keys_done {
        ($work:ident) => {{
            if multiplies_bias {
                wgmma::fence_operand(&mut of_bias);
            }
            release!(s.keys_free(k.stage));
            k.advance();
            $work.left -= 1;
            let last = all_agree!($work.left == 0);
            if s.shape.query_stages == 1 && last {
                release!(s.queries_free(consumer));
            }
            last
        }};
    }
    macro_rules! values_there {
        ($now:ident) => {
            wgmma::wait_group::<0>();
            wgmma::fence_operand(&mut o);
            wgmma::fence_operand(&mut $now);
        };
    }
    // Weights of a tile's first block: the rows have no references yet, so maxima come first.
    macro_rules! first_weights {
        ($work:ident, $next:ident) => {
            take_scale!();
            finish_logits!($work);
            if V::SOFTMAX {
                rows.rescale_late::<T, _>(&logits, shift, scale);
                let sums = rows.weigh_seen(&logits, shift, scale, &mut $next, T::pack);
                rows.add(&sums);
            } else {
                weights_as_they_are(&logits, &mut $next, T::pack);
            }
            $work.begin -= keys;
        };
    }
    // One block: `$now` holds the weights of the previous block, `$next` receives those of this one. True for the
    // tile's last block.
    macro_rules! step {
        ($work:ident, $now:ident, $next:ident) => {{
            let values = uniform(s.values(v.stage));
            mbarrier::wait(s.keys_full(k.stage), k.parity);
            issue_keys!($work);
            mbarrier::wait(s.values_full(v.stage), v.parity);
            weights_values::<T, O, P>(&mut o, &$now, values, value_slabs);
            wgmma::wait_group::<1>();
            wgmma::fence_operand(&mut logits);
            let last_of_tile = keys_done!($work);
            finish_logits!($work);
            $work.begin -= keys;

            // Weights relative to the old references; their sums tell whether those are still large enough. With two
            // sets of weights the wait for P·V comes after the weights. ptxas hoists that wait as far as it can, but
            // not over a branch: hence the branch around the weights.
            if !two_weights {
                values_there!($now);
            }
            let mut sums = [0.0; 4];
            let mut factors = [1.0; 2];
            let mut needs_rescale = false;
            if !V::SOFTMAX {
                weights_as_they_are(&logits, &mut $next, T::pack);
            } else {
                let mut good = false;
                if all_agree!(maxima_first == 0) {
                    sums = rows.weigh_with_stale_max(&logits, shift, scale, &mut $next, T::pack);
                    good = !all_agree!(Rows::needs_rescale(&sums, largest_sum::<T>()));
                }
                // This overlaps with P·V as well: it does not touch the accumulator.
                if !good {
                    (factors, needs_rescale) = rows.rescale_late::<T, _>(&logits, shift, scale);
                    needs_rescale = all_agree!(needs_rescale);
                    sums = rows.weigh_seen(&logits, shift, scale, &mut $next, T::pack);
                }
            }
            if two_weights {
                values_there!($now);
            }
            release!(s.values_free(v.stage));
            v.advance();
            if needs_rescale {
                maxima_first = 2;
                let mut i = 0;
                while i < O {
                    o[i] *= factors[i / 2 % 2];
                    i += 1;
                }
            }
            if V::SOFTMAX {
                rows.add(&sums);
            }
            last_of_tile
        }};
    }
    // Rows of the tile; 0 means that no tile is left.
    macro_rules! rows_of_tile {
        () => {
            shared::load_u32(s.tile(tiles.stage) + 8)
        };
    }
    // Whether the tile has no rows for this warpgroup, or no tile is left. A prompt's last tile may have few rows.
    macro_rules! is_idle {
        () => {
            rows_of_tile!() <= 64 * consumer_anew!()
        };
    }
    // A tile without rows for this warpgroup: arrives at every barrier of its blocks, without computing.
    macro_rules! pass {
        () => {{
            if s.shape.query_stages == 1 {
                release!(s.queries_free(consumer));
            }
            let mut blocks = Tile::load(s.tile(tiles.stage)).blocks;
            while all_agree!(blocks > 0) {
                mbarrier::wait(s.keys_full(k.stage), k.parity);
                release!(s.keys_free(k.stage));
                k.advance();
                mbarrier::wait(s.values_full(v.stage), v.parity);
                release!(s.values_free(v.stage));
                v.advance();
                blocks -= 1;
            }
            mbarrier::arrive(s.tile_free(tiles.stage));
            if lane == 0 || turns_queries::<EXTRAS>(p, s) {
                mbarrier::arrive(s.output_full(tiles.stage));
            }
            tiles.advance();
            mbarrier::wait(s.queries_full(tiles.stage, consumer), tiles.parity);
        }};
    }
    // The last P·V of the previous tile is done: releases its values and runs the epilogue.
    macro_rules! finish {
        () => {
            release!(s.values_free(v.stage));
            v.advance();
            finish_tile::<T, EXTRAS, SCALED, O>(p, s, tiles.stage ^ 1, &o, &rows, scale);
        };
    }

    // A tile's end and the next tile's first block. The last P·V overlaps with opening the next tile, the epilogue with
    // the next tile's first Q·Kᵀ. `$leave` runs where the next tile has no rows for this warpgroup, or no tile is left.
    macro_rules! turn {
        ($work:ident, $now:ident, $next:ident, $leave:expr) => {{
            let values = uniform(s.values(v.stage));
            mbarrier::wait(s.values_full(v.stage), v.parity);
            weights_values::<T, O, P>(&mut o, &$now, values, value_slabs);
            tiles.advance();
            maxima_first = maxima_first.saturating_sub(1);
            mbarrier::wait(s.queries_full(tiles.stage, consumer), tiles.parity);
            if is_idle!() {
                $leave;
            }
            $work = open!();
            mbarrier::wait(s.keys_full(k.stage), k.parity);
            values_there!($now);
            issue_keys!($work);
            finish!();
            wgmma::wait_group::<0>();
            wgmma::fence_operand(&mut logits);
            let last_of_tile = keys_done!($work);
            o = [0.0; O];
            rows = Rows::begin::<V>();
            first_weights!($work, $next);
            skip_values!($work);
            last_of_tile
        }};
    }

    // SAFETY: whole warpgroups; the full and free barriers order every access to a stage.
    unsafe {
        mbarrier::wait(s.queries_full(0, consumer), 0);
        // A captured launch may have more CTAs than the current plan has tiles.
        if rows_of_tile!() == 0 {
            return;
        }
        // Ping-pong of two consumers: once, the first waits until the second has its first logits. From then on each
        // computes weights during the other's products. If both start together they may stay in step for a whole tile,
        // which costs 25 %. No deadlock: the second skips no more blocks than the first, so the blocks it needs arrive
        // while the first still waits. For the same reason the second computes a first tile even without rows of its
        // own, instead of passing it.
        let mut staggers = s.shape.consumers == 2 && !s.shape.co_resident;
        loop {
            let mut work = open!();
            mbarrier::wait(s.keys_full(k.stage), k.parity);
            if staggers && consumer == 0 {
                barrier::bar_sync(STAGGER, 256);
            }
            issue_keys!(work);
            wgmma::wait_group::<0>();
            wgmma::fence_operand(&mut logits);
            if staggers && consumer == 1 {
                barrier::bar_arrive(STAGGER, 256);
            }
            staggers = false;
            let mut last = keys_done!(work);
            o = [0.0; O];
            rows = Rows::begin::<V>();
            first_weights!(work, weights);
            skip_values!(work);
            if two_weights {
                'tiles: loop {
                    last = if last {
                        turn!(work, weights, other_weights, break 'tiles)
                    } else {
                        step!(work, weights, other_weights)
                    };
                    last = if last {
                        turn!(work, other_weights, weights, break 'tiles)
                    } else {
                        step!(work, other_weights, weights)
                    };
                }
            } else {
                'tiles: loop {
                    last = if last {
                        turn!(work, weights, weights, break 'tiles)
                    } else {
                        step!(work, weights, weights)
                    };
                }
            }
            values_there!(weights);
            values_there!(other_weights);
            finish!();
            while all_agree!(is_idle!()) {
                if rows_of_tile!() == 0 {
                    return;
                }
                pass!();
            }
        }
    }
}
