//! What the warps of a CTA share: units, their rows, blocks of keys, weights, barriers.

use cuda_std::{fence, mbarrier, shared, thread};

use super::config::{
    BARRIERS, BARRIERS_OFFSET, BLOCK_BYTES, CONVERTERS, FACTORS_OFFSET, GREW_OFFSET, GROUP,
    HALF_BYTES, KEYS, KEYS_OFFSET, Keys, RAW_OFFSET, RAW_SLOTS, REFERENCES_OFFSET, ROW_BYTES,
    ROWS_OFFSET, SLABS, STAGES, THERE_OFFSET, THREADS, TILE_ROWS, TOTALS_OFFSET, UNIT_BYTES,
    UNITS_OFFSET,
};
use crate::abi::QueryRow;

/// What the claiming warp passes on about a unit.
#[derive(Clone, Copy)]
pub(super) struct Unit {
    /// Query tokens; none ends the work.
    pub tokens: u32,
    /// The first query head of the tile.
    pub head: u32,
    /// Smallest position among the query tokens.
    pub position: i32,
    /// First page of the table.
    pub table: u32,
    /// Where the first block begins.
    pub first: u32,
    /// The item's keys.
    pub kv_begin: u32,
    pub kv_end: u32,
    /// Blocks of keys, at least one.
    pub blocks: u32,
    /// As [`WorkItem::flags`](crate::abi::WorkItem::flags).
    pub flags: u32,
}

impl Unit {
    /// The end of all work.
    pub const NONE: Self = Self {
        tokens: 0,
        head: 0,
        position: 0,
        table: 0,
        first: 0,
        kv_begin: 0,
        kv_end: 0,
        blocks: 0,
        flags: 0,
    };

    /// Writes it to its place.
    ///
    /// # Safety
    /// `at` is one of [`Shared::unit`]'s, and the caller's to write.
    #[inline(always)]
    pub unsafe fn store(&self, at: u32) {
        // SAFETY: the caller owns the unit's 48 bytes.
        unsafe {
            shared::store_u32x4(
                at,
                [self.tokens, self.head, self.position as u32, self.table],
            );
            shared::store_u32x4(
                at + 16,
                [self.first, self.kv_begin, self.kv_end, self.blocks],
            );
            shared::store_u32(at + 32, self.flags);
        }
    }

    /// Reads it from its place.
    ///
    /// # Safety
    /// `at` is one of [`Shared::unit`]'s; the unit was stored, and its barrier completed.
    #[inline(always)]
    pub unsafe fn load(at: u32) -> Self {
        // SAFETY: the unit was stored and its barrier completed.
        unsafe {
            let [tokens, head, position, table] = shared::load_u32x4(at);
            let [first, kv_begin, kv_end, blocks] = shared::load_u32x4(at + 16);
            Self {
                tokens,
                head,
                position: position as i32,
                table,
                first,
                kv_begin,
                kv_end,
                blocks,
                flags: shared::load_u32(at + 32),
            }
        }
    }
}

/// Shared addresses.
#[derive(Clone, Copy)]
pub(super) struct Shared {
    pub base: u32,
}

impl Shared {
    /// Slabs of 64 columns, all rows of one after the other.
    #[inline(always)]
    pub fn queries(self) -> u32 {
        self.base
    }
    /// A half of a block: groups of 8 keys, in each one slab of 64 columns after the other.
    #[inline(always)]
    pub fn half(self, stage: u32, half: u32) -> u32 {
        self.base + KEYS_OFFSET + stage * BLOCK_BYTES + half * HALF_BYTES[0]
    }
    /// The weights of a block, in the place of its last slab: 16 bytes of all rows, [`WEIGHTS_CHUNK`] apart.
    #[inline(always)]
    pub fn weights(self, stage: u32) -> u32 {
        self.half(stage, 1) + (SLABS[1] - 1) * 1024
    }
    /// The [`QueryRow`] of one of a unit's tokens.
    #[inline(always)]
    pub fn row(self, slot: u32, token: u32) -> u32 {
        self.base + ROWS_OFFSET + (slot * TILE_ROWS + token) * 16
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
    /// The reference of a row's weights, of the block in a stage.
    #[inline(always)]
    pub fn reference(self, stage: u32, row: u32) -> u32 {
        self.base + REFERENCES_OFFSET + (stage * TILE_ROWS + row) * 4
    }
    /// What outputs before that block are multiplied by.
    #[inline(always)]
    pub fn factor(self, stage: u32, row: u32) -> u32 {
        self.base + FACTORS_OFFSET + (stage * TILE_ROWS + row) * 4
    }
    /// Whether any row of a warp has a new reference for that block.
    #[inline(always)]
    pub fn grew(self, stage: u32, warp: u32) -> u32 {
        self.base + GREW_OFFSET + (stage * 4 + warp) * 4
    }
    /// The sum of a row's weights in the blocks of a consumer.
    #[inline(always)]
    pub fn total(self, slot: u32, consumer: u32, row: u32) -> u32 {
        self.base + TOTALS_OFFSET + ((slot * 2 + consumer) * TILE_ROWS + row) * 4
    }
    #[inline(always)]
    pub fn unit(self, slot: u32) -> u32 {
        self.base + UNITS_OFFSET + slot * UNIT_BYTES
    }
    #[inline(always)]
    fn barrier(self, index: u32) -> u32 {
        self.base + BARRIERS_OFFSET + 8 * index
    }
    /// It is known what the unit is, and who its rows are.
    #[inline(always)]
    pub fn unit_full(self, slot: u32) -> u32 {
        self.barrier(slot)
    }
    /// It is done: loaders have read it, consumers have written their results.
    #[inline(always)]
    pub fn unit_free(self, slot: u32) -> u32 {
        self.barrier(2 + slot)
    }
    /// The unit's queries are there.
    #[inline(always)]
    pub fn queries_full(self) -> u32 {
        self.barrier(4)
    }
    /// Nobody reads them any more.
    #[inline(always)]
    pub fn queries_free(self) -> u32 {
        self.barrier(5)
    }
    /// A unit of [`CLAIM_AHEAD`](super::CLAIM_AHEAD) blocks or more comes to its end.
    #[inline(always)]
    pub fn ends_soon(self) -> u32 {
        self.barrier(6)
    }
    #[inline(always)]
    pub fn full(self, stage: u32, half: u32) -> u32 {
        self.barrier(8 + 4 * stage + half)
    }
    #[inline(always)]
    pub fn free(self, stage: u32, half: u32) -> u32 {
        self.barrier(8 + 4 * stage + 2 + half)
    }

    /// A converting warp's group of rows as the pool has them.
    #[inline(always)]
    pub fn raw(self, converter: u32, slot: u32) -> u32 {
        self.base + RAW_OFFSET + (converter * RAW_SLOTS + slot) * GROUP * ROW_BYTES
    }
    /// They are there.
    #[inline(always)]
    pub fn raw_full(self, converter: u32, slot: u32) -> u32 {
        self.barrier(8 + 4 * STAGES + converter * RAW_SLOTS + slot)
    }
    /// Which keys of a group of a stage's block are there, a bit each.
    #[inline(always)]
    pub fn there(self, stage: u32, group: u32) -> u32 {
        self.base + THERE_OFFSET + (stage * (KEYS / GROUP) + group) * 4
    }

    /// Initialises the barriers, a warp each in turn (the hardware takes about 60 cycles for one), and the queries of
    /// rows that tiles may not have. Blocks come with one arrival, with that of each lane that copies keys, or with
    /// one for each group that was converted.
    ///
    /// # Safety
    /// All threads of the CTA come here once, and then to a barrier.
    #[inline(always)]
    pub unsafe fn init(self, keys: Keys) {
        let thread = thread::thread_idx_x();
        let index = thread / 32 + thread % 32 * (THREADS / 32);
        let barriers = match keys {
            Keys::Converted => BARRIERS,
            _ => 8 + 4 * STAGES,
        };
        if index < barriers {
            let arrivals = match index {
                0 | 1 => 32,
                // The loaders' lanes (or converting warps) and the consumers'.
                2 | 3 => match keys {
                    Keys::Converted => CONVERTERS + 2 * 128,
                    _ => 2 * 32 + 2 * 128,
                },
                4 => 32,
                5 => 8,
                6 | 7 => 1,
                // A group's rows come by one lane's copies.
                _ if index >= 8 + 4 * STAGES => 1,
                _ if index & 2 == 0 => match keys {
                    Keys::Pages => 1,
                    Keys::Rows => 32,
                    Keys::Converted => KEYS / GROUP,
                },
                // The right half of a block of consumer 1: consumer 0 has read its weights, 1 its values. Of an odd number
                // of stages each has blocks of both, and consumer 0 says of its own, too, that it has read them.
                _ if index & 7 == 7 || index & 1 == 1 && keys == Keys::Converted => 8,
                _ => 4,
            };
            // SAFETY: nobody knows the barriers yet.
            unsafe { mbarrier::init(self.barrier(index), arrivals) };
        }
        fence::mbarrier_init();
        let mut at = thread * 16;
        while at < KEYS_OFFSET {
            // SAFETY: the queries' memory; nobody uses it before the barrier.
            unsafe { shared::store_u32x4(self.queries() + at, [0; 4]) };
            at += THREADS * 16;
        }
        // Queries come by bulk copies.
        fence::proxy_async_shared();
    }
}

/// Bytes from 8 keys' weights to those of the next.
pub(super) const WEIGHTS_CHUNK: u32 = SLABS[1] * 1024;
