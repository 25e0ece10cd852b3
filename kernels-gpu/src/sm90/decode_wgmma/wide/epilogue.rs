//! The epilogue of a unit: normalise, write, merge.

use core::f32::consts::LN_2;

use cuda_std::{
    barrier,
    math::{lg2, rcp},
    mbarrier, ptr, shared, thread, warp, wgmma,
};

use super::shared::{Shared, Unit};
use crate::{
    abi::{DIRECT, DecodeParams, NO_MERGE},
    common::{
        cache,
        decode::results::Results,
        half::Half,
        softmax::Rows,
        state::{sink_of_row, with_sink},
        variant::Variant,
    },
};

const WARP: u32 = warp::FULL_MASK;

/// The factors of a row with 8-bit keys: of its products with keys, without the softmax scale, and of its output.
///
/// # Safety
/// The unit's barrier completed, and its slot is not free.
#[inline(always)]
pub(super) unsafe fn factors(p: &DecodeParams, s: Shared, slot: u32, row: u32) -> [f32; 2] {
    let (token, _) = p.group.div_rem(row);
    // SAFETY: the caller's promise. Of rows past the end nothing is used.
    unsafe {
        let [k, v] = shared::load_u32x2(s.scales(slot, token)).map(f32::from_bits);
        let unfit = match s.unfitted(slot) {
            Some(at) => shared::load_f32(at + row * 4),
            None => 1.0,
        };
        [k * unfit, v]
    }
}

/// The epilogue of a warp's 16 rows.
pub(super) struct Finish<'a, const DIM: u32> {
    pub p: &'a DecodeParams,
    pub s: Shared,
    /// The factor that turns products into base-2 logits, without factors of their row.
    pub scale: f32,
    /// The warp's first row in the tile.
    pub first_row: u32,
}

impl<const DIM: u32> Finish<'_, DIM> {
    /// Writes the warp's 16 rows to the output or to partial states. Then performs the merges for which these were the
    /// last missing states (fused merge).
    ///
    /// # Safety
    /// All consumer warps come here for every unit; their products are done.
    #[inline(always)]
    pub unsafe fn unit<T: Half, V: Variant, const PER_LANE: usize, const O: usize>(
        &self,
        slot: u32,
        o: &[f32; O],
        rows: &Rows,
    ) {
        let (a, s) = (&self.p.attention, self.s);
        // Opaque: otherwise derived values are computed before the main loop and occupy registers there.
        let mut here = [warp::lane_id(), self.first_row];
        wgmma::fence_operand(&mut here);
        let [lane, first_row] = here;
        // SAFETY: whole warps; the unit stays until this warp has arrived; only this thread writes its elements.
        unsafe {
            let unit = Unit::load(s.unit(slot));
            let totals = rows.totals();
            let mut h = 0;
            while h < 2 {
                let (token, in_group) = self.p.group.div_rem(first_row + lane / 4 + 8 * h as u32);
                if token < unit.tokens {
                    let total = totals[h];
                    let mut reference = rows.reference[h];
                    let mut of_output = 1.0;
                    let mut scale = self.scale;
                    if s.shape.converts() {
                        let row = first_row + lane / 4 + 8 * h as u32;
                        let [of_products, of_row] = factors(self.p, s, slot, row);
                        // Otherwise logits already have the factor.
                        if !V::TRANSFORMS_LOGITS && !cache::by_token(s.shape.cache) {
                            scale *= of_products;
                        }
                        if cache::by_token(s.shape.cache) {
                            scale = 1.0;
                        }
                        of_output = of_row;
                        // Where the scale is 0, no reference is taken.
                        reference = reference.max(f32::MIN);
                    }
                    // `!= 0.0` keeps NaN: with an LSE of −∞ a merge would drop the state.
                    let (mut inverse, mut lse) = if total != 0.0 {
                        (rcp(total), reference * scale + lg2(total))
                    } else {
                        (0.0, f32::NEG_INFINITY)
                    };
                    let row = s.load_row(slot, token);
                    let head = unit.head * a.group + in_group;
                    if a.sinks != 0 && row.slot == DIRECT {
                        let (factor, with) = with_sink(lse, sink_of_row(a, row.token, head));
                        (inverse, lse) = (inverse * factor, with);
                    }
                    if s.shape.converts() {
                        inverse *= of_output;
                    }
                    let column = u64::from(lane % 4 * 2);
                    if row.slot == DIRECT {
                        let at = u64::from(row.token) * u64::from(a.q_heads) + u64::from(head);
                        if a.lse != 0 && lane % 4 == 0 {
                            ptr::store_f32((a.lse + at * 4) as *mut f32, lse * LN_2);
                        }
                        let element = u64::from(row.token) * u64::from(a.out_token_stride)
                            + u64::from(head * DIM)
                            + column;
                        let out = a.out + element * 2;
                        let mut j = 0;
                        while j < O / 4 {
                            let at = 4 * j + 2 * h;
                            let pair = T::pack(o[at] * inverse, o[at + 1] * inverse);
                            ptr::store_u32((out + 16 * j as u64) as *mut u32, pair);
                            j += 1;
                        }
                    } else {
                        let state = u64::from(row.slot) * u64::from(a.q_heads) + u64::from(head);
                        if lane % 4 == 0 {
                            ptr::store_f32((a.partial_lse + state * 4) as *mut f32, lse);
                        }
                        let out = a.partial_out + (state * u64::from(DIM) + column) * 4;
                        let mut j = 0;
                        while j < O / 4 {
                            let at = 4 * j + 2 * h;
                            let pair = [o[at] * inverse, o[at + 1] * inverse];
                            ptr::store_f32x2((out + 32 * j as u64) as *mut f32, pair);
                            j += 1;
                        }
                    }
                }
                h += 1;
            }
            if a.arrivals != 0 {
                self.merge::<T, V, PER_LANE>(slot, &unit, lane);
            }
            mbarrier::arrive(s.unit_free(slot));
        }
    }

    /// Counts the unit's states at their merges, one lane per token, and performs the merges that are now complete.
    ///
    /// # Safety
    /// As [`unit`](Self::unit), after the states were written.
    #[inline(always)]
    unsafe fn merge<T: Half, V: Variant, const PER_LANE: usize>(
        &self,
        slot: u32,
        unit: &Unit,
        lane: u32,
    ) {
        let a = &self.p.attention;
        let results = Results::<DIM> {
            params: a,
            lane,
            out_columns: DIM,
        };
        let warps = 4 * self.s.shape.consumers;
        let warp = thread::thread_idx_x() / 32 - 4;
        // SAFETY: the rows of a token may belong to several warps; after the barrier all of them are written.
        unsafe {
            let token = lane * warps + warp;
            let index = if token < unit.tokens {
                self.s.load_row(slot, token).merge
            } else {
                NO_MERGE
            };
            let merge = results.look_up(index);
            barrier::bar_sync(1, 32 * warps);
            let last = results.arrive(index, merge, unit.head);
            let mut waiting = warp::warp_vote_ballot(WARP, last);
            if waiting != 0 {
                // One lane has acquired the other CTAs' states, and all lanes will read them. A vote does not order
                // memory.
                warp::sync_warp(WARP);
            }
            while waiting != 0 {
                let merge = merge.broadcast(waiting.trailing_zeros());
                waiting &= waiting - 1;
                let mut in_group = 0;
                while in_group < a.group {
                    results.merge::<T, V>(merge, unit.head * a.group + in_group);
                    in_group += 1;
                }
            }
        }
    }
}
