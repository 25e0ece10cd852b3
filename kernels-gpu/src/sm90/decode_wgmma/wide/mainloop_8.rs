//! The consumer warpgroup's main loop over converted blocks of 8-bit keys.
//!
//! As [the one for 16-bit keys](super::mainloop), except that
//! - the converting warpgroup hands over one block of keys and one of values at a time, or two with two consumers (`Converted`);
//! - masks belong to blocks, not to stages, and count by themselves;
//! - rows have factors: the scale of keys, and what undoes the conversion of their queries to f16. With a scale for each token,
//!   logits are multiplied by it, and the logarithm of that of their value is added. So weights have both, and sums take the
//!   inverse.
//!
//! It stands by itself because branches in the other one cost the kernels for 16-bit keys registers.

use cuda_std::{mbarrier, misc, shared, thread, warp, wgmma};

use super::{
    super::super::{
        mma::{Slabs, queries_keys, weights_values, weights_values_by_slabs},
        pipeline::Pipeline,
        uniform,
    },
    epilogue::{Finish, factors},
    mainloop::{Work, finish_logits, query, seen},
    masks::{Mode, Visible},
    scales::{apply, inverses, multiply_rows},
    shared::{Converted, Shared},
};
use crate::{
    abi::DecodeParams,
    common::cache::{Cache, factor_of_products},
    common::half::Half,
    common::logits::hide_masked,
    common::softmax::Rows,
    common::variant::{Hook, Variant},
};

/// Works through all units.
///
/// # Safety
/// A whole warpgroup comes here; the barriers are initialised.
#[inline(always)]
pub(super) unsafe fn consume<
    C: Cache,
    V: Variant,
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
    // Transforms would take the logarithms for a part of the logits.
    const { assert!(!(C::BY_TOKEN && V::TRANSFORMS_LOGITS)) };
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
    // The factors of this thread's rows, in the unit of a slot.
    let scales = |slot: u32| {
        if V::TRANSFORMS_LOGITS {
            return [scale; 2];
        }
        // Opaque: otherwise rows occupy registers in the main loop.
        let row = misc::opaque(first_row) + warp::lane_id() / 4;
        // SAFETY: the unit's barrier completed.
        [row, row + 8].map(|row| factor_of_products(unsafe { factors(p, s, slot, row) }[0] * scale))
    };
    let finish = Finish::<DIM> {
        p,
        s,
        scale,
        first_row,
    };
    // Two consumers have the SM alone, and registers for all descriptors and for one product of all columns.
    let has_registers = s.shape.consumers == 2;
    // An address in each block anew: otherwise the descriptors of all products occupy registers in the main loop, and what they
    // displace is read from L2, since the stacks of two CTAs exceed the rest of L1.
    let at = |address: u32| {
        let mut opaque = [address];
        wgmma::fence_operand(&mut opaque);
        if has_registers {
            address
        } else {
            // SAFETY: a whole warp.
            unsafe { uniform(opaque[0]) }
        }
    };

    let mut slots = Pipeline::<2>::CONSUMER;
    // The place of the next keys. Values are one block behind.
    let mut k = Converted::first(0);
    let mut logits = [0.0; S];
    let mut weights = [0; P];
    let mut o = [0.0; O];
    let mut rows = Rows::begin::<V>();
    let (mut mask_of, mut scales_at) = (0, 0);
    let mut scale_of;

    // Frees the keys of a block and turns its products into logits.
    macro_rules! finish_keys {
        () => {
            mbarrier::arrive(s.converted_free(false, k.stage));
            k = k.next(&s.shape);
            let mask = s.mask(mask_of);
            if C::BY_TOKEN {
                scales_at = s.token_scales(mask_of);
                apply(&mut logits, scales_at, scale_of);
            }
            mask_of = s.shape.next_mask(mask_of);
            let mode = Mode::load(mask);
            if V::TRANSFORMS_LOGITS || V::MASKS || mode.masked {
                let of = |row| query(p, variant, s, slots.stage, row);
                let seen = |row| seen(p, s, slots.stage, row);
                // Opaque: otherwise rows occupy registers in the main loop.
                let mut row = [first_row];
                wgmma::fence_operand(&mut row);
                let row = row[0] + warp::lane_id() / 4;
                let rows = [row, row + 8];
                if V::TRANSFORMS_LOGITS {
                    let of_rows = rows.map(|row| factors(p, s, slots.stage, row)[0]);
                    multiply_rows(&mut logits, of_rows);
                }
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
        };
    }
    macro_rules! rescale {
        () => {
            if C::BY_TOKEN {
                rows.rescale::<V, S>(&logits, [1.0; 2])
            } else {
                rows.rescale::<V, S>(&logits, scale_of)
            }
        };
    }
    macro_rules! weigh {
        () => {
            if C::BY_TOKEN {
                let of_group = |group| inverses(s, scales_at, group);
                rows.weigh_scaled::<S, P>(&logits, &mut weights, of_group, C::Product::pack);
            } else {
                rows.weigh::<V, S, P>(&logits, scale_of, &mut weights, C::Product::pack);
            }
        };
    }
    // Waits for the keys of the next block.
    macro_rules! await_keys {
        () => {{
            mbarrier::wait(s.converted_full(false, k.stage), k.parity);
            at(s.converted(false, k.stage))
        }};
    }
    // Waits for the values of the next block, and multiplies them by the weights.
    macro_rules! multiply_values {
        () => {
            let v = k.before(&s.shape);
            mbarrier::wait(s.converted_full(true, v.stage), v.parity);
            let values = at(s.converted(true, v.stage));
            if has_registers {
                weights_values::<C::Product, O, P>(&mut o, &weights, values, slabs);
            } else {
                weights_values_by_slabs::<C::Product, O, P>(&mut o, &weights, values, slabs);
            }
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
            let keys = await_keys!();
            queries_keys::<C::Product, S>(&mut logits, work.queries, keys, DIM, slab, slabs);
            multiply_values!();
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
            if lane == 0 {
                // Of the block before that of the last keys.
                let v = k.before(&s.shape).before(&s.shape);
                mbarrier::arrive(s.converted_free(true, v.stage));
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
        multiply_values!();
        wgmma::wait_group::<0>();
        wgmma::fence_operand(&mut o);
        finish.unit::<C::Query, V, PER_LANE, O>(slots.stage ^ 1, &o, &rows);
    }
}
