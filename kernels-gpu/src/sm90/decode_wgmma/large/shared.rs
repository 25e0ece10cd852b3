//! What the warps of a CTA share: units, their rows, pieces of keys and values, weights, barriers.

use cuda_std::{fence, mbarrier, shared, thread, warp};

use super::config::{
    BARRIERS, KEY_STAGES, Offsets, PIECE_BYTES, THREADS, TILE_ROWS, VALUE_STAGES, WEIGHTS_BYTES,
};
pub(super) use crate::sm90::unit::Unit;
use crate::{abi::QueryRow, sm90::unit::UNIT_BYTES};

/// Shared addresses.
#[derive(Clone, Copy)]
pub(super) struct Shared {
    pub base: u32,
}

impl Shared {
    const AT: Offsets = Offsets::new();

    /// The first slabs of 64 columns, all rows of one after the other.
    #[inline(always)]
    pub fn queries(self) -> u32 {
        self.base
    }
    /// A piece of keys: groups of 8 keys, in each one slab of 64 columns after the other.
    #[inline(always)]
    pub fn keys(self, stage: u32) -> u32 {
        self.base + Self::AT.keys + stage * PIECE_BYTES
    }
    /// A piece of values, likewise.
    #[inline(always)]
    pub fn values(self, stage: u32) -> u32 {
        self.base + Self::AT.values + stage * PIECE_BYTES
    }
    /// A thread's weights of every other block for the first 16 keys; those for the next are
    /// [`WEIGHTS_STEP`](super::config::WEIGHTS_STEP) behind them.
    #[inline(always)]
    pub fn weights_of(self, turn: u32, thread: u32) -> u32 {
        self.base + Self::AT.weights + turn * WEIGHTS_BYTES + thread * 16
    }
    /// The [`QueryRow`] of one of a unit's tokens.
    #[inline(always)]
    pub fn row(self, slot: u32, token: u32) -> u32 {
        self.base + Self::AT.rows + (slot * TILE_ROWS + token) * 16
    }
    /// The same, read.
    ///
    /// # Safety
    /// The unit has the token, and its barrier completed.
    #[inline(always)]
    pub unsafe fn load_row(self, slot: u32, token: u32) -> QueryRow {
        // SAFETY: the unit has the token, and its barrier completed.
        let [token, position, slot, merge] = unsafe { shared::load_u32x4(self.row(slot, token)) };
        QueryRow {
            token,
            position: position as i32,
            slot,
            merge,
        }
    }
    /// What outputs before a block are multiplied by.
    #[inline(always)]
    pub fn factor(self, turn: u32, row: u32) -> u32 {
        self.base + Self::AT.factors + (turn * TILE_ROWS + row) * 4
    }
    /// Whether that is anything but 1 in any row of a warp.
    #[inline(always)]
    pub fn grew(self, turn: u32, warp: u32) -> u32 {
        self.base + Self::AT.grew + (turn * 4 + warp) * 4
    }
    /// What the sum of a row's weighted values is multiplied by.
    #[inline(always)]
    pub fn inverse(self, slot: u32, row: u32) -> u32 {
        self.base + Self::AT.inverses + (slot * TILE_ROWS + row) * 4
    }
    #[inline(always)]
    pub fn unit(self, slot: u32) -> u32 {
        self.base + Self::AT.units + slot * UNIT_BYTES
    }
    #[inline(always)]
    fn barrier(self, index: u32) -> u32 {
        self.base + Self::AT.barriers + 8 * index
    }
    /// It is known what the unit is.
    #[inline(always)]
    pub fn unit_full(self, slot: u32) -> u32 {
        self.barrier(slot)
    }
    /// It is done: loaders have read it, results are written.
    #[inline(always)]
    pub fn unit_free(self, slot: u32) -> u32 {
        self.barrier(2 + slot)
    }
    /// It is known who the unit's rows are.
    #[inline(always)]
    pub fn rows_full(self, slot: u32) -> u32 {
        self.barrier(4 + slot)
    }
    /// The [inverses](Self::inverse) are there.
    #[inline(always)]
    pub fn inverses_full(self, slot: u32) -> u32 {
        self.barrier(6 + slot)
    }
    /// Values that are not all of the item's have arrived, and wait for the others being set to zero.
    #[inline(always)]
    pub fn tail(self) -> u32 {
        self.barrier(8)
    }
    /// A unit of [`PREFETCH_DISTANCE`](super::PREFETCH_DISTANCE) blocks or more comes to its end.
    #[inline(always)]
    pub fn near_end(self) -> u32 {
        self.barrier(9)
    }
    /// The weights of every other block are there, and what outputs are multiplied by before them.
    #[inline(always)]
    pub fn weights_full(self, turn: u32) -> u32 {
        self.barrier(10 + turn)
    }
    /// Both warpgroups that add have read them.
    #[inline(always)]
    pub fn weights_free(self, turn: u32) -> u32 {
        self.barrier(12 + turn)
    }
    #[inline(always)]
    pub fn keys_full(self, stage: u32) -> u32 {
        self.barrier(BARRIERS + 2 * stage)
    }
    #[inline(always)]
    pub fn keys_free(self, stage: u32) -> u32 {
        self.barrier(BARRIERS + 2 * stage + 1)
    }
    #[inline(always)]
    pub fn values_full(self, stage: u32) -> u32 {
        self.barrier(BARRIERS + 2 * KEY_STAGES + 2 * stage)
    }
    #[inline(always)]
    pub fn values_free(self, stage: u32) -> u32 {
        self.barrier(BARRIERS + 2 * KEY_STAGES + 2 * stage + 1)
    }

    /// Initialises the barriers, a warp each in turn: the hardware takes about 60 cycles for one.
    ///
    /// # Safety
    /// All threads of the CTA come here once, and then to a barrier.
    #[inline(always)]
    pub unsafe fn init(self) {
        const KEYS: u32 = 2 * KEY_STAGES;
        let thread = thread::thread_idx_x();
        let index = thread / 32 + warp::lane_id() * (THREADS / 32);
        if index < BARRIERS + KEYS + 2 * VALUE_STAGES {
            // Where lanes write or read for themselves every one of them arrives; else one for its warp.
            let arrivals = match index {
                0 | 1 | 4 | 5 => 32,
                // The loaders, those that weigh and those that add.
                2 | 3 => 2 * 32 + 3 * 128,
                6 | 7 | 10 | 11 => 128,
                12 | 13 => 2 * 128,
                8 | 9 => 1,
                _ => match index - BARRIERS {
                    stage if stage % 2 == 0 => 1,
                    0..KEYS => 4,
                    _ => 8,
                },
            };
            // SAFETY: nobody knows the barriers yet.
            unsafe { mbarrier::init(self.barrier(index), arrivals) };
        }
        fence::mbarrier_init();
    }
}
