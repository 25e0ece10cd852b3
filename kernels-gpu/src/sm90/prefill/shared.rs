//! Shared-memory addresses of stages, mbarriers and tile descriptions, and the initialisation of the mbarriers.

use cuda_std::{fence, mbarrier, shared};

use super::config::{BARRIER_BYTES, Shape, TILE_BYTES};

/// The places of mbarriers. Each row is the name of a kind and how many there are; the name becomes the place of the first.
/// The last row is the place behind them. [`Shared::init`] says how many arrivals complete a phase of each.
macro_rules! barriers {
    (@ $first:expr;) => {};
    (@ $first:expr; $(#[$doc:meta])* $name:ident $(: $number:expr)?; $($rows:tt)*) => {
        $(#[$doc])*
        const $name: u32 = $first;
        barriers! { @ $name $(+ $number)?; $($rows)* }
    };
    ($($rows:tt)*) => {
        barriers! { @ 0; $($rows)* }
    };
}

/// The most stages of keys, or of values.
const MOST_STAGES: u32 = 4;

barriers! {
    TILE_FULL: 2;
    QUERIES_FULL: 2;
    TILE_FREE: 2;
    TAIL: 1;
    QUERIES_FREE: 1;
    KEYS_FULL: MOST_STAGES;
    KEYS_FREE: MOST_STAGES;
    VALUES_FULL: MOST_STAGES;
    VALUES_FREE: MOST_STAGES;
    OUTPUT_FULL: 2;
    NEAR_END: 1;
    /// Two words, in the place of a barrier.
    EPOCH: 1;
    /// With one stage of queries, those of the second consumer.
    SECOND_QUERIES_FULL: 2;
    SECOND_QUERIES_FREE: 1;
    END;
}
/// Kernels of 8-bit products have two stages of queries, and these in the place of the second consumer's.
const QUERIES_ROUNDED: u32 = SECOND_QUERIES_FULL;

const _: () = assert!(8 * END <= BARRIER_BYTES);

/// The base address and the layout.
#[derive(Clone, Copy)]
pub(super) struct Shared {
    pub(super) base: u32,
    pub(super) shape: Shape,
}

impl Shared {
    #[inline(always)]
    pub(super) fn queries(self, stage: u32) -> u32 {
        let place = if self.shape.query_stages == 1 {
            0
        } else {
            stage
        };
        self.base + place * self.shape.query_bytes()
    }
    #[inline(always)]
    pub(super) fn keys(self, stage: u32) -> u32 {
        self.base + self.shape.keys_offset() + stage * self.shape.key_bytes()
    }
    #[inline(always)]
    pub(super) fn values(self, stage: u32) -> u32 {
        self.base + self.shape.values_offset() + stage * self.shape.value_bytes()
    }
    #[inline(always)]
    fn barrier(self, index: u32) -> u32 {
        self.base + self.shape.barriers_offset() + 8 * index
    }
    #[inline(always)]
    pub(super) fn tile(self, stage: u32) -> u32 {
        self.base + self.shape.tiles_offset() + stage * TILE_BYTES
    }
    /// Address of the numbers of a block's keys, by which a product adds a linear bias: core matrices of 8 keys, each with 8
    /// columns that are all the key's number in bf16. Behind them is one that is multiplied by 0.
    #[inline(always)]
    pub(super) fn columns(self) -> u32 {
        self.base + self.shape.columns_offset()
    }
    /// Writes the [columns](Self::columns): one thread for each key, and 8 more.
    ///
    /// # Safety
    /// `key` is less than `shape.keys + 8`, and nobody else writes its numbers; a CTA-wide barrier follows.
    #[inline(always)]
    pub(super) unsafe fn fill_columns(self, key: u32) {
        // Exact: 8 bits suffice for the numbers that count.
        let number = (key as f32).to_bits() >> 16;
        // SAFETY: the caller's promise.
        unsafe { shared::store_u32x4(self.columns() + 16 * key, [number << 16 | number; 4]) };
        // Products read through the async proxy.
        fence::proxy_async_shared();
    }
    /// The tile's description is written.
    #[inline(always)]
    pub(super) fn tile_full(self, stage: u32) -> u32 {
        self.barrier(TILE_FULL + stage)
    }
    /// The tile's description is written and its queries are loaded. With one stage of queries each consumer warpgroup
    /// has its own barrier.
    #[inline(always)]
    pub(super) fn queries_full(self, stage: u32, consumer: u32) -> u32 {
        let own = if self.shape.query_stages == 1 {
            consumer
        } else {
            0
        };
        self.barrier(QUERIES_FULL + stage + (SECOND_QUERIES_FULL - QUERIES_FULL) * own)
    }
    /// The tile's stage is free: every lane that reads the description has read it, and the output, which takes the
    /// queries' place, has left shared memory.
    #[inline(always)]
    pub(super) fn tile_free(self, stage: u32) -> u32 {
        self.barrier(TILE_FREE + stage)
    }
    /// The consumer warps have stored their output, over the tile's queries or directly to memory.
    #[inline(always)]
    pub(super) fn output_full(self, stage: u32) -> u32 {
        self.barrier(OUTPUT_FULL + stage)
    }
    /// With 8-bit products: the tile's queries are rounded to 8 bits. Each lane that stored some of them arrives.
    #[inline(always)]
    pub(super) fn queries_rounded(self, stage: u32) -> u32 {
        self.barrier(QUERIES_ROUNDED + stage)
    }
    /// With one stage of queries: the warpgroup's last Q·Kᵀ is done, and its next queries may be loaded.
    #[inline(always)]
    pub(super) fn queries_free(self, consumer: u32) -> u32 {
        self.barrier(QUERIES_FREE + (SECOND_QUERIES_FREE - QUERIES_FREE) * consumer)
    }
    /// Address, behind the tile's description, of the flag that the next tile is claimed late.
    #[inline(always)]
    pub(super) fn late(self, stage: u32) -> u32 {
        self.tile(stage) + 48
    }
    /// Address, behind that flag, of the [limit](crate::abi::AttentionParams::limit_of_tokens) of the tile's tokens.
    #[inline(always)]
    pub(super) fn limit(self, stage: u32) -> u32 {
        self.tile(stage) + 52
    }
    /// Whether the scheduler waits for [`near_end`](Self::near_end) of this tile. The tile has at least that many
    /// blocks.
    ///
    /// # Safety
    /// The tile's description has been stored in the stage and seen.
    #[inline(always)]
    pub(super) unsafe fn claims_late(self, stage: u32) -> bool {
        // SAFETY: the caller's promise.
        self.shape.co_resident || unsafe { shared::load_u32(self.late(stage)) } != 0
    }
    /// A tile after which the next one is claimed late has
    /// [`PREFETCH_DISTANCE`](super::scheduler::PREFETCH_DISTANCE) blocks of keys left to load.
    #[inline(always)]
    pub(super) fn near_end(self) -> u32 {
        self.barrier(NEAR_END)
    }
    /// Address of the word that holds the epoch of [converted](super::convert) pages.
    #[inline(always)]
    pub(super) fn epoch(self) -> u32 {
        self.barrier(EPOCH)
    }
    /// A block of values that reaches past the item's last key has arrived; its loader then zeroes the rows past the
    /// end.
    #[inline(always)]
    pub(super) fn tail(self) -> u32 {
        self.barrier(TAIL)
    }
    #[inline(always)]
    pub(super) fn keys_full(self, stage: u32) -> u32 {
        self.barrier(KEYS_FULL + stage)
    }
    #[inline(always)]
    pub(super) fn keys_free(self, stage: u32) -> u32 {
        self.barrier(KEYS_FREE + stage)
    }
    #[inline(always)]
    pub(super) fn values_full(self, stage: u32) -> u32 {
        self.barrier(VALUES_FULL + stage)
    }
    #[inline(always)]
    pub(super) fn values_free(self, stage: u32) -> u32 {
        self.barrier(VALUES_FREE + stage)
    }

    /// The full barrier, the free barrier and the address of a stage of values or keys.
    #[inline(always)]
    pub(super) fn stage_of(self, values: bool, stage: u32) -> (u32, u32, u32) {
        if values {
            (
                self.values_full(stage),
                self.values_free(stage),
                self.values(stage),
            )
        } else {
            (
                self.keys_full(stage),
                self.keys_free(stage),
                self.keys(stage),
            )
        }
    }

    /// Initialises all barriers. `gathered`: rows are loaded by `cp.async`, not TMA. `each_lane`: every consumer lane
    /// arrives at `output_full`, instead of one per warp.
    ///
    /// # Safety
    /// One thread calls this, before a CTA-wide barrier.
    #[inline(always)]
    pub(super) unsafe fn init(self, gathered: bool, each_lane: bool) {
        let warps = 4 * self.shape.consumers;
        // Arrivals that fill a stage: with TMA one lane's `expect_tx`, with `cp.async` every lane of the loader.
        let fillers = if gathered { 32 } else { 1 };
        // SAFETY: one thread, before the CTA-wide barrier.
        unsafe {
            let mut stage = 0;
            while stage < 2 {
                mbarrier::init(self.tile_full(stage), 1);
                mbarrier::init(self.queries_full(stage, 0), 1);
                // Readers: the two loaders, the store warp and all consumer warps. Every lane arrives for itself.
                mbarrier::init(self.tile_free(stage), 32 * (3 + warps));
                let stores = if each_lane { 32 * warps } else { warps };
                mbarrier::init(self.output_full(stage), stores);
                if self.shape.bytes == 1 {
                    mbarrier::init(self.queries_rounded(stage), 32 * warps);
                }
                stage += 1;
            }
            mbarrier::init(self.tail(), 1);
            mbarrier::init(self.near_end(), 1);
            if self.shape.query_stages == 1 {
                let mut consumer = 0;
                while consumer < self.shape.consumers {
                    mbarrier::init(self.queries_free(consumer), 4);
                    consumer += 1;
                }
                mbarrier::init(self.queries_full(0, 1), 1);
                mbarrier::init(self.queries_full(1, 1), 1);
            }
            // Each consumer warp arrives at `free`, even for a block that it skips. Otherwise the stage could be
            // refilled before that warp has observed `full`, and it would wait for a phase that has passed.
            stage = 0;
            while stage < self.shape.stages {
                mbarrier::init(self.keys_full(stage), fillers);
                mbarrier::init(self.keys_free(stage), warps);
                stage += 1;
            }
            stage = 0;
            while stage < self.shape.value_stages {
                mbarrier::init(self.values_full(stage), fillers);
                mbarrier::init(self.values_free(stage), warps);
                stage += 1;
            }
        }
        fence::mbarrier_init();
    }
}
