//! The consumer warpgroups: products, masks and softmax.

use cuda_std::{mbarrier, misc, shared, thread, warp, wgmma};

use super::{
    super::super::{
        mma::{Slabs, queries_keys, weights_values, weights_values_by_slabs},
        pipeline::Pipeline,
        uniform,
    },
    epilogue::{Finish, factors},
    runs::{Mode, Visible},
    scales::{multiply, of_values, value_scales},
    shared::{Shared, Unit},
};
use crate::{
    abi::DecodeParams,
    common::cache::Cache,
    common::half::Half,
    common::logits::hide_other_branches,
    common::softmax::Rows,
    common::variant::{Pair, Query, Variant},
};

/// A consumer warpgroup's view of its unit.
struct Work {
    /// Shared address of its 64 rows of queries.
    queries: u32,
    /// Blocks left, the current one included.
    left: u32,
}

impl Work {
    #[inline(always)]
    unsafe fn open(s: Shared, slot: u32, consumer: u32) -> Self {
        // SAFETY: the unit's barrier completed; whole warps.
        unsafe {
            let unit = Unit::load(s.unit(slot));
            Self {
                queries: s.queries(slot) + consumer * 64 * 128,
                left: uniform(unit.blocks),
            }
        }
    }
}

/// The query of a row, as a pair with key 0. Rows past the end count as the last token's.
#[inline(always)]
unsafe fn query<V: Variant>(p: &DecodeParams, variant: &V, s: Shared, slot: u32, row: u32) -> Pair {
    // SAFETY: the unit's barrier completed.
    let (unit, row, in_group) = unsafe {
        let unit = Unit::load(s.unit(slot));
        let (token, in_group) = p.group.div_rem(row);
        (unit, s.load_row(slot, token.min(unit.tokens - 1)), in_group)
    };
    let query = Query {
        token: row.token,
        head: unit.head * p.attention.group + in_group,
        position: row.position,
    };
    Pair::new(variant, query, 0)
}

/// The first and the last key that a row sees by its position; arbitrary for rows that do not exist.
#[inline(always)]
unsafe fn seen(p: &DecodeParams, s: Shared, slot: u32, row: u32) -> [i32; 2] {
    let (token, _) = p.group.div_rem(row);
    // SAFETY: the unit's barrier completed.
    unsafe { shared::load_u32x2(s.seen(slot, token)).map(|key| key as i32) }
}

/// Turns accumulators into logits: applies the variant and the mask. `of` gives a row's query, `seen` its visible keys.
#[inline(always)]
unsafe fn finish_logits<C: Cache, V: Variant, const POSITIONAL: bool, const S: usize>(
    logits: &mut [f32; S],
    variant: &V,
    mask: u32,
    rows: [u32; 2],
    of: impl Fn(u32) -> Pair,
    seen: impl Fn(u32) -> [i32; 2],
    factor: impl Fn(u32) -> f32,
) {
    // Not read if the variant has no transform.
    let factors = rows.map(factor);
    let columns = warp::lane_id() % 4 * 2;
    // Not read if the variant has neither a transform nor a mask.
    let of = rows.map(of);
    let seen = if POSITIONAL {
        rows.map(seen)
    } else {
        [[0; 2]; 2]
    };
    let mut group = 0;
    while group < S / 4 {
        // SAFETY: the block's barrier completed.
        let visible = unsafe { Visible::load(mask, group as u32) };
        let column = [visible.column(columns), visible.column(columns + 1)];
        let row = rows.map(|row| visible.row(row));
        let first = of.map(|at| Pair {
            key: visible.key + columns,
            distance: (at.position - (visible.key + columns) as i32) as f32,
            ..at
        });
        let mut i = 0;
        while i < 4 {
            let (h, e) = (i / 2, i % 2);
            let logit = &mut logits[4 * group + i];
            let key = visible.key + columns + e as u32;
            let pair = first[h].further(e as u32);
            if V::TRANSFORMS_LOGITS {
                *logit = variant.logit(
                    if C::SCALED {
                        *logit * factors[h]
                    } else {
                        *logit
                    },
                    pair,
                );
            }
            let mut sees = row[h] & column[e];
            if POSITIONAL {
                sees &= key as i32 >= seen[h][0] && key as i32 <= seen[h][1];
            }
            if V::MASKS {
                sees &= variant.visible(pair);
            }
            if !sees {
                *logit = f32::NEG_INFINITY;
            }
            i += 1;
        }
        group += 1;
    }
}

/// Works through all units.
///
/// # Safety
/// Whole warpgroups come here, all consumers of the CTA; the barriers are initialised.
#[inline(always)]
pub(super) unsafe fn consume<
    C: Cache,
    V: Variant,
    const STAGES: u32,
    const DIM: u32,
    const PER_LANE: usize,
    const S: usize,
    const P: usize,
    const O: usize,
>(
    p: &DecodeParams,
    variant: &V,
    s: Shared,
) where
    [f32; S]: wgmma::Accumulator,
    [f32; O]: wgmma::Accumulator,
{
    let lane = warp::lane_id();
    let thread = thread::thread_idx_x() - 128;
    // SAFETY: whole warps here and in everything below.
    let consumer = unsafe { uniform(thread / 128) };
    let first_row = thread / 32 * 16;
    let scale = if V::TRANSFORMS_LOGITS && !V::KEEPS_UNIT {
        1.0
    } else {
        variant.unit()
    };
    let slab = s.shape.slab_bytes();
    let slabs = Slabs::of_eight_rows(DIM);
    // The factors of this thread's rows, in the unit of a slot.
    let scales = |slot: u32| {
        if !C::SCALED || V::TRANSFORMS_LOGITS {
            return [scale; 2];
        }
        // Opaque: otherwise rows occupy registers in the main loop.
        let row = misc::opaque(first_row) + warp::lane_id() / 4;
        // SAFETY: the unit's barrier completed.
        [row, row + 8].map(|row| unsafe { factors(p, s, slot, row) }[0] * scale)
    };
    let finish = Finish::<DIM> {
        p,
        s,
        scale,
        first_row,
    };

    let mut slots = Pipeline::<2>::CONSUMER;
    let mut k = Pipeline::<STAGES>::CONSUMER;
    let mut v = Pipeline::<STAGES>::CONSUMER;
    let mut logits = [0.0; S];
    let mut weights = [0; P];
    let mut o = [0.0; O];
    let mut rows = Rows::begin::<V>();
    let (mut mask_of, mut scales_at) = (0, 0);
    let mut scale_of;

    macro_rules! release {
        ($barrier:expr) => {
            if lane == 0 {
                mbarrier::arrive($barrier);
            }
        };
    }
    // Turns a block's products into logits and frees its keys. The mask belongs to the stage, so it is read first.
    macro_rules! finish_keys {
        () => {
            let mask = s.mask(if C::SCALED { mask_of } else { k.stage });
            if C::SCALED {
                mbarrier::arrive(s.converted_free(false));
                k.parity ^= 1;
            }
            if C::BY_TOKEN {
                scales_at = s.token_scales(mask_of);
                multiply(&mut logits, scales_at, scale_of);
            }
            mask_of = s.shape.next_mask(mask_of);
            let mode = Mode::load(mask);
            if V::TRANSFORMS_LOGITS || V::MASKS || mode.masked {
                let of = |row| query(p, variant, s, slots.stage, row);
                let seen = |row| seen(p, s, slots.stage, row);
                let factor = |row| match C::SCALED && V::TRANSFORMS_LOGITS {
                    true => factors(p, s, slots.stage, row)[0],
                    false => 1.0,
                };
                // Opaque: otherwise rows occupy registers in the main loop.
                let mut row = [first_row];
                wgmma::fence_operand(&mut row);
                let row = row[0] + warp::lane_id() / 4;
                let rows = [row, row + 8];
                if mode.positional {
                    finish_logits::<C, V, true, S>(
                        &mut logits,
                        variant,
                        mask,
                        rows,
                        of,
                        seen,
                        factor,
                    );
                    if p.attention.ancestors != 0 {
                        let column = (warp::lane_id() % 4 * 2) as i32;
                        hide_other_branches(
                            &mut logits,
                            |group| Visible::load(mask, group).key as i32 + column,
                            |h| {
                                let row = query(p, variant, s, slots.stage, misc::opaque(rows[h]));
                                (row.position, p.attention.ancestors_of(row.token))
                            },
                        );
                    }
                } else {
                    finish_logits::<C, V, false, S>(
                        &mut logits,
                        variant,
                        mask,
                        rows,
                        of,
                        seen,
                        factor,
                    );
                }
            }
            if !C::SCALED {
                mbarrier::arrive(s.keys_free(k.stage));
                k.advance();
            }
        };
    }
    macro_rules! rescale {
        () => {
            if C::BY_TOKEN {
                rows.rescale::<V, S>(&of_values(&logits, s.shape.keys, scales_at), [1.0; 2])
            } else {
                rows.rescale::<V, S>(&logits, scale_of)
            }
        };
    }
    macro_rules! weigh {
        () => {
            if C::BY_TOKEN {
                let values = scales_at + s.shape.keys * 4;
                let of_group = |group| value_scales(values, group);
                rows.weigh_times::<S, P>(&logits, &mut weights, of_group, C::Product::pack);
            } else {
                rows.weigh::<V, S, P>(&logits, scale_of, &mut weights, C::Product::pack);
            }
        };
    }
    macro_rules! values_product {
        ($values:expr) => {
            if C::SCALED {
                weights_values_by_slabs::<C::Product, O, P>(&mut o, &weights, $values, slabs);
            } else {
                weights_values::<C::Product, O, P>(&mut o, &weights, $values, slabs);
            }
        };
    }
    // Waits for the keys, or values, of the next block.
    macro_rules! await_keys {
        () => {{
            let (full, parity) = match C::SCALED {
                true => (s.converted_full(false), k.parity),
                false => (s.keys_full(k.stage), k.parity),
            };
            mbarrier::wait(full, parity);
            if C::SCALED {
                s.converted(false)
            } else {
                s.keys(k.stage)
            }
        }};
    }
    macro_rules! await_values {
        () => {{
            let (full, parity) = match C::SCALED {
                true => (s.converted_full(true), v.parity),
                false => (s.values_full(v.stage), v.parity),
            };
            mbarrier::wait(full, parity);
        }};
    }

    // SAFETY: whole warpgroups; the full and free barriers order every access to a stage.
    unsafe {
        mbarrier::wait(s.queries_full(0), 0);
        // A captured launch may have more CTAs than the current plan has units.
        if shared::load_u32(s.unit(0)) == 0 {
            return;
        }
        let mut work = Work::open(s, slots.stage, consumer);
        scale_of = scales(slots.stage);
        let keys = await_keys!();
        queries_keys::<C::Product, S>(&mut logits, work.queries, keys, DIM, slab, slabs);
        wgmma::wait_group::<0>();
        wgmma::fence_operand(&mut logits);
        finish_keys!();
        rescale!();
        weigh!();
        loop {
            work.left -= 1;
            // P·V of a unit's last block is issued together with the next unit's first Q·Kᵀ.
            let turn = work.left == 0;
            let done = slots.stage;
            if turn {
                slots.advance();
                // The next unit was claimed ahead, so this wait is usually short.
                mbarrier::wait(s.queries_full(slots.stage), slots.parity);
                if shared::load_u32(s.unit(slots.stage)) == 0 {
                    break;
                }
                work = Work::open(s, slots.stage, consumer);
                scale_of = scales(slots.stage);
            }
            let values = match C::SCALED {
                true => s.converted(true),
                false => uniform(s.values(v.stage)),
            };
            let keys = await_keys!();
            queries_keys::<C::Product, S>(&mut logits, work.queries, keys, DIM, slab, slabs);
            await_values!();
            values_product!(values);
            wgmma::wait_group::<1>();
            wgmma::fence_operand(&mut logits);
            finish_keys!();
            let ended = rows;
            if turn {
                rows = Rows::begin::<V>();
            }
            let (grew, factors) = rescale!();
            wgmma::wait_group::<0>();
            wgmma::fence_operand(&mut o);
            wgmma::fence_operand(&mut weights);
            if C::SCALED {
                release!(s.converted_free(true));
                v.parity ^= 1;
            } else {
                release!(s.values_free(v.stage));
                v.advance();
            }
            if turn {
                finish.unit::<C::Query, V, PER_LANE, O>(done, &o, &ended);
                o = [0.0; O];
            } else if grew {
                let mut i = 0;
                while i < O {
                    o[i] *= factors[i / 2 % 2];
                    i += 1;
                }
            }
            weigh!();
        }
        await_values!();
        let values = if C::SCALED {
            s.converted(true)
        } else {
            s.values(v.stage)
        };
        values_product!(values);
        wgmma::wait_group::<0>();
        wgmma::fence_operand(&mut o);
        finish.unit::<C::Query, V, PER_LANE, O>(slots.stage ^ 1, &o, &rows);
    }
}
