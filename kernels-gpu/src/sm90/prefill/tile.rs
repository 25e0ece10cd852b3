//! What the warps of a CTA share: tiles, stages, barriers.

use cuda_std::{fence, mbarrier, prelude::*};

use super::{Shape, TILE_BYTES};

/// What the scheduler tells the others of a tile.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    /// The first query token and its slot (or [`DIRECT`]).
    pub(super) token: u32,
    pub(super) slot: u32,
    /// Rows that exist; none ends the work.
    pub(super) rows: u32,
    /// The first query head, and its KV head.
    pub(super) head: u32,
    pub(super) kv_head: u32,
    /// Position of the first row.
    pub(super) position: i32,
    /// The item's keys and its page table.
    pub(super) kv_begin: u32,
    pub(super) kv_end: u32,
    pub(super) table: u32,
    /// Keys that any row sees: `lowest ..`, in blocks that end at `end`, a multiple of a box.
    pub(super) lowest: u32,
    pub(super) end: u32,
    pub(super) blocks: u32,
}

impl Tile {
    pub(super) const NONE: Self = Self {
        token: 0,
        slot: 0,
        rows: 0,
        head: 0,
        kv_head: 0,
        position: 0,
        kv_begin: 0,
        kv_end: 0,
        table: 0,
        lowest: 0,
        end: 0,
        blocks: 0,
    };

    #[inline(always)]
    pub(super) unsafe fn store(&self, at: u32) {
        // SAFETY: the caller owns the tile's 64 bytes.
        unsafe {
            shared::store_u32x4(at, [self.token, self.slot, self.rows, self.head]);
            shared::store_u32x4(
                at + 16,
                [
                    self.kv_head,
                    self.position as u32,
                    self.kv_begin,
                    self.kv_end,
                ],
            );
            shared::store_u32x4(at + 32, [self.table, self.lowest, self.end, self.blocks]);
        }
    }

    #[inline(always)]
    pub(super) unsafe fn load(at: u32) -> Self {
        // SAFETY: the tile was stored and its barrier completed.
        unsafe {
            let [token, slot, rows, head] = shared::load_u32x4(at);
            let [kv_head, position, kv_begin, kv_end] = shared::load_u32x4(at + 16);
            let [table, lowest, end, blocks] = shared::load_u32x4(at + 32);
            Self {
                token,
                slot,
                rows,
                head,
                kv_head,
                position: position as i32,
                kv_begin,
                kv_end,
                table,
                lowest,
                end,
                blocks,
            }
        }
    }
}

/// Shared addresses.
#[derive(Clone, Copy)]
pub(super) struct Shared {
    pub(super) base: u32,
    pub(super) shape: Shape,
}

impl Shared {
    #[inline(always)]
    pub(super) fn queries(self, stage: u32) -> u32 {
        self.base + stage * self.shape.query_bytes()
    }
    #[inline(always)]
    pub(super) fn keys(self, stage: u32) -> u32 {
        self.base + self.shape.keys_offset() + stage * self.shape.block_bytes()
    }
    #[inline(always)]
    pub(super) fn values(self, stage: u32) -> u32 {
        self.base + self.shape.values_offset() + stage * self.shape.block_bytes()
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
    /// The tile is described and its queries are there.
    #[inline(always)]
    pub(super) fn queries_full(self, stage: u32) -> u32 {
        self.barrier(2 + stage)
    }
    /// The tile is done: all loaders have read it, and its output has left its queries' place.
    #[inline(always)]
    pub(super) fn tile_free(self, stage: u32) -> u32 {
        self.barrier(4 + stage)
    }
    /// A consumer warp's output lies in the place of its queries, or has gone to a partial state.
    #[inline(always)]
    pub(super) fn output_full(self, stage: u32) -> u32 {
        self.barrier(24 + stage)
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

    #[inline(always)]
    pub(super) unsafe fn init(self) {
        let warps = 4 * self.shape.consumers;
        // SAFETY: one thread, before the barrier of the block.
        unsafe {
            let mut stage = 0;
            while stage < 2 {
                mbarrier::init(self.tile_full(stage), 1);
                mbarrier::init(self.queries_full(stage), 1);
                mbarrier::init(self.tile_free(stage), 3);
                mbarrier::init(self.output_full(stage), warps);
                stage += 1;
            }
            mbarrier::init(self.tail(), 1);
            // Every warp for itself: a warp that skips a block must have seen it full before the block
            // can be loaded anew, or it waits for a phase that is gone.
            stage = 0;
            while stage < self.shape.stages {
                mbarrier::init(self.keys_full(stage), 1);
                mbarrier::init(self.keys_free(stage), warps);
                stage += 1;
            }
            stage = 0;
            while stage < self.shape.value_stages {
                mbarrier::init(self.values_full(stage), 1);
                mbarrier::init(self.values_free(stage), warps);
                stage += 1;
            }
        }
        fence::mbarrier_init();
    }
}
