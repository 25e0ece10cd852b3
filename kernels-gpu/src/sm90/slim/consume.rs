//! The warpgroup that computes: transposed products, weights, and the end of a unit.

use cuda_std::{
    barrier, fence,
    math::{lg2, rcp},
    mbarrier, misc, shared, thread, warp,
    wgmma::{self, Descriptor, Swizzle},
};

use super::{
    super::{products::Dtype, ring::Ring, uniform},
    SHAPE,
    shared::{Shared, Unit},
    state_pitch,
};
use crate::{
    abi::DecodeParams,
    decode::{half::Half, results::Results},
    math::exp2,
    state::State,
    variant::{Pair, Variant},
};

const WARP: u32 = warp::FULL_MASK;

/// The named barrier of the consumers, and how many they are.
const CONSUMERS: u32 = 1;
const THREADS: u32 = 128;

/// How much larger than the reference a logit may grow before the accumulators are rescaled, in base 2.
/// Weights stay below 2⁸ then, which costs no precision in 16-bit floats and saves nearly all rescaling.
const SLACK: f32 = 8.0;

// ---- Shared memory behind that of the feeders -------------------------------------------------------

/// The weights of a block, one of two: 8 rows of each key after the other, 16 bytes.
#[inline(always)]
fn weights(s: Shared, parity: u32) -> u32 {
    s.base + SHAPE.shared_bytes().next_multiple_of(16) + parity * SHAPE.rows * SHAPE.keys * 2
}

/// The accumulated output of a unit's rows.
#[inline(always)]
fn state(s: Shared) -> u32 {
    weights(s, 2)
}

/// A number that a warp tells the others of a row: the largest logit of a block, or the sum of weights.
#[inline(always)]
fn told(s: Shared, warp: u32, row: u32) -> u32 {
    state(s) + SHAPE.rows * state_pitch(&SHAPE) * 4 + (warp * SHAPE.rows + row) * 4
}

// ---- Products ---------------------------------------------------------------------------------------

/// Sᵀ = K·Qᵀ of a block of 64 keys, issued.
#[inline(always)]
unsafe fn keys_queries<T: Dtype, const S: usize>(logits: &mut [f32; S], keys: u32, queries: u32)
where
    [f32; S]: wgmma::Accumulator,
{
    // Both K-major in slabs of 64 columns: those of 8 keys follow each other, those of all queries do.
    let k = Descriptor::new(keys, 16, 8 * SHAPE.head_dim * 2, Swizzle::B128);
    let q = Descriptor::new(queries, 16, 1024, Swizzle::B128);
    // SAFETY: the barriers of both operands completed; the accumulator is waited for.
    unsafe {
        wgmma::fence();
        wgmma::mma_ss::<T, false, false, false, _>(logits, k, q);
        let mut step = 1;
        while step < SHAPE.head_dim / 16 {
            let (slab, inner) = (step / 4, step % 4 * 32);
            wgmma::mma_ss::<T, true, false, false, _>(
                logits,
                k.advance(slab * 1024 + inner),
                q.advance(slab * SHAPE.rows * 128 + inner),
            );
            step += 1;
        }
        wgmma::commit_group();
    }
}

/// Oᵀ += Vᵀ·Pᵀ of a block, issued: 64 elements of the head for each accumulator.
#[inline(always)]
unsafe fn values_weights<T: Dtype, const S: usize>(o: &mut [[f32; S]; 2], values: u32, weights: u32)
where
    [f32; S]: wgmma::Accumulator,
{
    let group = 8 * SHAPE.head_dim * 2;
    let v = Descriptor::new(values, 1024, group, Swizzle::B128);
    // Not swizzled: core matrices of 8 keys × 8 rows, one after the other along the keys.
    let p = Descriptor::new(weights, 128, 128, Swizzle::None);
    // SAFETY: values and weights are there; the accumulators are waited for.
    unsafe {
        wgmma::fence();
        let mut step = 0;
        while step < SHAPE.keys / 16 {
            let mut slab = 0;
            while slab < 2 {
                wgmma::mma_ss::<T, true, true, true, _>(
                    &mut o[slab],
                    v.advance(step * 2 * group + slab as u32 * 1024),
                    p.advance(step * 256),
                );
                slab += 1;
            }
            step += 1;
        }
        wgmma::commit_group();
    }
}

// ---- A block's weights ------------------------------------------------------------------------------

/// Two columns of a thread: rows `2·(lane % 4)` and the next.
struct Softmax {
    /// What weights are relative to, in base 2; −∞ while no key was visible.
    reference: [f32; 2],
    /// Of the weights of this thread's keys.
    sum: [f32; 2],
}

impl Softmax {
    const EMPTY: Self = Self {
        reference: [f32::NEG_INFINITY; 2],
        sum: [0.0; 2],
    };

    #[inline(always)]
    fn offset(&self, column: usize) -> f32 {
        if self.reference[column] == f32::NEG_INFINITY {
            0.0
        } else {
            self.reference[column]
        }
    }

    /// Weights of the logits, to `target`; the sums of both columns.
    #[inline(always)]
    unsafe fn weigh<H: Half>(&self, logits: &[f32; 4], target: u32) -> [f32; 2] {
        let offset = [self.offset(0), self.offset(1)];
        let w = [
            exp2(logits[0] - offset[0]),
            exp2(logits[1] - offset[1]),
            exp2(logits[2] - offset[0]),
            exp2(logits[3] - offset[1]),
        ];
        // SAFETY: keys of this thread, 8 apart.
        unsafe {
            shared::store_u32(target, H::pack(w[0], w[1]));
            shared::store_u32(target + 128, H::pack(w[2], w[3]));
        }
        [w[0] + w[2], w[1] + w[3]]
    }
}

/// Hides the keys of a block that the rows do not see: the block's first key is `begin`.
#[inline(always)]
unsafe fn hide<V: Variant>(
    p: &DecodeParams,
    variant: &V,
    s: Shared,
    slot: u32,
    unit: &Unit,
    logits: &mut [f32; 4],
    begin: i32,
    lane: u32,
    warp: u32,
) {
    let mut column = 0;
    while column < 2 {
        let (token, _) = p.group.div_rem(lane % 4 * 2 + column as u32);
        // SAFETY: the unit's rows are listed; those that do not exist are given the last token.
        let position = unsafe { s.load_row(slot, token.min(unit.tokens - 1)).position };
        let (first, last) = variant.visible_keys(position);
        let (first, last) = (
            first.max(unit.kv_begin as i32),
            last.min(unit.kv_end as i32 - 1),
        );
        let mut i = 0;
        while i < 2 {
            let key = begin + (warp * 16 + lane / 4 + i as u32 * 8) as i32;
            if key < first || key > last {
                logits[2 * i + column] = f32::NEG_INFINITY;
            }
            i += 1;
        }
        column += 1;
    }
}

// ---- The loop ---------------------------------------------------------------------------------------

/// `T` and `H` are the same type to the products and to the results.
#[inline(always)]
pub(super) unsafe fn consume<
    T: Dtype,
    H: Half,
    V: Variant,
    const STAGES: u32,
    const VALUE_STAGES: u32,
    const S: usize,
>(
    p: &DecodeParams,
    variant: &V,
    s: Shared,
) where
    [f32; S]: wgmma::Accumulator,
{
    const { assert!(S == 4 && SHAPE.rows == 8 && SHAPE.head_dim == 128 && SHAPE.keys == 64) };
    const { assert!(!V::TRANSFORMS_LOGITS && !V::MASKS) };
    let lane = warp::lane_id();
    // SAFETY: whole warps here and in everything below.
    let warp = unsafe { uniform(thread::thread_idx_x() / 32) } - 4;
    let keys = SHAPE.keys as i32;
    let my_weights = (warp * 16 + lane / 4) * 16 + lane % 4 * 4;
    let mut slots = Ring::<2>::CONSUMER;
    let mut k = Ring::<STAGES>::CONSUMER;
    let mut v = Ring::<VALUE_STAGES>::CONSUMER;
    let mut parity = 0;

    macro_rules! release {
        ($barrier:expr) => {
            if lane == 0 {
                mbarrier::arrive($barrier);
            }
        };
    }

    unsafe {
        loop {
            let slot = slots.stage;
            mbarrier::wait(s.queries_full(slot), slots.parity);
            let unit = Unit::load(s.unit(slot));
            if unit.tokens == 0 {
                return;
            }
            let (_, least) = variant.visible_keys(unit.position);
            // Positions may lie anywhere after the smallest: under a window nothing is seen by all for sure.
            let all_from = if variant.params().window_left == i32::MAX {
                unit.kv_begin as i32
            } else {
                i32::MAX
            };
            let all_to = least.min(unit.kv_end as i32 - 1);
            let mut softmax = Softmax::EMPTY;
            let mut logits = [0.0; S];
            let mut o = [[0.0; S]; 2];
            let mut begin = unit.end as i32;
            let mut left = uniform(unit.blocks);
            let blocks = left;
            while left > 0 {
                begin -= keys;
                mbarrier::wait(s.keys_full(k.stage), k.parity);
                keys_queries::<T, S>(&mut logits, uniform(s.keys(k.stage)), s.queries(slot));
                // The weights of the block before are there, which those of this one are to follow.
                let second = left < blocks;
                if second {
                    mbarrier::wait(s.values_full(v.stage), v.parity);
                    values_weights::<T, S>(
                        &mut o,
                        uniform(s.values(v.stage)),
                        uniform(weights(s, parity ^ 1)),
                    );
                    wgmma::wait_group::<1>();
                } else {
                    wgmma::wait_group::<0>();
                }
                wgmma::fence_operand(&mut logits);
                release!(s.keys_free(k.stage));
                k.advance();
                let mut i = 0;
                while i < 4 {
                    let at = Pair {
                        token: 0,
                        head: 0,
                        position: 0,
                        key: 0,
                    };
                    logits[i] = variant.logit(logits[i], at);
                    i += 1;
                }
                if begin + keys - 1 > all_to || begin < all_from {
                    let four = &mut *logits.as_mut_ptr().cast::<[f32; 4]>();
                    hide(p, variant, s, slot, &unit, four, begin, lane, warp);
                }
                let four = *logits.as_ptr().cast::<[f32; 4]>();
                let most = [
                    if four[2] > four[0] { four[2] } else { four[0] },
                    if four[3] > four[1] { four[3] } else { four[1] },
                ];
                let grew = most[0] > softmax.reference[0] + SLACK
                    || most[1] > softmax.reference[1] + SLACK;
                let target = weights(s, parity) + my_weights;
                let mut sums = softmax.weigh::<H>(&four, target);
                wgmma::wait_group::<0>();
                wgmma::fence_operand(&mut o[0]);
                wgmma::fence_operand(&mut o[1]);
                if second {
                    release!(s.values_free(v.stage));
                    v.advance();
                }
                fence::proxy_async_shared();
                if barrier::bar_any(CONSUMERS, THREADS, grew) {
                    outgrown(s, &mut softmax, &mut o, most, lane, warp);
                    sums = softmax.weigh::<H>(&four, target);
                    fence::proxy_async_shared();
                    barrier::bar_sync(CONSUMERS, THREADS);
                }
                softmax.sum[0] += sums[0];
                softmax.sum[1] += sums[1];
                parity ^= 1;
                left -= 1;
            }
            mbarrier::wait(s.values_full(v.stage), v.parity);
            values_weights::<T, S>(
                &mut o,
                uniform(s.values(v.stage)),
                uniform(weights(s, parity ^ 1)),
            );
            wgmma::wait_group::<0>();
            wgmma::fence_operand(&mut o[0]);
            wgmma::fence_operand(&mut o[1]);
            release!(s.values_free(v.stage));
            v.advance();
            finish::<H, S>(
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

/// Takes the block's largest logits for the new references, where they are larger, and rescales what was
/// accumulated.
#[inline(always)]
unsafe fn outgrown<const S: usize>(
    s: Shared,
    softmax: &mut Softmax,
    o: &mut [[f32; S]; 2],
    most: [f32; 2],
    lane: u32,
    warp: u32,
) {
    let mut column = 0;
    // SAFETY: all consumers come here; rows are told apart by warps.
    unsafe {
        while column < 2 {
            let mut max = most[column];
            // The lanes of the same columns are 4 apart.
            let mut stride = 4;
            while stride < 32 {
                let other = warp::warp_shuffle_xor(WARP, max, stride, 32);
                max = if other > max { other } else { max };
                stride *= 2;
            }
            if lane < 4 {
                shared::store_f32(told(s, warp, lane * 2 + column as u32), max);
            }
            column += 1;
        }
        barrier::bar_sync(CONSUMERS, THREADS);
        column = 0;
        while column < 2 {
            let mut max = softmax.reference[column];
            let mut of = 0;
            while of < 4 {
                let other = shared::load_f32(told(s, of, lane % 4 * 2 + column as u32));
                max = if other > max { other } else { max };
                of += 1;
            }
            // By the column alone, so that a row's result does not depend on its neighbours.
            if max > softmax.reference[column] + SLACK {
                let factor = exp2(softmax.reference[column] - max);
                softmax.reference[column] = max;
                softmax.sum[column] *= factor;
                let mut slab = 0;
                while slab < 2 {
                    o[slab][column] *= factor;
                    o[slab][2 + column] *= factor;
                    slab += 1;
                }
            }
            column += 1;
        }
    }
}

/// Writes a unit's rows, to the output or to partial states.
#[inline(always)]
unsafe fn finish<H: Half, const S: usize>(
    p: &DecodeParams,
    s: Shared,
    slot: u32,
    unit: &Unit,
    o: &[[f32; S]; 2],
    softmax: &Softmax,
    lane: u32,
    warp: u32,
) {
    let pitch = state_pitch(&SHAPE);
    // SAFETY: all consumers come here; the state was read before the barriers of this unit's blocks.
    unsafe {
        let mut column = 0;
        while column < 2 {
            let row = lane % 4 * 2 + column as u32;
            let first = state(s) + (row * pitch + warp * 16 + lane / 4) * 4;
            let mut slab = 0;
            while slab < 2 {
                shared::store_f32(first + slab as u32 * 256, o[slab][column]);
                shared::store_f32(first + slab as u32 * 256 + 32, o[slab][2 + column]);
                slab += 1;
            }
            let mut sum = softmax.sum[column];
            let mut stride = 4;
            while stride < 32 {
                sum += warp::warp_shuffle_xor(WARP, sum, stride, 32);
                stride *= 2;
            }
            if lane < 4 {
                shared::store_f32(told(s, warp, row), sum);
                if warp == 0 {
                    shared::store_f32(told(s, 4, row), softmax.offset(column));
                }
            }
            column += 1;
        }
        barrier::bar_sync(CONSUMERS, THREADS);
        let results = Results::<128> {
            params: &p.attention,
            lane,
        };
        let group = p.attention.group;
        let mut row = warp;
        while row < unit.tokens * group {
            let (token, in_group) = p.group.div_rem(row);
            let mut sum = 0.0;
            let mut of = 0;
            while of < 4 {
                sum += shared::load_f32(told(s, of, row));
                of += 1;
            }
            let (inverse, lse) = if sum > 0.0 {
                (rcp(sum), shared::load_f32(told(s, 4, row)) + lg2(sum))
            } else {
                (0.0, f32::NEG_INFINITY)
            };
            let out = shared::load_f32x4(state(s) + (row * pitch + lane * 4) * 4);
            let out = out.map(|x| x * inverse);
            let info = s.load_row(slot, token);
            results.write::<H, 4>(info, unit.head * group + in_group, State { out, lse });
            row += 4;
        }
        warp::sync_warp(WARP);
        if lane == 0 {
            mbarrier::arrive(s.unit_free(slot));
        }
    }
}
