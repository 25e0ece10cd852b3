//! A warp's part of a row.

use cuda_std::prelude::*;

use super::{
    ROUND, WARPS,
    logits::Logits,
    team::{CTAS, Team},
};
use crate::step::{VECTOR, Vector};

/// The largest number of [rounds that stay in registers](Logits::HELD).
pub const MOST_HELD: usize = 4;

/// Neighbouring tokens. In each round the lanes have neighbouring vectors.
pub struct Part<L: Logits> {
    row: u64,
    vocabulary: u32,
    /// Rounds per warp.
    pub rounds: u32,
    /// The lane's first token.
    first: u32,
    /// The logits of the first rounds, [`L::HELD`](Logits::HELD) of them.
    pub held: [L::Eight; MOST_HELD],
}

impl<L: Logits> Part<L> {
    /// Loads the part of this warp.
    ///
    /// # Safety
    /// `row` is the address, a multiple of 16, of `vocabulary` logits.
    #[inline(always)]
    pub unsafe fn load(team: &Team, row: u64, vocabulary: u32) -> Self {
        let rounds = vocabulary.div_ceil(ROUND).div_ceil(CTAS * WARPS);
        let mut part = Self {
            row,
            vocabulary,
            rounds,
            first: team.warp() * rounds * ROUND + warp::lane_id() * VECTOR,
            held: [L::NONE; MOST_HELD],
        };
        let end = (team.warp() + 1) * rounds * ROUND;
        let mut i = 0;
        // SAFETY: the caller's promise. Nearly all warps have all of their tokens and need no check per vector.
        unsafe {
            if rounds as usize == L::HELD && end <= vocabulary {
                let from = row + u64::from(part.first) * L::BYTES;
                while i < L::HELD {
                    part.held[i] = L::load(from + i as u64 * u64::from(ROUND) * L::BYTES);
                    i += 1;
                }
            } else {
                while i < L::HELD {
                    part.held[i] = part.vector(i as u32);
                    i += 1;
                }
            }
        }
        part
    }

    /// The lane's first token in a round; may be past the vocabulary.
    #[inline(always)]
    pub fn token(&self, round: u32) -> u32 {
        self.first + round * ROUND
    }

    /// Number of warps in which all lanes have logits.
    #[inline(always)]
    pub fn full_warps(&self) -> u32 {
        let full = (self.vocabulary / ROUND).div_ceil(self.rounds);
        let all = CTAS * WARPS;
        if full < all { full } else { all }
    }

    /// Eight logits; NaN past the vocabulary.
    ///
    /// # Safety
    /// The row exists.
    #[inline(always)]
    pub unsafe fn vector(&self, round: u32) -> L::Eight {
        let token = self.token(round);
        let from = self.row + u64::from(token) * L::BYTES;
        // SAFETY: the caller's promise.
        unsafe {
            if round >= self.rounds || token >= self.vocabulary {
                L::NONE
            } else if token + VECTOR <= self.vocabulary {
                L::load(from)
            } else {
                // Opaque: the difference would be kept in a register for other rounds.
                L::load_some(from, self.vocabulary - misc::opaque(token))
            }
        }
    }

    /// The lane's largest logit; NaN if all are NaN or it has none.
    ///
    /// # Safety
    /// The row exists.
    #[inline(always)]
    pub unsafe fn largest(&self) -> f32 {
        let (mut largest, mut i) = (self.held[0], 1);
        while i < L::HELD {
            largest = L::larger(largest, self.held[i]);
            i += 1;
        }
        let mut round = L::HELD as u32;
        while round < self.rounds {
            // SAFETY: the caller's promise.
            largest = L::larger(largest, unsafe { self.vector(round) });
            round += 1;
        }
        L::largest(largest)
    }

    /// The lane's first token with this logit; `u32::MAX` if it has none.
    ///
    /// # Safety
    /// The row exists.
    #[inline(always)]
    pub unsafe fn first_of(&self, logit: f32) -> u32 {
        let (mut eight, mut first, mut i) = (self.held[0], u32::MAX, L::HELD);
        while i > 0 {
            i -= 1;
            if L::largest(self.held[i]) == logit {
                (eight, first) = (self.held[i], self.token(i as u32));
            }
        }
        let mut round = L::HELD as u32;
        while first == u32::MAX && round < self.rounds {
            // SAFETY: the caller's promise.
            let next = unsafe { self.vector(round) };
            if L::largest(next) == logit {
                (eight, first) = (next, self.token(round));
            }
            round += 1;
        }
        if first == u32::MAX {
            return first;
        }
        let (x, mut place, mut i) = (L::unpack(eight), 7, 7);
        while i > 0 {
            i -= 1;
            place = if x[i] == logit { i as u32 } else { place };
        }
        first + place
    }

    /// Calls `take` for each round with the round and the lane's eight logits. All lanes have the same rounds.
    ///
    /// # Safety
    /// The row exists.
    #[inline(always)]
    pub unsafe fn each(&self, mut take: impl FnMut(u32, Vector)) {
        let mut i = 0;
        while i < L::HELD {
            if (i as u32) < self.rounds {
                take(i as u32, L::unpack(self.held[i]));
            }
            i += 1;
        }
        let mut round = L::HELD as u32;
        while round < self.rounds {
            // SAFETY: the caller's promise.
            take(round, L::unpack(unsafe { self.vector(round) }));
            round += 1;
        }
    }
}
