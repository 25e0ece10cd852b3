//! The consumer warpgroups: products, masks and softmax.

use cuda_std::{mbarrier, misc, shared, thread, warp, wgmma};

use super::{
    super::super::{
        mma::{Slabs, queries_keys, weights_values},
        pipeline::Pipeline,
        uniform,
    },
    epilogue::Finish,
    masks::{Mode, Visible},
    shared::{Shared, Unit},
};
use crate::{
    abi::DecodeParams,
    common::half::Half,
    common::logits::hide_masked,
    common::softmax::Rows,
    common::variant::{Hook, Pair, Query, Variant},
};

/// A consumer warpgroup's view of its unit.
pub(super) struct Work {
    /// Shared address of its 64 rows of queries.
    pub(super) queries: u32,
    /// Blocks left, the current one included.
    pub(super) left: u32,
}

impl Work {
    #[inline(always)]
    pub(super) unsafe fn open(s: Shared, slot: u32, consumer: u32) -> Self {
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
pub(super) unsafe fn query<V: Variant>(
    p: &DecodeParams,
    variant: &V,
    s: Shared,
    slot: u32,
    row: u32,
) -> Pair {
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
pub(super) unsafe fn seen(p: &DecodeParams, s: Shared, slot: u32, row: u32) -> [i32; 2] {
    let (token, _) = p.group.div_rem(row);
    // SAFETY: the unit's barrier completed.
    unsafe { shared::load_u32x2(s.seen(slot, token)).map(|key| key as i32) }
}

/// Turns accumulators into logits: applies the variant and the mask. `of` gives a row's query, `seen` its visible keys.
#[inline(always)]
pub(super) unsafe fn finish_logits<V: Variant, const POSITIONAL: bool, const S: usize>(
    logits: &mut [f32; S],
    variant: &V,
    mask: u32,
    rows: [u32; 2],
    of: impl Fn(u32) -> Pair,
    seen: impl Fn(u32) -> [i32; 2],
) {
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
                *logit = variant.logit(*logit, pair).plain();
            }
            let mut sees = row[h] & column[e];
            if POSITIONAL {
                sees &= key as i32 >= seen[h][0] && key as i32 <= seen[h][1];
            }
            if V::MASKS {
                sees &= variant.visible(pair).plain();
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
    T: Half,
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
        variant.unit().plain()
    };
    let slab = s.shape.slab_bytes();
    let slabs = Slabs::of_eight_rows(DIM);
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
            let mask = s.mask(k.stage);
            let mode = Mode::load(mask);
            if V::TRANSFORMS_LOGITS || V::MASKS || mode.masked {
                let of = |row| query(p, variant, s, slots.stage, row);
                let seen = |row| seen(p, s, slots.stage, row);
                // Opaque: otherwise rows occupy registers in the main loop.
                let mut row = [first_row];
                wgmma::fence_operand(&mut row);
                let row = row[0] + warp::lane_id() / 4;
                let rows = [row, row + 8];
                if mode.positional {
                    finish_logits::<V, true, S>(&mut logits, variant, mask, rows, of, seen);
                    let masks = p.attention.key_masks();
                    if masks.any() {
                        // Positional blocks have keys of one run: they are consecutive.
                        let begin = Visible::load(mask, 0).key as i32;
                        let row = |h: usize| {
                            let row = query(p, variant, s, slots.stage, misc::opaque(rows[h]));
                            (row.position, masks.of(row.token))
                        };
                        hide_masked(&mut logits, begin, row, false);
                    }
                } else {
                    finish_logits::<V, false, S>(&mut logits, variant, mask, rows, of, seen);
                }
            }
            mbarrier::arrive(s.keys_free(k.stage));
            k.advance();
        };
    }

    // SAFETY: whole warpgroups; the full and free barriers order every access to a stage.
    unsafe {
        mbarrier::wait(s.queries_full(0), 0);
        // A captured launch may have more CTAs than the current plan has units.
        if shared::load_u32(s.unit(0)) == 0 {
            return;
        }
        let mut work = Work::open(s, slots.stage, consumer);
        mbarrier::wait(s.keys_full(k.stage), k.parity);
        queries_keys::<T, S>(&mut logits, work.queries, s.keys(k.stage), DIM, slab, slabs);
        wgmma::wait_group::<0>();
        wgmma::fence_operand(&mut logits);
        finish_keys!();
        rows.rescale::<V, S>(&logits, [scale; 2]);
        rows.weigh::<V, S, P>(&logits, [scale; 2], &mut weights, T::pack);
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
            }
            let values = uniform(s.values(v.stage));
            mbarrier::wait(s.keys_full(k.stage), k.parity);
            queries_keys::<T, S>(&mut logits, work.queries, s.keys(k.stage), DIM, slab, slabs);
            mbarrier::wait(s.values_full(v.stage), v.parity);
            weights_values::<T, O, P>(&mut o, &weights, values, slabs);
            wgmma::wait_group::<1>();
            wgmma::fence_operand(&mut logits);
            finish_keys!();
            let ended = rows;
            if turn {
                rows = Rows::begin::<V>();
            }
            let (grew, factors) = rows.rescale::<V, S>(&logits, [scale; 2]);
            wgmma::wait_group::<0>();
            wgmma::fence_operand(&mut o);
            wgmma::fence_operand(&mut weights);
            release!(s.values_free(v.stage));
            v.advance();
            if turn {
                finish.unit::<T, V, PER_LANE, O>(done, &o, &ended);
                o = [0.0; O];
            } else if grew {
                let mut i = 0;
                while i < O {
                    o[i] *= factors[i / 2 % 2];
                    i += 1;
                }
            }
            rows.weigh::<V, S, P>(&logits, [scale; 2], &mut weights, T::pack);
        }
        mbarrier::wait(s.values_full(v.stage), v.parity);
        weights_values::<T, O, P>(&mut o, &weights, s.values(v.stage), slabs);
        wgmma::wait_group::<0>();
        wgmma::fence_operand(&mut o);
        finish.unit::<T, V, PER_LANE, O>(slots.stage ^ 1, &o, &rows);
    }
}
