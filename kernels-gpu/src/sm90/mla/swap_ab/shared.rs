//! What the warps of a CTA share: units, their rows, queries, keys, weights, barriers.

use super::config::{
    CONSUMERS, Offsets, SCALES_BYTES, STAGE_BARRIERS, THREADS, WEIGHED, WEIGHTS_BYTES,
};
use crate::sm90::mla::{
    config::{QUERY_SLABS, Ring, SLAB_BYTES, TILE_ROWS},
    keys_656::{KEYS, LOADERS},
    load::{Places, QueryPlace},
    shared::Units,
};

/// Shared addresses, where there are places for `STAGES` times 32 keys.
#[derive(Clone, Copy)]
pub(super) struct Shared<const STAGES: u32> {
    pub base: u32,
}

impl<const STAGES: u32> Units for Shared<STAGES> {
    const KEYS: u32 = KEYS;
    const ROWS: u32 = TILE_ROWS;
    const RING: Ring = Self::AT.ring;
    const STAGE_BARRIERS: u32 = STAGE_BARRIERS;
    #[inline(always)]
    fn base(self) -> u32 {
        self.base
    }
}

impl<const STAGES: u32> QueryPlace for Shared<STAGES> {
    const SLABS: u32 = QUERY_SLABS;
}

impl<const STAGES: u32> Places for Shared<STAGES> {
    const STAGES: u32 = STAGES;
    const FREED: u32 = 1;
    const KEYS_AT: u32 = Self::AT.keys;
    const THERE_AT: u32 = Self::AT.there;
}

impl<const STAGES: u32> Shared<STAGES> {
    const AT: Offsets = Offsets::new(STAGES);

    /// A slab of the queries.
    #[inline(always)]
    pub fn slab(self, slab: u32) -> u32 {
        self.base + slab * SLAB_BYTES
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

    /// Initialises the barriers, and the queries of rows that tiles may not have.
    ///
    /// # Safety
    /// All threads of the CTA come here once, and then to a barrier.
    #[inline(always)]
    pub unsafe fn init(self) {
        let arrivals = |index| match index {
            0 | 1 | 4 | 5 => 32,
            // The loaders' lanes and the consumers'.
            2 | 3 => LOADERS * 32 + CONSUMERS * 128,
            6 | 8 => 1,
            // The lanes of a loader; those of both consumers.
            _ if index >= STAGE_BARRIERS && index < STAGE_BARRIERS + STAGES => 32,
            _ => CONSUMERS * 128,
        };
        // SAFETY: the caller's promise.
        unsafe {
            self.init_barriers(THREADS, STAGE_BARRIERS + 2 * STAGES, arrivals);
            self.clear_queries(THREADS);
        }
    }
}
