//! The main loop of the consumer warpgroup.

use cuda_std::{
    barrier, fence, mbarrier, misc, shared, thread, warp,
    wgmma::{self, Accumulator},
};

use super::{
    super::super::{pipeline::Pipeline, uniform},
    config::{Config, SCALE_STAGES},
    epilogue::finish,
    products::{Tile, at, keys_queries, row_of, values_weights},
    products_8,
    scales::take_scales,
    shared::{CONSUMERS, Shared, THREADS, Unit},
    softmax::{Softmax, hide, largest, rescale},
};
use crate::{
    abi::DecodeParams,
    common::{softmax::SLACK, variant::Variant},
};

/// Works through all units: blocks of `KEYS` · 64 keys, head dimension `SLABS` · 64, and `N` elements of an accumulator
/// and `COLUMNS` rows in a thread.
///
/// # Safety
/// Whole warps come here, all consumers of the CTA; the barriers are initialised.
#[inline(always)]
pub(super) unsafe fn consume<
    C: Config,
    V: Variant,
    const STAGES: u32,
    const VALUE_STAGES: u32,
    const KEYS: usize,
    const SLABS: usize,
    const N: usize,
    const COLUMNS: usize,
>(
    p: &DecodeParams,
    variant: &V,
    s: Shared,
) where
    Tile<N>: Accumulator,
{
    const { assert!(!V::TRANSFORMS_LOGITS && !V::MASKS) };
    let lane = warp::lane_id();
    // SAFETY: whole warps here and in everything below.
    let warp = unsafe { uniform(thread::thread_idx_x() / 32) } - 4;
    let keys = const { C::SHAPE.keys as i32 };
    let my_weights = (warp * 16 + lane / 4) * 16 + lane % 4 * 4;
    let (my_keys, my_values) = (
        products_8::keys_of(warp, lane),
        products_8::values_of(warp, lane),
    );
    let mut turns = products_8::Turns::NONE;
    let mut slots = Pipeline::<2>::CONSUMER;
    let mut k = Pipeline::<STAGES>::CONSUMER;
    let mut v = Pipeline::<VALUE_STAGES>::CONSUMER;
    let mut scales = Pipeline::<SCALE_STAGES>::CONSUMER;
    let mut parity = 0;

    // The tensor cores have read 16-bit stages for the whole warp; each lane has read 8-bit ones for itself.
    macro_rules! release {
        ($barrier:expr) => {
            if C::SHAPE.scaled() || lane == 0 {
                mbarrier::arrive($barrier);
            }
        };
    }

    // SAFETY: the full and free barriers order every access to a stage.
    unsafe {
        loop {
            let slot = slots.stage;
            mbarrier::wait(s.queries_full(slot), slots.parity);
            let unit = Unit::load(s.unit(slot));
            if unit.tokens == 0 {
                return;
            }
            let (_, least) = variant.visible_keys(unit.position);
            let least = p.attention.seen_by_all(least, unit.position);
            // Only the smallest position is known: with a window, no key is sure to be seen by all rows.
            let all_from = if variant.params().window_left == i32::MAX {
                unit.kv_begin as i32
            } else {
                i32::MAX
            };
            let all_to = least.min(unit.kv_end as i32 - 1);
            let scale = variant.params().scale_log2;
            let mut scale = [scale; COLUMNS];
            let mut column = 0;
            while C::SHAPE.scaled() && column < COLUMNS {
                let factors = shared::load_f32x2(s.factors(slot, 0, row_of(lane, column)));
                scale[column] *= factors[0];
                scale[column + 1] *= factors[1];
                column += 2;
            }
            let mut softmax = Softmax::<COLUMNS>::EMPTY;
            let mut logits: [Tile<N>; KEYS] = [[0.0; N]; KEYS];
            let mut o: [Tile<N>; SLABS] = [[0.0; N]; SLABS];
            let mut begin = unit.end as i32;
            let mut left = uniform(unit.blocks);
            let blocks = left;
            while left > 0 {
                begin -= keys;
                mbarrier::wait(s.keys_full(k.stage), k.parity);
                if C::SHAPE.scaled() {
                    let keys = s.keys(k.stage) + my_keys;
                    products_8::keys_queries(&mut turns, &mut logits, keys, s.queries(slot));
                    release!(s.keys_free(k.stage));
                    k.advance();
                } else {
                    keys_queries::<C, KEYS, N>(
                        &mut logits,
                        uniform(s.keys(k.stage)),
                        s.queries(slot),
                    );
                }
                // P·V of the previous block runs together with Q·Kᵀ of this one; the first block has none before it.
                let second = left < blocks;
                if second {
                    mbarrier::wait(s.values_full(v.stage), v.parity);
                    let weights = uniform(s.weights(parity ^ 1));
                    if C::SHAPE.scaled() {
                        let values = s.values(v.stage) + my_values;
                        products_8::values_weights::<KEYS, SLABS, N>(
                            &mut turns, &mut o, values, weights,
                        );
                        release!(s.values_free(v.stage));
                        v.advance();
                        wgmma::wait_group::<{ products_8::UNDER_WAY }>();
                    } else {
                        values_weights::<C, SLABS, N>(&mut o, uniform(s.values(v.stage)), weights);
                        wgmma::wait_group::<1>();
                    }
                } else {
                    wgmma::wait_group::<0>();
                }
                fence_all(&mut logits);
                if !C::SHAPE.scaled() {
                    release!(s.keys_free(k.stage));
                    k.advance();
                }
                let mut tile = 0;
                while tile < KEYS {
                    let mut column = 0;
                    while column < COLUMNS {
                        logits[tile][at(0, column)] *= scale[column];
                        logits[tile][at(1, column)] *= scale[column];
                        column += 1;
                    }
                    tile += 1;
                }
                let masked = begin + keys - 1 > all_to || begin < all_from;
                let mut inverses = [[1.0; 2]; KEYS];
                if C::SHAPE.by_token {
                    mbarrier::wait(s.scales_full(scales.stage), scales.parity);
                    let at = s.scales(scales.stage);
                    let mine = warp * 16 + lane / 4;
                    inverses = take_scales(s, &unit, &mut logits, at, mine, begin, masked);
                    mbarrier::arrive(s.scales_free(scales.stage));
                    scales.advance();
                }
                if masked {
                    hide(p, variant, s, slot, &unit, &mut logits, begin, lane, warp);
                }
                let most: [f32; COLUMNS] = largest(&logits);
                let mut grew = false;
                column = 0;
                while column < COLUMNS {
                    grew |= most[column] > softmax.reference[column] + SLACK;
                    column += 1;
                }
                let target = s.weights(parity) + my_weights;
                let mut sums = softmax.weigh::<C::Product, KEYS, N>(&logits, &inverses, target);
                wgmma::wait_group::<0>();
                fence_all(&mut o);
                if C::SHAPE.scaled() {
                    turns.keep();
                }
                if second && !C::SHAPE.scaled() {
                    release!(s.values_free(v.stage));
                    v.advance();
                }
                fence::proxy_async_shared();
                if barrier::bar_any(CONSUMERS, THREADS, grew) {
                    rescale(s, &mut softmax, &mut o, most, lane, warp);
                    sums = softmax.weigh::<C::Product, KEYS, N>(&logits, &inverses, target);
                    fence::proxy_async_shared();
                    barrier::bar_sync(CONSUMERS, THREADS);
                }
                column = 0;
                while column < COLUMNS {
                    softmax.sum[column] += sums[column];
                    column += 1;
                }
                parity ^= 1;
                left -= 1;
            }
            mbarrier::wait(s.values_full(v.stage), v.parity);
            let weights = uniform(s.weights(parity ^ 1));
            if C::SHAPE.scaled() {
                let values = s.values(v.stage) + my_values;
                products_8::values_weights::<KEYS, SLABS, N>(&mut turns, &mut o, values, weights);
            } else {
                values_weights::<C, SLABS, N>(&mut o, uniform(s.values(v.stage)), weights);
            }
            wgmma::wait_group::<0>();
            fence_all(&mut o);
            if C::SHAPE.scaled() {
                turns.keep();
            }
            release!(s.values_free(v.stage));
            v.advance();
            finish::<C::Half, SLABS, N, COLUMNS>(
                p,
                s,
                slot,
                &unit,
                &o,
                &softmax,
                misc::opaque(lane),
                misc::opaque(warp),
            );
            slots.advance();
        }
    }
}

/// Keeps the compiler from moving reads of the accumulators before this point.
#[inline(always)]
fn fence_all<const TILES: usize, const N: usize>(tiles: &mut [Tile<N>; TILES]) {
    let mut tile = 0;
    while tile < TILES {
        wgmma::fence_operand(&mut tiles[tile]);
        tile += 1;
    }
}
