//! Shared-memory addresses of units, rows, queries, keys, weights and mbarriers.

use super::config::{
    CONSUMERS, KEYS, Offsets, PART_BYTES, PART_SLABS, PARTS, SLABS, STAGE_BARRIERS, THREADS,
    UNDER_WAY, WEIGHED,
};
use crate::sm90::{
    arrivals,
    mla::{
        config::Ring,
        keys_16::Keys,
        shared::{Parts, QueryPlace, Units},
        swapped::Swapped,
    },
    pipeline::stage_of_block,
};

/// Shared addresses, with `STAGES` stages for parts of blocks, and tiles of `ROWS` rows.
#[derive(Clone, Copy)]
pub(super) struct Shared<const ROWS: u32, const STAGES: u32> {
    pub base: u32,
}

impl<const ROWS: u32, const STAGES: u32> Units for Shared<ROWS, STAGES> {
    const KEYS: u32 = KEYS;
    const ROWS: u32 = ROWS;
    const RING: Ring = Self::AT.ring;
    const STAGE_BARRIERS: u32 = STAGE_BARRIERS;
    #[inline(always)]
    fn base(self) -> u32 {
        self.base
    }
}

impl<const ROWS: u32, const STAGES: u32> QueryPlace for Shared<ROWS, STAGES> {
    const SLABS: u32 = SLABS;
    const QUERIES_AT: u32 = Self::AT.queries;
}

impl<const ROWS: u32, const STAGES: u32> Parts<STAGES> for Shared<ROWS, STAGES> {
    const PARTS: u32 = PARTS;
    const FIRST_SLAB: u32 = 0;
    const PART_SLABS: u32 = PART_SLABS;
    const UNDER_WAY: u32 = UNDER_WAY;
    const MAP: usize = 1;
    #[inline(always)]
    fn keys(self, stage: u32) -> u32 {
        self.base + stage * PART_BYTES
    }
    #[inline(always)]
    fn full(self, stage: u32) -> u32 {
        Self::RING.barrier(self.base, STAGE_BARRIERS + stage)
    }
    #[inline(always)]
    fn free(self, stage: u32) -> u32 {
        Self::RING.barrier(self.base, STAGE_BARRIERS + STAGES + stage)
    }
}

impl<const ROWS: u32, const STAGES: u32> Swapped for Shared<ROWS, STAGES> {
    #[inline(always)]
    fn seen(self, slot: u32, row: u32) -> u32 {
        self.base + Self::AT.seen + (slot * ROWS + row) * 8
    }
    #[inline(always)]
    fn reference(self, slot: u32, row: u32) -> u32 {
        self.base + Self::AT.references + (slot * ROWS + row) * 4
    }
    #[inline(always)]
    fn factor(self, consumer: u32, row: u32) -> u32 {
        self.base + Self::AT.factors + (consumer * ROWS + row) * 4
    }
    #[inline(always)]
    fn said(self, slot: u32, consumer: u32, warp: u32, row: u32) -> u32 {
        self.base + Self::AT.said + ((slot * 8 + consumer * 4 + warp) * ROWS + row) * 4
    }
    #[inline(always)]
    fn grew(self, consumer: u32) -> u32 {
        self.base + Self::AT.grew + consumer * 16
    }
}

impl<const ROWS: u32, const STAGES: u32> Shared<ROWS, STAGES> {
    const AT: Offsets = Offsets::new(ROWS, STAGES);

    /// The stage of a part of a block, by the block's number over all units, and the parity of its full barrier.
    #[inline(always)]
    pub fn stage(self, number: u32, part: u32) -> (u32, u32) {
        stage_of_block(number * PARTS + part, STAGES)
    }
    /// The weights of a block, by its number over all units.
    #[inline(always)]
    pub fn weights(self, number: u32) -> u32 {
        self.base + Self::AT.weights + number % WEIGHED * (ROWS * 128)
    }

    /// Initialises the barriers, and zeroes the queries, as tiles may lack rows. A stage is filled with one arrival by
    /// TMA, or with one of each lane for eight keys that it copies.
    ///
    /// # Safety
    /// All threads of the CTA come here once, and then meet at a CTA-wide barrier.
    #[inline(always)]
    pub unsafe fn init(self, keys: Keys) {
        let (loaders, filled) = match keys {
            Keys::Pages => (1, 1),
            Keys::Rows => (PARTS, KEYS / 8 * 32),
        };
        // All lanes of the loaders and of the consumers.
        let all = loaders * 32 + CONSUMERS * 128;
        // Queries free, and free: the warps of both consumers.
        let warps = CONSUMERS * 4;
        let full = (STAGE_BARRIERS + STAGES, filled);
        let runs = [(2, 32), (4, all), (7, 32), (8, warps), (9, 1), full];
        let arrivals = |index| arrivals(index, runs, warps);
        // SAFETY: the caller's promise.
        unsafe {
            self.init_barriers(THREADS, STAGE_BARRIERS + 2 * STAGES, arrivals);
            self.clear_queries(THREADS);
        }
    }
}
