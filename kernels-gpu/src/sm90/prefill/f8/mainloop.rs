//! The warpgroups that compute.

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
    pages::image_bytes,
    weights::State,
};
use crate::{
    abi::{ConvertedPage, PrefillParams},
    common::half::Half,
    common::prefill_tile::Tile,
    common::softmax::{hide_after, hide_before, hide_strangers_from, lean, mask, transform},
    common::variant::{Pair, Query, Variant},
};

const WARP: u32 = warp::FULL_MASK;
/// Named barriers: the second consumer has its first logits; the warps of a consumer have their queries.
const STAGGER: u32 = 1;
const QUANTISED: [u32; 3] = [2, 3, 4];
/// All kernels take sinks and masks of the last keys.
const EXTRAS: bool = true;

/// Works through all tiles.
///
/// One step is half a block of keys. P·V of the half before it is issued for the first columns, and behind it Q·Kᵀ;
/// then P·V for the last columns, in the same registers. What they left is added to the outputs, and weights are
/// computed beside the products of the other warpgroups. So there are outputs, half a product's part of them and one
/// half block's logits, and registers suffice for three warpgroups.
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
        variant.params().scale_log2
    };
    // Of a thread's rows, in the tile at hand; and what products with keys are multiplied by to be those of the
    // cache, in the tile that is opened.
    let mut scale = [of_logits; 2];
    let mut of_products;
    // Whose they are; of no use without a transform or a mask.
    let nobody = Query {
        token: 0,
        head: 0,
        position: 0,
    };
    let mut of = [Pair::new(variant, nobody, 0); 2];
    const PIECE: u32 = ConvertedPage::KEYS;
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
    // Put to a vote, or the compiler does not know that all lanes agree.
    macro_rules! all_agree {
        ($condition:expr) => {
            warp::warp_vote_any(WARP, $condition)
        };
    }
    // The next tile: its queries in 8 bits, and the keys of its blocks that these rows do not see.
    macro_rules! open {
        () => {{
            let mut work = Work::open::<V, EXTRAS>(p, variant, s, tiles.stage, consumer);
            work.begin += (s.shape.keys - PIECE) as i32;
            // Opaque: or what follows from it is computed before the main loop and takes its registers.
            let first = misc::opaque(first_row);
            of_products = quantise::<T, Q>(s, tiles.stage, first);
            // Constants: of a number that is computed ptxas counts all sixteen.
            match consumer {
                0 => barrier::bar_sync(QUANTISED[0], 128),
                1 => barrier::bar_sync(QUANTISED[1], 128),
                _ => barrier::bar_sync(QUANTISED[2], 128),
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
    // Logits without a transform take the factors with their scale.
    macro_rules! take_scale {
        () => {
            if !V::TRANSFORMS_LOGITS {
                // Never so small that −∞ times it is no number.
                scale = of_products.map(|factor| (factor * of_logits).max(f32::MIN_POSITIVE));
            }
        };
    }
    // Q·Kᵀ of a half of the block at hand.
    macro_rules! multiply {
        ($work:ident, $half:literal) => {
            let keys = s.keys(k.stage) + $half * image_bytes(dim);
            queries_keys::<S>(&mut logits, $work.queries, keys, dim, slab);
        };
    }
    // What P·V left of the first or the last columns. A branch of its own rescales: with one that does nothing else
    // ptxas has outputs in two sets of registers, and copies them.
    macro_rules! add_part {
        ($half:literal) => {
            let mut i = 0;
            if let Some(others) = rescale {
                while i < PART {
                    let (at, h) = ($half * PART + i, i / 2 % 2);
                    o[at] = fma(part[i], factor[h], o[at] * others[h]);
                    i += 1;
                }
            } else {
                while i < PART {
                    let at = $half * PART + i;
                    o[at] = fma(part[i], factor[i / 2 % 2], o[at]);
                    i += 1;
                }
            }
        };
    }
    // P·V of a half of the block at hand, for the first and the last columns.
    macro_rules! first_columns {
        ($half:literal) => {
            let values = s.values(v.stage) + $half * image_bytes(dim);
            weights_values::<PART, P>(&mut part, &weights, values);
        };
    }
    macro_rules! last_columns {
        ($half:literal) => {
            let values = s.values(v.stage) + $half * image_bytes(dim) + image_bytes(dim) / 2;
            weights_values::<PART, P>(&mut part, &weights, values);
        };
    }
    // From products to weights.
    macro_rules! weigh {
        ($work:ident) => {
            logits_of_block!(
                p, variant, s, tiles.stage, $work, rows_of_thread, of;
                logits, PIECE, _shift, true, of_products
            );
            $work.begin -= PIECE as i32;
            let to = state.refer(&logits, scale);
            rescale = to.rescale;
            factor = to.factor;
            state.weigh(&logits, scale, &to, &mut weights);
        };
    }
    // Behind P·V of the first columns and Q·Kᵀ: P·V of the last ones.
    macro_rules! add {
        ($half:literal) => {
            wgmma::wait_group::<1>();
            wgmma::fence_operand(&mut part);
            add_part!(0);
            last_columns!($half);
            wgmma::wait_group::<0>();
            wgmma::fence_operand(&mut logits);
            wgmma::fence_operand(&mut part);
            wgmma::fence_operand(&mut weights);
            add_part!(1);
        };
    }

    // SAFETY: whole warpgroups; the barriers say what has arrived and what may be written again.
    unsafe {
        mbarrier::wait(s.queries_full(0), 0);
        // A captured launch may have more CTAs than the plan at hand has units.
        if shared::load_u32(s.tile(0) + 8) == 0 {
            return;
        }
        let mut work = open!();
        mbarrier::wait(s.keys_full(k.stage), k.parity);
        // As in the kernel of 16 bits: each then computes weights beside the other's products.
        let staggered = s.shape.consumers == 2;
        if staggered && consumer == 0 {
            barrier::bar_sync(STAGGER, 256);
        }
        multiply!(work, 1);
        wgmma::wait_group::<0>();
        wgmma::fence_operand(&mut logits);
        if staggered && consumer == 1 {
            barrier::bar_arrive(STAGGER, 256);
        }
        take_scale!();
        weigh!(work);
        skip_values!(work);
        loop {
            // The second half of the block at hand.
            mbarrier::wait(s.values_full(v.stage), v.parity);
            first_columns!(1);
            multiply!(work, 0);
            add!(1);
            release!(s.keys_free(k.stage));
            k.advance();
            weigh!(work);

            // The first half of the next block, which may be the first of a tile.
            work.left -= 1;
            let turn = all_agree!(work.left == 0);
            if turn {
                tiles.advance();
                mbarrier::wait(s.queries_full(tiles.stage), tiles.parity);
                if shared::load_u32(s.tile(tiles.stage) + 8) == 0 {
                    break;
                }
                work = open!();
            }
            mbarrier::wait(s.keys_full(k.stage), k.parity);
            first_columns!(0);
            multiply!(work, 1);
            add!(0);
            release!(s.values_free(v.stage));
            v.advance();
            if turn {
                finish_tile::<T, EXTRAS, true, O>(p, s, tiles.stage ^ 1, &o, &state.rows(), scale);
                take_scale!();
                o = [0.0; O];
                state = State::EMPTY;
                skip_values!(work);
            }
            weigh!(work);
        }
        first_columns!(0);
        wgmma::wait_group::<0>();
        wgmma::fence_operand(&mut part);
        add_part!(0);
        last_columns!(0);
        wgmma::wait_group::<0>();
        wgmma::fence_operand(&mut part);
        add_part!(1);
        finish_tile::<T, EXTRAS, true, O>(p, s, tiles.stage ^ 1, &o, &state.rows(), scale);
    }
}
