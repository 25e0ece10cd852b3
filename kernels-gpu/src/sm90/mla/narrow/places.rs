//! Where a lane that computes belongs, and what it reads and writes.

use cuda_std::misc;

use super::{
    config::{TEAMS, WARPS, WEIGHTS_OF_BLOCK},
    shared::Shared,
};
use crate::sm90::mla::{
    config::VALUE_DIM,
    keys_656::{BLOCK, FEEDERS, KEYS, ROW_BYTES, ROW_ROPE, ROW_SCALES},
};

/// Bytes of half of the numbers of a key.
const HALF_BYTES: u32 = VALUE_DIM / 2;

/// A lane's place in its CTA.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub team: u32,
    /// In the team.
    pub warp: u32,
    pub lane: u32,
}

impl Place {
    /// Of a thread. Opaque: or what follows from it is computed once, and there are no registers to keep it in.
    #[inline(always)]
    pub fn of(thread: u32) -> Self {
        let thread = misc::opaque(thread) - FEEDERS;
        Self {
            team: thread / (WARPS * 32),
            warp: thread / 32 % WARPS,
            lane: thread % 32,
        }
    }

    /// The group of columns with one scale that the warp's values are a half of.
    #[inline(always)]
    pub fn group(self) -> u32 {
        self.warp / 2
    }

    /// The half of the columns that it multiplies, for its own keys and for its partner's.
    #[inline(always)]
    pub fn half(self) -> u32 {
        self.warp % 2
    }

    /// Bytes from its own keys to its partner's: modulo 2³².
    #[inline(always)]
    pub fn to_partner(self) -> u32 {
        (8 * ROW_BYTES).wrapping_mul(1u32.wrapping_sub(2 * self.half()))
    }

    /// From its half of a key's columns to its half of those that only keys have: modulo 2³².
    #[inline(always)]
    pub fn rope(self) -> u32 {
        ROW_ROPE.wrapping_sub(self.half() * (HALF_BYTES - 16))
    }

    /// The first of its rows, 8 further down the second.
    #[inline(always)]
    pub fn row(self) -> u32 {
        self.lane / 4
    }

    /// The first of its two keys of a block.
    #[inline(always)]
    pub fn key(self) -> u32 {
        self.warp * 8 + self.lane % 4 * 2
    }
}

/// A lane's places in shared memory, two in a word.
#[derive(Clone, Copy)]
pub(super) struct Places {
    keys: u32,
    values: u32,
    /// And the team, from 1 on.
    weights: u32,
}

impl Places {
    #[inline(always)]
    pub fn new<const STAGES: u32>(s: Shared<STAGES>, place: Place) -> Self {
        let Place { team, warp, lane } = place;
        // Keys lie 656 bytes apart: every other 16 of 128 columns of two keys are in different banks.
        let key = (warp * 8 + lane / 4) * ROW_BYTES + lane % 4 * 32 + place.half() * HALF_BYTES;
        let scales = place.key() * ROW_BYTES + ROW_SCALES;
        let values = lane % 16 * ROW_BYTES + warp * 64 + lane / 16 * 16;
        let weights = s.weights(0, 0, 0);
        let to_write = s.weights(team, 0, place.row()) + place.key() * 2 - weights;
        let to_read = s.weights(team, place.group(), lane % 16) + lane / 16 * 16 - weights;
        // Opaque: or they are kept one by one.
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
    /// In a block: the lane's columns of its key of the warp's 8.
    #[inline(always)]
    pub fn key(self) -> u32 {
        self.keys & 0xFFFF
    }
    /// In a block: the scales of the first of the keys that it weighs.
    #[inline(always)]
    pub fn scales(self) -> u32 {
        self.keys >> 16
    }
    /// In a block: what it gives as the row of a matrix of values.
    #[inline(always)]
    pub fn values(self) -> u32 {
        self.values & 0xFFFF
    }
    /// Where its weights for the first group and row go. Two blocks of a team have places of their own: a warp may have the
    /// next one's weights while others still read.
    #[inline(always)]
    pub fn weights_to_write<const STAGES: u32>(self, s: Shared<STAGES>, number: u32) -> u32 {
        s.weights(0, 0, 0) + number / TEAMS % 2 * WEIGHTS_OF_BLOCK + (self.values >> 16)
    }
    /// Where its warp's fragments are: a row of one of them.
    #[inline(always)]
    pub fn weights_to_read<const STAGES: u32>(self, s: Shared<STAGES>, number: u32) -> u32 {
        s.weights(0, 0, 0) + number / TEAMS % 2 * WEIGHTS_OF_BLOCK + (self.weights & 0xFFFF)
    }
}

const _: () = {
    assert!(BLOCK * ROW_BYTES < 1 << 16 && TEAMS * 2 * WEIGHTS_OF_BLOCK < 1 << 16);
    assert!(BLOCK == WARPS * 8 && KEYS == 32 && ROW_BYTES % 128 == 16);
};
