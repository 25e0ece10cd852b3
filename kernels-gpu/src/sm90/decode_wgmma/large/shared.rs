//! Shared-memory addresses of units, rows, pieces of keys and values, weights and mbarriers.

use cuda_std::{fence, mbarrier, shared, thread, warp};

use super::config::{
    BARRIERS, Keys, Offsets, THREADS, TILE_ROWS, VALUE_BYTES, VALUE_PIECES, WEIGHTS_BYTES,
};
pub(super) use crate::sm90::unit::Unit;
use crate::{
    abi::QueryRow,
    sm90::{arrivals, unit::UNIT_BYTES},
};

/// The base address, in a kernel whose keys have `DIM` elements.
#[derive(Clone, Copy)]
pub(super) struct Shared<const DIM: u32> {
    pub base: u32,
}

impl<const DIM: u32> Shared<DIM> {
    const AT: Offsets = Keys::<DIM>::AT;
    const STAGES: u32 = Keys::<DIM>::STAGES;
    const VALUE_STAGES: u32 = Keys::<DIM>::VALUE_STAGES;

    /// The first slabs of 64 columns of the queries; each slab holds all rows.
    #[inline(always)]
    pub fn queries(self) -> u32 {
        self.base
    }
    /// A piece of keys: groups of 8 keys; within a group the slabs of 64 columns follow each other.
    #[inline(always)]
    pub fn keys(self, stage: u32) -> u32 {
        self.base + Self::AT.keys + stage * Keys::<DIM>::PIECE_BYTES
    }
    /// A piece of values, likewise.
    #[inline(always)]
    pub fn values(self, stage: u32) -> u32 {
        self.base + Self::AT.values + stage * VALUE_BYTES
    }
    /// A thread's weights for the first 16 keys of a block, in stage `turn`; those for the next 16 keys are
    /// [`WEIGHTS_STEP`](super::config::WEIGHTS_STEP) further.
    #[inline(always)]
    pub fn weights_of(self, turn: u32, thread: u32) -> u32 {
        self.base + Self::AT.weights + turn * WEIGHTS_BYTES + thread * 16
    }
    /// The [`QueryRow`] of one of a unit's tokens.
    #[inline(always)]
    pub fn row(self, slot: u32, token: u32) -> u32 {
        self.base + Self::AT.rows + (slot * TILE_ROWS + token) * 16
    }
    /// Reads a row of a unit.
    ///
    /// # Safety
    /// The unit has the token, and its barrier completed.
    #[inline(always)]
    pub unsafe fn load_row(self, slot: u32, token: u32) -> QueryRow {
        // SAFETY: the unit has the token, and its barrier completed.
        QueryRow::from_words(unsafe { shared::load_u32x4(self.row(slot, token)) })
    }
    /// The rescale factor, at a block, of earlier outputs.
    #[inline(always)]
    pub fn factor(self, turn: u32, row: u32) -> u32 {
        self.base + Self::AT.factors + (turn * TILE_ROWS + row) * 4
    }
    /// Whether any row of a warp has such a factor.
    #[inline(always)]
    pub fn grew(self, turn: u32, warp: u32) -> u32 {
        self.base + Self::AT.grew + (turn * 4 + warp) * 4
    }
    /// The normalisation factor of a row's outputs.
    #[inline(always)]
    pub fn inverse(self, slot: u32, row: u32) -> u32 {
        self.base + Self::AT.inverses + (slot * TILE_ROWS + row) * 4
    }
    #[inline(always)]
    pub fn unit(self, slot: u32) -> u32 {
        self.base + Self::AT.units + slot * UNIT_BYTES
    }
    #[inline(always)]
    fn barrier(self, index: u32) -> u32 {
        self.base + Self::AT.barriers + 8 * index
    }
    /// The unit's description is written.
    #[inline(always)]
    pub fn unit_full(self, slot: u32) -> u32 {
        self.barrier(slot)
    }
    /// The slot is free: loaders have read the unit, and its results are written.
    #[inline(always)]
    pub fn unit_free(self, slot: u32) -> u32 {
        self.barrier(2 + slot)
    }
    /// The unit's rows are written.
    #[inline(always)]
    pub fn rows_full(self, slot: u32) -> u32 {
        self.barrier(4 + slot)
    }
    /// The unit's [inverses](Self::inverse) are stored.
    #[inline(always)]
    pub fn inverses_full(self, slot: u32) -> u32 {
        self.barrier(6 + slot)
    }
    /// A piece with values outside its item has arrived; its loader then zeroes these.
    #[inline(always)]
    pub fn tail(self) -> u32 {
        self.barrier(8)
    }
    /// A unit of at least [`PREFETCH_DISTANCE`](super::PREFETCH_DISTANCE) blocks has that many left to load.
    #[inline(always)]
    pub fn near_end(self) -> u32 {
        self.barrier(9)
    }
    /// A block's weights and rescale factors are stored, in stage `turn`.
    #[inline(always)]
    pub fn weights_full(self, turn: u32) -> u32 {
        self.barrier(10 + turn)
    }
    /// Both P·V warpgroups have read the weights.
    #[inline(always)]
    pub fn weights_free(self, turn: u32) -> u32 {
        self.barrier(12 + turn)
    }
    #[inline(always)]
    pub fn keys_full(self, stage: u32) -> u32 {
        self.barrier(BARRIERS + 2 * stage)
    }
    #[inline(always)]
    pub fn keys_free(self, stage: u32) -> u32 {
        self.barrier(BARRIERS + 2 * stage + 1)
    }
    #[inline(always)]
    pub fn values_full(self, stage: u32) -> u32 {
        self.barrier(BARRIERS + 2 * Self::STAGES + 2 * stage)
    }
    #[inline(always)]
    pub fn values_free(self, stage: u32) -> u32 {
        self.barrier(BARRIERS + 2 * Self::STAGES + 2 * stage + 1)
    }

    /// Initialises the barriers, distributed over the warps: one takes about 60 cycles.
    ///
    /// # Safety
    /// All threads of the CTA come here once, and then meet at a CTA-wide barrier.
    #[inline(always)]
    pub unsafe fn init(self) {
        let keys = 2 * Self::STAGES;
        let thread = thread::thread_idx_x();
        let index = thread / 32 + warp::lane_id() * (THREADS / 32);
        if index < BARRIERS + keys + 2 * Self::VALUE_STAGES {
            // Two loader warps, the softmax warpgroup and both P·V warpgroups. Every lane arrives where lanes read or write for
            // themselves; otherwise one lane per warp.
            let all = 2 * 32 + 3 * 128;
            let of_unit = [(2, 32), (4, all), (6, 32), (8, 128), (10, 1), (12, 128)];
            let arrivals = if index < BARRIERS {
                arrivals(index, of_unit, 2 * 128)
            } else {
                match (index - BARRIERS) % 2 {
                    0 => 1,
                    _ => arrivals(index, [(BARRIERS + keys, 4)], 8),
                }
            };
            // SAFETY: no thread uses the barriers yet.
            unsafe { mbarrier::init(self.barrier(index), arrivals) };
        }
        fence::mbarrier_init();
    }
}

/// The stages of a block's values, and the parity of their mbarriers: a block uses as many stages as it has pieces, and the ring
/// holds one block or several.
#[derive(Clone, Copy)]
pub(super) struct ValueRing<const DIM: u32> {
    /// The stage of the block's first piece.
    pub first: u32,
    pub parity: u32,
}

impl<const DIM: u32> ValueRing<DIM> {
    pub const CONSUMER: Self = Self {
        first: 0,
        parity: 0,
    };
    /// Parity 1 counts as completed on a fresh mbarrier.
    pub const PRODUCER: Self = Self {
        first: 0,
        parity: 1,
    };

    /// Goes to the next block.
    #[inline(always)]
    pub fn advance(&mut self) {
        const { assert!(Keys::<DIM>::VALUE_STAGES.is_multiple_of(VALUE_PIECES)) };
        self.first += VALUE_PIECES;
        if self.first == Keys::<DIM>::VALUE_STAGES {
            self.first = 0;
            self.parity ^= 1;
        }
    }
}
