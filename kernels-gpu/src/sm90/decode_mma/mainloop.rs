//! The consumer warps: the mainloop over chunks, and the end of a unit.

use cuda_std::{barrier, mbarrier, misc, warp};

use super::{
    super::{meet, pipeline::LaunchPipeline},
    config::per_lane,
    layout::{KEYS, Layout},
    unit::{Descriptor, Unit},
};
use crate::{
    abi::{AttentionParams, NO_MERGE, RotaryParams},
    common::{
        cache::{self, Cache, Stored},
        decode::{
            results::Results,
            tile::{Chunk, Keys, LaneOffsets, Rows, Sharers},
        },
        divisor::Divisor,
        half::Half,
        variant::Variant,
    },
};

const ALL: u32 = warp::FULL_MASK;

/// A consumer warp.
#[derive(Clone, Copy)]
pub struct Consumer<'a, const DIM: u32, const ROWS: u32, const WARPS: u32, const CACHE: u32> {
    /// The launch.
    pub params: &'a AttentionParams,
    /// Query heads per KV head. (`params.group` counts the query heads of a unit, which may have two KV heads.)
    pub group: Divisor,
    /// As [`DecodeParams::out_columns`](crate::abi::DecodeParams::out_columns).
    pub out_columns: u32,
    /// The rotary embedding, in kernels that apply it.
    pub rotary: &'a RotaryParams,
    /// Shared memory.
    pub layout: Layout<DIM, ROWS, WARPS, CACHE>,
    /// Index among the consumer warps.
    pub warp: u32,
    /// Lane in the warp.
    pub lane: u32,
}

/// Shares per lane in [`Weights::of`].
pub(super) const SHARE_STEPS: usize = 3;

/// The result of [`Consumer::weights`].
pub(super) struct Weights<const ROW_BLOCKS: usize> {
    pub of: [[f32; SHARE_STEPS]; ROW_BLOCKS],
    pub lse: [f32; ROW_BLOCKS],
}

impl<const ROW_BLOCKS: usize> Weights<ROW_BLOCKS> {
    /// For a warp that is alone with its unit.
    pub const NONE: Self = Self {
        of: [[0.0; SHARE_STEPS]; ROW_BLOCKS],
        lse: [f32::NEG_INFINITY; ROW_BLOCKS],
    };
}

impl<const DIM: u32, const ROWS: u32, const WARPS: u32, const CACHE: u32>
    Consumer<'_, DIM, ROWS, WARPS, CACHE>
{
    /// Processes chunks until a loader signals the end. A lane writes `PER_LANE` elements of an output row. `turns` is
    /// the result of [`load_turns`](Self::load_turns).
    ///
    /// # Safety
    /// The lanes come together; the barriers are initialised; the parameters describe memory as [`AttentionParams`]
    /// says.
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
        turns: [[u32; 2]; 2],
    ) where
        Stored<T, CACHE>: Cache,
    {
        const {
            assert!(DIM_BLOCKS as u32 * 16 == DIM && per_lane(DIM) == PER_LANE);
            assert!(ROW_BLOCKS as u32 * 8 == Layout::<DIM, ROWS, WARPS, CACHE>::OWN_ROWS);
            assert!(!V::TRANSFORMS_QUERY && !V::TRANSFORMS_KEY);
            assert!(!V::TRANSFORMS_VALUE && !V::TRANSFORMS_OUTPUT);
        }
        let layout = &self.layout;
        let offsets = LaneOffsets::new(self.lane, Layout::<DIM, ROWS, WARPS, CACHE>::KEY_BYTES);
        // SAFETY: all consumer warps call this.
        let turning = unsafe { self.fill_turning(turns) };
        // SAFETY: all consumer warps call this.
        unsafe { self.expect_sinks() };
        let mut rows = Rows::<DIM_BLOCKS, ROW_BLOCKS>::EMPTY;
        let mut stages = LaunchPipeline::first(0);
        let at_a_time = Layout::<DIM, ROWS, WARPS, CACHE>::AT_A_TIME;
        stages.advance_in(self.turn(), layout.stages);
        // With rotary embeddings: whether the warp's next chunk is of the same unit; that chunk's slot and first key.
        let (mut goes_on, mut slot, mut first) = (false, 0, 0);
        // SAFETY: addresses are the plan's; the waits order accesses with those of the producers and of other
        // consumers; the lanes stay together.
        unsafe {
            loop {
                if <Stored<T, CACHE>>::TURNS {
                    // Within a unit, queries are rotated while the next chunk is being loaded.
                    if !goes_on {
                        mbarrier::wait(layout.stage_full(stages.stage), stages.parity);
                        let descriptor = Descriptor::load(layout.descriptor(stages.stage));
                        if descriptor.exit {
                            break;
                        }
                        (slot, first) = (descriptor.slot, descriptor.first);
                        mbarrier::wait(layout.unit_full(slot), descriptor.parity);
                        let unit = Unit::load(layout.unit(slot));
                        self.start::<T, DIM_BLOCKS, ROW_BLOCKS>(&mut rows, slot, &unit, self.lane);
                    }
                    self.turn_queries::<T, DIM_BLOCKS, ROW_BLOCKS>(&mut rows, slot, first, turning);
                }
                mbarrier::wait(layout.stage_full(stages.stage), stages.parity);
                let descriptor = Descriptor::load(layout.descriptor(stages.stage));
                if descriptor.exit {
                    break;
                }
                slot = descriptor.slot;
                let begins = descriptor.chunk < at_a_time;
                if begins && !<Stored<T, CACHE>>::TURNS {
                    mbarrier::wait(layout.unit_full(slot), descriptor.parity);
                }
                let unit = Unit::load(layout.unit(slot));
                if begins {
                    // `opaque` has values that depend on the lane recomputed, which saves registers. Kernels with a
                    // soft cap do without: with this choice, the registers suffice in all kernels.
                    let lane = if V::TRANSFORMS_LOGITS {
                        self.lane
                    } else {
                        misc::opaque(self.lane)
                    };
                    if !<Stored<T, CACHE>>::TURNS {
                        self.start::<T, DIM_BLOCKS, ROW_BLOCKS>(&mut rows, slot, &unit, lane);
                    }
                    if <Stored<T, CACHE>>::SCALED {
                        // Rows past the unit's tokens have no scales; they use those of the last token.
                        rows.take_scales(
                            |row| {
                                if <Stored<T, CACHE>>::BY_TOKEN {
                                    return [1.0; 2];
                                }
                                let (token, in_unit) = self.place(row);
                                let token = self.row(slot, token.min(unit.tokens - 1)).token;
                                let second = (in_unit >= self.group.get()) as u32;
                                let kv_head = unit.head * cache::kv_heads(CACHE) + second;
                                self.params.scales.of(token, kv_head)
                            },
                            lane,
                        );
                    }
                    if descriptor.chunk == 0 && self.block() == 0 && self.params.arrivals != 0 {
                        let merge = self.merge_of_lane(slot, unit.tokens);
                        let first = unit.head * cache::kv_heads(CACHE);
                        self.results().expect(merge, first);
                    }
                }
                let k = layout.stage(stages.stage);
                let chunk = Chunk {
                    k,
                    v: k + Layout::<DIM, ROWS, WARPS, CACHE>::CHUNK,
                    scales: layout.scales(stages.stage),
                    first: descriptor.first,
                };
                let keys = Keys {
                    begin: unit.begin,
                    end: unit.end,
                    masks: self.params.key_masks(),
                };
                let sharers = Sharers {
                    warps: Layout::<DIM, ROWS, WARPS, CACHE>::PER_CHUNK,
                    index: self.block(),
                    barrier: Layout::<DIM, ROWS, WARPS, CACHE>::sharers(self.turn()),
                };
                // Not computed in each of the two cases below: it is more code than the rest of the loop.
                let turned = if <Stored<T, CACHE>>::TURNS {
                    rows.turned_logits::<Stored<T, CACHE>>(&offsets, chunk, self.lane, turning)
                } else {
                    Rows::<DIM_BLOCKS, ROW_BLOCKS>::NO_LOGITS
                };
                if descriptor.masked {
                    rows.attend::<Stored<T, CACHE>, V, true>(
                        variant, self.lane, &offsets, chunk, keys, turned, sharers,
                    );
                    // Orders the zeros written to the values before the TMA copy of the next chunk that overwrites
                    // them.
                    #[cfg(target_feature = "sm_90")]
                    cuda_std::fence::proxy_async_shared();
                } else {
                    rows.attend::<Stored<T, CACHE>, V, false>(
                        variant, self.lane, &offsets, chunk, keys, turned, sharers,
                    );
                }
                mbarrier::arrive(layout.stage_empty(stages.stage));
                let ends = descriptor.chunk + at_a_time >= unit.chunks;
                (goes_on, first) = (!ends, descriptor.first + at_a_time * KEYS);
                if ends {
                    // Derived values are recomputed at the end of a unit; otherwise they would occupy registers in the
                    // loop.
                    let here = Self {
                        warp: misc::opaque(self.warp),
                        lane: misc::opaque(self.lane),
                        ..*self
                    };
                    // Loaded early, to hide the latency.
                    let sinks = here.sinks::<ROW_BLOCKS>(slot, &unit);
                    rows.finish::<Stored<T, CACHE>>();
                    here.store_state::<Stored<T, CACHE>, DIM_BLOCKS, ROW_BLOCKS>(&rows);
                    rows.clear();
                    here.end_of_share::<T, V, ROW_BLOCKS, PER_LANE>(descriptor, &unit, &sinks);
                }
                stages.advance_in(at_a_time, layout.stages);
            }
            if self.params.arrivals != 0 {
                self.late_merges::<T, V>();
            }
        }
    }

    #[inline(always)]
    pub(super) fn results(&self) -> Results<'_, DIM> {
        Results {
            params: self.params,
            lane: self.lane,
            out_columns: self.out_columns,
        }
    }

    /// The end of a warp's share of a unit. Waits until all the unit's warps have stored their states; each of them
    /// then combines and writes a part of the rows. After that, the first one counts the unit's arrivals at merges.
    /// (None of them has anything else to do: the next chunk of each is of a later unit.)
    ///
    /// # Safety
    /// The lanes come together; the state is stored.
    #[inline(always)]
    unsafe fn end_of_share<T: Half, V: Variant, const ROW_BLOCKS: usize, const PER_LANE: usize>(
        &self,
        descriptor: Descriptor,
        unit: &Unit,
        sinks: &[f32; ROW_BLOCKS],
    ) {
        let layout = &self.layout;
        let Descriptor { slot, chunk, .. } = descriptor;
        let Unit {
            head,
            tokens,
            chunks,
            ..
        } = *unit;
        let at_a_time = Layout::<DIM, ROWS, WARPS, CACHE>::AT_A_TIME;
        let (per_chunk, own_rows) = (
            Layout::<DIM, ROWS, WARPS, CACHE>::PER_CHUNK,
            Layout::<DIM, ROWS, WARPS, CACHE>::OWN_ROWS,
        );
        // The unit's last chunks went to a warp each, or to a warp for each 8 rows.
        let shares = chunks.min(at_a_time);
        let share = chunk - (chunks - shares);
        let first = self.wrap(self.turn() + at_a_time - share);
        // SAFETY: the slot stays filled until this warp arrives at its `unit_empty` barrier below.
        unsafe {
            let sequence = Unit::load_sequence(layout.unit(slot));
            let meeting = if per_chunk > 1 && shares == 1 {
                Layout::<DIM, ROWS, WARPS, CACHE>::sharers(self.turn())
            } else {
                Layout::<DIM, ROWS, WARPS, CACHE>::meeting(sequence + chunks - shares, slot)
            };
            warp::sync_warp(ALL);
            let merges = self.params.arrivals != 0;
            let index = if merges {
                self.merge_of_lane(slot, tokens)
            } else {
                NO_MERGE
            };
            let merge = self.results().look_up(index);
            let weights = if shares > 1 {
                meet(meeting, shares * per_chunk);
                self.weights::<ROW_BLOCKS>(first, shares, sinks)
            } else {
                Weights::NONE
            };
            let (results, heads) = (self.results(), self.params.group);
            // Rows in the order of the queries in memory; a warp that has 8 of the tile's rows has 8 that are adjacent there.
            let begin = self.block() * own_rows;
            let end = if per_chunk > 1 {
                (tokens * heads).min(begin + own_rows)
            } else {
                tokens * heads
            };
            let mut row = begin + share;
            while row < end {
                let (token, in_unit, in_tile) = self.of_dense(row);
                let own = in_tile - begin;
                // The state of a warp alone is that of the unit; combining it with a weight of 1 would give the same
                // bits.
                let state = if shares > 1 {
                    self.combine::<ROW_BLOCKS, PER_LANE>(&weights, own, first, shares)
                } else {
                    self.own_state_with::<PER_LANE, ROW_BLOCKS>(own, sinks)
                };
                let info = self.row(slot, token);
                results.write_with_sink::<T, V, PER_LANE>(info, head * heads + in_unit, state);
                row += shares;
            }
            // Behind this barrier, all warps have read the states, which may be overwritten, and have written their
            // results, which can be merged.
            if shares > 1 || per_chunk > 1 && merges {
                barrier::bar_sync(meeting, shares * per_chunk * 32);
            } else {
                warp::sync_warp(ALL);
            }
            if merges && share == 0 && self.block() == 0 {
                self.merge::<T, V>(index, merge, head);
            }
            // Orders the reads of the queries before the bulk copy that overwrites them.
            #[cfg(target_feature = "sm_90")]
            cuda_std::fence::proxy_async_shared();
            // Each lane arrives. The barrier counts all consumer warps, so those of the first share also arrive for those
            // without one.
            let arrivals = if share == 0 {
                at_a_time + 1 - shares
            } else {
                1
            };
            mbarrier::arrive_count(layout.unit_empty(slot), arrivals);
        }
    }
}
