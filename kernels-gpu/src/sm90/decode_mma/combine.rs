//! The partial states of the warps that share a unit. A warp stores its state when it is done with its chunks; then the
//! states are combined row by row.

use core::f32::consts::LOG2_E;

use cuda_std::{misc, ptr, shared, warp};

use super::{
    layout::Layout,
    mainloop::{Consumer, SHARE_STEPS, Weights},
    unit::Unit,
};
use crate::{
    abi::DIRECT,
    common::{
        cache::Cache,
        decode::tile::Rows,
        state::{Softmax, State, natural_sink},
    },
};

const ALL: u32 = warp::FULL_MASK;

impl<const DIM: u32, const ROWS: u32, const WARPS: u32, const CACHE: u32>
    Consumer<'_, DIM, ROWS, WARPS, CACHE>
{
    /// Stores this warp's partial state to shared memory.
    ///
    /// # Safety
    /// Nobody reads the warp's previous state any more.
    #[inline(always)]
    pub(super) unsafe fn store_state<C: Cache, const DIM_BLOCKS: usize, const ROW_BLOCKS: usize>(
        &self,
        rows: &Rows<DIM_BLOCKS, ROW_BLOCKS>,
    ) {
        let pitch = Layout::<DIM, ROWS, WARPS, CACHE>::PITCH;
        let (out, lse) = (
            self.layout.state_out(self.warp),
            self.layout.state_lse(self.warp),
        );
        let mut i = 0;
        while i < ROW_BLOCKS * 2 {
            let (block, column) = (i / 2, i % 2);
            let row = block as u32 * 8 + 2 * (self.lane % 4) + column as u32;
            // Accumulators that are 8 rows apart in a fragment are elements 8 apart; with 8-bit values, neighbouring
            // elements.
            let width = if C::SCALED { 2 } else { 1 };
            let first = out + (row * pitch + self.lane / 4 * width) * 4;
            let mut dim = 0;
            while dim < DIM_BLOCKS {
                let element = first + dim as u32 * 64;
                let [a, b] = [column, 2 + column].map(|i| rows.out[dim][block][i]);
                // SAFETY: inside the state.
                unsafe {
                    if C::SCALED {
                        shared::store_f32x2(element, [a, b]);
                    } else {
                        shared::store_f32(element, a);
                        shared::store_f32(element + 32, b);
                    }
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

    /// Byte offset in a state of the lane's elements of a row. Lanes past the end of the row have those of the last
    /// lane within.
    #[inline(always)]
    fn in_state<const PER_LANE: usize>(&self, row: u32) -> u32 {
        let per_lane = PER_LANE as u32;
        let lane = match DIM == 32 * per_lane {
            true => self.lane,
            false => self.lane.min(DIM / per_lane - 1),
        };
        (row * Layout::<DIM, ROWS, WARPS, CACHE>::PITCH + lane * per_lane) * 4
    }

    /// One of the warp's rows of its own state.
    ///
    /// # Safety
    /// The warp's state is stored.
    #[inline(always)]
    pub(super) unsafe fn own_state<const PER_LANE: usize>(&self, row: u32) -> State<PER_LANE> {
        let offset = self.in_state::<PER_LANE>(row);
        // SAFETY: inside the state.
        unsafe {
            State {
                out: load_shared(self.layout.state_out(self.warp) + offset),
                lse: shared::load_f32(self.layout.state_lse(self.warp) + row * 4),
            }
        }
    }

    /// [`own_state`](Self::own_state) with the row's sink.
    ///
    /// # Safety
    /// As there, and the lanes come together.
    #[inline(always)]
    pub(super) unsafe fn own_state_with<const PER_LANE: usize, const ROW_BLOCKS: usize>(
        &self,
        row: u32,
        sinks: &[f32; ROW_BLOCKS],
    ) -> State<PER_LANE> {
        // SAFETY: the caller's promise.
        let state = unsafe { self.own_state::<PER_LANE>(row) };
        if self.params.sinks == 0 {
            return state;
        }
        let mut sink = sinks[0];
        let mut block = 1;
        while block < ROW_BLOCKS {
            if row / 8 == block as u32 {
                sink = sinks[block];
            }
            block += 1;
        }
        // SAFETY: the lanes are together.
        let sink = unsafe { warp::warp_shuffle_idx(ALL, sink, row % 8, 32) };
        state.with_sink(sink * LOG2_E)
    }

    /// The sinks of the warp's rows as natural logits. Lane `l` holds those of rows `8·block + l % 8`; −∞ where no sink is added
    /// here: of rows that do not exist or are written as partial states, and without sinks.
    ///
    /// A warp loads all of them before it stores its own state, which hides their latency.
    ///
    /// # Safety
    /// `slot` is filled, and `unit` is its unit.
    #[inline(always)]
    pub(super) unsafe fn sinks<const ROW_BLOCKS: usize>(
        &self,
        slot: u32,
        unit: &Unit,
    ) -> [f32; ROW_BLOCKS] {
        let mut sinks = [f32::NEG_INFINITY; ROW_BLOCKS];
        if self.params.sinks != 0 {
            let mut block = 0;
            while block < ROW_BLOCKS {
                let (token, in_unit) = self.place(block as u32 * 8 + self.lane % 8);
                if token < unit.tokens {
                    // SAFETY: the caller's promise; there is a sink for each query head.
                    unsafe {
                        let row = self.row(slot, token);
                        if row.slot == DIRECT {
                            let head = unit.head * self.params.group + in_unit;
                            sinks[block] = natural_sink(self.params, row.token, head);
                        }
                    }
                }
                block += 1;
            }
        }
        sinks
    }

    /// Prefetches the sinks to L2.
    ///
    /// # Safety
    /// All consumer warps call this.
    #[inline(always)]
    pub(super) unsafe fn expect_sinks(&self) {
        let params = self.params;
        if params.sinks != 0 && self.thread() * 32 < params.q_heads {
            // SAFETY: there is a sink for each query head.
            unsafe {
                ptr::prefetch_l2((params.sinks as *const u32).add(self.thread() as usize * 32))
            };
        }
    }

    /// `turn` modulo the chunks at a time, below twice as many.
    #[inline(always)]
    pub(super) fn wrap(&self, turn: u32) -> u32 {
        let at_a_time = Layout::<DIM, ROWS, WARPS, CACHE>::AT_A_TIME;
        if turn >= at_a_time {
            turn - at_a_time
        } else {
            turn
        }
    }

    /// The warp that has the same rows as this one, of the chunks of `turn`.
    #[inline(always)]
    fn same_rows(&self, turn: u32) -> u32 {
        self.wrap(turn) * Layout::<DIM, ROWS, WARPS, CACHE>::PER_CHUNK + self.block()
    }

    /// The weights of the warps' states in the combined state, for all rows at once. Lane `l` holds shares
    /// `l / 8 + 4·i` of rows `8·block + l % 8`, whose [`sinks`](Self::sinks) it has, too. They count in the sums as another
    /// share would; −∞ changes no bit.
    ///
    /// # Safety
    /// The lanes come together; the states are stored.
    #[inline(always)]
    pub(super) unsafe fn weights<const ROW_BLOCKS: usize>(
        &self,
        first: u32,
        shares: u32,
        sinks: &[f32; ROW_BLOCKS],
    ) -> Weights<ROW_BLOCKS> {
        let most = Layout::<DIM, ROWS, WARPS, CACHE>::AT_A_TIME;
        const { assert!(Layout::<DIM, ROWS, WARPS, CACHE>::AT_A_TIME <= 4 * SHARE_STEPS as u32) };
        let mut weights = Weights::NONE;
        let mut block = 0;
        while block < ROW_BLOCKS {
            let row = block as u32 * 8 + self.lane % 8;
            let mut lse = [f32::NEG_INFINITY; SHARE_STEPS];
            // Opaque: otherwise a branch would wait for the loaded sink in order to multiply it.
            let sink = f32::from_bits(misc::opaque(sinks[block].to_bits())) * LOG2_E;
            let mut max = sink;
            let mut i = 0;
            while i < SHARE_STEPS && 4 * i < most as usize {
                let share = self.lane / 8 + 4 * i as u32;
                if share < shares {
                    // SAFETY: inside the warp's state.
                    lse[i] = unsafe {
                        let warp = self.same_rows(first + share);
                        shared::load_f32(self.layout.state_lse(warp) + row * 4)
                    };
                }
                max = if lse[i] > max { lse[i] } else { max };
                i += 1;
            }
            // SAFETY: the lanes are together.
            unsafe {
                let other = warp::warp_shuffle_xor(ALL, max, 8, 32);
                max = if other > max { other } else { max };
                let other = warp::warp_shuffle_xor(ALL, max, 16, 32);
                max = if other > max { other } else { max };
            }
            let mut softmax = Softmax { max, sum: 0.0 };
            // One of the row's four lanes adds the sink, before they add up their sums: its power of two is beside the others.
            let of_sink = softmax.weight(sink);
            softmax.sum = if self.lane < 8 { of_sink } else { 0.0 };
            i = 0;
            while i < SHARE_STEPS && 4 * i < most as usize {
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
            while i < SHARE_STEPS && 4 * i < most as usize {
                weights.of[block][i] *= norm;
                i += 1;
            }
            weights.lse[block] = softmax.lse();
            block += 1;
        }
        weights
    }

    /// Combines the states of one of the warp's rows over all warps that have the row, in the order of their last chunks.
    ///
    /// # Safety
    /// The lanes come together; the states are stored.
    #[inline(always)]
    pub(super) unsafe fn combine<const ROW_BLOCKS: usize, const PER_LANE: usize>(
        &self,
        weights: &Weights<ROW_BLOCKS>,
        row: u32,
        first: u32,
        shares: u32,
    ) -> State<PER_LANE> {
        let layout = &self.layout;
        let offset = self.in_state::<PER_LANE>(row);
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
            // All loads are issued before the first is used.
            let mut outs = [[0.0; PER_LANE]; 4 * SHARE_STEPS];
            let most = Layout::<DIM, ROWS, WARPS, CACHE>::AT_A_TIME;
            let mut share = 0;
            while share < most {
                if share < shares {
                    let warp = self.same_rows(first + share);
                    outs[share as usize] = load_shared(layout.state_out(warp) + offset);
                }
                share += 1;
            }
            share = 0;
            while share < most {
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
}

/// Loads `N` floats of a row.
///
/// # Safety
/// `address` is a shared address of `N` floats, aligned to the widest load.
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
