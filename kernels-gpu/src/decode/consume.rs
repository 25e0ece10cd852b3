//! The consumer warps: states of chunks, and their combination at the end of a unit.

use cuda_std::{atomic, barrier, mbarrier, misc, shared, warp};

use super::{
    half::Half,
    layout::{Descriptor, Layout, MERGES, Place, Unit},
    results::{Merge, Results, SLICE},
    tile::{Chunk, Keys, LaneOffsets, Rows},
};
use crate::{
    abi::{AttentionParams, NO_MERGE, QueryRow},
    divisor::Divisor,
    state::{Softmax, State},
    variant::Variant,
};

const ALL: u32 = warp::FULL_MASK;

/// Shares of a unit that a lane weighs.
const SHARE_STEPS: usize = 2;

/// A consumer warp.
#[derive(Clone, Copy)]
pub struct Consumer<'a, const DIM: u32, const ROWS: u32, const WARPS: u32> {
    /// The launch.
    pub params: &'a AttentionParams,
    /// Query heads per KV head.
    pub group: Divisor,
    /// Shared memory.
    pub layout: Layout<DIM, ROWS, WARPS>,
    /// Among the consumers.
    pub warp: u32,
    /// In the warp.
    pub lane: u32,
}

impl<const DIM: u32, const ROWS: u32, const WARPS: u32> Consumer<'_, DIM, ROWS, WARPS> {
    /// Works until the producer says that nothing is left. `PER_LANE` elements of a row are a lane's to
    /// write.
    ///
    /// # Safety
    /// The lanes come together; barriers are initialised; the parameters describe memory as
    /// [`AttentionParams`] says.
    #[inline(always)]
    pub unsafe fn run<
        T: Half,
        V: Variant,
        const DIM_BLOCKS: usize,
        const ROW_BLOCKS: usize,
        const PER_LANE: usize,
    >(
        &self,
        variant: &V,
    ) {
        const {
            assert!(DIM_BLOCKS as u32 * 16 == DIM && PER_LANE as u32 * 32 == DIM);
            assert!(ROW_BLOCKS as u32 * 8 == ROWS);
            assert!(V::SOFTMAX && !V::TRANSFORMS_QUERY && !V::TRANSFORMS_KEY);
            assert!(!V::TRANSFORMS_VALUE && !V::TRANSFORMS_OUTPUT);
        }
        let layout = &self.layout;
        let offsets = LaneOffsets::new(self.lane, DIM);
        let mut rows = Rows::<DIM_BLOCKS, ROW_BLOCKS>::EMPTY;
        let mut place = Place::first(0);
        place.advance(self.warp, layout.stages);
        // SAFETY: addresses are the plan's; the waits order accesses with the producer's and with those
        // of other consumers; the lanes stay together.
        unsafe {
            loop {
                mbarrier::wait(layout.stage_full(place.index), place.parity);
                let descriptor = Descriptor::load(layout.descriptor(place.index));
                if descriptor.exit {
                    break;
                }
                let slot = descriptor.slot;
                let begins = descriptor.chunk < WARPS;
                if begins {
                    mbarrier::wait(layout.unit_full(slot), descriptor.parity);
                }
                let unit = Unit::load(layout.unit(slot));
                if begins {
                    let head = unit.head * self.params.group;
                    // Computed anew, which saves registers; ptxas finds enough of them in all kernels if
                    // those with a soft cap do not.
                    let lane = if V::TRANSFORMS_LOGITS {
                        self.lane
                    } else {
                        misc::opaque(self.lane)
                    };
                    rows.start(layout.queries(slot), lane, |row| {
                        let (token, in_group) = self.group.div_rem(row);
                        (self.row(slot, token), head + in_group)
                    });
                    if descriptor.chunk == 0 && self.params.arrivals != 0 {
                        let merge = self.merge_of_lane(slot, unit.tokens);
                        self.results().expect(merge, unit.head);
                    }
                }
                let k = layout.stage(place.index);
                let chunk = Chunk {
                    k,
                    v: k + Layout::<DIM, ROWS, WARPS>::CHUNK,
                    first: descriptor.first,
                };
                let keys = Keys {
                    begin: unit.begin,
                    end: unit.end,
                };
                if descriptor.masked {
                    rows.attend::<T, V, true>(variant, self.lane, &offsets, chunk, keys);
                    // The zeroes come before the copy that overwrites them.
                    #[cfg(target_feature = "sm_90")]
                    cuda_std::fence::proxy_async_shared();
                } else {
                    rows.attend::<T, V, false>(variant, self.lane, &offsets, chunk, keys);
                }
                mbarrier::arrive(layout.stage_empty(place.index));
                if descriptor.chunk + WARPS >= unit.chunks {
                    // What the end of a unit needs is computed there.
                    let here = Self {
                        warp: misc::opaque(self.warp),
                        lane: misc::opaque(self.lane),
                        ..*self
                    };
                    rows.finish();
                    here.store_state(&rows);
                    rows.clear();
                    here.end_of_share::<T, ROW_BLOCKS, PER_LANE>(descriptor, &unit);
                }
                place.advance(WARPS, layout.stages);
            }
            if self.params.arrivals != 0 {
                self.late_merges::<T>();
            }
        }
    }

    #[inline(always)]
    fn results(&self) -> Results<'_, DIM> {
        Results {
            params: self.params,
            lane: self.lane,
        }
    }

    /// # Safety
    /// `slot` is filled and has the token.
    #[inline(always)]
    unsafe fn row(&self, slot: u32, token: u32) -> QueryRow {
        // SAFETY: the caller's promise.
        unsafe {
            let [token, position, slot, merge] = shared::load_u32x4(self.layout.token(slot, token));
            QueryRow {
                token,
                position: position as i32,
                slot,
                merge,
            }
        }
    }

    /// # Safety
    /// The warp's state is free.
    #[inline(always)]
    unsafe fn store_state<const DIM_BLOCKS: usize, const ROW_BLOCKS: usize>(
        &self,
        rows: &Rows<DIM_BLOCKS, ROW_BLOCKS>,
    ) {
        let pitch = Layout::<DIM, ROWS, WARPS>::PITCH;
        let (out, lse) = (
            self.layout.state_out(self.warp),
            self.layout.state_lse(self.warp),
        );
        let mut i = 0;
        while i < ROW_BLOCKS * 2 {
            let (block, column) = (i / 2, i % 2);
            let row = block as u32 * 8 + 2 * (self.lane % 4) + column as u32;
            let first = out + (row * pitch + self.lane / 4) * 4;
            let mut dim = 0;
            while dim < DIM_BLOCKS {
                let element = first + dim as u32 * 64;
                // SAFETY: inside the state.
                unsafe {
                    shared::store_f32(element, rows.out[dim][block][column]);
                    shared::store_f32(element + 32, rows.out[dim][block][2 + column]);
                }
                dim += 1;
            }
            if self.lane < 4 {
                // SAFETY: inside the state.
                unsafe { shared::store_f32(lse + row * 4, rows.softmax[block][column].lse()) };
            }
            i += 1;
        }
    }

    /// Waits for the states of all the unit's warps, which then combine and write a part of the rows each; when
    /// all have, the first of them merges. (None of them has anything else to do: the next chunk of each comes after
    /// all of this unit.)
    ///
    /// # Safety
    /// The lanes come together; the state is stored.
    #[inline(always)]
    unsafe fn end_of_share<T: Half, const ROW_BLOCKS: usize, const PER_LANE: usize>(
        &self,
        descriptor: Descriptor,
        unit: &Unit,
    ) {
        let layout = &self.layout;
        let Descriptor { slot, chunk, .. } = descriptor;
        let Unit {
            head,
            tokens,
            chunks,
            ..
        } = *unit;
        // The unit's last chunks went to one warp each.
        let shares = chunks.min(WARPS);
        let share = chunk - (chunks - shares);
        let first = self.wrap(self.warp + WARPS - share);
        // SAFETY: the slot stays filled until its barrier is arrived at, below.
        unsafe {
            let sequence = Unit::load_sequence(layout.unit(slot));
            let meeting = Layout::<DIM, ROWS, WARPS>::meeting(sequence + chunks - shares);
            warp::sync_warp(ALL);
            let merges = self.params.arrivals != 0;
            let index = if merges {
                self.merge_of_lane(slot, tokens)
            } else {
                NO_MERGE
            };
            let merge = self.results().look_up(index);
            let weights = if shares > 1 {
                meet(meeting, shares);
                self.weights::<ROW_BLOCKS>(first, shares)
            } else {
                Weights::NONE
            };
            let (results, group) = (self.results(), self.group.get());
            let mut row = share;
            while row < tokens * group {
                let (token, in_group) = self.group.div_rem(row);
                // Alone, the warp's state is the unit's: the same bits as with a weight of 1.
                let state = if shares > 1 {
                    self.combine::<ROW_BLOCKS, PER_LANE>(&weights, row, first, shares)
                } else {
                    self.own_state::<PER_LANE>(row)
                };
                let info = self.row(slot, token);
                results.write::<T, PER_LANE>(info, head * group + in_group, state);
                row += shares;
            }
            // The states are read, so that the next ones may be stored, and the unit's own are written.
            if shares > 1 {
                barrier::bar_sync(meeting, shares * 32);
            } else {
                warp::sync_warp(ALL);
            }
            if merges && share == 0 {
                self.merge::<T>(index, merge, head);
            }
            // The queries were read before the copy that overwrites them.
            #[cfg(target_feature = "sm_90")]
            cuda_std::fence::proxy_async_shared();
            // Each lane says so itself. The barrier waits for all warps there are: the first arrives for those that
            // have no share.
            let arrivals = if share == 0 { WARPS + 1 - shares } else { 1 };
            mbarrier::arrive_count(layout.unit_empty(slot), arrivals);
        }
    }

    #[inline(always)]
    fn wrap(&self, warp: u32) -> u32 {
        if warp >= WARPS { warp - WARPS } else { warp }
    }

    /// What the warps' states weigh in the combined ones, for all rows at once: lane `l` has the shares
    /// `l / 8 + 4·i` of the rows `8·block + l % 8`.
    ///
    /// # Safety
    /// The lanes come together; the states are stored.
    #[inline(always)]
    unsafe fn weights<const ROW_BLOCKS: usize>(
        &self,
        first: u32,
        shares: u32,
    ) -> Weights<ROW_BLOCKS> {
        const { assert!(WARPS <= 4 * SHARE_STEPS as u32) };
        let mut weights = Weights::NONE;
        let mut block = 0;
        while block < ROW_BLOCKS {
            let row = block as u32 * 8 + self.lane % 8;
            let mut lse = [f32::NEG_INFINITY; SHARE_STEPS];
            let mut softmax = Softmax::EMPTY;
            let mut i = 0;
            while i < SHARE_STEPS {
                let share = self.lane / 8 + 4 * i as u32;
                if share < shares {
                    // SAFETY: inside the warp's state.
                    lse[i] = unsafe {
                        shared::load_f32(self.layout.state_lse(self.wrap(first + share)) + row * 4)
                    };
                }
                let _ = softmax.raise(lse[i]);
                i += 1;
            }
            let mut max = softmax.max;
            // SAFETY: the lanes are together.
            unsafe {
                let other = warp::warp_shuffle_xor(ALL, max, 8, 32);
                max = if other > max { other } else { max };
                let other = warp::warp_shuffle_xor(ALL, max, 16, 32);
                max = if other > max { other } else { max };
            }
            let _ = softmax.raise(max);
            i = 0;
            while i < SHARE_STEPS {
                weights.of[block][i] = softmax.weight(lse[i]);
                softmax.sum += weights.of[block][i];
                i += 1;
            }
            // SAFETY: the lanes are together.
            unsafe {
                softmax.sum += warp::warp_shuffle_xor(ALL, softmax.sum, 8, 32);
                softmax.sum += warp::warp_shuffle_xor(ALL, softmax.sum, 16, 32);
            }
            let norm = softmax.norm();
            i = 0;
            while i < SHARE_STEPS {
                weights.of[block][i] *= norm;
                i += 1;
            }
            weights.lse[block] = softmax.lse();
            block += 1;
        }
        weights
    }

    /// A row of what this warp stored.
    ///
    /// # Safety
    /// The warp's state is stored.
    #[inline(always)]
    unsafe fn own_state<const PER_LANE: usize>(&self, row: u32) -> State<PER_LANE> {
        let offset = (row * Layout::<DIM, ROWS, WARPS>::PITCH + self.lane * PER_LANE as u32) * 4;
        // SAFETY: inside the state.
        unsafe {
            State {
                out: load_shared(self.layout.state_out(self.warp) + offset),
                lse: shared::load_f32(self.layout.state_lse(self.warp) + row * 4),
            }
        }
    }

    /// A row's state over all warps that have a share in it, in the order of their last chunks.
    ///
    /// # Safety
    /// The lanes come together; the states are stored.
    #[inline(always)]
    unsafe fn combine<const ROW_BLOCKS: usize, const PER_LANE: usize>(
        &self,
        weights: &Weights<ROW_BLOCKS>,
        row: u32,
        first: u32,
        shares: u32,
    ) -> State<PER_LANE> {
        let layout = &self.layout;
        let offset = (row * Layout::<DIM, ROWS, WARPS>::PITCH + self.lane * PER_LANE as u32) * 4;
        let (mut of, mut lse) = (weights.of[0], weights.lse[0]);
        let mut block = 1;
        while block < ROW_BLOCKS {
            if row / 8 == block as u32 {
                of = weights.of[block];
                lse = weights.lse[block];
            }
            block += 1;
        }
        let mut state = State::<PER_LANE>::EMPTY;
        // SAFETY: inside the states; the lanes are together.
        unsafe {
            state.lse = warp::warp_shuffle_idx(ALL, lse, row % 8, 32);
            // All loads at once.
            let mut outs = [[0.0; PER_LANE]; 4 * SHARE_STEPS];
            let mut share = 0;
            while share < WARPS {
                if share < shares {
                    let warp = self.wrap(first + share);
                    outs[share as usize] = load_shared(layout.state_out(warp) + offset);
                }
                share += 1;
            }
            share = 0;
            while share < WARPS {
                let lane = share % 4 * 8 + row % 8;
                let weight = warp::warp_shuffle_idx(ALL, of[share as usize / 4], lane, 32);
                let mut i = 0;
                while i < PER_LANE {
                    state.out[i] += weight * outs[share as usize][i];
                    i += 1;
                }
                share += 1;
            }
        }
        state
    }

    /// The merge of the token that the lane stands for, if there is any.
    ///
    /// # Safety
    /// `slot` is filled and has so many tokens.
    #[inline(always)]
    unsafe fn merge_of_lane(&self, slot: u32, tokens: u32) -> u32 {
        if self.lane < tokens {
            // SAFETY: the caller's promise.
            unsafe { self.row(slot, self.lane).merge }
        } else {
            NO_MERGE
        }
    }

    /// Counts the unit's partial states at their merges, of which each lane has one, or none. Where it is the last one, the merge waits until the CTA
    /// has no other work and all its warps can share it; if the list of those is full, this warp does it.
    ///
    /// # Safety
    /// The lanes come together, after the partial states were written.
    #[inline(always)]
    unsafe fn merge<T: Half>(&self, index: u32, merge: Merge, head: u32) {
        let (results, group) = (self.results(), self.params.group);
        // SAFETY: merges and slots are the plan's; the warp's barrier gathers what all lanes wrote.
        unsafe {
            warp::sync_warp(ALL);
            let mut last = results.arrive(index, merge, head);
            if last {
                let index = atomic::shared::fetch_add_u32(self.layout.merges(), 1);
                if index < MERGES {
                    shared::store_u32x4(
                        self.layout.merge(index),
                        [merge.token, merge.slots_begin, merge.slots, head],
                    );
                    last = false;
                }
            }
            let mut waiting = warp::warp_vote_ballot(ALL, last);
            while waiting != 0 {
                let merge = merge.broadcast(waiting.trailing_zeros());
                waiting &= waiting - 1;
                let mut in_group = 0;
                while in_group < group {
                    results.merge::<T>(merge, head * group + in_group);
                    in_group += 1;
                }
            }
        }
    }

    /// The merges that waited, shared out to all warps by slices of rows.
    ///
    /// # Safety
    /// The warps come together, after their last units.
    #[inline(always)]
    unsafe fn late_merges<T: Half>(&self) {
        // SAFETY: every consumer warp comes here once; what the list holds was published by the barrier,
        // the states by the acquiring atomic of the warp that put the merge on the list.
        unsafe {
            meet(0, WARPS);
            let merges = shared::load_u32(self.layout.merges()).min(MERGES);
            let slices = DIM / SLICE;
            let mut task = self.warp;
            while task < merges * self.params.group * slices {
                let (row, slice) = (task / slices, task % slices);
                let (index, in_group) = self.group.div_rem(row);
                let [token, slots_begin, slots, kv_head] =
                    shared::load_u32x4(self.layout.merge(index));
                let merge = Merge {
                    token,
                    slots_begin,
                    slots,
                };
                self.results().merge_slice::<T>(
                    merge,
                    kv_head * self.params.group + in_group,
                    slice,
                );
                task += WARPS;
            }
        }
    }
}

/// Where warps read what the others stored just before.
///
/// They meet twice: who waits at the second barrier has seen to the first, which racecheck of CUDA 13.0 takes to come
/// later, now and then, than what another warp does behind it.
///
/// # Safety
/// As [`barrier::bar_sync`]'s.
#[inline(always)]
unsafe fn meet(barrier: u32, warps: u32) {
    // SAFETY: the caller's promise.
    unsafe {
        barrier::bar_sync(barrier, warps * 32);
        barrier::bar_sync(barrier, warps * 32);
    }
}

/// See [`Consumer::weights`].
struct Weights<const ROW_BLOCKS: usize> {
    of: [[f32; SHARE_STEPS]; ROW_BLOCKS],
    lse: [f32; ROW_BLOCKS],
}

impl<const ROW_BLOCKS: usize> Weights<ROW_BLOCKS> {
    const NONE: Self = Self {
        of: [[0.0; SHARE_STEPS]; ROW_BLOCKS],
        lse: [f32::NEG_INFINITY; ROW_BLOCKS],
    };
}

/// # Safety
/// `address` is a shared one of `N` floats, aligned to as much as the load takes.
#[inline(always)]
unsafe fn load_shared<const N: usize>(address: u32) -> [f32; N] {
    let mut values = [0.0; N];
    let mut i = 0;
    // SAFETY: the caller's promise.
    unsafe {
        while i + 4 <= N {
            let four = shared::load_f32x4(address + i as u32 * 4);
            values[i] = four[0];
            values[i + 1] = four[1];
            values[i + 2] = four[2];
            values[i + 3] = four[3];
            i += 4;
        }
        if i + 2 <= N {
            let two = shared::load_f32x2(address + i as u32 * 4);
            values[i] = two[0];
            values[i + 1] = two[1];
        }
    }
    values
}
