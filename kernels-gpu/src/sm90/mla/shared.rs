//! What the warps of a CTA share: units, their rows, blocks of keys, weights, barriers.

use cuda_std::{fence, mbarrier, shared, thread};

use super::config::{
    CONSUMERS, Keys, Offsets, Ring, SLABS, STAGE_BARRIERS, THREADS, TILE_ROWS, half_bytes,
    query_slabs,
};
use super::load::QueryPlace;
pub(super) use crate::sm90::unit::Unit;
use crate::{abi::QueryRow, sm90::unit::UNIT_BYTES};

/// A kernel's shared memory: the ring of two units between the warp that claims them and all others, and the barriers.
pub(super) trait Units: Copy {
    /// Keys of a block.
    const KEYS: u32;
    /// Rows of a tile.
    const ROWS: u32;
    /// Where the ring and the barriers lie in it.
    const RING: Ring;
    /// The first mbarrier of a stage; the one before it is [`near_end`](Self::near_end).
    const STAGE_BARRIERS: u32;
    /// Where it begins.
    fn base(self) -> u32;

    /// The [`Unit`] of a place.
    #[inline(always)]
    fn unit(self, slot: u32) -> u32 {
        self.base() + Self::RING.units + slot * UNIT_BYTES
    }
    /// The [`QueryRow`] of one of a unit's tokens.
    #[inline(always)]
    fn row(self, slot: u32, token: u32) -> u32 {
        self.base() + Self::RING.rows + (slot * Self::ROWS + token) * 16
    }
    /// It is known what the unit is.
    #[inline(always)]
    fn unit_full(self, slot: u32) -> u32 {
        Self::RING.barrier(self.base(), slot)
    }
    /// It is done: loaders have read it, consumers have written their results.
    #[inline(always)]
    fn unit_free(self, slot: u32) -> u32 {
        Self::RING.barrier(self.base(), 2 + slot)
    }
    /// It is known who the unit's rows are.
    #[inline(always)]
    fn rows_full(self, slot: u32) -> u32 {
        Self::RING.barrier(self.base(), 4 + slot)
    }
    /// A unit of [`PREFETCH_DISTANCE`](super::PREFETCH_DISTANCE) blocks or more comes to its end.
    #[inline(always)]
    fn near_end(self) -> u32 {
        Self::RING.barrier(self.base(), Self::STAGE_BARRIERS - 1)
    }

    /// Initialises `count` barriers, a warp each in turn: the hardware takes about 60 cycles for one. `arrivals` says how many
    /// end a phase of each.
    ///
    /// # Safety
    /// All `threads` of the CTA come here once, and then to a barrier.
    #[inline(always)]
    unsafe fn init_barriers(self, threads: u32, count: u32, arrivals: impl Fn(u32) -> u32) {
        let thread = thread::thread_idx_x();
        let index = thread / 32 + thread % 32 * (threads / 32);
        if index < count {
            let arrivals = arrivals(index);
            // SAFETY: nobody knows the barriers yet.
            unsafe { mbarrier::init(Self::RING.barrier(self.base(), index), arrivals) };
        }
        fence::mbarrier_init();
    }

    /// Reads a row.
    ///
    /// # Safety
    /// The unit has the token, and its barrier completed.
    #[inline(always)]
    unsafe fn load_row(self, slot: u32, token: u32) -> QueryRow {
        // SAFETY: the unit has the token, and its barrier completed.
        let [token, position, slot, merge] = unsafe { shared::load_u32x4(self.row(slot, token)) };
        QueryRow {
            token,
            position: position as i32,
            slot,
            merge,
        }
    }
}

/// Shared addresses, where there are `STAGES` blocks of `KEYS` keys.
#[derive(Clone, Copy)]
pub(super) struct Shared<const KEYS: u32, const STAGES: u32> {
    pub base: u32,
}

impl<const KEYS: u32, const STAGES: u32> Units for Shared<KEYS, STAGES> {
    const KEYS: u32 = KEYS;
    const ROWS: u32 = TILE_ROWS;
    const RING: Ring = Self::AT.ring;
    const STAGE_BARRIERS: u32 = STAGE_BARRIERS;
    #[inline(always)]
    fn base(self) -> u32 {
        self.base
    }
}

impl<const KEYS: u32, const STAGES: u32> QueryPlace for Shared<KEYS, STAGES> {
    const SLABS: u32 = query_slabs(KEYS);
}

impl<const KEYS: u32, const STAGES: u32> Shared<KEYS, STAGES> {
    const AT: Offsets = Offsets::new(KEYS, STAGES);

    /// A half of a block: groups of 8 keys, in each one slab of 64 columns after the other.
    #[inline(always)]
    pub fn half(self, stage: u32, half: u32) -> u32 {
        let bytes = const { [half_bytes(KEYS, 0), half_bytes(KEYS, 1)] };
        self.base + Self::AT.keys + stage * (bytes[0] + bytes[1]) + half * bytes[0]
    }
    /// The weights of a block, in the place of its last slab: 16 bytes of all rows, [`WEIGHTS_CHUNK`] apart.
    #[inline(always)]
    pub fn weights(self, stage: u32) -> u32 {
        self.half(stage, 1) + (SLABS[1] - 1) * 1024
    }
    /// The reference of a row's weights, of a consumer's latest block.
    #[inline(always)]
    pub fn reference(self, consumer: u32, row: u32) -> u32 {
        self.base + Self::AT.references + (consumer * TILE_ROWS + row) * 4
    }
    /// What outputs before that block are multiplied by.
    #[inline(always)]
    pub fn factor(self, consumer: u32, row: u32) -> u32 {
        self.base + Self::AT.factors + (consumer * TILE_ROWS + row) * 4
    }
    /// Whether any row of a warp has a new reference for that block.
    #[inline(always)]
    pub fn grew(self, consumer: u32, warp: u32) -> u32 {
        self.base + Self::AT.grew + (consumer * 4 + warp) * 4
    }
    /// The sum of a row's weights in the blocks of a consumer.
    #[inline(always)]
    pub fn total(self, slot: u32, consumer: u32, row: u32) -> u32 {
        self.base + Self::AT.totals + ((slot * 2 + consumer) * TILE_ROWS + row) * 4
    }
    #[inline(always)]
    pub fn full(self, stage: u32, half: u32) -> u32 {
        Self::RING.barrier(self.base, STAGE_BARRIERS + 4 * stage + half)
    }
    #[inline(always)]
    pub fn free(self, stage: u32, half: u32) -> u32 {
        Self::RING.barrier(self.base, STAGE_BARRIERS + 4 * stage + 2 + half)
    }

    /// Initialises the barriers, and the queries of rows that tiles may not have. Blocks come with one arrival, or with that of
    /// each lane that copies keys.
    ///
    /// # Safety
    /// All threads of the CTA come here once, and then to a barrier.
    #[inline(always)]
    pub unsafe fn init(self, keys: Keys) {
        let arrivals = |index| match index {
            0 | 1 => 32,
            // The loaders' lanes and the consumers'.
            2 | 3 => keys.loaders() * 32 + CONSUMERS,
            4 | 5 => 32,
            6 | 8 => 1,
            7 => 8,
            _ => match ((index - STAGE_BARRIERS) % 4, keys) {
                (0 | 1, Keys::Pages) => 1,
                (0, Keys::Rows) => 32,
                (1, Keys::Rows) => 2 * 32,
                // Only consumer 0 reads the left half; of the right one both read or write the weights.
                (2, _) => 4,
                _ => 8,
            },
        };
        // SAFETY: the caller's promise.
        unsafe {
            self.init_barriers(THREADS, STAGE_BARRIERS + 4 * STAGES, arrivals);
            self.clear_queries(THREADS);
        }
    }
}

/// Bytes from 8 keys' weights to those of the next.
pub(super) const WEIGHTS_CHUNK: u32 = SLABS[1] * 1024;
