//! The layout of a CTA's shared memory: sizes here, `addresses` on the device.
//!
//! The loaders fill a ring of *stages*. A stage holds a chunk of keys and values, with a descriptor that says which
//! unit they belong to. Consumer warps take stages in turn. Everything else that a *unit* (an item and a KV head) needs
//! is in a slot of a second ring.

use crate::common::cache;
pub use crate::common::decode::KEYS;
use crate::common::decode::turning_bytes;

#[cfg(target_arch = "nvptx64")]
mod addresses;
#[cfg(test)]
mod tests;

/// Bytes of a stage's two mbarriers, full and empty.
const PAIR: u32 = 16;

/// Mbarriers of a slot: listed, full, ending and empty; and their bytes.
const BARRIERS: u32 = 4;
const SLOT_BARRIERS: u32 = BARRIERS * 8;

/// Page ids in a slot: those of the first pieces (TMA boxes) of the unit's keys.
pub const IDS: u32 = 32;

/// How many chunks the scheduler claims ahead of the loaders. More would hide no more latency, and would take work that
/// other CTAs could do sooner.
pub const fn known_ahead(cache: u32) -> u32 {
    8 / cache::bytes(cache)
}

/// Loader warps, which take chunks in turn. Issuing a TMA copy takes a warp about 70 cycles whatever its size, and a
/// chunk needs at least two copies. Chunks of 8-bit elements have half the bytes, so twice as many are loaded in the
/// same time. (Registers are allocated for four warps at a time. Large tiles and pairs of KV heads keep theirs with
/// three producers, twelve consumers with four.)
pub const fn loaders(dim: u32, warps: u32, cache: u32) -> u32 {
    if cache::is_16_bits(cache) || cache::kv_heads(cache) > 1 || dim > 64 && warps < 8 {
        2
    } else if warps == 12 {
        3
    } else {
        4
    }
}

/// Merges that can be deferred to the end of the CTA.
pub const MERGES: u32 = 16;

/// The first named barrier at which the warps of a unit synchronise; barrier 0 is that of `__syncthreads`. (Before any
/// unit, four of them also serve the start of the CTA.)
const FIRST_MEETING: u32 = 1;
const NAMED_BARRIERS: u32 = 16;

/// Shared addresses of everything in a CTA's shared memory.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(target_arch = "nvptx64"), allow(dead_code))]
pub struct Layout<const DIM: u32, const ROWS: u32, const WARPS: u32, const CACHE: u32> {
    base: u32,
    /// Stages in the ring.
    pub stages: u32,
}

impl<const DIM: u32, const ROWS: u32, const WARPS: u32, const CACHE: u32>
    Layout<DIM, ROWS, WARPS, CACHE>
{
    /// Consumer warps that share a chunk: each has 8 rows of a KV head.
    pub const PER_CHUNK: u32 = ROWS / cache::kv_heads(CACHE) / 8;
    /// Chunks that the consumer warps work on at a time.
    pub const AT_A_TIME: u32 = WARPS / Self::PER_CHUNK;
    /// Named barriers for the warps of one chunk, if there are several.
    const OF_CHUNKS: u32 = if Self::PER_CHUNK > 1 {
        Self::AT_A_TIME
    } else {
        0
    };
    /// Named barriers for the warps of a unit that has several chunks.
    const MEETINGS: u32 = NAMED_BARRIERS - FIRST_MEETING - Self::OF_CHUNKS;
    /// Slots: units that can be in flight.
    pub const UNITS: u32 = {
        // With heads of 128 fewer beside the states of twelve warps, so that 18 stages fit.
        let memory = if WARPS == 12 && DIM > 64 {
            if cache::by_token(CACHE) { 10240 } else { 12288 }
        } else {
            16384
        };
        let fit = memory / (DIM * ROWS);
        // There must be a named barrier for each slot.
        let most = if cache::is_16_bits(CACHE) {
            16
        } else {
            Self::MEETINGS
        };
        if fit < most { fit } else { most }
    };
    /// Bytes of the keys of a chunk, or of its values.
    pub const CHUNK: u32 = KEYS * Self::KEY_BYTES;
    /// Bytes of a key or a value, rounded up to lines of 128 bytes if it is longer than one. (The lines of two heads of
    /// 80 overlap.)
    pub const KEY_BYTES: u32 = {
        let bytes = DIM * cache::bytes(CACHE) * cache::kv_heads(CACHE);
        if bytes > 128 {
            bytes.next_multiple_of(128)
        } else {
            bytes
        }
    };
    const STAGE: u32 = 2 * Self::CHUNK;
    /// Bytes of the scales of a chunk's keys and values.
    const SCALES: u32 = if cache::by_token(CACHE) {
        2 * KEYS * 4 * cache::kv_heads(CACHE)
    } else {
        0
    };
    const QUERIES: u32 = ROWS * DIM * 2;
    const UNIT: u32 = Self::QUERIES + ROWS * 16 + IDS * 4 + 64;
    /// Stride in f32 of an output row in a warp's state; the padding spreads the columns of a fragment over banks.
    pub const PITCH: u32 = DIM + 4;
    const STATE: u32 = Self::OWN_ROWS * (Self::PITCH + 4) * 4;
    /// Rows of a consumer warp.
    pub const OWN_ROWS: u32 = ROWS / Self::PER_CHUNK;
    /// Bytes of the sines, cosines and angles for rotary embeddings, in kernels that apply them.
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

    /// The number of stages that fit into `bytes` of shared memory: a multiple of the chunks at a time, so that a stage
    /// always belongs to the same warps. (So no warp is more than one phase ahead of a stage that it waits for. An
    /// mbarrier knows only the parity of a phase, and would take the phase two before for the awaited one.)
    /// [`meeting`](Self::meeting) limits the number further.
    #[must_use]
    pub const fn stages(bytes: u32) -> u32 {
        let fit = bytes.saturating_sub(Self::FIXED) / (Self::STAGE + Self::SCALES + 16 + PAIR);
        let most = if cache::is_16_bits(CACHE) {
            2 * Self::MEETINGS - 1 - Self::AT_A_TIME
        } else {
            u32::MAX
        };
        (if fit < most { fit } else { most }) / Self::AT_A_TIME * Self::AT_A_TIME
    }

    /// The named barrier of a unit that several warps share. Each of these warps has one of the unit's last chunks;
    /// `chunk` is the CTA's count of chunks at the first of them.
    ///
    /// Units that synchronise at the same time need different barriers. With 16-bit caches, a barrier serves two
    /// successive values of `chunk`, and `MEETINGS` barriers are used in turn. So these values must differ by at least
    /// 2 and by less than 2 · `MEETINGS`:
    /// - At least 2: units that several warps share have at least two chunks, one from each loader.
    /// - Less than 2 · `MEETINGS`: a warp that waits at the barrier, or has yet to reach it, has not taken its next
    ///   chunk, which comes `AT_A_TIME` after its last. So the chunk `stages` after that one is not loaded into the same
    ///   stage, and the same loader, one of two, loads nothing later. Hence no chunk from `chunk + AT_A_TIME + stages` on
    ///   is taken meanwhile, and [`stages`](Self::stages) keeps `AT_A_TIME + stages` below 2 · `MEETINGS`.
    ///
    /// With more than two loaders, as other caches have, the second condition does not hold: loaders may be further
    /// ahead of each other. There each slot has its own barrier. There are no more slots than barriers, and a slot is
    /// not reused before its unit is done.
    #[inline(always)]
    #[must_use]
    pub const fn meeting(chunk: u32, slot: u32) -> u32 {
        if cache::is_16_bits(CACHE) {
            FIRST_MEETING + chunk / 2 % Self::MEETINGS
        } else {
            FIRST_MEETING + slot
        }
    }

    /// The named barrier of the warps that share a chunk; `turn` is the chunk's place among those at a time.
    #[inline(always)]
    #[must_use]
    pub const fn sharers(turn: u32) -> u32 {
        FIRST_MEETING + Self::MEETINGS + turn
    }

    /// Bytes of shared memory for this number of stages.
    #[must_use]
    pub const fn bytes(stages: u32) -> u32 {
        Self::FIXED + stages * (Self::STAGE + Self::SCALES + 16 + PAIR)
    }
}
