//! A consumer lane's team, warp and pair, and its addresses in shared memory.

use cuda_std::misc;

use super::{
    config::{FRAGMENT_BYTES, FRAGMENTS_OF_HALF, TEAMS, WARPS, WEIGHTS_BYTES, WEIGHTS_OF_BLOCK},
    shared::Shared,
};
use crate::sm90::mla::{
    config::{FEEDERS, VALUE_DIM},
    keys_656::{BLOCK, KEYS, ROW_BYTES, ROW_ROPE, ROW_SCALES},
};

/// Bytes of half of a key's 8-bit numbers.
const HALF_BYTES: u32 = VALUE_DIM / 2;

/// A consumer lane's place in its CTA.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub team: u32,
    /// Index in the team.
    pub warp: u32,
    pub lane: u32,
}

impl Place {
    /// The place of a thread. Opaque: otherwise derived values are computed once and occupy registers.
    #[inline(always)]
    pub fn of(thread: u32) -> Self {
        let thread = misc::opaque(thread) - FEEDERS;
        Self {
            team: thread / (WARPS * 32),
            warp: thread / 32 % WARPS,
            lane: thread % 32,
        }
    }

    /// The group of 128 columns that contains the warp's 64 columns of values.
    #[inline(always)]
    pub fn group(self) -> u32 {
        self.warp / 2
    }

    /// The half of the columns that the warp multiplies, for its own keys and for its partner's.
    #[inline(always)]
    pub fn half(self) -> u32 {
        self.warp % 2
    }

    /// Bytes from the warp's own keys to its partner's, modulo 2³².
    #[inline(always)]
    pub fn to_partner(self) -> u32 {
        (8 * ROW_BYTES).wrapping_mul(1u32.wrapping_sub(2 * self.half()))
    }

    /// Bytes from the warp's half of a key's columns to its half of the RoPE columns, modulo 2³².
    #[inline(always)]
    pub fn rope(self) -> u32 {
        ROW_ROPE.wrapping_sub(self.half() * (HALF_BYTES - 16))
    }

    /// The lane's first row; its second is 8 rows further.
    #[inline(always)]
    pub fn row(self) -> u32 {
        self.lane / 4
    }

    /// The first of the lane's two keys of a block.
    #[inline(always)]
    pub fn key(self) -> u32 {
        self.warp * 8 + self.lane % 4 * 2
    }
}

impl<const STAGES: u32> Shared<STAGES> {
    /// A lane's fragments of a warp's half of the columns.
    #[inline(always)]
    pub fn queries_of(self, place: Place) -> u32 {
        self.queries(place.lane) + place.half() * FRAGMENTS_OF_HALF as u32 * FRAGMENT_BYTES
    }
    /// Where the warps of a pair exchange partial logits: per lane 16 bytes for each warp of the team. They lie where
    /// that warp later stores its weights.
    #[inline(always)]
    pub fn parts(self, place: Place, number: u32) -> u32 {
        self.weights(place.team, 0, 0)
            + number / TEAMS % 2 * WEIGHTS_OF_BLOCK
            + place.lane * WEIGHTS_BYTES
    }
}

/// A lane's offsets in shared memory, packed two per word to save registers.
#[derive(Clone, Copy)]
pub(super) struct Places {
    keys: u32,
    values: u32,
    /// Also holds the team, counted from 1.
    weights: u32,
}

impl Places {
    #[inline(always)]
    pub fn new<const STAGES: u32>(s: Shared<STAGES>, place: Place) -> Self {
        let Place { team, warp, lane } = place;
        // Keys are 656 bytes apart, an odd multiple of 16: alternate 16-byte chunks of two keys are in different banks.
        let key = (warp * 8 + lane / 4) * ROW_BYTES + lane % 4 * 32 + place.half() * HALF_BYTES;
        let scales = place.key() * ROW_BYTES + ROW_SCALES;
        let values = lane % 16 * ROW_BYTES + warp * 64 + lane / 16 * 16;
        let weights = s.weights(0, 0, 0);
        let to_write = s.weights(team, 0, place.row()) + place.key() * 2 - weights;
        let to_read = s.weights(team, place.group(), lane % 16) + lane / 16 * 16 - weights;
        // Opaque: otherwise the compiler keeps them unpacked.
        Self {
            keys: misc::opaque(scales << 16 | key),
            values: misc::opaque(to_write << 16 | values),
            weights: misc::opaque((1 + team) << 28 | to_read),
        }
    }

    /// 1 or 2.
    #[inline(always)]
    pub fn team(self) -> u32 {
        self.weights >> 28
    }
    /// Offset in a block of the lane's columns of its key.
    #[inline(always)]
    pub fn key(self) -> u32 {
        self.keys & 0xFFFF
    }
    /// Offset in a block of the scales of the first of the two keys whose weights the lane computes.
    #[inline(always)]
    pub fn scales(self) -> u32 {
        self.keys >> 16
    }
    /// Offset in a block of the row address that the lane supplies to `ldmatrix` of values.
    #[inline(always)]
    pub fn values(self) -> u32 {
        self.values & 0xFFFF
    }
    /// Where the lane stores its weights for the first group and row. They are double-buffered: a warp may store the
    /// team's next block's weights while other warps still read these.
    #[inline(always)]
    pub fn weights_to_write<const STAGES: u32>(self, s: Shared<STAGES>, number: u32) -> u32 {
        s.weights(0, 0, 0) + number / TEAMS % 2 * WEIGHTS_OF_BLOCK + (self.values >> 16)
    }
    /// The row address that the lane supplies to `ldmatrix` of its warp's weights.
    #[inline(always)]
    pub fn weights_to_read<const STAGES: u32>(self, s: Shared<STAGES>, number: u32) -> u32 {
        s.weights(0, 0, 0) + number / TEAMS % 2 * WEIGHTS_OF_BLOCK + (self.weights & 0xFFFF)
    }
}

const _: () = {
    assert!(BLOCK * ROW_BYTES < 1 << 16 && TEAMS * 2 * WEIGHTS_OF_BLOCK < 1 << 16);
    assert!(BLOCK == WARPS * 8 && KEYS == 32 && ROW_BYTES % 128 == 16);
};
