//! Shared memory of a CTA, and what lies in it.
//!
//! The producer fills a ring of *stages*, a chunk of keys and values each, with a descriptor that says
//! whose it is. Consumer warps take stages in turn. What a *unit* (an item and a KV head) needs beside its
//! keys stands in a slot of a second ring.

#[cfg(target_arch = "nvptx64")]
use core::ops::Range;

#[cfg(target_arch = "nvptx64")]
use cuda_std::{fence, mbarrier, shared, thread};

use crate::common::cache;
pub use crate::common::decode::KEYS;
use crate::common::decode::turning_bytes;

/// Bytes of a stage's barriers, full and empty.
const PAIR: u32 = 16;

/// Barriers of a slot: listed, full, ending and empty; and their bytes.
const BARRIERS: u32 = 4;
const SLOT_BARRIERS: u32 = BARRIERS * 8;

/// Page ids that a slot holds: those of the first pieces of the unit's keys.
pub const IDS: u32 = 32;

/// Chunks that are known before they are loaded. More would hide no more latency, and take from other CTAs
/// what they could do sooner.
pub const fn known_ahead(cache: u32) -> u32 {
    8 / cache::bytes(cache)
}

/// Warps that load chunks in turn. To issue a copy takes a warp about 70 cycles, however little it brings, and a chunk
/// has at least two. Of 8-bit chunks there are twice as many in the same time. (Registers are given out to four warps at
/// a time: large tiles and pairs keep theirs with three producers, twelve consumers with four.)
pub const fn loaders(dim: u32, warps: u32, cache: u32) -> u32 {
    if cache::is_16_bits(cache) || cache::kv_heads(cache) > 1 || dim > 64 && warps < 8 {
        2
    } else if warps == 12 {
        3
    } else {
        4
    }
}

/// Merges that wait for the end.
pub const MERGES: u32 = 16;

/// The named barriers where warps of a unit synchronise: all but barrier 0, which is that of `__syncthreads`. (Four of
/// them serve the start of the CTA, too, before any unit.)
const FIRST_MEETING: u32 = 1;
const MEETINGS: u32 = 16 - FIRST_MEETING;

/// Where things are; all functions give shared addresses.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(target_arch = "nvptx64"), allow(dead_code))]
pub struct Layout<const DIM: u32, const ROWS: u32, const WARPS: u32, const CACHE: u32> {
    base: u32,
    /// Stages of the ring.
    pub stages: u32,
}

impl<const DIM: u32, const ROWS: u32, const WARPS: u32, const CACHE: u32>
    Layout<DIM, ROWS, WARPS, CACHE>
{
    /// Units under way.
    pub const UNITS: u32 = {
        let fit = 16384 / (DIM * ROWS);
        // With a barrier for each.
        let most = if cache::is_16_bits(CACHE) {
            16
        } else {
            MEETINGS
        };
        if fit < most { fit } else { most }
    };
    /// Bytes of the keys of a chunk, or of its values.
    pub const CHUNK: u32 = KEYS * Self::KEY_BYTES;
    /// Bytes of a key, or of a value: lines of 128 bytes if it has more than one. (Of two heads of 80 the lines overlap.)
    pub const KEY_BYTES: u32 = {
        let bytes = DIM * cache::bytes(CACHE) * cache::kv_heads(CACHE);
        if bytes > 128 {
            bytes.next_multiple_of(128)
        } else {
            bytes
        }
    };
    const STAGE: u32 = 2 * Self::CHUNK;
    /// Bytes of the scales of a chunk's keys, and of its values.
    const SCALES: u32 = if cache::by_token(CACHE) {
        2 * KEYS * 4 * cache::kv_heads(CACHE)
    } else {
        0
    };
    const QUERIES: u32 = ROWS * DIM * 2;
    const UNIT: u32 = Self::QUERIES + ROWS * 16 + IDS * 4 + 64;
    /// f32 of an output row in a warp's state; the padding spreads the columns of a fragment over banks.
    pub const PITCH: u32 = DIM + 4;
    const STATE: u32 = ROWS * (Self::PITCH + 4) * 4;
    /// Bytes of sines and turns, where keys are turned.
    const TURNING: u32 = if CACHE == cache::BITS16_TURNED {
        turning_bytes(DIM)
    } else {
        0
    };
    const FIXED: u32 = Self::UNITS * (Self::UNIT + SLOT_BARRIERS)
        + (MERGES + 2) * 16
        + 8
        + WARPS * Self::STATE
        + Self::TURNING;

    /// As many stages as `bytes` of shared memory hold: a multiple of the warps, so that a stage is always the same
    /// warp's. (So no warp is more than one phase ahead of a stage that it waits for. An mbarrier knows only the parity of
    /// a phase, and would take the phase two before for the one that is waited for.) No more than
    /// [`meeting`](Self::meeting) allows.
    #[must_use]
    pub const fn stages(bytes: u32) -> u32 {
        let fit = bytes.saturating_sub(Self::FIXED) / (Self::STAGE + Self::SCALES + 16 + PAIR);
        let most = if cache::is_16_bits(CACHE) {
            2 * MEETINGS - 1 - WARPS
        } else {
            u32::MAX
        };
        (if fit < most { fit } else { most }) / WARPS * WARPS
    }

    /// The named barrier of a unit that several warps share: each of them has one of the unit's last chunks, and `chunk`
    /// is the CTA's count of chunks at the first of these.
    ///
    /// Units that synchronise at the same time need different barriers. Of 16-bit caches, a barrier serves two
    /// successive values of `chunk`, and `MEETINGS` of them are used in turn. So these values must differ by at least 2
    /// and by less than 2 · `MEETINGS`:
    /// - At least 2: units that several warps share have at least two chunks, one of each loader.
    /// - Less than 2 · `MEETINGS`: a warp that waits at the barrier, or is yet to come, has not taken its next chunk, the
    ///   one `WARPS` behind `chunk`. So nothing is loaded into that one's stage, where the chunk `stages` later would go,
    ///   nor anything that the same loader, of two, would load after it. Meanwhile no chunk from
    ///   `chunk + WARPS + stages` on is taken, and [`stages`](Self::stages) keeps `WARPS + stages` below 2 · `MEETINGS`.
    ///
    /// With more than two loaders, for other caches, the second does not hold: loaders may be further ahead of each other.
    /// There each slot has a barrier. Slots are fewer than barriers, and a slot is not used again before its unit is done.
    #[inline(always)]
    #[must_use]
    pub const fn meeting(chunk: u32, slot: u32) -> u32 {
        if cache::is_16_bits(CACHE) {
            FIRST_MEETING + chunk / 2 % MEETINGS
        } else {
            FIRST_MEETING + slot
        }
    }

    /// Bytes of shared memory that so many stages take.
    #[must_use]
    pub const fn bytes(stages: u32) -> u32 {
        Self::FIXED + stages * (Self::STAGE + Self::SCALES + 16 + PAIR)
    }
}

#[cfg(target_arch = "nvptx64")]
impl<const DIM: u32, const ROWS: u32, const WARPS: u32, const CACHE: u32>
    Layout<DIM, ROWS, WARPS, CACHE>
{
    /// The dynamic shared memory of this CTA.
    #[inline(always)]
    pub fn new(stages: u32) -> Self {
        Self {
            base: shared::dynamic_shared_address(),
            stages,
        }
    }

    /// Keys of a stage; the values follow.
    #[inline(always)]
    pub fn stage(&self, index: u32) -> u32 {
        self.base + index * Self::STAGE
    }

    #[inline(always)]
    fn units(&self) -> u32 {
        self.base + self.stages * Self::STAGE
    }

    /// Queries of a unit: `ROWS` dense rows.
    #[inline(always)]
    pub fn queries(&self, slot: u32) -> u32 {
        self.units() + slot * Self::UNIT
    }

    /// The [`QueryRow`](crate::abi::QueryRow) of one of a unit's tokens.
    #[inline(always)]
    pub fn token(&self, slot: u32, token: u32) -> u32 {
        self.queries(slot) + Self::QUERIES + token * 16
    }

    /// The page ids of a unit's first [`IDS`] pieces.
    #[inline(always)]
    pub fn ids(&self, slot: u32) -> u32 {
        self.token(slot, ROWS)
    }

    /// The [`Unit`](super::unit::Unit) of a slot.
    #[inline(always)]
    pub fn unit(&self, slot: u32) -> u32 {
        self.ids(slot) + IDS * 4
    }

    #[inline(always)]
    fn states(&self) -> u32 {
        self.units() + Self::UNITS * Self::UNIT
    }

    /// Output of a warp's state: `ROWS` rows of f32, [`Self::PITCH`] apart.
    #[inline(always)]
    pub fn state_out(&self, warp: u32) -> u32 {
        self.states() + warp * Self::STATE
    }

    /// LSEs of a warp's state, base 2.
    #[inline(always)]
    pub fn state_lse(&self, warp: u32) -> u32 {
        self.state_out(warp) + ROWS * Self::PITCH * 4
    }

    /// Sines of a chunk's keys, and turns: see `common::decode::turn`.
    #[inline(always)]
    pub fn turning(&self) -> u32 {
        self.states() + WARPS * Self::STATE
    }

    /// Scales of a stage's keys, one for each KV head; those of the values follow.
    #[inline(always)]
    pub fn scales(&self, stage: u32) -> u32 {
        self.turning() + Self::TURNING + stage * Self::SCALES
    }

    /// The [`Descriptor`](super::unit::Descriptor) of a stage.
    #[inline(always)]
    pub fn descriptor(&self, stage: u32) -> u32 {
        self.scales(self.stages) + stage * 16
    }

    /// Completes when all barriers are initialised.
    #[inline(always)]
    pub fn started(&self) -> u32 {
        self.descriptor(self.stages)
    }

    /// Completes when the chunk is there.
    #[inline(always)]
    pub fn stage_full(&self, stage: u32) -> u32 {
        self.started() + 8 + stage * PAIR
    }

    /// Completes when each lane that used the chunk said so.
    #[inline(always)]
    pub fn stage_empty(&self, stage: u32) -> u32 {
        self.stage_full(stage) + 8
    }

    /// Completes when it is known what a slot's unit is.
    #[inline(always)]
    pub fn unit_listed(&self, slot: u32) -> u32 {
        self.stage_full(self.stages) + slot * SLOT_BARRIERS
    }

    /// Completes when the unit's queries are there.
    #[inline(always)]
    pub fn unit_full(&self, slot: u32) -> u32 {
        self.unit_listed(slot) + 8
    }

    /// Completes when all but the unit's last [`known_ahead`] chunks are on their way.
    #[inline(always)]
    pub fn unit_ending(&self, slot: u32) -> u32 {
        self.unit_listed(slot) + 16
    }

    /// Completes when the unit is finished, and no loader reads the slot: each of their lanes says so.
    #[inline(always)]
    pub fn unit_empty(&self, slot: u32) -> u32 {
        self.unit_listed(slot) + 24
    }

    /// Barriers that the stream of keys begins with: [`started`](Self::started), the stages' and the first slot's.
    #[inline(always)]
    pub fn first_barriers(&self) -> Range<u32> {
        0..1 + 2 * self.stages + BARRIERS
    }

    /// All others.
    #[inline(always)]
    pub fn other_barriers(&self) -> Range<u32> {
        self.first_barriers().end..1 + 2 * self.stages + BARRIERS * Self::UNITS
    }

    /// Initialises barriers, and the list of merges with the first. One initialisation takes the hardware about 60
    /// cycles and the lanes of a warp go one by one, so `warps` warps share them; this is one of those.
    ///
    /// # Safety
    /// All threads of those warps come here once for either part, and then to a barrier of the CTA.
    #[inline(always)]
    pub unsafe fn initialise(&self, barriers: Range<u32>, warp: u32, warps: u32) {
        let lane = thread::thread_idx_x() % 32;
        let stages = 1 + 2 * self.stages;
        let mut barrier = barriers.start + warp + lane * warps;
        // SAFETY: the barriers lie one after the other; nobody knows them yet.
        unsafe {
            while barrier < barriers.end {
                // One arrival at what is full or ending; of a warp, each lane says itself that it has read. (Sums: of
                // a choice the compiler makes a table, in memory that is far away.)
                let of_slot = (barrier - stages.min(barrier)) % BARRIERS;
                let (in_stages, in_slots) = (barrier > 0 && barrier < stages, barrier >= stages);
                let arrivals = 1
                    + (warps * 32 - 1) * (barrier == 0) as u32
                    + 31 * (in_stages && barrier % 2 == 0) as u32
                    + 32 * (cache::by_token(CACHE) && in_stages && barrier % 2 == 1) as u32
                    + 32 * (in_slots && of_slot == 0) as u32
                    + ((WARPS + loaders(DIM, WARPS, CACHE)) * 32 - 1)
                        * (in_slots && of_slot == 3) as u32;
                mbarrier::init(self.started() + barrier * 8, arrivals);
                barrier += warps * 32;
            }
            if barriers.start == 0 && warp == 0 && lane == 0 {
                shared::store_u32(self.merges(), 0);
            }
        }
        fence::mbarrier_init();
    }

    /// Number of merges that wait for the end.
    #[inline(always)]
    pub fn merges(&self) -> u32 {
        (self.unit_listed(Self::UNITS) + 15) & !15
    }

    /// One of them.
    #[inline(always)]
    pub fn merge(&self, index: u32) -> u32 {
        self.merges() + 16 + index * 16
    }
}

/// A place in a ring that is walked round and round.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Index.
    pub index: u32,
    /// Parity of the round.
    pub parity: u32,
}

impl Place {
    /// `index` in the first round.
    #[inline(always)]
    #[must_use]
    pub const fn first(index: u32) -> Self {
        Self { index, parity: 0 }
    }

    /// `steps` on in a ring of `length`, at most once round.
    #[inline(always)]
    pub fn advance(&mut self, steps: u32, length: u32) {
        self.index += steps;
        if self.index >= length {
            self.index -= length;
            self.parity ^= 1;
        }
    }
}

#[cfg(test)]
mod tests;
