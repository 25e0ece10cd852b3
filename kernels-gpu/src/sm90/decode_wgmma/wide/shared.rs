//! Shared-memory addresses of units, rows, runs, stages, masks and mbarriers.

use cuda_std::{fence, mbarrier, shared, thread};

use super::super::rows::shared_with_queries;
use super::config::{BARRIERS, RUN_BYTES, Shape, UNIT_BYTES};
use crate::{abi::WorkItem, common::cache, sm90::arrivals};

/// The place of a converted block, of keys or of values, and the parity of the phase to wait for.
#[derive(Clone, Copy)]
pub(super) struct Converted {
    pub stage: u32,
    pub parity: u32,
}

impl Converted {
    /// Of the first block: `parity` is 0 for consumers, 1 for the warps that convert, which find the place free.
    pub const fn first(parity: u32) -> Self {
        Self { stage: 0, parity }
    }

    /// That of the next block.
    #[inline(always)]
    pub fn next(self, shape: &Shape) -> Self {
        match shape.converted_stages() {
            1 => Self {
                stage: 0,
                parity: self.parity ^ 1,
            },
            _ => Self {
                stage: self.stage ^ 1,
                parity: self.parity ^ self.stage,
            },
        }
    }

    /// That of the block before.
    #[inline(always)]
    pub fn before(self, shape: &Shape) -> Self {
        match shape.converted_stages() {
            1 => self.next(shape),
            _ => Self {
                stage: self.stage ^ 1,
                parity: self.parity ^ self.stage ^ 1,
            },
        }
    }
}

/// A unit of work, as the scheduler warp describes it.
#[derive(Clone, Copy)]
pub(super) struct Unit {
    /// Query tokens; 0 ends the work.
    pub tokens: u32,
    /// The KV head.
    pub head: u32,
    /// Smallest position among the query tokens.
    pub position: i32,
    /// Runs of keys, at least one.
    pub runs: u32,
    /// Blocks of keys, at least one.
    pub blocks: u32,
}

impl Unit {
    /// No more work.
    pub const NONE: Self = Self {
        tokens: 0,
        head: 0,
        position: 0,
        runs: 0,
        blocks: 0,
    };

    /// Writes the unit to shared memory.
    ///
    /// # Safety
    /// `at` is one of [`Shared::unit`]'s addresses, and only the caller accesses it.
    #[inline(always)]
    pub unsafe fn store(&self, at: u32) {
        // SAFETY: only the caller accesses the unit's 32 bytes.
        unsafe {
            shared::store_u32x4(
                at,
                [self.tokens, self.head, self.position as u32, self.runs],
            );
            shared::store_u32(at + 16, self.blocks);
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
            let [tokens, head, position, runs] = shared::load_u32x4(at);
            let blocks = shared::load_u32(at + 16);
            Self {
                tokens,
                head,
                position: position as i32,
                runs,
                blocks,
            }
        }
    }
}

shared_with_queries!();

impl Shared {
    /// The [`QueryRow`](crate::abi::QueryRow) of one of a unit's tokens.
    #[inline(always)]
    pub fn row(self, slot: u32, token: u32) -> u32 {
        self.base + self.shape.rows_offset() + (slot * self.shape.rows() + token) * 16
    }
    /// The first and the last key that one of a unit's tokens sees by its position.
    #[inline(always)]
    pub fn seen(self, slot: u32, token: u32) -> u32 {
        self.base + self.shape.seen_offset() + (slot * self.shape.rows() + token) * 8
    }
    /// Keys, or values, converted to 16 bits.
    #[inline(always)]
    pub fn converted(self, values: bool, stage: u32) -> u32 {
        let block = u32::from(values) + 2 * stage;
        self.base + self.shape.converted_offset() + block * self.shape.converted_bytes()
    }
    /// The scales of keys and values for one of a unit's tokens.
    #[inline(always)]
    pub fn scales(self, slot: u32, token: u32) -> u32 {
        let of_slot = slot * self.shape.factor_bytes();
        self.base + self.shape.factors_offset() + of_slot + token * 8
    }
    /// The factor that undoes the conversion of one of a unit's rows to f16.
    #[inline(always)]
    pub fn unfit(self, slot: u32, row: u32) -> u32 {
        self.scales(slot, self.shape.rows()) + row * 4
    }
    /// See [`Queries`](super::super::rows::Queries).
    #[inline(always)]
    pub fn unfitted(self, slot: u32) -> Option<u32> {
        if self.shape.fits {
            Some(self.unfit(slot, 0))
        } else {
            None
        }
    }
    /// See [`Queries`](super::super::rows::Queries).
    #[inline(always)]
    pub fn copies_queries_first(self) -> bool {
        self.shape.registers()[0] >= 64
    }
    /// One of a unit's [`Run`](super::runs::Run)s.
    #[inline(always)]
    pub fn run(self, slot: u32, index: u32) -> u32 {
        let index = slot * WorkItem::MAX_RUNS + index;
        self.base + self.shape.runs_offset() + index * RUN_BYTES
    }
    /// The mask of a stage: a [`Mode`](super::masks::Mode), and, 16 bytes further, a [`Visible`](super::masks::Visible)
    /// per 8 keys.
    #[inline(always)]
    pub fn mask(self, stage: u32) -> u32 {
        self.base + self.shape.masks_offset() + stage * self.shape.mask_bytes()
    }
    /// The [scales](super::scales) of a block, if each token has its own.
    #[inline(always)]
    pub fn token_scales(self, mask: u32) -> u32 {
        self.mask(mask) + 16 + self.shape.keys
    }
    /// A block with values outside its item has arrived; its loader then zeroes these.
    #[inline(always)]
    pub fn tail(self, turn: u32) -> u32 {
        self.barrier(6 + turn)
    }
    /// The unit's rows are written.
    #[inline(always)]
    pub fn rows_full(self, slot: u32) -> u32 {
        self.barrier(8 + slot)
    }
    /// A unit of at least [`PREFETCH_DISTANCE`](super::PREFETCH_DISTANCE) blocks has that many left to load.
    #[inline(always)]
    pub fn near_end(self) -> u32 {
        self.barrier(10)
    }
    #[inline(always)]
    pub fn keys_full(self, stage: u32) -> u32 {
        self.barrier(BARRIERS + 4 * stage)
    }
    #[inline(always)]
    pub fn values_full(self, stage: u32) -> u32 {
        self.barrier(BARRIERS + 4 * stage + 1)
    }
    #[inline(always)]
    pub fn keys_free(self, stage: u32) -> u32 {
        self.barrier(BARRIERS + 4 * stage + 2)
    }
    #[inline(always)]
    pub fn values_free(self, stage: u32) -> u32 {
        self.barrier(BARRIERS + 4 * stage + 3)
    }

    /// The converted keys, or values, are there.
    #[inline(always)]
    pub fn converted_full(self, values: bool, stage: u32) -> u32 {
        let first = BARRIERS + 4 * (self.shape.stages + stage);
        self.barrier(first + u32::from(values))
    }
    /// The products with the converted keys, or values, are done.
    #[inline(always)]
    pub fn converted_free(self, values: bool, stage: u32) -> u32 {
        let first = BARRIERS + 4 * (self.shape.stages + stage);
        self.barrier(first + 2 + u32::from(values))
    }

    /// Initialises the barriers, distributed over the warps: one takes about 60 cycles. If keys are loaded `by_rows`, the
    /// lanes of a loader arrive for their own copies.
    ///
    /// # Safety
    /// All threads of the CTA come here once, and then meet at a CTA-wide barrier.
    #[inline(always)]
    pub unsafe fn init(self, by_rows: bool) {
        let (warps, consumers) = (self.shape.threads() / 32, 4 * self.shape.consumers);
        let thread = thread::thread_idx_x();
        let index = thread / 32 + thread % 32 * warps;
        if index < self.shape.barriers() {
            // Every lane arrives where lanes read or write for themselves; otherwise one lane per warp.
            // Rows full: all lanes of both query loaders, once their copies are done.
            let converts = self.shape.converts();
            let (rows, all) = (64, 32 * (consumers + 2) + 128 * u32::from(converts));
            let of_unit = [(2, 32), (4, rows), (6, all), (8, 1), (10, 32)];
            // Each lane of the warps that convert a block reads and writes a part of it.
            let convert = if converts {
                self.shape.converting_threads()
            } else {
                0
            };
            let free = if converts { convert } else { 32 * consumers };
            // Where each token has scales, each lane also arrives once its copies of them are there.
            let full = if cache::by_token(self.shape.cache) || by_rows {
                64
            } else {
                32
            };
            let values = if converts || by_rows { 32 } else { 1 };
            let of_stage = [(1, full), (2, values), (if converts { 4 } else { 3 }, free)];
            let of_converted = [(2, convert), (3, 32 * consumers)];
            let (stages, converted) = (BARRIERS, BARRIERS + 4 * self.shape.stages);
            let arrivals = if index < stages {
                arrivals(index, of_unit, 1)
            } else if index < converted {
                arrivals((index - stages) % 4, of_stage, consumers)
            } else {
                arrivals((index - converted) % 4, of_converted, consumers)
            };
            // SAFETY: no thread uses the barriers yet.
            unsafe { mbarrier::init(self.barrier(index), arrivals) };
        }
        fence::mbarrier_init();
    }
}
