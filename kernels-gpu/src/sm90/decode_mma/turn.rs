//! Rotary embeddings, in kernels whose cache holds keys before rotation: what a consumer warp does for them.

use cuda_std::barrier;

use super::{mainloop::Consumer, roles::FIRST_INITIALISED, unit::Unit};
use crate::common::{
    cache::{self, Cache, Stored},
    decode::{tile::Rows, turn::Turning},
    half::Half,
};

/// The named barrier after which sines and angles are in shared memory; later, warps of a unit use it. At the start,
/// roles synchronise at several named barriers. A consumer warp knows that this one is free for reuse: warps that
/// initialise mbarriers have left it, and the warp that loads the first queries has waited for these mbarriers.
const TURNING_FILLED: u32 = FIRST_INITIALISED;

impl<const DIM: u32, const ROWS: u32, const WARPS: u32, const CACHE: u32>
    Consumer<'_, DIM, ROWS, WARPS, CACHE>
{
    /// Rotates the queries of a unit for the chunk that begins with key `first`.
    ///
    /// # Safety
    /// The lanes come together after [`start`](Self::start) for the unit, and nobody uses the warp's state.
    #[inline(always)]
    pub(super) unsafe fn turn_queries<T: Half, const DIM_BLOCKS: usize, const ROW_BLOCKS: usize>(
        &self,
        rows: &mut Rows<DIM_BLOCKS, ROW_BLOCKS>,
        slot: u32,
        first: u32,
        turning: Turning,
    ) where
        Stored<T, CACHE>: Cache,
    {
        // SAFETY: the caller's promise; `slot` is the unit's.
        unsafe {
            let tokens = Unit::load(self.layout.unit(slot)).tokens;
            let sines = self.layout.state_out(self.warp);
            let distance = |token| self.row(slot, token).position.wrapping_sub(first as i32);
            let token = |row| self.place(row).0.min(tokens - 1);
            turning.fill_queries(DIM, sines, self.lane, tokens, distance);
            rows.turn_queries::<Stored<T, CACHE>>(sines, self.lane, turning, token);
        }
    }

    /// The angles that this thread will write to shared memory, in kernels that rotate keys. They are loaded first,
    /// because global memory has a high latency.
    ///
    /// # Safety
    /// The parameters describe memory as they say.
    #[inline(always)]
    pub unsafe fn load_turns(&self) -> [[u32; 2]; 2] {
        if CACHE != cache::BITS16_TURNED {
            return [[0; 2]; 2];
        }
        // SAFETY: the caller's promise.
        unsafe { self.turning().load(self.rotary, self.thread() % (DIM / 4)) }
    }

    /// Writes the angles, and the sines and cosines of a chunk's keys, to shared memory, in kernels that rotate keys.
    ///
    /// # Safety
    /// All consumer warps call this, before any of them synchronises at the barrier of a unit.
    #[inline(always)]
    pub(super) unsafe fn fill_turning(&self, turns: [[u32; 2]; 2]) -> Turning {
        if CACHE != cache::BITS16_TURNED {
            return Turning::NONE;
        }
        let (turning, thread) = (self.turning(), self.thread());
        // SAFETY: the caller's promise; units use the barrier only later.
        unsafe {
            if thread < DIM / 4 {
                turning.put(DIM, thread, turns);
            }
            barrier::bar_sync(TURNING_FILLED, WARPS * 32);
            turning.fill(self.rotary, DIM, thread, WARPS * 32);
            barrier::bar_sync(TURNING_FILLED, WARPS * 32);
        }
        turning
    }

    #[inline(always)]
    fn turning(&self) -> Turning {
        Turning::new(self.rotary, self.layout.turning())
    }
}
