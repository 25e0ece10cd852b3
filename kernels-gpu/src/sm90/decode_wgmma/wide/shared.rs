//! What the warps of a CTA share: units, their rows, stages, barriers.

use cuda_std::{fence, mbarrier, shared, thread};

use super::super::rows::Queries;
use super::config::{BARRIERS, RUN_BYTES, Shape, UNIT_BYTES};
use crate::abi::{QueryRow, WorkItem};

/// What the gathering warp passes on about a unit.
#[derive(Clone, Copy)]
pub(super) struct Unit {
    /// Query tokens; none ends the work.
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
    /// The end of all work.
    pub const NONE: Self = Self {
        tokens: 0,
        head: 0,
        position: 0,
        runs: 0,
        blocks: 0,
    };

    /// Writes it to its place.
    ///
    /// # Safety
    /// `at` is one of [`Shared::unit`]'s, and the caller's to write.
    #[inline(always)]
    pub unsafe fn store(&self, at: u32) {
        // SAFETY: the caller owns the unit's 32 bytes.
        unsafe {
            shared::store_u32x4(
                at,
                [self.tokens, self.head, self.position as u32, self.runs],
            );
            shared::store_u32(at + 16, self.blocks);
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

/// Shared addresses.
#[derive(Clone, Copy)]
pub(super) struct Shared {
    pub base: u32,
    pub shape: Shape,
}

impl Shared {
    #[inline(always)]
    pub fn queries(self, slot: u32) -> u32 {
        self.base + slot * self.shape.query_bytes()
    }
    /// The queries of a slot's unit.
    #[inline(always)]
    pub fn queries_of(self, slot: u32, head: u32, tokens: u32) -> Queries {
        Queries {
            target: self.queries(slot),
            slab_bytes: self.shape.slab_bytes(),
            rows: self.row(slot, 0),
            tokens,
            head,
            head_dim: self.shape.head_dim,
        }
    }
    #[inline(always)]
    pub fn keys(self, stage: u32) -> u32 {
        self.base + self.shape.keys_offset() + stage * self.shape.block_bytes()
    }
    #[inline(always)]
    pub fn values(self, stage: u32) -> u32 {
        self.base + self.shape.values_offset() + stage * self.shape.block_bytes()
    }
    /// The [`QueryRow`] of one of a unit's tokens.
    #[inline(always)]
    pub fn row(self, slot: u32, token: u32) -> u32 {
        self.base + self.shape.rows_offset() + (slot * self.shape.rows() + token) * 16
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
    /// The first and the last key that one of a unit's tokens sees, by its position.
    #[inline(always)]
    pub fn seen(self, slot: u32, token: u32) -> u32 {
        self.base + self.shape.seen_offset() + (slot * self.shape.rows() + token) * 8
    }
    #[inline(always)]
    pub fn unit(self, slot: u32) -> u32 {
        self.base + self.shape.units_offset() + slot * UNIT_BYTES
    }
    /// One of a unit's [`Run`](super::runs::Run)s.
    #[inline(always)]
    pub fn run(self, slot: u32, index: u32) -> u32 {
        let index = slot * WorkItem::MAX_RUNS + index;
        self.base + self.shape.runs_offset() + index * RUN_BYTES
    }
    /// Which keys of a stage which rows see: a [`Mode`](super::runs::Mode), and 16 bytes further on, for each 8
    /// keys, a [`Visible`](super::runs::Visible).
    #[inline(always)]
    pub fn mask(self, stage: u32) -> u32 {
        self.base + self.shape.masks_offset() + stage * self.shape.mask_bytes()
    }
    #[inline(always)]
    fn barrier(self, index: u32) -> u32 {
        self.base + self.shape.barriers_offset() + 8 * index
    }
    /// It is known what the unit is.
    #[inline(always)]
    pub fn unit_full(self, slot: u32) -> u32 {
        self.barrier(slot)
    }
    /// Its rows and queries are there.
    #[inline(always)]
    pub fn queries_full(self, slot: u32) -> u32 {
        self.barrier(2 + slot)
    }
    /// It is done: both loaders have read it, all consumer warps have written their results.
    #[inline(always)]
    pub fn unit_free(self, slot: u32) -> u32 {
        self.barrier(4 + slot)
    }
    /// Values that are not all of the item's have arrived, and wait for the others being set to zero.
    #[inline(always)]
    pub fn tail(self, turn: u32) -> u32 {
        self.barrier(6 + turn)
    }
    /// Its rows are there.
    #[inline(always)]
    pub fn rows_full(self, slot: u32) -> u32 {
        self.barrier(8 + slot)
    }
    /// A unit of [`PREFETCH_DISTANCE`](super::PREFETCH_DISTANCE) blocks or more comes to its end.
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

    /// Initialises the barriers, a warp each in turn: the hardware takes about 60 cycles for one.
    ///
    /// # Safety
    /// All threads of the CTA come here once, and then to a barrier.
    #[inline(always)]
    pub unsafe fn init(self) {
        let (warps, consumers) = (self.shape.threads() / 32, 4 * self.shape.consumers);
        let thread = thread::thread_idx_x();
        let index = thread / 32 + thread % 32 * warps;
        if index < BARRIERS + 4 * self.shape.stages {
            // Where lanes write or read for themselves every one of them arrives; else one for its warp.
            let arrivals = match index {
                0 | 1 | 8 | 9 => 32,
                // The gatherers, once their copies are there.
                2 | 3 => 64,
                4 | 5 => 32 * (consumers + 2),
                6 | 7 | 10 => 1,
                _ => match (index - BARRIERS) % 4 {
                    0 => 32,
                    1 => 1,
                    2 => 32 * consumers,
                    _ => consumers,
                },
            };
            // SAFETY: nobody knows the barriers yet.
            unsafe { mbarrier::init(self.barrier(index), arrivals) };
        }
        fence::mbarrier_init();
    }
}
