//! Shared-memory addresses of units, rows, queries, keys, weights and mbarriers.

use super::config::{
    CONSUMERS, Offsets, SCALES_BYTES, STAGE_BARRIERS, THREADS, UNDER_WAY, WEIGHED, WEIGHTS_BYTES,
};
use crate::sm90::{
    arrivals,
    mla::{
        config::{QUERY_SLABS, Ring, SLAB_BYTES, TILE_ROWS},
        keys_656::{KEYS, LOADERS},
        load::Places,
        shared::{QueryPlace, Units},
        swapped::Swapped,
    },
};

/// Shared addresses, with `STAGES` places for 32 keys each.
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
    const UNDER_WAY: u32 = UNDER_WAY;
    const KEYS_AT: u32 = Self::AT.keys;
    const THERE_AT: u32 = Self::AT.there;
}

impl<const STAGES: u32> Swapped for Shared<STAGES> {
    #[inline(always)]
    fn seen(self, _slot: u32, row: u32) -> u32 {
        self.base + Self::AT.seen + row * 8
    }
    #[inline(always)]
    fn reference(self, slot: u32, row: u32) -> u32 {
        self.base + Self::AT.references + (slot * TILE_ROWS + row) * 4
    }
    #[inline(always)]
    fn factor(self, consumer: u32, row: u32) -> u32 {
        self.base + Self::AT.factors + (consumer * TILE_ROWS + row) * 4
    }
    #[inline(always)]
    fn said(self, _slot: u32, consumer: u32, warp: u32, row: u32) -> u32 {
        self.base + Self::AT.said + ((consumer * 4 + warp) * TILE_ROWS + row) * 4
    }
    #[inline(always)]
    fn grew(self, consumer: u32) -> u32 {
        self.base + Self::AT.grew + consumer * 16
    }
}

impl<const STAGES: u32> Shared<STAGES> {
    const AT: Offsets = Offsets::new(STAGES);

    /// A slab of the queries.
    #[inline(always)]
    pub fn slab(self, slab: u32) -> u32 {
        self.base + slab * SLAB_BYTES
    }
    /// The weights of a block, by its number over all units: 128 bytes per key, swizzled.
    #[inline(always)]
    pub fn weights(self, number: u32) -> u32 {
        self.base + Self::AT.weights + number % WEIGHED * WEIGHTS_BYTES
    }
    /// The f16 scales of a block: per group those of all keys, in the order of a lane's fragments.
    #[inline(always)]
    pub fn scales(self, number: u32) -> u32 {
        self.base + Self::AT.scales + number % WEIGHED * SCALES_BYTES
    }
    /// The inverse of the power of two by which a row's query was multiplied.
    #[inline(always)]
    pub fn inverse(self, row: u32) -> u32 {
        self.base + Self::AT.inverses + row * 4
    }

    /// Initialises the barriers, and zeroes the queries, as tiles may lack rows.
    ///
    /// # Safety
    /// All threads of the CTA come here once, and then meet at a CTA-wide barrier.
    #[inline(always)]
    pub unsafe fn init(self) {
        let consumers = CONSUMERS * 128;
        // Full: the lanes of a loader. Queries free, and free: the lanes of both consumers.
        let full = (STAGE_BARRIERS + STAGES, 32);
        // All lanes of the loaders and consumers.
        let all = LOADERS * 32 + consumers;
        let runs = [
            (2, 32),
            (4, all),
            (6, 32),
            (7, 1),
            (8, consumers),
            (9, 1),
            full,
        ];
        let arrivals = |index| arrivals(index, runs, consumers);
        // SAFETY: the caller's promise.
        unsafe {
            self.init_barriers(THREADS, STAGE_BARRIERS + 2 * STAGES, arrivals);
            self.clear_queries(THREADS);
        }
    }
}
