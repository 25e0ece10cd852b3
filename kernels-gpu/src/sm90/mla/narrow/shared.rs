//! What the warps of a CTA share: units, their rows, blocks of keys, logits, weights, barriers.

use cuda_std::{fence, mbarrier, thread};

use super::config::{
    KEYS, KEYS_AN_ARRIVAL, LOADERS, Offsets, PARTIAL_BYTES, ROWS_OF_TILE, STAGE_BARRIERS, TEAMS,
    THREADS, WARPS, WEIGHTS_BYTES,
};
use crate::sm90::{
    mla::{config::ROW_BYTES, shared::Units},
    unit::UNIT_BYTES,
};

/// Shared addresses, where there are `STAGES` blocks of keys.
#[derive(Clone, Copy)]
pub(super) struct Shared<const STAGES: u32> {
    pub base: u32,
}

impl<const STAGES: u32> Units for Shared<STAGES> {
    const KEYS: u32 = KEYS;
    #[inline(always)]
    fn unit(self, slot: u32) -> u32 {
        self.base + Self::AT.units + slot * UNIT_BYTES
    }
    #[inline(always)]
    fn row(self, slot: u32, token: u32) -> u32 {
        self.base + Self::AT.rows + (slot * ROWS_OF_TILE + token) * 16
    }
    #[inline(always)]
    fn unit_full(self, slot: u32) -> u32 {
        self.barrier(slot)
    }
    #[inline(always)]
    fn unit_free(self, slot: u32) -> u32 {
        self.barrier(2 + slot)
    }
    #[inline(always)]
    fn rows_full(self, slot: u32) -> u32 {
        self.barrier(4 + slot)
    }
    #[inline(always)]
    fn near_end(self) -> u32 {
        self.barrier(6)
    }
}

impl<const STAGES: u32> Shared<STAGES> {
    const AT: Offsets = Offsets::new(STAGES);

    #[inline(always)]
    fn barrier(self, index: u32) -> u32 {
        self.base + Self::AT.barriers + 8 * index
    }
    /// One of a block's keys.
    #[inline(always)]
    pub fn key(self, stage: u32, key: u32) -> u32 {
        self.base + Self::AT.keys + (stage * KEYS + key) * ROW_BYTES
    }
    /// Which of them are there, a bit each.
    #[inline(always)]
    pub fn there(self, stage: u32) -> u32 {
        self.base + Self::AT.there + stage * 4
    }
    /// They have come.
    #[inline(always)]
    pub fn full(self, stage: u32) -> u32 {
        self.barrier(STAGE_BARRIERS + 2 * stage)
    }
    /// The block's team has them in registers.
    #[inline(always)]
    pub fn free(self, stage: u32) -> u32 {
        self.barrier(STAGE_BARRIERS + 2 * stage + 1)
    }
    /// What a warp of a team has of the logits of its block: 16 rows of 32 keys, whose pairs are [swizzled](swizzled).
    #[inline(always)]
    pub fn partial(self, team: u32, warp: u32) -> u32 {
        self.base + Self::AT.partials + (team * WARPS + warp) * PARTIAL_BYTES
    }
    /// The weights of a row, 32 of 16 bits.
    #[inline(always)]
    pub fn weights(self, team: u32, row: u32) -> u32 {
        self.base + Self::AT.weights + (team * ROWS_OF_TILE + row) * WEIGHTS_BYTES
    }
    /// Queries of a warp's lanes, of the columns that only keys have: two pairs a lane.
    #[inline(always)]
    pub fn rope(self, team: u32, warp: u32) -> u32 {
        self.base + Self::AT.rope + (team * WARPS + warp) * 256
    }
    /// What a row's output before the block is multiplied by.
    #[inline(always)]
    pub fn factor(self, team: u32, row: u32) -> u32 {
        self.base + Self::AT.factors + (team * ROWS_OF_TILE + row) * 4
    }
    /// A row's reference and its sum of weights, when the team has no more blocks of the unit.
    #[inline(always)]
    pub fn state(self, team: u32, row: u32) -> u32 {
        self.base + Self::AT.states + (team * ROWS_OF_TILE + row) * 8
    }

    /// Initialises the barriers, a warp each in turn: the hardware takes about 60 cycles for one.
    ///
    /// # Safety
    /// All threads of the CTA come here once, and then to a barrier.
    #[inline(always)]
    pub unsafe fn init(self) {
        let thread = thread::thread_idx_x();
        let index = thread / 32 + thread % 32 * (THREADS / 32);
        if index < STAGE_BARRIERS + 2 * STAGES {
            let arrivals = match index {
                0 | 1 | 4 | 5 => 32,
                // The loaders' lanes and the teams'.
                2 | 3 => (LOADERS + TEAMS * WARPS) * 32,
                6 => 1,
                // Every lane's copies, and what a lane says of the block; the lanes of a team.
                _ if (index - STAGE_BARRIERS) % 2 == 0 => KEYS / KEYS_AN_ARRIVAL * 32 + 1,
                _ => WARPS * 32,
            };
            // SAFETY: nobody knows the barriers yet.
            unsafe { mbarrier::init(self.barrier(index), arrivals) };
        }
        fence::mbarrier_init();
    }
}

/// The place of a pair of keys in a row of logits: four rows that are stored at a time lie in different banks.
#[inline(always)]
pub(super) fn swizzled(row: u32, pair: u32) -> u32 {
    pair ^ row % 4 * 4
}
