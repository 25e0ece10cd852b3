//! What the warps of a CTA share: tiles, stages, barriers.

use cuda_std::{fence, mbarrier, shared};

use super::config::{Shape, TILE_BYTES};

/// Shared addresses.
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
    pub(super) fn barrier(self, index: u32) -> u32 {
        self.base + self.shape.barriers_offset() + 8 * index
    }
    #[inline(always)]
    pub(super) fn tile(self, stage: u32) -> u32 {
        self.barrier(32) + stage * TILE_BYTES
    }
    /// The tile is described.
    #[inline(always)]
    pub(super) fn tile_full(self, stage: u32) -> u32 {
        self.barrier(stage)
    }
    /// The tile is described and its queries are there. With one tile of queries each warpgroup awaits its own.
    #[inline(always)]
    pub(super) fn queries_full(self, stage: u32, consumer: u32) -> u32 {
        let own = if self.shape.query_stages == 1 {
            consumer
        } else {
            0
        };
        self.barrier(2 + stage + 26 * own)
    }
    /// The tile is done: all lanes that read what it is have done so, and its output has left its queries' place.
    #[inline(always)]
    pub(super) fn tile_free(self, stage: u32) -> u32 {
        self.barrier(4 + stage)
    }
    /// A consumer warp's output lies in the place of its queries, or where it is wanted.
    #[inline(always)]
    pub(super) fn output_full(self, stage: u32) -> u32 {
        self.barrier(24 + stage)
    }
    /// With products of 8 bits: the tile's queries have become 8 bits, each lane that stored some says so for itself.
    #[inline(always)]
    pub(super) fn queries_rounded(self, stage: u32) -> u32 {
        self.barrier(28 + stage)
    }
    /// With one tile of queries: the warpgroup has read its own, the next ones can come.
    #[inline(always)]
    pub(super) fn queries_free(self, consumer: u32) -> u32 {
        self.barrier(7 + 23 * consumer)
    }
    /// Behind the tile: whether the next one is claimed late.
    #[inline(always)]
    pub(super) fn late(self, stage: u32) -> u32 {
        self.tile(stage) + 48
    }
    /// Whether the scheduler waits for [`near_end`](Self::near_end) of the tile, which has blocks enough.
    ///
    /// # Safety
    /// The tile is there.
    #[inline(always)]
    pub(super) unsafe fn claims_late(self, stage: u32) -> bool {
        // SAFETY: the caller's promise.
        self.shape.co_resident || unsafe { shared::load_u32(self.late(stage)) } != 0
    }
    /// A tile behind which the next one is claimed late comes to its end: [`PREFETCH_DISTANCE`](super::scheduler::PREFETCH_DISTANCE) blocks.
    #[inline(always)]
    pub(super) fn near_end(self) -> u32 {
        self.barrier(26)
    }
    /// The epoch in which pages are [converted](super::convert).
    #[inline(always)]
    pub(super) fn epoch(self) -> u32 {
        self.barrier(27)
    }
    /// Values past the end have arrived and wait for being set to zero.
    #[inline(always)]
    pub(super) fn tail(self) -> u32 {
        self.barrier(6)
    }
    #[inline(always)]
    pub(super) fn keys_full(self, stage: u32) -> u32 {
        self.barrier(8 + stage)
    }
    #[inline(always)]
    pub(super) fn keys_free(self, stage: u32) -> u32 {
        self.barrier(12 + stage)
    }
    #[inline(always)]
    pub(super) fn values_full(self, stage: u32) -> u32 {
        self.barrier(16 + stage)
    }
    #[inline(always)]
    pub(super) fn values_free(self, stage: u32) -> u32 {
        self.barrier(20 + stage)
    }

    /// Of a stage of values or keys: its barriers, full and free, and where it is.
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

    /// Initialises all barriers. `each_lane` says for itself that its output is there, or one for its warp.
    ///
    /// # Safety
    /// One thread comes here, before a barrier of the CTA.
    #[inline(always)]
    pub(super) unsafe fn init(self, gathered: bool, each_lane: bool) {
        let warps = 4 * self.shape.consumers;
        // Who fills a block: the tensor maps' boxes are awaited by one, copies of rows by each lane.
        let fillers = if gathered { 32 } else { 1 };
        // SAFETY: one thread, before the barrier of the block.
        unsafe {
            let mut stage = 0;
            while stage < 2 {
                mbarrier::init(self.tile_full(stage), 1);
                mbarrier::init(self.queries_full(stage, 0), 1);
                // Each lane that has read the tile's description says so for itself.
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
            // Every warp for itself: a warp that skips a block must have seen it full before the block
            // can be loaded anew, or it waits for a phase that is gone.
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
