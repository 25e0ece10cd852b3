//! The warpgroups that compute: products, masks and weights.

use cuda_std::{mbarrier, shared, thread, warp, wgmma};

use super::{
    super::{
        products::{Dtype, queries_keys, weights_values},
        ring::Ring,
        uniform,
    },
    finish::Finish,
    shared::{Shared, Unit},
};
use crate::{
    abi::DecodeParams,
    decode::half::Half,
    softmax::{Rows, hide_after, hide_before, mask, transform},
    variant::{Pair, Variant},
};

/// What a consumer knows of its unit.
struct Work {
    /// Shared address of its 64 rows of queries.
    queries: u32,
    /// First key of the block at hand, blocks left (this one included).
    begin: i32,
    left: u32,
    /// The first and the last key that all rows see.
    all_see: (i32, i32),
}

impl Work {
    #[inline(always)]
    unsafe fn open<V: Variant>(variant: &V, s: Shared, slot: u32, consumer: u32) -> Self {
        // SAFETY: the unit's barrier completed.
        let unit = unsafe { Unit::load(s.unit(slot)) };
        let (_, least) = variant.visible_keys(unit.position);
        // Positions may lie anywhere after the smallest: under a window nothing is seen by all for sure.
        let first = if variant.params().window_left == i32::MAX {
            unit.kv_begin as i32
        } else {
            i32::MAX
        };
        // SAFETY: whole warps; all lanes agree on these.
        unsafe {
            Self {
                queries: s.queries(slot) + consumer * 64 * 128,
                begin: uniform(unit.end - s.shape.keys) as i32,
                left: uniform(unit.blocks),
                all_see: (
                    uniform(first as u32) as i32,
                    uniform(least.min(unit.kv_end as i32 - 1) as u32) as i32,
                ),
            }
        }
    }
}

/// Whose a row is (the key is left open), and the first and the last key of the unit that it sees.
#[inline(always)]
unsafe fn query<V: Variant>(
    p: &DecodeParams,
    variant: &V,
    s: Shared,
    slot: u32,
    row: u32,
) -> (Pair, (i32, i32)) {
    // SAFETY: the unit's barrier completed; rows that do not exist are given the last token.
    let (unit, row, in_group) = unsafe {
        let unit = Unit::load(s.unit(slot));
        let (token, in_group) = p.group.div_rem(row);
        (unit, s.load_row(slot, token.min(unit.tokens - 1)), in_group)
    };
    let (first, last) = variant.visible_keys(row.position);
    let pair = Pair {
        token: row.token,
        head: unit.head * p.attention.group + in_group,
        position: row.position,
        key: 0,
    };
    let seen = (
        first.max(unit.kv_begin as i32),
        last.min(unit.kv_end as i32 - 1),
    );
    (pair, seen)
}

/// `T` and `H` are the same type to the products and to the merges.
#[inline(always)]
pub(super) unsafe fn consume<
    T: Dtype,
    H: Half,
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
    let rows_of_thread = [first_row + lane / 4, first_row + lane / 4 + 8];
    let scale = if V::TRANSFORMS_LOGITS {
        1.0
    } else {
        variant.params().scale_log2
    };
    let keys = s.shape.keys as i32;
    let slab = s.shape.slab_bytes();
    let finish = Finish::<DIM> {
        p,
        s,
        scale,
        first_row,
    };

    let mut slots = Ring::<2>::CONSUMER;
    let mut k = Ring::<STAGES>::CONSUMER;
    let mut v = Ring::<STAGES>::CONSUMER;
    let mut logits = [0.0; S];
    let mut weights = [0; P];
    let mut o = [0.0; O];
    let mut rows = Rows::EMPTY;

    macro_rules! release {
        ($barrier:expr) => {
            if lane == 0 {
                mbarrier::arrive($barrier);
            }
        };
    }
    // From accumulators to logits: the variant's and the mask.
    macro_rules! finish_logits {
        ($work:ident) => {
            let last = $work.begin + keys - 1;
            let after = last > $work.all_see.1;
            let before = $work.begin < $work.all_see.0;
            if V::TRANSFORMS_LOGITS || V::MASKS || after || before {
                // Seldom: what the rows see is computed again rather than kept in registers.
                let of = rows_of_thread.map(|row| query(p, variant, s, slots.stage, row));
                let pairs = of.map(|(pair, _)| pair);
                if V::TRANSFORMS_LOGITS {
                    transform(&mut logits, variant, $work.begin, pairs);
                }
                if V::MASKS {
                    mask(&mut logits, variant, $work.begin, pairs);
                }
                if after {
                    hide_after(&mut logits, $work.begin, of.map(|(_, seen)| seen.1));
                }
                if before {
                    hide_before(&mut logits, $work.begin, of.map(|(_, seen)| seen.0));
                }
            }
        };
    }

    unsafe {
        mbarrier::wait(s.queries_full(0), 0);
        // A captured launch may have more CTAs than the plan at hand has units.
        if shared::load_u32(s.unit(0)) == 0 {
            return;
        }
        let mut work = Work::open(variant, s, slots.stage, consumer);
        mbarrier::wait(s.keys_full(k.stage), k.parity);
        queries_keys::<T, S>(&mut logits, work.queries, s.keys(k.stage), DIM, slab);
        wgmma::wait_group::<0>();
        wgmma::fence_operand(&mut logits);
        release!(s.keys_free(k.stage));
        k.advance();
        finish_logits!(work);
        rows.rescale(&logits, scale);
        rows.weigh(&logits, scale, &mut weights, T::pack);
        loop {
            work.left -= 1;
            work.begin -= keys;
            // The last block's P·V is still to be done: it goes with the next unit's first Q·Kᵀ.
            let turn = work.left == 0;
            let done = slots.stage;
            if turn {
                slots.advance();
                // If the next unit is not known yet, this one's result does not wait for it.
                mbarrier::wait(s.queries_full(slots.stage), slots.parity);
                if shared::load_u32(s.unit(slots.stage)) == 0 {
                    break;
                }
                work = Work::open(variant, s, slots.stage, consumer);
            }
            let values = uniform(s.values(v.stage));
            mbarrier::wait(s.keys_full(k.stage), k.parity);
            queries_keys::<T, S>(&mut logits, work.queries, s.keys(k.stage), DIM, slab);
            mbarrier::wait(s.values_full(v.stage), v.parity);
            weights_values::<T, O, P>(&mut o, &weights, values, DIM);
            wgmma::wait_group::<1>();
            wgmma::fence_operand(&mut logits);
            release!(s.keys_free(k.stage));
            k.advance();
            finish_logits!(work);
            let ended = rows;
            if turn {
                rows = Rows::EMPTY;
            }
            let (grew, factors) = rows.rescale(&logits, scale);
            wgmma::wait_group::<0>();
            wgmma::fence_operand(&mut o);
            wgmma::fence_operand(&mut weights);
            release!(s.values_free(v.stage));
            v.advance();
            if turn {
                finish.unit::<T, H, PER_LANE, O>(done, &o, &ended);
                o = [0.0; O];
            } else if grew {
                let mut i = 0;
                while i < O {
                    o[i] *= factors[i / 2 % 2];
                    i += 1;
                }
            }
            rows.weigh(&logits, scale, &mut weights, T::pack);
        }
        mbarrier::wait(s.values_full(v.stage), v.parity);
        weights_values::<T, O, P>(&mut o, &weights, s.values(v.stage), DIM);
        wgmma::wait_group::<0>();
        wgmma::fence_operand(&mut o);
        finish.unit::<T, H, PER_LANE, O>(slots.stage ^ 1, &o, &rows);
    }
}
