//! The results of decode kernels: outputs and partial states, which the CTA that arrives last merges.

use cuda_std::{
    atomic::{self, AcqRel, Gpu, Relaxed},
    ptr, warp,
};

use super::output_columns;
use crate::{
    abi::{AttentionParams, DIRECT, NO_MERGE, QueryRow},
    common::{
        half::Half,
        state::{Merger, Softmax, State, natural, sink_of_row},
        variant::Variant,
    },
};

mod vectors;

use vectors::{load_f32, store_f32, store_half};

const ALL: u32 = warp::FULL_MASK;

/// Elements of a row that a warp merges at a time.
pub const SLICE: u32 = 64;

/// The outputs and partial states of a launch, as a warp writes them, for head dimension `DIM`.
#[derive(Clone, Copy)]
pub struct Results<'a, const DIM: u32> {
    /// The launch.
    pub params: &'a AttentionParams,
    /// Lane in the warp.
    pub lane: u32,
    /// Columns of a head in the outputs, where `DIM` is no multiple of 64; otherwise they are `DIM`.
    pub out_columns: u32,
}

impl<const DIM: u32> Results<'_, DIM> {
    /// Columns of a head in partial states.
    const COLUMNS: u32 = output_columns(DIM);

    /// The column of a head's element among `columns`.
    #[inline(always)]
    const fn column(element: u32, columns: u32) -> u32 {
        if DIM < Self::COLUMNS && element >= 64 {
            element + (columns - DIM)
        } else {
            element
        }
    }

    /// Columns of a head in the outputs.
    #[inline(always)]
    const fn out_columns(&self) -> u32 {
        if DIM < Self::COLUMNS {
            self.out_columns
        } else {
            DIM
        }
    }

    /// Writes a row of one head to the output, with its sink, or as a partial state.
    ///
    /// # Safety
    /// `row` and `head` belong to a unit of the launch.
    #[inline(always)]
    pub unsafe fn write<T: Half, V: Variant, const PER_LANE: usize>(
        &self,
        row: QueryRow,
        head: u32,
        state: State<PER_LANE>,
    ) {
        // SAFETY: the caller's promise.
        unsafe { self.write_either::<T, V, PER_LANE, true>(row, head, state) };
    }

    /// [`write`](Self::write) for a state that has its sink, if the row is written to the output.
    ///
    /// # Safety
    /// As there.
    #[inline(always)]
    pub unsafe fn write_with_sink<T: Half, V: Variant, const PER_LANE: usize>(
        &self,
        row: QueryRow,
        head: u32,
        state: State<PER_LANE>,
    ) {
        // SAFETY: the caller's promise.
        unsafe { self.write_either::<T, V, PER_LANE, false>(row, head, state) };
    }

    /// [`write`](Self::write), which adds the sink, or [`write_with_sink`](Self::write_with_sink), which does not.
    ///
    /// # Safety
    /// As there.
    #[inline(always)]
    unsafe fn write_either<T: Half, V: Variant, const PER_LANE: usize, const ADDS: bool>(
        &self,
        row: QueryRow,
        head: u32,
        mut state: State<PER_LANE>,
    ) {
        // SAFETY: the row is this unit's.
        unsafe {
            if row.slot == DIRECT {
                if ADDS && self.params.sinks != 0 {
                    state = state.with_sink(sink_of_row(self.params, row.token, head));
                }
                self.write_output::<T, V, PER_LANE>(row.token, head, state);
            } else {
                let at = u64::from(row.slot) * u64::from(self.params.q_heads) + u64::from(head);
                let element = self.lane * PER_LANE as u32;
                if element < DIM {
                    let column = at * u64::from(Self::COLUMNS)
                        + u64::from(Self::column(element, Self::COLUMNS));
                    store_f32(
                        (self.params.partial_out + column * 4) as *mut f32,
                        state.out,
                    );
                }
                if self.lane == 0 {
                    ptr::store_f32((self.params.partial_lse + at * 4) as *mut f32, state.lse);
                }
            }
        }
    }

    /// # Safety
    /// The warp owns this row of the output.
    #[inline(always)]
    unsafe fn write_output<T: Half, V: Variant, const PER_LANE: usize>(
        &self,
        token: u32,
        head: u32,
        mut state: State<PER_LANE>,
    ) {
        let params = self.params;
        if !V::SOFTMAX {
            state = state.added_up();
        }
        let element = self.lane * PER_LANE as u32;
        let column = u64::from(token) * u64::from(params.out_token_stride)
            + u64::from(head * self.out_columns() + Self::column(element, self.out_columns()));
        // SAFETY: the caller's promise.
        unsafe {
            if element < DIM {
                store_half::<T, PER_LANE>(params.out + column * 2, state.out);
            }
            if self.lane == 0 && params.lse != 0 {
                let at = u64::from(token) * u64::from(params.q_heads) + u64::from(head);
                ptr::store_f32((params.lse + at * 4) as *mut f32, natural(state.lse));
            }
        }
    }

    /// Address of the counter of arrivals at a merge.
    #[inline(always)]
    fn counter(&self, merge: u32, kv_head: u32) -> u64 {
        let params = self.params;
        params.arrivals + (u64::from(merge) * u64::from(params.kv_heads) + u64::from(kv_head)) * 4
    }

    /// Address of the description of a merge.
    #[inline(always)]
    fn description(&self, merge: u32) -> *const u32 {
        (self.params.merges + u64::from(merge) * 16) as *const u32
    }

    /// Prefetches to L2 what [`arrive`](Self::arrive) will need.
    ///
    /// # Safety
    /// As [`arrive`](Self::arrive), except that the states need not be written.
    #[inline(always)]
    pub unsafe fn expect(&self, merge: u32, kv_head: u32) {
        if merge != NO_MERGE {
            // SAFETY: merges and counters are the plan's.
            unsafe {
                ptr::prefetch_l2(self.description(merge));
                ptr::prefetch_l2(self.counter(merge, kv_head) as *const u32);
            }
        }
    }

    /// Loads the description of a merge, and prefetches its list of slots.
    ///
    /// # Safety
    /// `merge` is [`NO_MERGE`] or a merge of the plan.
    #[inline(always)]
    pub unsafe fn look_up(&self, merge: u32) -> Merge {
        if merge == NO_MERGE {
            return Merge::NONE;
        }
        // SAFETY: the merge is the plan's, and so is the list.
        unsafe {
            let [token, slots_begin, slots, _] = ptr::load_nc_u32x4(self.description(merge));
            // For the CTA that will arrive last and merge.
            let list = self.params.merge_slots + u64::from(slots_begin) * 4;
            ptr::prefetch_l2(list as *const u32);
            Merge {
                token,
                slots_begin,
                slots,
            }
        }
    }

    /// Counts the partial states of a token and KV head as arrived at their merge. Returns whether they were the last
    /// ones.
    ///
    /// # Safety
    /// `index` is [`NO_MERGE`] or that of `merge` in the plan. All states of this unit for the merge are written, by
    /// this warp or by warps that it has synchronised with at a barrier.
    #[inline(always)]
    pub unsafe fn arrive(&self, index: u32, merge: Merge, kv_head: u32) -> bool {
        if index == NO_MERGE {
            return false;
        }
        let counter = self.counter(index, kv_head);
        // SAFETY: the counter is the plan's. The release half of the atomic is cumulative over the barriers before it
        // and publishes the states; the acquire half makes the others' states visible.
        unsafe {
            let before = atomic::fetch_add::<AcqRel, Gpu, u32>(counter as *mut u32, 1);
            let last = before + 1 == merge.slots;
            if last {
                atomic::store::<Relaxed, Gpu, u32>(counter as *mut u32, 0);
            }
            last
        }
    }

    /// Merges a row of the output.
    ///
    /// # Safety
    /// The lanes come together; the states are written and visible.
    #[inline(always)]
    pub unsafe fn merge<T: Half, V: Variant>(&self, merge: Merge, head: u32) {
        let mut slice = 0;
        while slice < DIM.div_ceil(SLICE) {
            // SAFETY: the caller's promise.
            unsafe { self.merge_slice::<T, V>(merge, head, slice) };
            slice += 1;
        }
    }

    /// Merges [`SLICE`] elements of a row. Each quarter of the warp loads a quarter of the states, so that memory
    /// latency is paid about once. The order of the arithmetic depends only on the number of states: which warp merges
    /// is a matter of timing, and the result must not be.
    ///
    /// # Safety
    /// The lanes come together; the states are written and visible.
    #[inline(always)]
    pub unsafe fn merge_slice<T: Half, V: Variant>(&self, merge: Merge, head: u32, slice: u32) {
        /// States whose loads a quarter of the warp has in flight together.
        const BATCH: usize = 5;
        const PER_LANE: usize = SLICE as usize / 8;
        let params = self.params;
        let (quarter, element) = (
            self.lane / 8,
            slice * SLICE + self.lane % 8 * PER_LANE as u32,
        );
        let inside = DIM.is_multiple_of(SLICE) || element < DIM;
        let list = (params.merge_slots + u64::from(merge.slots_begin) * 4) as *const u32;
        // SAFETY: the caller's promise.
        unsafe {
            let mut merger = Merger::<PER_LANE>::EMPTY;
            // The row's sink counts as another state, without an output. It is the first, so that its load is in flight with
            // those of the states.
            if params.sinks != 0 && quarter == 0 {
                merger.softmax = Softmax::of_sink(sink_of_row(params, merge.token, head));
            }
            let mut next = 0;
            while next < merge.slots {
                let mut ids = [u32::MAX; BATCH];
                let mut i = 0;
                while i < BATCH {
                    let at = next + quarter + i as u32 * 4;
                    if at < merge.slots {
                        ids[i] = ptr::load_nc_u32(list.add(at as usize));
                    }
                    i += 1;
                }
                let mut states = [State::<PER_LANE>::EMPTY; BATCH];
                i = 0;
                while i < BATCH {
                    if ids[i] != u32::MAX && inside {
                        let at = u64::from(ids[i]) * u64::from(params.q_heads) + u64::from(head);
                        let out = params.partial_out
                            + (at * u64::from(Self::COLUMNS)
                                + u64::from(Self::column(element, Self::COLUMNS)))
                                * 4;
                        states[i].lse = ptr::load_f32((params.partial_lse + at * 4) as *const f32);
                        states[i].out = load_f32(out as *const f32);
                    }
                    i += 1;
                }
                merger.push_all(states);
                next += BATCH as u32 * 4;
            }
            let mut state = merger.finish();
            let mut stride = 8;
            while stride < 32 {
                let mut other = State::<PER_LANE>::EMPTY;
                other.lse = warp::warp_shuffle_down(ALL, state.lse, stride, 32);
                let mut i = 0;
                while i < PER_LANE {
                    other.out[i] = warp::warp_shuffle_down(ALL, state.out[i], stride, 32);
                    i += 1;
                }
                state = state.merge(other);
                stride *= 2;
            }
            if !V::SOFTMAX {
                state = state.added_up();
            }
            if quarter == 0 && inside {
                let out = u64::from(merge.token) * u64::from(params.out_token_stride)
                    + u64::from(
                        head * self.out_columns() + Self::column(element, self.out_columns()),
                    );
                store_half::<T, PER_LANE>(params.out + out * 2, state.out);
                if element == 0 && params.lse != 0 {
                    let at = u64::from(merge.token) * u64::from(params.q_heads) + u64::from(head);
                    ptr::store_f32((params.lse + at * 4) as *mut f32, natural(state.lse));
                }
            }
        }
    }
}

/// The fields of a [`MergeRow`](crate::abi::MergeRow) that a merge needs.
#[derive(Clone, Copy)]
pub struct Merge {
    /// As [`MergeRow::token`](crate::abi::MergeRow::token).
    pub token: u32,
    /// As [`MergeRow::slots_begin`](crate::abi::MergeRow::slots_begin).
    pub slots_begin: u32,
    /// As [`MergeRow::slots`](crate::abi::MergeRow::slots).
    pub slots: u32,
}

impl Merge {
    const NONE: Self = Self {
        token: 0,
        slots_begin: 0,
        slots: 0,
    };

    /// Returns the merge of lane `lane` in all lanes.
    ///
    /// # Safety
    /// The lanes come together.
    #[inline(always)]
    pub unsafe fn broadcast(self, lane: u32) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            Self {
                token: warp::warp_shuffle_idx(ALL, self.token, lane, 32),
                slots_begin: warp::warp_shuffle_idx(ALL, self.slots_begin, lane, 32),
                slots: warp::warp_shuffle_idx(ALL, self.slots, lane, 32),
            }
        }
    }
}
