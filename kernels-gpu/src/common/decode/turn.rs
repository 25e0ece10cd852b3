//! K·Qᵀ where queries and keys are turned by their positions.
//!
//! A turn by a key's position is that by its chunk's first position and, behind it, by its place in the chunk; and a product of
//! two vectors stays what it is where both are turned alike. So keys are turned by their place in the chunk alone, of which
//! there are 32: their sines lie in shared memory. Queries are turned by the distance from the chunk, once for each chunk:
//! there are fewer of them than keys. The sines of that are the same for all heads of a token: each lane computes a part of
//! them, and they lie where the warp's state will.
//!
//! A k-step's fragments have columns 2t, 2t + 1 and 2t + 8, 2t + 9 of 16. *Slots* are an order of k-steps in which pairs are in
//! fragments of the same lane: where pairs are halves of the turned part, a step of the first half and that of the second
//! follow each other; where they are neighbours, or nothing is turned, steps follow as they are. Shared memory has for two
//! slots, each half of their columns, each key and each of four lanes the sines and cosines of two pairs, 16 bytes; then, for
//! all but the keys, the two turns.

use cuda_std::{mma, shared, warp};

use super::{
    KEYS,
    products::{KEY_BLOCKS, LaneOffsets, Logits, column},
    tile::{Chunk, Rows},
};
use crate::{
    abi::RotaryParams,
    common::{
        cache::Cache,
        half::Half,
        rotary::{sine_cosine, turn_words, turned, turned_by},
    },
};

/// Bytes of an entry: two sines and cosines, or two turns.
const ENTRY: u32 = 16;

/// Bytes of the sines of two slots, for half of their columns.
const SINES: u32 = KEYS * 4 * ENTRY;

/// Where sines and turns lie, and how words come to hold pairs.
#[derive(Clone, Copy)]
pub struct Turning {
    /// Shared address.
    address: u32,
    /// Steps from a slot's step to that of its pairs' other elements; 0: pairs are in one step.
    apart: u32,
    picks: [u32; 2],
}

impl Turning {
    /// None.
    pub const NONE: Self = Self {
        address: 0,
        apart: 0,
        picks: [0; 2],
    };

    /// What lies at an address.
    #[inline(always)]
    #[must_use]
    pub const fn new(params: &RotaryParams, address: u32) -> Self {
        let apart = if params.interleaved != 0 {
            0
        } else {
            params.pairs / 16
        };
        Self {
            address,
            apart,
            picks: params.picks(),
        }
    }

    /// Loads the turns of one of a head's `dim / 4` entries.
    ///
    /// # Safety
    /// The parameters describe memory as they say.
    #[inline(always)]
    pub unsafe fn load(&self, params: &RotaryParams, entry: u32) -> [[u32; 2]; 2] {
        // SAFETY: the caller's promise.
        self.pairs(entry / 4, entry % 4)
            .map(|pair| unsafe { params.turn(pair) })
    }

    /// Writes them.
    ///
    /// # Safety
    /// `address` is that of [`turning_bytes`](super::turning_bytes).
    #[inline(always)]
    pub unsafe fn put(&self, dim: u32, entry: u32, [[a, b], [c, d]]: [[u32; 2]; 2]) {
        // SAFETY: the caller's promise.
        unsafe { shared::store_u32x4(self.turns(dim) + entry * ENTRY, [a, b, c, d]) }
    }

    /// Shared address of the turns.
    #[inline(always)]
    const fn turns(&self, dim: u32) -> u32 {
        self.address + dim / 16 * SINES
    }

    /// Writes the sines of a chunk's keys: a share of the work for each of so many threads.
    ///
    /// # Safety
    /// All turns were written, with a barrier behind; another comes before sines are read.
    #[inline(always)]
    pub unsafe fn fill(&self, params: &RotaryParams, dim: u32, thread: u32, threads: u32) {
        let mut entry = thread;
        while entry < dim / 4 * KEYS {
            let (lane, key, half) = (entry % 4, entry / 4 % KEYS, entry / 4 / KEYS);
            let gains = self.pairs(half, lane).map(|pair| params.gain(pair));
            // SAFETY: the caller's promise.
            unsafe {
                let at = self.turns(dim) + (half * 4 + lane) * ENTRY;
                let [a, b, c, d] = shared::load_u32x4(at);
                let [[s0, c0], [s1, c1]] =
                    [[a, b], [c, d]].map(|turn| sine_cosine(turned(turn, key)));
                let sines = [s0 * gains[0], c0 * gains[0], s1 * gains[1], c1 * gains[1]];
                shared::store_f32x4(self.address + entry * ENTRY, sines);
            }
            entry += threads;
        }
    }

    /// Writes the sines of queries of so many tokens, which are so far from their chunk, for one warp.
    ///
    /// # Safety
    /// The lanes come together; `sines` has room for `dim` numbers of each token, which nobody else uses; turns were written.
    #[inline(always)]
    pub unsafe fn fill_queries(
        &self,
        dim: u32,
        sines: u32,
        lane: u32,
        tokens: u32,
        distance: impl Fn(u32) -> i32,
    ) {
        let mut token = 0;
        while token < tokens {
            let distance = distance(token);
            let mut entry = lane;
            while entry < dim / 4 {
                // SAFETY: the caller's promise.
                unsafe {
                    let [a, b, c, d] = shared::load_u32x4(self.turns(dim) + entry * ENTRY);
                    let [s0, c0] = sine_cosine(turned_by([a, b], distance));
                    let [s1, c1] = sine_cosine(turned_by([c, d], distance));
                    let at = sines + token * dim * 4 + entry * ENTRY;
                    shared::store_f32x4(at, [s0, c0, s1, c1]);
                }
                entry += 32;
            }
            token += 1;
        }
        // SAFETY: the lanes are together.
        unsafe { warp::sync_warp(warp::FULL_MASK) };
    }

    /// The pairs of a lane in half the columns of two slots.
    #[inline(always)]
    const fn pairs(&self, half: u32, lane: u32) -> [u32; 2] {
        if self.picks[0] == 0x3210 {
            // Neighbours: a pair of each of two steps.
            let first = half / 2 * 16 + half % 2 * 4 + lane;
            [first, first + 8]
        } else {
            let first = half * 8 + lane * 2;
            [first, first + 1]
        }
    }

    /// The k-steps of two slots.
    #[inline(always)]
    const fn steps(&self, slot: u32) -> [u32; 2] {
        if slot / 2 < self.apart {
            [slot / 2, slot / 2 + self.apart]
        } else {
            [slot, slot + 1]
        }
    }
}

impl<const DIM_BLOCKS: usize, const ROW_BLOCKS: usize> Rows<DIM_BLOCKS, ROW_BLOCKS> {
    /// Of no keys.
    pub const NO_LOGITS: Logits<ROW_BLOCKS> = [[[0.0; 4]; ROW_BLOCKS]; KEY_BLOCKS];

    /// K·Qᵀ of the keys of a chunk, for which the queries were turned.
    ///
    /// # Safety
    /// The lanes come together; the keys are there; `turning` was filled.
    #[inline(always)]
    pub unsafe fn turned_logits<C: Cache>(
        &self,
        offsets: &LaneOffsets,
        chunk: Chunk,
        lane: u32,
        turning: Turning,
    ) -> Logits<ROW_BLOCKS> {
        let group = offsets.row_bytes * 8;
        let first_keys = chunk.k + offsets.k;
        let sines = turning.address + lane * ENTRY;
        let mut s = [[[0.0; 4]; ROW_BLOCKS]; KEY_BLOCKS];
        each_two_slots::<DIM_BLOCKS>(|slot| {
            let [step, other] = turning.steps(slot);
            let mut keys = 0;
            while keys < KEY_BLOCKS {
                let block = keys as u32 * 2 * group;
                // SAFETY: the caller's promise.
                unsafe {
                    let mut a = mma::ldmatrix_x4(column(first_keys, step as usize) + block);
                    let mut b = mma::ldmatrix_x4(column(first_keys, other as usize) + block);
                    let mut i = 0;
                    while i < 4 {
                        // Words are those of keys g and g + 8 in the first half of the columns, then in the second.
                        let key = keys as u32 * 16 + i as u32 % 2 * 8;
                        let at = sines + (slot + i as u32 / 2) * SINES + key * 4 * ENTRY;
                        let by = shared::load_f32x4(at);
                        [a[i], b[i]] = turn_words::<C::Product>([a[i], b[i]], by, turning.picks);
                        i += 1;
                    }
                    let mut block = 0;
                    while block < ROW_BLOCKS {
                        C::Product::mma(&mut s[keys][block], a, self.q[slot as usize][block]);
                        C::Product::mma(&mut s[keys][block], b, self.q[slot as usize + 1][block]);
                        block += 1;
                    }
                }
                keys += 1;
            }
        });
        s
    }

    /// Turns the queries by the `sines` of their tokens, whose places among these are those of the rows. Fragments are in
    /// the order of slots.
    ///
    /// # Safety
    /// The lanes come together, after [`Rows::start`] and [`Turning::fill_queries`]; the rows are still there.
    #[inline(always)]
    pub unsafe fn turn_queries<C: Cache>(
        &mut self,
        sines: u32,
        lane: u32,
        turning: Turning,
        token: impl Fn(u32) -> u32,
    ) {
        let mut of_block = [0; ROW_BLOCKS];
        let mut block = 0;
        while block < ROW_BLOCKS {
            let token = token(block as u32 * 8 + lane / 4);
            of_block[block] = sines + token * DIM_BLOCKS as u32 * 64 + lane % 4 * ENTRY;
            block += 1;
        }
        each_two_slots::<DIM_BLOCKS>(|slot| {
            let [step, other] = turning.steps(slot);
            // Lanes of the first half say where matrices of the step are, those of the second those of the other.
            let at = if lane < 16 { step } else { other - 1 } * 32;
            let mut block = 0;
            while block < ROW_BLOCKS {
                // SAFETY: inside the rows; the lanes are together.
                unsafe {
                    let words =
                        mma::ldmatrix_x4(self.q_address + block as u32 * 8 * Self::ROW_BYTES + at);
                    let mut half = 0;
                    while half < 2 {
                        let by = of_block[block] + (slot + half as u32) * 4 * ENTRY;
                        let by = shared::load_f32x4(by);
                        let two = [words[half], words[2 + half]];
                        let turned = turn_words::<C::Product>(two, by, turning.picks);
                        let slot = slot as usize;
                        [self.q[slot][block][half], self.q[slot + 1][block][half]] = turned;
                        half += 1;
                    }
                }
                block += 1;
            }
        });
        // The sines' place is free again.
        // SAFETY: the lanes are together.
        unsafe { warp::sync_warp(warp::FULL_MASK) };
    }
}

/// Calls it for every other slot. Written out: compilers leave a loop of so much a loop, and each round would wait for the one
/// before.
#[inline(always)]
fn each_two_slots<const DIM_BLOCKS: usize>(mut of: impl FnMut(u32)) {
    // No kernel of heads of 80, 96 or 256 turns keys, but the code is compiled for them before that is known.
    const { assert!(matches!(DIM_BLOCKS, 4 | 5 | 6 | 8 | 16)) };
    of(0);
    of(2);
    if DIM_BLOCKS >= 8 {
        of(4);
        of(6);
    }
    if DIM_BLOCKS == 16 {
        of(8);
        of(10);
        of(12);
        of(14);
    }
}
