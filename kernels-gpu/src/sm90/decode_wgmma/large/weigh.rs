//! The softmax warpgroup: Q·Kᵀ, masks, weights, and the normalisation factors of the rows.

use core::f32::consts::LN_2;

use cuda_std::{
    async_copy, barrier, fence,
    math::{lg2, rcp},
    mbarrier, misc, ptr, shared, thread, warp,
    wgmma::{self, Descriptor, Swizzle},
};

use super::{
    super::super::{pipeline::Pipeline, uniform},
    config::{BLOCK_KEYS, Keys, SLAB_BYTES, WEIGHTS_STEP},
    queries::{copy_queries, hold_queries, row_of},
    shared::{Shared, Unit},
};
use crate::{
    abi::{DIRECT, DecodeParams},
    common::{
        half::Half,
        logits::{hide_after, hide_before, hide_masked},
        softmax::{Rows, largest_sum},
        state::{sink_of_row, with_sink},
        variant::Variant,
    },
};

const WARP: u32 = warp::FULL_MASK;

/// The named barrier of the warpgroup.
const OWN: u32 = 1;

/// Logits per thread and block.
const S: usize = BLOCK_KEYS as usize / 2;

/// Issues the product with one piece of the keys' columns. Piece 0 overwrites the logits, the others add to them.
///
/// # Safety
/// The whole warpgroup comes here; both operands have arrived; the accumulator is waited for.
#[inline(always)]
unsafe fn multiply<T: Half, const PIECE: u32, const DIM: u32, const HELD: usize>(
    s: Shared<DIM>,
    held: &[u32; HELD],
    logits: &mut [f32; S],
    stage: u32,
) {
    let (slabs, steps) = (Keys::<DIM>::PIECE_SLABS, Keys::<DIM>::PIECE_SLABS * 4);
    // SAFETY: the caller's promise.
    unsafe {
        // Recomputed for every piece: otherwise the descriptors of all steps are computed before the loop and spilled.
        let mut queries = s.queries() + PIECE * slabs * SLAB_BYTES;
        if Keys::<DIM>::SLABS > Keys::<DIM>::HELD_SLABS {
            queries = uniform(queries);
        }
        let q = Descriptor::new(queries, 16, 1024, Swizzle::B128);
        let keys = uniform(s.keys(stage));
        let k = Descriptor::new(keys, 16, slabs * 1024, Swizzle::B128);
        wgmma::fence();
        let mut step = 0;
        while step < steps {
            let (slab, inner) = (step / 4, step % 4 * 32);
            let k = k.advance(slab * 1024 + inner);
            let in_all = PIECE * steps + step;
            if let Some(i) = (4 * in_all + HELD as u32).checked_sub(Keys::<DIM>::SLABS * 16) {
                let i = i as usize;
                let q = [held[i], held[i + 1], held[i + 2], held[i + 3]];
                if in_all > 0 {
                    wgmma::mma_rs::<T, true, false, _>(logits, q, k);
                } else {
                    wgmma::mma_rs::<T, false, false, _>(logits, q, k);
                }
            } else {
                let q = q.advance(slab * SLAB_BYTES + inner);
                if in_all > 0 {
                    wgmma::mma_ss::<T, true, false, false, _>(logits, q, k);
                } else {
                    wgmma::mma_ss::<T, false, false, false, _>(logits, q, k);
                }
            }
            step += 1;
        }
        wgmma::commit_group();
    }
}

/// Sets the logits of keys that rows do not see to −∞, in the block that begins at `begin`.
///
/// # Safety
/// Whole warps; `unit` is the unit in the slot, and its rows are written.
#[inline(always)]
unsafe fn hide<V: Variant, const DIM: u32>(
    p: &DecodeParams,
    variant: &V,
    s: Shared<DIM>,
    slot: u32,
    unit: &Unit,
    logits: &mut [f32; S],
    begin: i32,
    row: u32,
) {
    let of = |row: u32| {
        let (token, _) = row_of(p, row);
        // SAFETY: the unit has the token, and its barrier completed.
        unsafe { s.load_row(slot, token.min(unit.tokens - 1)) }
    };
    let seen = |row: u32| {
        let (first, last) = variant.visible_keys(of(row).position);
        [
            first.max(unit.kv_begin as i32),
            last.min(unit.kv_end as i32 - 1),
        ]
    };
    let [upper, lower] = [seen(row), seen(row + 8)];
    hide_after(logits, begin, [upper[1], lower[1]]);
    hide_before(logits, begin, [upper[0], lower[0]]);
    let masks = p.attention.key_masks();
    if masks.any() {
        let row = |h: usize| {
            let row = of(misc::opaque(row + 8 * h as u32));
            // SAFETY: the token is one of the launch's.
            (row.position, unsafe { masks.of(row.token) })
        };
        // SAFETY: whole warps.
        unsafe { hide_masked(logits, begin, row, true) };
    }
}

/// Whether all rows of a unit see all keys of the block that begins at `begin`.
#[inline(always)]
fn is_whole<V: Variant>(p: &DecodeParams, variant: &V, unit: &Unit, begin: i32) -> bool {
    let (_, last) = variant.visible_keys(unit.position);
    let last = p.attention.seen_by_all(last, unit.position);
    // Only the smallest position is known: with a window, no key is sure to be seen by all rows.
    let has_window = variant.params().window_left != i32::MAX;
    let past = begin + BLOCK_KEYS as i32;
    !has_window
        && begin >= unit.kv_begin as i32
        && past <= (unit.kv_end as i32).min(last.saturating_add(1))
}

/// Calls `each` with the logits of each step of 16 keys.
#[inline(always)]
fn each_step(logits: &[f32; S], mut each: impl FnMut(u32, &[f32; 8])) {
    let mut step = 0;
    while step < S / 8 {
        let mut part = [0.0; 8];
        let mut i = 0;
        while i < 8 {
            part[i] = logits[8 * step + i];
            i += 1;
        }
        each(step as u32, &part);
        step += 1;
    }
}

#[inline(always)]
fn add_to(sums: &mut [f32; 4], more: [f32; 4]) {
    let mut i = 0;
    while i < 4 {
        sums[i] += more[i];
        i += 1;
    }
}

/// Stores the normalisation factors of a warp's rows for the P·V warpgroups, and writes their LSEs.
///
/// # Safety
/// A whole warp comes here; the slot holds its unit.
#[inline(always)]
unsafe fn finish<const DIM: u32>(
    p: &DecodeParams,
    s: Shared<DIM>,
    slot: u32,
    rows: &Rows,
    scale: f32,
    warp: u32,
) {
    let a = &p.attention;
    let lane = misc::opaque(warp::lane_id());
    // SAFETY: as above; four lanes share a row.
    unsafe {
        let unit = Unit::load(s.unit(slot));
        let totals = rows.totals();
        let mut h = 0;
        while h < 2 {
            let row = warp * 16 + lane / 4 + 8 * h as u32;
            let total = totals[h];
            // `!= 0.0` keeps NaN: with an LSE of −∞ a merge would drop the state.
            let (mut inverse, mut lse) = if total != 0.0 {
                (rcp(total), rows.reference[h] * scale + lg2(total))
            } else {
                (0.0, f32::NEG_INFINITY)
            };
            let (token, in_group) = row_of(p, row);
            if token < unit.tokens {
                let info = s.load_row(slot, token);
                let head = unit.head * a.group + in_group;
                if a.sinks != 0 && info.slot == DIRECT {
                    let (factor, with) = with_sink(lse, sink_of_row(a, info.token, head));
                    (inverse, lse) = (inverse * factor, with);
                }
                if lane % 4 == 0 {
                    let at = |row: u32| u64::from(row) * u64::from(a.q_heads) + u64::from(head);
                    if info.slot != DIRECT {
                        ptr::store_f32((a.partial_lse + at(info.slot) * 4) as *mut f32, lse);
                    } else if a.lse != 0 {
                        ptr::store_f32((a.lse + at(info.token) * 4) as *mut f32, lse * LN_2);
                    }
                }
            }
            if lane % 4 == 0 {
                shared::store_f32(s.inverse(slot, row), inverse);
            }
            h += 1;
        }
        mbarrier::arrive(s.inverses_full(slot));
    }
}

/// Works through all units, with `STAGES` stages of keys and `HELD` registers of queries.
///
/// # Safety
/// A whole warpgroup comes here; the barriers are initialised.
#[inline(always)]
pub(super) unsafe fn weigh<T, V, const DIM: u32, const STAGES: u32, const HELD: usize>(
    p: &DecodeParams,
    variant: &V,
    s: Shared<DIM>,
) where
    T: Half,
    V: Variant,
{
    const {
        assert!(!V::TRANSFORMS_LOGITS && !V::MASKS);
        assert!(STAGES == Keys::<DIM>::STAGES && HELD as u32 == 16 * Keys::<DIM>::HELD_SLABS);
    };
    let copies = Keys::<DIM>::SLABS > Keys::<DIM>::HELD_SLABS;
    let lane = warp::lane_id();
    // SAFETY: whole warps here and in everything below.
    let warp = unsafe { uniform(thread::thread_idx_x() % 128 / 32) };
    let scale = variant.params().scale_log2;
    let mut slots = Pipeline::<2>::CONSUMER;
    // The next piece to multiply.
    let mut next = Pipeline::<STAGES>::CONSUMER;
    // Parities of the two stages of weights, one bit each. They differ: every unit starts with stage 0, which may be
    // used more often.
    let mut phases = 0b11;

    // SAFETY: a whole warpgroup; the full and free barriers order every access to a stage.
    unsafe {
        loop {
            let slot = slots.stage;
            mbarrier::wait(s.unit_full(slot), slots.parity);
            let unit = Unit::load(s.unit(slot));
            if unit.tokens == 0 {
                break;
            }
            mbarrier::wait(s.rows_full(slot), slots.parity);
            if copies {
                // All warps have finished with the previous unit's queries.
                barrier::bar_sync(OWN, 128);
                copy_queries(p, s, slot, &unit, warp);
            }
            let mut held: [u32; HELD] = hold_queries(p, s, slot, &unit, warp);
            if copies {
                async_copy::wait_all();
                // wgmma reads these copies through the async proxy.
                fence::proxy_async_shared();
                barrier::bar_sync(OWN, 128);
            }
            wgmma::fence_operand(&mut held);
            let mut rows = Rows::EMPTY;
            let (mut even, mut odd) = ([0.0; S], [0.0; S]);
            // Blocks after the one that was opened last.
            let mut left = uniform(unit.blocks) - 1;

            macro_rules! piece {
                ($logits:ident, $piece:literal) => {
                    mbarrier::wait(s.keys_full(next.stage), next.parity);
                    multiply::<T, $piece, DIM, HELD>(s, &held, &mut $logits, next.stage);
                    next.advance();
                };
            }
            // Waits until all but `pending` pieces are multiplied, and releases the piece `behind` stages before the
            // next.
            macro_rules! release {
                ($pending:literal, $behind:literal) => {
                    wgmma::wait_group::<$pending>();
                    let stage = match next.stage < $behind {
                        true => next.stage + STAGES - $behind,
                        false => next.stage - $behind,
                    };
                    if lane == 0 {
                        mbarrier::arrive(s.keys_free(stage));
                    }
                };
            }
            // Issues the first half of a block's Q·Kᵀ (or all of it, if it has one piece), which overlaps with the softmax of the
            // previous block.
            macro_rules! open {
                ($logits:ident) => {
                    piece!($logits, 0);
                    if Keys::<DIM>::PIECES > 1 {
                        piece!($logits, 1);
                    }
                };
            }
            macro_rules! close {
                ($logits:ident) => {
                    if Keys::<DIM>::PIECES > 1 {
                        piece!($logits, 2);
                        release!(2, 3);
                        piece!($logits, 3);
                        release!(2, 3);
                        release!(1, 2);
                    }
                    release!(0, 1);
                    wgmma::fence_operand(&mut $logits);
                };
            }
            // Computes the weights of a block, with `$behind` blocks after it.
            macro_rules! weigh {
                ($logits:ident, $turn:literal, $behind:expr) => {{
                    // Reloaded from shared memory for each block, to save registers.
                    let unit = Unit::load(s.unit(slot));
                    let begin = (unit.first + (unit.blocks - 1 - $behind) * BLOCK_KEYS) as i32;
                    if !is_whole(p, variant, &unit, begin) {
                        let row = warp * 16 + misc::opaque(lane) / 4;
                        hide(p, variant, s, slot, &unit, &mut $logits, begin, row);
                    }
                    // Both P·V warpgroups have read the weights of the block before the previous one.
                    mbarrier::wait(s.weights_free($turn), phases >> $turn & 1);
                    phases ^= 1 << $turn;
                    // Weights relative to the old references; their sums tell whether those are still large enough. In
                    // the first block of a unit there are none, and the sums always ask for a rescale.
                    let target = s.weights_of($turn, warp * 32 + lane);
                    let mut sums = [0.0; 4];
                    each_step(&$logits, |step, logits| {
                        let mut weights = [0; 4];
                        let more = rows.weigh_with_stale_max(logits, None, [scale; 2], &mut weights, T::pack);
                        add_to(&mut sums, more);
                        shared::store_u32x4(target + step * WEIGHTS_STEP, weights);
                    });
                    let needs_rescale = warp::warp_vote_any(WARP, Rows::needs_rescale(&sums, largest_sum::<T>()));
                    if needs_rescale {
                        let (factors, _) = rows.rescale_late::<T, _>(&$logits, None, [scale; 2]);
                        sums = [0.0; 4];
                        each_step(&$logits, |step, logits| {
                            let mut weights = [0; 4];
                            let more =
                                rows.weigh_seen(logits, None, [scale; 2], &mut weights, T::pack);
                            add_to(&mut sums, more);
                            shared::store_u32x4(target + step * WEIGHTS_STEP, weights);
                        });
                        if lane % 4 == 0 {
                            let row = warp * 16 + lane / 4;
                            shared::store_f32(s.factor($turn, row), factors[0]);
                            shared::store_f32(s.factor($turn, row + 8), factors[1]);
                        }
                    }
                    if lane == 0 {
                        shared::store_u32(s.grew($turn, warp), u32::from(needs_rescale));
                    }
                    rows.add(&sums);
                    mbarrier::arrive(s.weights_full($turn));
                }};
            }

            open!(even);
            close!(even);
            while left >= 2 {
                open!(odd);
                weigh!(even, 0, left);
                close!(odd);
                open!(even);
                weigh!(odd, 1, left - 1);
                close!(even);
                left -= 2;
            }
            if left == 1 {
                open!(odd);
                weigh!(even, 0, 1);
                close!(odd);
                weigh!(odd, 1, 0);
            } else {
                weigh!(even, 0, 0);
            }
            finish(p, s, slot, &rows, scale, warp);
            mbarrier::arrive(s.unit_free(slot));
            slots.advance();
        }
    }
}
