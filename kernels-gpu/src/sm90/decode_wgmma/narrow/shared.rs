//! Shared-memory addresses of units, rows, stages and mbarriers.

use cuda_std::{fence, mbarrier, shared, thread};

use super::super::rows::shared_with_queries;
use super::PREFETCH_BYTES;
use super::config::{BARRIERS, Shape, UNIT_BYTES};
use crate::sm90::arrivals;

/// The named barrier of the consumers, and its threads.
pub(super) const CONSUMERS: u32 = 1;
pub(super) const THREADS: u32 = 128;

/// A unit of work, as the scheduler warp describes it.
#[derive(Clone, Copy)]
pub(super) struct Unit {
    /// Query tokens; 0 ends the work.
    pub tokens: u32,
    /// The KV head.
    pub head: u32,
    /// Smallest position among the query tokens.
    pub position: i32,
    /// Index into the plan's page ids of the table's first page, that of key 0.
    pub table: u32,
    /// The item's keys: the first, and one past the last.
    pub kv_begin: u32,
    pub kv_end: u32,
    /// Blocks of keys, at least one. The last ends at `end`: a multiple of a TMA box, or `kv_end` if keys are loaded one by one.
    pub blocks: u32,
    pub end: u32,
    /// As [`WorkItem::flags`](crate::abi::WorkItem::flags).
    pub flags: u32,
}

impl Unit {
    /// No more work.
    pub const NONE: Self = Self {
        tokens: 0,
        head: 0,
        position: 0,
        table: 0,
        kv_begin: 0,
        kv_end: 0,
        blocks: 0,
        end: 0,
        flags: 0,
    };

    /// Writes the unit to shared memory.
    ///
    /// # Safety
    /// `at` is one of [`Shared::unit`]'s addresses, and only the caller accesses it.
    #[inline(always)]
    pub unsafe fn store(&self, at: u32) {
        // SAFETY: only the caller accesses the unit's 48 bytes.
        unsafe {
            shared::store_u32x4(
                at,
                [self.tokens, self.head, self.position as u32, self.table],
            );
            shared::store_u32x4(at + 16, [self.kv_begin, self.kv_end, self.blocks, self.end]);
            shared::store_u32x4(at + 32, [self.flags, 0, 0, 0]);
        }
    }

    /// Reads a unit from shared memory.
    ///
    /// # Safety
    /// `at` is one of [`Shared::unit`]'s addresses; the unit was stored, and its barrier completed.
    #[inline(always)]
    pub unsafe fn load(at: u32) -> Self {
        // SAFETY: the unit was stored and its barrier completed.
        unsafe {
            let [tokens, head, position, table] = shared::load_u32x4(at);
            let [kv_begin, kv_end, blocks, end] = shared::load_u32x4(at + 16);
            let [flags, _, _, _] = shared::load_u32x4(at + 32);
            Self {
                tokens,
                head,
                position: position as i32,
                table,
                kv_begin,
                kv_end,
                blocks,
                end,
                flags,
            }
        }
    }
}

shared_with_queries!();

impl Shared {
    /// The [`QueryRow`](crate::abi::QueryRow) of one of a unit's tokens.
    #[inline(always)]
    pub fn row(self, slot: u32, token: u32) -> u32 {
        self.base + self.shape.rows_offset() + (slot * self.shape.rows + token) * 16
    }
    /// Products are of the queries' type.
    #[inline(always)]
    pub fn unfitted(self, _slot: u32) -> Option<u32> {
        None
    }
    /// Queries are not converted after they were copied.
    #[inline(always)]
    pub fn copies_queries_first(self) -> bool {
        false
    }
    /// A block of values that reaches past the item's last key has arrived; its loader then zeroes the rows past the
    /// end.
    #[inline(always)]
    pub fn tail(self) -> u32 {
        self.barrier(6)
    }
    /// The unit's rows are written.
    #[inline(always)]
    pub fn rows_full(self, slot: u32) -> u32 {
        self.barrier(7 + slot)
    }
    /// The scales of a block's keys, followed by those of its values.
    #[inline(always)]
    pub fn scales(self, stage: u32) -> u32 {
        self.factors(2, 0, 0) + stage * self.shape.scale_bytes()
    }
    /// The scales of a block have arrived.
    #[inline(always)]
    pub fn scales_full(self, stage: u32) -> u32 {
        self.values_full(self.shape.value_stages + stage)
    }
    #[inline(always)]
    pub fn scales_free(self, stage: u32) -> u32 {
        self.scales_full(stage) + 8
    }
    /// Blocks of a unit still to be loaded when the next unit is claimed.
    #[inline(always)]
    pub fn prefetch_distance(self) -> u32 {
        PREFETCH_BYTES / self.shape.block_bytes()
    }
    /// A unit of at least [`prefetch_distance`](Self::prefetch_distance) blocks has that many left to load.
    #[inline(always)]
    pub fn near_end(self) -> u32 {
        self.barrier(9)
    }
    #[inline(always)]
    pub fn keys_full(self, stage: u32) -> u32 {
        self.barrier(BARRIERS + 2 * stage)
    }
    #[inline(always)]
    pub fn values_full(self, stage: u32) -> u32 {
        self.keys_full(self.shape.stages + stage)
    }
    #[inline(always)]
    pub fn keys_free(self, stage: u32) -> u32 {
        self.keys_full(stage) + 8
    }
    #[inline(always)]
    pub fn values_free(self, stage: u32) -> u32 {
        self.values_full(stage) + 8
    }
    /// The weights of a block, double-buffered: for each 8 rows, 16 bytes per key.
    #[inline(always)]
    pub fn weights(self, parity: u32) -> u32 {
        let behind = self.shape.shared_bytes().next_multiple_of(16);
        self.base + behind + parity * self.shape.rows * self.shape.keys * 2
    }
    /// The output of 8 of a unit's rows, in the epilogue.
    #[inline(always)]
    pub fn state(self) -> u32 {
        let over = self.shape.state_over_weights();
        self.weights(if over { 0 } else { 2 })
    }
    /// A number per row that the warps exchange: the largest logit of a block, or the sum of weights.
    #[inline(always)]
    pub fn exchange(self, warp: u32, row: u32) -> u32 {
        let behind = self.weights(0) + self.shape.weights_and_state_bytes();
        behind + (warp * self.shape.rows + row) * 4
    }

    /// The two factors of a unit's row, if keys have scales: of its logits, and of its output.
    #[inline(always)]
    pub fn factors(self, slot: u32, factor: u32, row: u32) -> u32 {
        self.exchange(9, 0) + ((slot * 2 + factor) * self.shape.rows + row) * 4
    }

    /// Initialises the barriers, distributed over the warps: one takes about 60 cycles. Also zeroes the queries: a unit
    /// may have fewer rows than the products read, and garbage there would trigger rescales. If keys are loaded `by_rows`,
    /// the lanes of a loader arrive for their own copies.
    ///
    /// # Safety
    /// All threads of the CTA come here once, and then meet at a CTA-wide barrier.
    #[inline(always)]
    pub unsafe fn init(self, by_rows: bool) {
        let (warps, consumers) = (self.shape.threads() / 32, 4);
        let thread = thread::thread_idx_x();
        let index = thread / 32 + thread % 32 * warps;
        if index < self.shape.barriers() {
            // Every lane arrives where lanes read or write for themselves; otherwise one lane per warp.
            let loaders = if self.shape.by_token { 3 } else { 2 };
            let all = (consumers + loaders) * 32;
            // Of 8-bit kernels, one warp gathers and converts the queries.
            let query_loaders = if self.shape.scaled() { 1 } else { 2 };
            let of_unit = [(2, 1), (4, query_loaders * 32), (6, all), (7, 1), (9, 32)];
            let arrivals = match index < BARRIERS {
                true => arrivals(index, of_unit, 1),
                false => {
                    let readers = if self.shape.scaled() { 32 } else { 1 };
                    // Each lane of the loader arrives for its own scales.
                    let stages = self.shape.stages + self.shape.value_stages;
                    let by_box = index < BARRIERS + 2 * stages && !by_rows;
                    let full = if by_box { 1 } else { 32 };
                    arrivals((index - BARRIERS) % 2, [(1, full)], consumers * readers)
                }
            };
            // SAFETY: no thread uses the barriers yet.
            unsafe { mbarrier::init(self.barrier(index), arrivals) };
        }
        let mut at = thread * 16;
        while at < 2 * self.shape.query_bytes() {
            // SAFETY: inside the two slots; each thread stores to bytes of its own.
            unsafe { shared::store_u32x4(self.queries(0) + at, [0; 4]) };
            at += self.shape.threads() * 16;
        }
        fence::proxy_async_shared();
        fence::mbarrier_init();
    }
}
