//! The consumer warps: states of chunks, their combination at the end of a unit, results.

use cuda_std::{
    atomic::{self, AcqRel, Gpu, Relaxed},
    barrier, mbarrier, ptr, shared, warp,
};

use super::{
    half::Half,
    layout::{Descriptor, Layout, MERGES, Place, Unit},
    tile::{Chunk, Keys, LaneOffsets, Rows},
};
use crate::{
    abi::{AttentionParams, DIRECT, NO_MERGE, QueryRow},
    divisor::Divisor,
    state::{Merger, Softmax, State, natural},
    variant::Variant,
};

const ALL: u32 = warp::FULL_MASK;

/// Elements of a row that a warp merges at a time, at the end.
const SLICE: u32 = 32;

/// Shares of a unit that a lane weighs.
const SHARE_STEPS: usize = 2;

/// A merge of more states than this waits for the end of the CTA's units, when all warps share in it.
const AT_ONCE: u32 = 4;

/// A consumer warp.
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
        let mut state_parity = 1;
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
                let unit = shared::pointer_to::<Unit>(layout.unit(slot));
                if descriptor.chunk < WARPS {
                    mbarrier::wait(layout.unit_full(slot), descriptor.parity);
                    let head = (*unit).head * self.params.group;
                    rows.start(layout.queries(slot), self.lane, |row| {
                        let (token, in_group) = self.group.div_rem(row);
                        (self.row(slot, token), head + in_group)
                    });
                }
                let k = layout.stage(place.index);
                let chunk = Chunk {
                    k,
                    v: k + Layout::<DIM, ROWS, WARPS>::CHUNK,
                    first: descriptor.first,
                };
                let keys = Keys {
                    begin: (*unit).begin,
                    end: (*unit).end,
                };
                if descriptor.masked {
                    rows.attend::<T, V, true>(variant, self.lane, &offsets, chunk, keys);
                    // The zeroes come before the copy that overwrites them.
                    #[cfg(target_feature = "sm_90")]
                    cuda_std::fence::proxy_async_shared();
                } else {
                    rows.attend::<T, V, false>(variant, self.lane, &offsets, chunk, keys);
                }
                warp::sync_warp(ALL);
                if self.lane == 0 {
                    mbarrier::arrive(layout.stage_empty(place.index));
                }
                if descriptor.chunk + WARPS >= (*unit).chunks {
                    rows.finish();
                    mbarrier::wait(layout.state_free(self.warp), state_parity);
                    state_parity ^= 1;
                    self.store_state(&rows);
                    rows.clear();
                    self.end_of_share::<T, ROW_BLOCKS, PER_LANE>(slot, unit, descriptor.chunk);
                }
                place.advance(WARPS, layout.stages);
            }
            self.late_merges::<T>();
        }
    }

    /// # Safety
    /// `slot` is filled and has the token.
    #[inline(always)]
    unsafe fn row(&self, slot: u32, token: u32) -> QueryRow {
        // SAFETY: the caller's promise.
        unsafe { *shared::pointer_to::<QueryRow>(self.layout.token(slot, token)) }
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

    /// Counts the warp's state; the last warp of the unit combines all of them and writes the result.
    ///
    /// # Safety
    /// The lanes come together; the state is stored.
    #[inline(always)]
    unsafe fn end_of_share<T: Half, const ROW_BLOCKS: usize, const PER_LANE: usize>(
        &self,
        slot: u32,
        unit: *mut Unit,
        chunk: u32,
    ) {
        let layout = &self.layout;
        // SAFETY: the slot stays filled until its barrier is arrived at, below.
        unsafe {
            let Unit {
                head,
                tokens,
                chunks,
                ..
            } = *unit;
            let shares = chunks.min(WARPS);
            if shares > 1 {
                warp::sync_warp(ALL);
                let mut before = 0;
                if self.lane == 0 {
                    let arrived = shared::address_of(&raw const (*unit).arrived);
                    before = atomic::shared::fetch_add_u32(arrived, 1);
                }
                if warp::warp_shuffle_idx(ALL, before, 0, 32) + 1 != shares {
                    return;
                }
            }
            warp::sync_warp(ALL);
            // The unit's last chunks went to one warp each, of which this is not the first.
            let first = self.wrap(self.warp + WARPS - (chunk - (chunks - shares)));

            let weights = self.weights::<ROW_BLOCKS>(first, shares);
            let group = self.params.group;
            let (mut row, mut token) = (0, 0);
            while token < tokens {
                let info = self.row(slot, token);
                let mut in_group = 0;
                while in_group < group {
                    let state = self.combine::<ROW_BLOCKS, PER_LANE>(&weights, row, first, shares);
                    self.write::<T, PER_LANE>(info, head * group + in_group, state);
                    in_group += 1;
                    row += 1;
                }
                token += 1;
            }
            warp::sync_warp(ALL);
            if self.lane < shares {
                mbarrier::arrive(layout.state_free(self.wrap(first + self.lane)));
            }
            if self.params.arrivals != 0 {
                self.merge::<T, PER_LANE>(slot, tokens, head);
            }
            if self.lane == 0 {
                mbarrier::arrive(layout.unit_empty(slot));
            }
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
        let mut weights = Weights {
            of: [[0.0; SHARE_STEPS]; ROW_BLOCKS],
            lse: [0.0; ROW_BLOCKS],
        };
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
            // All loads at once; what is none of the unit's is not looked at.
            let mut outs = [[0.0; PER_LANE]; 4 * SHARE_STEPS];
            let mut share = 0;
            while share < WARPS {
                let warp = self.wrap(first + share);
                outs[share as usize] = load_shared(layout.state_out(warp) + offset);
                share += 1;
            }
            share = 0;
            while share < WARPS {
                let lane = share % 4 * 8 + row % 8;
                let weight = warp::warp_shuffle_idx(ALL, of[share as usize / 4], lane, 32);
                let mut i = 0;
                while i < PER_LANE {
                    let out = if share < shares {
                        outs[share as usize][i]
                    } else {
                        0.0
                    };
                    state.out[i] += weight * out;
                    i += 1;
                }
                share += 1;
            }
        }
        state
    }

    /// Writes a row of one head: the output, or a partial state.
    ///
    /// # Safety
    /// `row` and `head` belong to a unit of the launch.
    #[inline(always)]
    unsafe fn write<T: Half, const PER_LANE: usize>(
        &self,
        row: QueryRow,
        head: u32,
        state: State<PER_LANE>,
    ) {
        // SAFETY: the row is this unit's.
        unsafe {
            if row.slot == DIRECT {
                self.write_output::<T, PER_LANE>(row.token, head, state);
            } else {
                let at = u64::from(row.slot) * u64::from(self.params.q_heads) + u64::from(head);
                let element = at * u64::from(DIM) + u64::from(self.lane) * PER_LANE as u64;
                store_f32(
                    (self.params.partial_out + element * 4) as *mut f32,
                    state.out,
                );
                if self.lane == 0 {
                    ptr::store_f32((self.params.partial_lse + at * 4) as *mut f32, state.lse);
                }
            }
        }
    }

    /// # Safety
    /// The warp owns this row of the output.
    #[inline(always)]
    unsafe fn write_output<T: Half, const PER_LANE: usize>(
        &self,
        token: u32,
        head: u32,
        state: State<PER_LANE>,
    ) {
        let params = self.params;
        let element = u64::from(token) * u64::from(params.out_token_stride)
            + u64::from(head * DIM + self.lane * PER_LANE as u32);
        // SAFETY: the caller's promise.
        unsafe {
            store_half::<T, PER_LANE>(params.out + element * 2, state.out);
            if self.lane == 0 && params.lse != 0 {
                let at = u64::from(token) * u64::from(params.q_heads) + u64::from(head);
                ptr::store_f32((params.lse + at * 4) as *mut f32, natural(state.lse));
            }
        }
    }

    /// Counts the unit's partial states at their merges; where it is the last one, merges.
    ///
    /// # Safety
    /// The lanes come together, after the partial states were written.
    #[inline(always)]
    unsafe fn merge<T: Half, const PER_LANE: usize>(&self, slot: u32, tokens: u32, head: u32) {
        let params = self.params;
        // SAFETY: merges and slots are the plan's. The release half of the atomic, cumulative over the
        // warp's barrier, publishes all lanes' states; its acquire half shows those of the others.
        unsafe {
            warp::sync_warp(ALL);
            let mut merge_row = [0; 4];
            let mut last = false;
            if self.lane < tokens {
                let merge = self.row(slot, self.lane).merge;
                if merge != NO_MERGE {
                    let counter = params.arrivals
                        + (u64::from(merge) * u64::from(params.kv_heads) + u64::from(head)) * 4;
                    merge_row =
                        ptr::load_nc_u32x4((params.merges + u64::from(merge) * 16) as *const u32);
                    let before = atomic::fetch_add::<AcqRel, Gpu, u32>(counter as *mut u32, 1);
                    last = before + 1 == merge_row[2];
                    if last {
                        atomic::store::<Relaxed, Gpu, u32>(counter as *mut u32, 0);
                    }
                }
            }
            if last && merge_row[2] > AT_ONCE {
                let index = atomic::shared::fetch_add_u32(self.layout.merges(), 1);
                if index < MERGES {
                    let [token, slots_begin, slots, _] = merge_row;
                    shared::store_u32x4(
                        self.layout.merge(index),
                        [token, slots_begin, slots, head],
                    );
                    last = false;
                }
            }
            let mut waiting = warp::warp_vote_ballot(ALL, last);
            while waiting != 0 {
                let lane = waiting.trailing_zeros();
                waiting &= waiting - 1;
                let merge = Merge {
                    token: warp::warp_shuffle_idx(ALL, merge_row[0], lane, 32),
                    slots_begin: warp::warp_shuffle_idx(ALL, merge_row[1], lane, 32),
                    slots: warp::warp_shuffle_idx(ALL, merge_row[2], lane, 32),
                };
                let mut in_group = 0;
                while in_group < params.group {
                    let q_head = head * params.group + in_group;
                    if merge.slots <= AT_ONCE {
                        let state = self.merge_row::<PER_LANE>(merge, q_head);
                        self.write_output::<T, PER_LANE>(merge.token, q_head, state);
                    } else {
                        // The list is full. The same arithmetic as for those on it: which ones are is
                        // a matter of timing, and the result must not be.
                        let mut slice = 0;
                        while slice < DIM / SLICE {
                            self.merge_slice::<T>(merge, q_head, slice);
                            slice += 1;
                        }
                    }
                    in_group += 1;
                }
            }
        }
    }

    /// A row of the output over its partial states, at most [`AT_ONCE`].
    ///
    /// # Safety
    /// The states are written and visible.
    #[inline(always)]
    unsafe fn merge_row<const PER_LANE: usize>(&self, merge: Merge, head: u32) -> State<PER_LANE> {
        let params = self.params;
        let list = (params.merge_slots + u64::from(merge.slots_begin) * 4) as *const u32;
        let mut states = [State::<PER_LANE>::EMPTY; AT_ONCE as usize];
        let mut i = 0;
        while i < AT_ONCE as usize {
            if (i as u32) < merge.slots {
                // SAFETY: the caller's promise.
                unsafe {
                    let slot = ptr::load_nc_u32(list.add(i));
                    let at = u64::from(slot) * u64::from(params.q_heads) + u64::from(head);
                    let element = at * u64::from(DIM) + u64::from(self.lane) * PER_LANE as u64;
                    states[i].lse = ptr::load_f32((params.partial_lse + at * 4) as *const f32);
                    states[i].out = load_f32((params.partial_out + element * 4) as *const f32);
                }
            }
            i += 1;
        }
        let mut merger = Merger::<PER_LANE>::EMPTY;
        merger.push_all(states);
        merger.finish()
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
            barrier::bar_sync(1, WARPS * 32);
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
                self.merge_slice::<T>(merge, kv_head * self.params.group + in_group, slice);
                task += WARPS;
            }
        }
    }

    /// Merges [`SLICE`] elements of a row. The lanes share the states as well, a quarter each, so that the
    /// latency of memory is paid about once.
    ///
    /// # Safety
    /// The lanes come together; the states are written and visible.
    #[inline(always)]
    unsafe fn merge_slice<T: Half>(&self, merge: Merge, head: u32, slice: u32) {
        const QUARTER_BATCH: usize = 8;
        let params = self.params;
        let (quarter, element) = (self.lane / 8, slice * SLICE + self.lane % 8 * 4);
        let list = (params.merge_slots + u64::from(merge.slots_begin) * 4) as *const u32;
        // SAFETY: the caller's promise.
        unsafe {
            let mut merger = Merger::<4>::EMPTY;
            let mut next = 0;
            while next < merge.slots {
                let mut ids = [u32::MAX; QUARTER_BATCH];
                let mut i = 0;
                while i < QUARTER_BATCH {
                    let at = next + quarter + i as u32 * 4;
                    if at < merge.slots {
                        ids[i] = ptr::load_nc_u32(list.add(at as usize));
                    }
                    i += 1;
                }
                let mut states = [State::<4>::EMPTY; QUARTER_BATCH];
                i = 0;
                while i < QUARTER_BATCH {
                    if ids[i] != u32::MAX {
                        let at = u64::from(ids[i]) * u64::from(params.q_heads) + u64::from(head);
                        let out =
                            params.partial_out + (at * u64::from(DIM) + u64::from(element)) * 4;
                        states[i].lse = ptr::load_f32((params.partial_lse + at * 4) as *const f32);
                        states[i].out = load_f32(out as *const f32);
                    }
                    i += 1;
                }
                merger.push_all(states);
                next += QUARTER_BATCH as u32 * 4;
            }
            let mut state = merger.finish();
            let mut stride = 8;
            while stride < 32 {
                let mut other = State::<4>::EMPTY;
                other.lse = warp::warp_shuffle_down(ALL, state.lse, stride, 32);
                let mut i = 0;
                while i < 4 {
                    other.out[i] = warp::warp_shuffle_down(ALL, state.out[i], stride, 32);
                    i += 1;
                }
                state = state.merge(other);
                stride *= 2;
            }
            if quarter == 0 {
                let out = u64::from(merge.token) * u64::from(params.out_token_stride)
                    + u64::from(head * DIM + element);
                store_half::<T, 4>(params.out + out * 2, state.out);
                if element == 0 && params.lse != 0 {
                    let at = u64::from(merge.token) * u64::from(params.q_heads) + u64::from(head);
                    ptr::store_f32((params.lse + at * 4) as *mut f32, natural(state.lse));
                }
            }
        }
    }
}

/// See [`Consumer::weights`].
struct Weights<const ROW_BLOCKS: usize> {
    of: [[f32; SHARE_STEPS]; ROW_BLOCKS],
    lse: [f32; ROW_BLOCKS],
}

/// The part of a [`MergeRow`](crate::abi::MergeRow) that says something.
#[derive(Clone, Copy)]
struct Merge {
    token: u32,
    slots_begin: u32,
    slots: u32,
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

/// # Safety
/// As [`load_shared`]'s, in device memory.
#[inline(always)]
unsafe fn load_f32<const N: usize>(source: *const f32) -> [f32; N] {
    let mut values = [0.0; N];
    let mut i = 0;
    // SAFETY: the caller's promise.
    unsafe {
        while i + 4 <= N {
            let four = ptr::load_f32x4(source.add(i));
            values[i] = four[0];
            values[i + 1] = four[1];
            values[i + 2] = four[2];
            values[i + 3] = four[3];
            i += 4;
        }
        if i + 2 <= N {
            let two = ptr::load_f32x2(source.add(i));
            values[i] = two[0];
            values[i + 1] = two[1];
        }
    }
    values
}

/// # Safety
/// As [`load_shared`]'s, writable, in device memory.
#[inline(always)]
unsafe fn store_f32<const N: usize>(target: *mut f32, values: [f32; N]) {
    let mut i = 0;
    // SAFETY: the caller's promise.
    unsafe {
        while i + 4 <= N {
            let four = [values[i], values[i + 1], values[i + 2], values[i + 3]];
            ptr::store_f32x4(target.add(i), four);
            i += 4;
        }
        if i + 2 <= N {
            ptr::store_f32x2(target.add(i), [values[i], values[i + 1]]);
        }
    }
}

/// # Safety
/// As [`store_f32`]'s, for 16-bit floats.
#[inline(always)]
unsafe fn store_half<T: Half, const N: usize>(target: u64, values: [f32; N]) {
    let target = target as *mut u32;
    let mut i = 0;
    // SAFETY: the caller's promise.
    unsafe {
        while i + 8 <= N {
            let pairs = [
                T::pack(values[i], values[i + 1]),
                T::pack(values[i + 2], values[i + 3]),
                T::pack(values[i + 4], values[i + 5]),
                T::pack(values[i + 6], values[i + 7]),
            ];
            ptr::store_u32x4(target.add(i / 2), pairs);
            i += 8;
        }
        if i + 4 <= N {
            let pairs = [
                T::pack(values[i], values[i + 1]),
                T::pack(values[i + 2], values[i + 3]),
            ];
            ptr::store_u32x2(target.add(i / 2), pairs);
            i += 4;
        }
        if i + 2 <= N {
            ptr::store_u32(target.add(i / 2), T::pack(values[i], values[i + 1]));
        }
    }
}
