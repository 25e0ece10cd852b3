//! What the warps of a CTA share: units, their rows, queries, keys, weights, barriers.

use cuda_std::{fence, mbarrier, shared, thread};

use super::config::{
    BLOCK, CONSUMERS, KEYS, LOADERS, Offsets, PARTS, SCALES_BYTES, STAGE_BARRIERS, THREADS,
    WEIGHED, WEIGHTS_BYTES,
};
use crate::sm90::{
    mla::{
        config::{QUERY_SLABS, ROW_BYTES, SLAB_BYTES, TILE_ROWS},
        load::{Places, QueryPlace},
        shared::Units,
    },
    unit::UNIT_BYTES,
};

/// Shared addresses, where there are places for `STAGES` times 32 keys.
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
        self.base + Self::AT.rows + (slot * TILE_ROWS + token) * 16
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
        self.barrier(8)
    }
}

impl<const STAGES: u32> QueryPlace for Shared<STAGES> {
    const SLABS: u32 = QUERY_SLABS;
    #[inline(always)]
    fn queries(self) -> u32 {
        self.base + Self::AT.queries
    }
    #[inline(always)]
    fn queries_full(self) -> u32 {
        self.barrier(6)
    }
    #[inline(always)]
    fn queries_free(self) -> u32 {
        self.barrier(7)
    }
}

impl<const STAGES: u32> Places for Shared<STAGES> {
    const STAGES: u32 = STAGES;
    const PARTS: u32 = PARTS;
    #[inline(always)]
    fn place(self, stage: u32) -> u32 {
        self.base + Self::AT.keys + stage * (KEYS * ROW_BYTES)
    }
    #[inline(always)]
    fn there(self, stage: u32) -> u32 {
        self.base + Self::AT.there + stage * 4
    }
    #[inline(always)]
    fn full(self, stage: u32) -> u32 {
        self.barrier(STAGE_BARRIERS + stage)
    }
    #[inline(always)]
    fn free(self, stage: u32) -> u32 {
        self.barrier(STAGE_BARRIERS + STAGES + stage)
    }
}

impl<const STAGES: u32> Shared<STAGES> {
    const AT: Offsets = Offsets::new(STAGES);

    #[inline(always)]
    fn barrier(self, index: u32) -> u32 {
        self.base + Self::AT.barriers + 8 * index
    }
    /// The first key of a block, by its number among all.
    #[inline(always)]
    pub fn block(self, number: u32) -> u32 {
        self.base + Self::AT.keys + number % (STAGES / PARTS) * (BLOCK * ROW_BYTES)
    }
    /// A slab of the queries.
    #[inline(always)]
    pub fn slab(self, slab: u32) -> u32 {
        self.base + Self::AT.queries + slab * SLAB_BYTES
    }
    /// The weights of a block, by its number among all: of each key 128 bytes, swizzled.
    #[inline(always)]
    pub fn weights(self, number: u32) -> u32 {
        self.base + Self::AT.weights + number % WEIGHED * WEIGHTS_BYTES
    }
    /// Its scales: of each group those of the keys, in the order of a lane's fragments.
    #[inline(always)]
    pub fn scales(self, number: u32) -> u32 {
        self.base + Self::AT.scales + number % WEIGHED * SCALES_BYTES
    }
    /// What undoes the power of two that a row's query was multiplied by.
    #[inline(always)]
    pub fn inverse(self, row: u32) -> u32 {
        self.base + Self::AT.inverses + row * 4
    }
    /// The first and the last key that a row sees.
    #[inline(always)]
    pub fn seen(self, row: u32) -> u32 {
        self.base + Self::AT.seen + row * 8
    }
    /// What a row's weights are relative to.
    #[inline(always)]
    pub fn reference(self, slot: u32, row: u32) -> u32 {
        self.base + Self::AT.references + (slot * TILE_ROWS + row) * 4
    }
    /// What outputs before a consumer's latest block are multiplied by; at the end, what makes a row's outputs of its sums.
    #[inline(always)]
    pub fn factor(self, consumer: u32, row: u32) -> u32 {
        self.base + Self::AT.factors + (consumer * TILE_ROWS + row) * 4
    }
    /// What a warp says of a row.
    #[inline(always)]
    pub fn said(self, consumer: u32, warp: u32, row: u32) -> u32 {
        self.base + Self::AT.said + ((consumer * 4 + warp) * TILE_ROWS + row) * 4
    }
    /// Whether a consumer's latest block changes references: a word of each of its warps.
    #[inline(always)]
    pub fn grew(self, consumer: u32) -> u32 {
        self.base + Self::AT.grew + consumer * 16
    }

    /// Initialises the barriers, a warp each in turn (the hardware takes about 60 cycles for one), and the queries of rows
    /// that tiles may not have.
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
                // The loaders' lanes and the consumers'.
                2 | 3 => LOADERS * 32 + CONSUMERS * 128,
                6 | 8 => 1,
                // The lanes of a loader; those of both consumers.
                _ if index >= STAGE_BARRIERS && index < STAGE_BARRIERS + STAGES => 32,
                _ => CONSUMERS * 128,
            };
            // SAFETY: nobody knows the barriers yet.
            unsafe { mbarrier::init(self.barrier(index), arrivals) };
        }
        fence::mbarrier_init();
        let mut at = thread * 16;
        while at < Self::AT.weights {
            // SAFETY: the queries' memory; nobody uses it before the barrier.
            unsafe { shared::store_u32x4(self.base + at, [0; 4]) };
            at += THREADS * 16;
        }
        // Queries come by bulk copies.
        fence::proxy_async_shared();
    }
}
