//! Shared-memory addresses of units, rows, blocks of keys, weights and mbarriers.

use cuda_std::{fence, mbarrier, shared, thread};

use super::config::{
    CONSUMERS, Offsets, QUERY_SLABS, Ring, SLABS, STAGE_BARRIERS, THREADS, TILE_ROWS, half_bytes,
    query_slabs, under_way,
};
use super::keys_16::Keys;
pub(super) use crate::sm90::unit::Unit;
use crate::{
    abi::QueryRow,
    sm90::{arrivals, unit::UNIT_BYTES},
};

/// Named barriers. `WEIGHTS_READY` + owner: a block's weights are stored (the owner arrives, the other waits).
/// `CONSUMER` + consumer: its four warps. `BOTH`: four barriers of both consumers, at the end of a unit.
pub(super) const WEIGHTS_READY: u32 = 1;
pub(super) const CONSUMER: u32 = 3;
pub(super) const BOTH: u32 = 5;

/// The part of shared memory that all MLA kernels have: the ring of two units between the scheduler warp and all other
/// warps, and the barriers.
pub(super) trait Units: Copy {
    /// Keys of a block.
    const KEYS: u32;
    /// Rows of a tile.
    const ROWS: u32;
    /// Offsets of the ring and the barriers.
    const RING: Ring;
    /// The first mbarrier of a stage; the one before it is [`near_end`](Self::near_end).
    const STAGE_BARRIERS: u32;
    /// Where shared memory begins.
    fn base(self) -> u32;

    /// The [`Unit`] of a slot.
    #[inline(always)]
    fn unit(self, slot: u32) -> u32 {
        self.base() + Self::RING.units + slot * UNIT_BYTES
    }
    /// The [`QueryRow`] of one of a unit's tokens.
    #[inline(always)]
    fn row(self, slot: u32, token: u32) -> u32 {
        self.base() + Self::RING.rows + (slot * Self::ROWS + token) * 16
    }
    /// The unit's description is written.
    #[inline(always)]
    fn unit_full(self, slot: u32) -> u32 {
        Self::RING.barrier(self.base(), slot)
    }
    /// The slot is free: loaders have read the unit, consumers have written its results.
    #[inline(always)]
    fn unit_free(self, slot: u32) -> u32 {
        Self::RING.barrier(self.base(), 2 + slot)
    }
    /// The unit's rows are written.
    #[inline(always)]
    fn rows_full(self, slot: u32) -> u32 {
        Self::RING.barrier(self.base(), 4 + slot)
    }
    /// A unit of at least [`PREFETCH_DISTANCE`](super::PREFETCH_DISTANCE) blocks has that many left to load.
    #[inline(always)]
    fn near_end(self) -> u32 {
        Self::RING.barrier(self.base(), Self::STAGE_BARRIERS - 1)
    }

    /// Initialises `count` barriers, distributed over the warps: one takes about 60 cycles. `arrivals` gives the number
    /// of arrivals that complete a phase.
    ///
    /// # Safety
    /// All `threads` of the CTA come here once, and then meet at a CTA-wide barrier.
    #[inline(always)]
    unsafe fn init_barriers(self, threads: u32, count: u32, arrivals: impl Fn(u32) -> u32) {
        let thread = thread::thread_idx_x();
        let index = thread / 32 + thread % 32 * (threads / 32);
        if index < count {
            let arrivals = arrivals(index);
            // SAFETY: no thread uses the barriers yet.
            unsafe { mbarrier::init(Self::RING.barrier(self.base(), index), arrivals) };
        }
        fence::mbarrier_init();
    }

    /// Reads a row of a unit.
    ///
    /// # Safety
    /// The unit has the token, and its barrier completed.
    #[inline(always)]
    unsafe fn load_row(self, slot: u32, token: u32) -> QueryRow {
        // SAFETY: the unit has the token, and its barrier completed.
        QueryRow::from_words(unsafe { shared::load_u32x4(self.row(slot, token)) })
    }
}

/// Shared memory with a ring of `STAGES` stages for parts of blocks. A part has some slabs of 64 columns, of all keys of
/// a block: groups of 8 keys; within a group the slabs follow each other.
pub(super) trait Parts<const STAGES: u32>: Units {
    /// Parts of a block, which take stages in turn.
    const PARTS: u32;
    /// The first slab of the first part.
    const FIRST_SLAB: u32;
    /// Slabs of a part.
    const PART_SLABS: u32;
    /// Parts under way at most, if TMA loads them. See [`load`](super::load).
    const UNDER_WAY: u32;
    /// The tensor map of the parts. If the last slab has a pool of its own, the last part has other maps.
    const MAP: usize;
    /// Whether the last part has the last slab of the keys, which is no part of the values.
    const HAS_ROPE: bool = Self::FIRST_SLAB + Self::PARTS * Self::PART_SLABS == QUERY_SLABS;

    /// The keys of a stage.
    fn keys(self, stage: u32) -> u32;
    /// A stage's keys have arrived.
    fn full(self, stage: u32) -> u32;
    /// The products that read a stage are done.
    fn free(self, stage: u32) -> u32;
}

/// Shared memory with the queries of a unit.
pub(super) trait QueryPlace: Units {
    /// Slabs of 64 columns in shared memory.
    const SLABS: u32;
    /// Offset of the first.
    const QUERIES_AT: u32 = 0;

    /// The first slab; each slab holds all rows.
    #[inline(always)]
    fn queries(self) -> u32 {
        self.base() + Self::QUERIES_AT
    }
    /// The unit's queries have arrived.
    #[inline(always)]
    fn queries_full(self) -> u32 {
        Self::RING.barrier(self.base(), 6)
    }
    /// The consumers have finished reading the queries.
    #[inline(always)]
    fn queries_free(self) -> u32 {
        Self::RING.barrier(self.base(), 7)
    }

    /// Zeroes the queries, as tiles may lack rows.
    ///
    /// # Safety
    /// All `threads` of the CTA come here, and then meet at a CTA-wide barrier; the queries are not used before.
    #[inline(always)]
    unsafe fn clear_queries(self, threads: u32) {
        let mut at = thread::thread_idx_x() * 16;
        while at < Self::SLABS * (Self::ROWS * 128) {
            // SAFETY: inside the queries; the caller's promise.
            unsafe { shared::store_u32x4(self.queries() + at, [0; 4]) };
            at += threads * 16;
        }
        // Order these stores before the bulk copies of queries.
        fence::proxy_async_shared();
    }
}

/// Shared addresses, with `STAGES` stages of `KEYS` keys.
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

    /// Half of a block: groups of 8 keys; within a group the slabs of 64 columns follow each other.
    #[inline(always)]
    pub fn half(self, stage: u32, half: u32) -> u32 {
        let bytes = const { [half_bytes(KEYS, 0), half_bytes(KEYS, 1)] };
        self.base + Self::AT.keys + stage * (bytes[0] + bytes[1]) + half * bytes[0]
    }
    /// The weights of a block, which overwrite its last slab: chunks of 8 keys (16 bytes of each row),
    /// [`WEIGHTS_CHUNK`] apart.
    #[inline(always)]
    pub fn weights(self, stage: u32) -> u32 {
        self.half(stage, 1) + (SLABS[1] - 1) * 1024
    }
    /// The reference of a row's weights in a consumer's latest block.
    #[inline(always)]
    pub fn reference(self, consumer: u32, row: u32) -> u32 {
        self.base + Self::AT.references + (consumer * TILE_ROWS + row) * 4
    }
    /// The rescale factor, at that block, of outputs accumulated before it.
    #[inline(always)]
    pub fn factor(self, consumer: u32, row: u32) -> u32 {
        self.base + Self::AT.factors + (consumer * TILE_ROWS + row) * 4
    }
    /// Whether any row of a warp has a new reference for that block.
    #[inline(always)]
    pub fn grew(self, consumer: u32, warp: u32) -> u32 {
        self.base + Self::AT.grew + (consumer * 4 + warp) * 4
    }
    /// The sum of a row's weights over a consumer's blocks.
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

    /// Initialises the barriers, and zeroes the queries, as tiles may lack rows. A stage is filled with one arrival by
    /// TMA, or with one of each lane for eight keys that it copies.
    ///
    /// # Safety
    /// All threads of the CTA come here once, and then meet at a CTA-wide barrier.
    #[inline(always)]
    pub unsafe fn init(self, keys: Keys) {
        let (loaders, [left, right]) = match keys {
            Keys::Pages => (2, [1; 2]),
            Keys::Rows => (3, [KEYS / 8 * 32; 2]),
        };
        // All lanes of the loaders and consumers.
        let all = loaders * 32 + CONSUMERS;
        let of_unit = [(2, 32), (4, all), (6, 32), (7, 1), (8, 8)];
        // Free: one arrival per warp. Only consumer 0 reads the left half; both access the weights in the right half.
        let of_stage = [(1, left), (2, right), (3, 4)];
        let arrivals = |index| match index < STAGE_BARRIERS {
            true => arrivals(index, of_unit, 1),
            false => arrivals((index - STAGE_BARRIERS) % 4, of_stage, 8),
        };
        // SAFETY: the caller's promise.
        unsafe {
            self.init_barriers(THREADS, STAGE_BARRIERS + 4 * STAGES, arrivals);
            self.clear_queries(THREADS);
        }
    }
}

/// One half of the columns of blocks, as its loaders see it.
#[derive(Clone, Copy)]
pub(super) struct Half<const RIGHT: bool, const KEYS: u32, const STAGES: u32>(
    pub Shared<KEYS, STAGES>,
);

impl<const RIGHT: bool, const KEYS: u32, const STAGES: u32> Units for Half<RIGHT, KEYS, STAGES> {
    const KEYS: u32 = KEYS;
    const ROWS: u32 = TILE_ROWS;
    const RING: Ring = Shared::<KEYS, STAGES>::RING;
    const STAGE_BARRIERS: u32 = STAGE_BARRIERS;
    #[inline(always)]
    fn base(self) -> u32 {
        self.0.base
    }
}

impl<const RIGHT: bool, const KEYS: u32, const STAGES: u32> Parts<STAGES>
    for Half<RIGHT, KEYS, STAGES>
{
    const PARTS: u32 = 1;
    const FIRST_SLAB: u32 = if RIGHT { SLABS[0] } else { 0 };
    const PART_SLABS: u32 = SLABS[RIGHT as usize];
    const UNDER_WAY: u32 = under_way(KEYS);
    const MAP: usize = 1 + RIGHT as usize;
    #[inline(always)]
    fn keys(self, stage: u32) -> u32 {
        self.0.half(stage, RIGHT as u32)
    }
    #[inline(always)]
    fn full(self, stage: u32) -> u32 {
        self.0.full(stage, RIGHT as u32)
    }
    #[inline(always)]
    fn free(self, stage: u32) -> u32 {
        self.0.free(stage, RIGHT as u32)
    }
}

/// Bytes between the weights of consecutive groups of 8 keys.
pub(super) const WEIGHTS_CHUNK: u32 = SLABS[1] * 1024;
