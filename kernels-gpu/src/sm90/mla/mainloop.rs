//! The warpgroups that compute: products, weights, and what each hands over to the other.

use cuda_std::{
    barrier, fence, mbarrier, misc, mma, shared, thread, warp,
    wgmma::{self, Descriptor, Swizzle},
};

use super::{
    super::{
        mma::{Slabs, load_fragments, weights_values},
        pipeline::Pipeline,
        uniform,
    },
    config::{GROUP, HEAD_DIM, HELD_SLABS, QUERY_SLABS, SLAB_BYTES, SLABS, VALUE_DIM, query_slabs},
    epilogue::finish,
    shared::{Shared, Unit, WEIGHTS_CHUNK},
};
use crate::{
    abi::LatentParams,
    common::{
        half::Half,
        softmax::{Rows, hide_after, hide_before, largest_sum},
        variant::Variant,
    },
};

const WARP: u32 = warp::FULL_MASK;

/// Named barriers: the weights of a stage's block are there (the owner arrives, the other waits); the warps of a
/// consumer; what each consumer waits at where both meet, for the first and the second time.
const WEIGHTS_READY: u32 = 1;
const CONSUMER: u32 = 3;
const BOTH: u32 = 5;

/// Outputs of a thread: those of 64 rows and half of the columns.
pub(super) const O: usize = VALUE_DIM as usize / 4;

/// Steps of 16 columns whose queries are in registers, the last ones. Q·Kᵀ is bound by what it reads of shared memory:
/// 2 KB of queries beside 1.5 KB of keys for each step.
const HELD: usize = HELD_SLABS as usize * 4;

/// The same where keys are converted, of which there is an odd number of blocks.
const HELD_CONVERTED: usize = 2;

/// The queries of those steps, of a warp's rows; the last ones, where there are fewer.
type Held = [u32; 4 * HELD];

/// Both consumers have come here, of which this is `C`. Each waits at a barrier of its own, for they come to it at two places
/// of the code.
///
/// # Safety
/// All their threads do, for the first and the second time in turn: who came the first time may not have left when the
/// other comes again.
#[inline(always)]
pub(super) unsafe fn meet<const C: u32>(time: u32) {
    // SAFETY: the caller's promise.
    unsafe {
        barrier::bar_arrive(BOTH + 2 * time + (C ^ 1), 256);
        barrier::bar_sync(BOTH + 2 * time + C, 256);
    }
}

/// Loads the queries that stay in registers, from shared memory.
///
/// # Safety
/// A whole warp comes here; the queries are there.
#[inline(always)]
unsafe fn hold<const KEYS: u32, const STAGES: u32, const CONVERTED: bool>(
    s: Shared<KEYS, STAGES, CONVERTED>,
    warp: u32,
    steps: usize,
) -> Held {
    // Opaque: or the addresses are kept in registers from unit to unit.
    let (lane, mut held) = (misc::opaque(warp::lane_id()), [0; 4 * HELD]);
    let row = warp * 16 + lane % 16;
    let mut i = HELD - steps;
    while i < HELD {
        let slab = QUERY_SLABS - HELD_SLABS + i as u32 / 4;
        let chunk = 2 * (i as u32 % 4) + lane / 16;
        let at = s.queries() + slab * SLAB_BYTES + row * 128 + (chunk ^ row % 8) * 16;
        // SAFETY: the slabs' rows are swizzled.
        let fragments = unsafe { mma::ldmatrix_x4(at) };
        let mut j = 0;
        while j < 4 {
            held[4 * i + j] = fragments[j];
            j += 1;
        }
        i += 1;
    }
    held
}

/// The same from memory, where shared memory has no place for them.
///
/// # Safety
/// A whole warp comes here; the unit's rows are listed.
#[inline(always)]
unsafe fn hold_from_memory<const KEYS: u32, const STAGES: u32, const CONVERTED: bool>(
    p: &LatentParams,
    s: Shared<KEYS, STAGES, CONVERTED>,
    slot: u32,
    warp: u32,
) -> Held {
    // SAFETY: the unit's barrier completed.
    let unit = unsafe { Unit::load(s.unit(slot)) };
    let row_of = |row: u32| {
        let (token, in_tile) = p.heads.div_rem(warp * 16 + row);
        let head = unit.head + in_tile;
        // SAFETY: the row is listed.
        let of = unsafe { s.load_row(slot, token.min(unit.tokens - 1)).token };
        let element = u64::from(of) * u64::from(p.attention.q_token_stride)
            + u64::from(head * HEAD_DIM + (QUERY_SLABS - HELD_SLABS) * 64);
        let exists = token < unit.tokens && head < p.attention.q_heads;
        (p.attention.q + element * 2, exists)
    };
    // SAFETY: a query has as many columns, and vectors of 16 bytes are aligned, as tensor maps ask for.
    unsafe { load_fragments(row_of) }
}

/// Adds the product with a half of the keys' columns to the logits, or begins with it; issued.
#[inline(always)]
unsafe fn multiply<
    T: Half,
    const ADD: bool,
    const KEYS: u32,
    const STAGES: u32,
    const CONVERTED: bool,
    const S: usize,
>(
    s: Shared<KEYS, STAGES, CONVERTED>,
    held: &Held,
    logits: &mut [f32; S],
    stage: u32,
    half: u32,
    steps: usize,
) where
    [f32; S]: wgmma::Accumulator,
{
    let slabs = SLABS[half as usize];
    // SAFETY: whole warps; both operands are there; the accumulator is waited for.
    unsafe {
        // Anew for every block: or the descriptors of all steps are computed before the loop and spilled.
        let queries = uniform(s.queries() + half * SLABS[0] * SLAB_BYTES);
        let q = Descriptor::new(queries, 16, 1024, Swizzle::B128);
        let keys = uniform(s.half(stage, half));
        let k = Descriptor::new(keys, 16, slabs * 1024, Swizzle::B128);
        wgmma::fence();
        let mut step = 0;
        while step < slabs * 4 {
            let (slab, inner) = (step / 4, step % 4 * 32);
            let (q, k) = (
                q.advance(slab * SLAB_BYTES + inner),
                k.advance(slab * 1024 + inner),
            );
            let from_registers = (step + HELD as u32).checked_sub(SLABS[1] * 4);
            if let (true, Some(i)) = (
                ADD && from_registers >= Some((HELD - steps) as u32),
                from_registers,
            ) {
                let i = 4 * i as usize;
                let q = [held[i], held[i + 1], held[i + 2], held[i + 3]];
                wgmma::mma_rs::<T, true, false, _>(logits, q, k);
            } else if ADD || step > 0 {
                wgmma::mma_ss::<T, true, false, false, _>(logits, q, k);
            } else {
                wgmma::mma_ss::<T, false, false, false, _>(logits, q, k);
            }
            step += 1;
        }
    }
}

/// O += P·V of weights in shared memory and a half of a block's values, issued.
#[inline(always)]
unsafe fn add_handed<T: Half, const KEYS: u32, const STAGES: u32, const CONVERTED: bool>(
    s: Shared<KEYS, STAGES, CONVERTED>,
    o: &mut [f32; O],
    stage: u32,
    half: u32,
) {
    let group = SLABS[half as usize] * 1024;
    // SAFETY: whole warps; both operands are there; the accumulator is waited for.
    unsafe {
        let weights = uniform(s.weights(stage));
        let weights = Descriptor::new(weights, WEIGHTS_CHUNK, 128, Swizzle::None);
        let values = uniform(s.half(stage, half));
        let values = Descriptor::new(values, 1024, group, Swizzle::B128);
        wgmma::fence();
        let mut step = 0;
        while step < KEYS / 16 {
            let (weights, values) = (
                weights.advance(step * 2 * WEIGHTS_CHUNK),
                values.advance(step * 2 * group),
            );
            if CONVERTED {
                let [left, right] = parts(o);
                wgmma::mma_ss::<T, true, false, true, _>(left, weights, values);
                let values = values.advance(PART_BYTES);
                wgmma::mma_ss::<T, true, false, true, _>(right, weights, values);
            } else {
                wgmma::mma_ss::<T, true, false, true, _>(o, weights, values);
            }
            step += 1;
        }
        wgmma::commit_group();
    }
}

/// The same of weights in registers, where there are the keys.
#[inline(always)]
unsafe fn add_own<T: Half, const CONVERTED: bool, const P: usize>(
    o: &mut [f32; O],
    weights: &[u32; P],
    values: u32,
    slabs: u32,
) {
    // SAFETY: whole warps; the values are there; accumulator and weights are waited for.
    unsafe {
        if !CONVERTED {
            return weights_values::<T, O, P>(o, weights, values, Slabs::of_eight_rows(slabs * 64));
        }
        let v = Descriptor::new(values, 1024, slabs * 1024, Swizzle::B128);
        wgmma::fence();
        let mut step = 0;
        while step < P / 4 {
            let a = [0, 1, 2, 3].map(|i| weights[4 * step + i]);
            let v = v.advance(step as u32 * 2 * slabs * 1024);
            let [left, right] = parts(o);
            wgmma::mma_rs::<T, true, true, _>(left, a, v);
            wgmma::mma_rs::<T, true, true, _>(right, a, v.advance(PART_BYTES));
            step += 1;
        }
        wgmma::commit_group();
    }
}

/// Bytes from the values of one of the [`parts`] to those of the other: two slabs.
const PART_BYTES: u32 = 2 * 1024;

/// The left and the right 128 columns of a consumer's outputs. With 512 threads a kernel begins with 128 registers a
/// thread, and ptxas refuses a product of 256 columns (C7602), whatever the registers are raised to.
#[inline(always)]
fn parts(o: &mut [f32; O]) -> [&mut [f32; O / 2]; 2] {
    let (left, right) = o.split_at_mut(O / 2);
    // SAFETY: both have as many elements.
    unsafe {
        [
            &mut *left.as_mut_ptr().cast(),
            &mut *right.as_mut_ptr().cast(),
        ]
    }
}

#[inline(always)]
fn scale_by(o: &mut [f32; O], factors: [f32; 2]) {
    let mut i = 0;
    while i < O {
        o[i] *= factors[i / 2 % 2];
        i += 1;
    }
}

/// Sets the values of keys to zero that are not the item's: they may be anything, and a weight of 0 does not keep a
/// NaN out.
#[inline(always)]
unsafe fn clear<const KEYS: u32, const STAGES: u32, const CONVERTED: bool>(
    s: Shared<KEYS, STAGES, CONVERTED>,
    stage: u32,
    thread: u32,
    first: u32,
    past: u32,
) {
    let vector = thread % 64;
    let (half, in_half) = (vector / 32, vector % 32);
    let group = if half == 0 { SLABS[0] } else { SLABS[1] } * 1024;
    let column = s.half(stage, half) + in_half / 8 * 1024 + in_half % 8 * 16;
    // Opaque: or it is counted in 16 bits.
    let mut key = misc::opaque(thread / 64);
    while key < KEYS {
        if key < first || key >= past {
            // SAFETY: the block is the consumer's; the row is zero, however it is swizzled.
            unsafe { shared::store_u32x4(column + key / 8 * group + key % 8 * 128, [0; 4]) };
        }
        key += 2;
    }
}

/// Hides what rows do not see of the block that begins at `begin`.
#[inline(always)]
unsafe fn hide<
    V: Variant,
    const KEYS: u32,
    const STAGES: u32,
    const CONVERTED: bool,
    const S: usize,
>(
    p: &LatentParams,
    variant: &V,
    s: Shared<KEYS, STAGES, CONVERTED>,
    slot: u32,
    unit: &Unit,
    logits: &mut [f32; S],
    begin: u32,
    first_row: u32,
) {
    let seen = |h: u32| {
        let (token, _) = p.heads.div_rem(first_row + h * 8);
        // SAFETY: the unit has the token, and its barrier completed.
        let row = unsafe { s.load_row(slot, token.min(unit.tokens - 1)) };
        let (first, last) = variant.visible_keys(row.position);
        [
            first.max(unit.kv_begin as i32),
            last.min(unit.kv_end as i32 - 1),
        ]
    };
    let [upper, lower] = [seen(0), seen(1)];
    hide_after(logits, begin as i32, [upper[1], lower[1]]);
    hide_before(logits, begin as i32, [upper[0], lower[0]]);
}

/// Whether all rows of a unit see all keys from `begin` on.
#[inline(always)]
fn is_whole<V: Variant>(variant: &V, unit: &Unit, begin: i32, keys: i32) -> bool {
    let (_, last) = variant.visible_keys(unit.position);
    // Positions may lie anywhere after the smallest: under a window nothing is seen by all for sure.
    let has_window = variant.params().window_left != i32::MAX;
    !has_window
        && begin >= unit.kv_begin as i32
        && begin + keys <= (unit.kv_end as i32).min(last + 1)
}

/// Hides keys of a converted block that are not there.
#[inline(always)]
unsafe fn hide_missing<
    const KEYS: u32,
    const STAGES: u32,
    const CONVERTED: bool,
    const S: usize,
>(
    s: Shared<KEYS, STAGES, CONVERTED>,
    stage: u32,
    logits: &mut [f32; S],
) {
    const { assert!(!CONVERTED || KEYS / GROUP == 4) };
    // SAFETY: they were written before the block was announced.
    let there = unsafe { shared::load_u32x4(s.there(stage, 0)) };
    if there[0] & there[1] & there[2] & there[3] == 0xff {
        return;
    }
    let pair = warp::lane_id() % 4 * 2;
    let mut group = 0;
    while group < 4 {
        let there = there[group] >> pair;
        let mut i = 0;
        while i < 4 {
            if there >> (i % 2) & 1 == 0 {
                logits[4 * group + i] = f32::NEG_INFINITY;
            }
            i += 1;
        }
        group += 1;
    }
}

/// Works through all units, as the consumer of the columns' half `C` and of every other block. `S` and `P`: logits and
/// packed weights that a thread has of a block.
///
/// # Safety
/// A whole warpgroup comes here, the other one with the other half; the barriers are initialised.
#[inline(always)]
pub(super) unsafe fn consume<
    T: Half,
    V: Variant,
    const C: u32,
    const KEYS: u32,
    const STAGES: u32,
    const CONVERTED: bool,
    const S: usize,
    const P: usize,
>(
    p: &LatentParams,
    variant: &V,
    s: Shared<KEYS, STAGES, CONVERTED>,
) where
    [f32; S]: wgmma::Accumulator,
{
    const { assert!(!V::TRANSFORMS_LOGITS && !V::MASKS) };
    const { assert!(S as u32 == KEYS / 2 && P == S / 2) };
    let steps = const { if CONVERTED { HELD_CONVERTED } else { HELD } };
    let lane = warp::lane_id();
    let thread = thread::thread_idx_x() % 128;
    // SAFETY: whole warps here and in everything below.
    let warp = unsafe { uniform(thread / 32) };
    let first_row = warp * 16 + lane / 4;
    let scale = variant.params().scale_log2;
    let other = C ^ 1;
    let mut slots = Pipeline::<2>::CONSUMER;
    // Blocks of all units so far: a block's owner is its number's last bit.
    let mut next = 0;

    macro_rules! release {
        ($barrier:expr) => {
            // Of converted blocks lanes read which keys are there: each arrives for itself.
            if CONVERTED || lane == 0 {
                mbarrier::arrive($barrier);
            }
        };
    }

    // SAFETY: a whole warpgroup; the barriers say what has arrived and what may be written again.
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
            if CONVERTED {
                // Here: or a part is set to zero behind the product of the other (C7519).
                wgmma::fence_operand(&mut o);
            }
            let mut rows = Rows::EMPTY;
            let mut logits = [0.0; S];
            let mut weights = [0; P];

            // The other's weights of a block: references, if they changed, and the product.
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
                    add_handed::<T, _, _, _>(s, &mut o, $block % STAGES, C);
                };
            }
            macro_rules! taken {
                ($block:expr) => {
                    wgmma::wait_group::<0>();
                    wgmma::fence_operand(&mut o);
                    release!(s.free($block % STAGES, C));
                    if C == 0 {
                        // The weights lie in the right half.
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
            // Their phases are those of units.
            mbarrier::wait(s.queries_full(), slot);
            if !from_memory {
                held = hold(s, warp, steps);
                // One lane says for all that the queries have been read.
                warp::sync_warp(WARP);
            }
            wgmma::fence_operand(&mut held);
            let mut block = next + ((next ^ C) & 1);
            let mut begin = unit.first + (block - next) * KEYS;
            if block >= end {
                release!(s.queries_free());
            }
            // A block of this consumer's own; the unit's first has none before it.
            macro_rules! own {
                ($first:literal) => {{
                    let (stage, parity) = (block % STAGES, block / STAGES & 1);
                    // In this order whoever owns the block, which is a matter of timing: the same bits.
                    mbarrier::wait(s.full(stage, 0), parity);
                    multiply::<T, false, _, _, _, _>(s, &held, &mut logits, stage, 0, steps);
                    mbarrier::wait(s.full(stage, 1), parity);
                    multiply::<T, true, _, _, _, _>(s, &held, &mut logits, stage, 1, steps);
                    wgmma::commit_group();
                    // From shared memory for each block: registers are what there is least of.
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
                    if CONVERTED {
                        hide_missing(s, stage, &mut logits);
                    }
                    // Weights against the references that there are; whether those still do shows in the sums. The vote
                    // also keeps the wait for the other product behind the weights.
                    let mut sums = [f32::INFINITY; 4];
                    let mut good = false;
                    if !$first {
                        sums = rows.weigh_with_stale_max(&logits, None, [scale; 2], &mut weights, T::pack);
                        good = !warp::warp_vote_any(WARP, Rows::needs_rescale(&sums, largest_sum::<T>()));
                        taken!(block - 1);
                    }
                    if !good {
                        let factors = rows.rescale_late(&logits, None, &sums, [scale; 2], largest_sum::<T>());
                        if !$first {
                            scale_by(&mut o, factors);
                        }
                        sums = rows.weigh_seen(&logits, None, [scale; 2], &mut weights, T::pack);
                        if lane % 4 == 0 {
                            let mut h = 0;
                            while h < 2 {
                                let row = first_row + 8 * h as u32;
                                shared::store_f32(s.factor(C, row), factors[h]);
                                shared::store_f32(s.reference(C, row), rows.reference[h]);
                                h += 1;
                            }
                        }
                    }
                    rows.add(&sums);
                    if lane == 0 {
                        shared::store_u32(s.grew(C, warp), u32::from(!good));
                    }
                    // All four warps have read the keys, whose place the weights take.
                    barrier::bar_sync(CONSUMER + C, 128);
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
                    // Keys of others are seen by nobody. Those that were converted are zeros already.
                    let clears = not_all && !CONVERTED;
                    if clears {
                        let unit = Unit::load(s.unit(slot));
                        let past = unit.kv_end.saturating_sub(begin);
                        let first = unit.kv_begin.saturating_sub(begin);
                        clear(s, stage, thread, first, past);
                    }
                    fence::proxy_async_shared();
                    if clears {
                        barrier::bar_sync(CONSUMER + C, 128);
                    }
                    barrier::bar_arrive(WEIGHTS_READY + C, 256);
                    let values = uniform(s.half(stage, C));
                    add_own::<T, CONVERTED, P>(&mut o, &weights, values, SLABS[C as usize]);
                    wgmma::wait_group::<0>();
                    wgmma::fence_operand(&mut o);
                    wgmma::fence_operand(&mut weights);
                    release!(s.free(stage, C));
                    if C == 0 {
                        // Its weights lay in the right half.
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
            if (end - 1) & 1 != C {
                take!(end - 1);
                taken!(end - 1);
            }
            let unit = Unit::load(s.unit(slot));
            finish::<T, C, _, _, _>(p, s, slot, &unit, &o, &rows, scale, warp * 16);
            mbarrier::arrive(s.unit_free(slot));
            slots.advance();
            next = end;
        }
    }
}
