//! K·Qᵀ with rotary embeddings of queries and keys.
//!
//! The rotation by a key's position is that by its chunk's first position, followed by that by its index in the chunk.
//! A dot product does not change if both vectors are rotated alike. So keys are rotated by their index in the chunk
//! alone: there are 32 of them, whose sines and cosines are kept in shared memory. Queries, which are fewer than keys,
//! are rotated once per chunk by their distance from the chunk's first key. The sines and cosines for that are the same
//! for all heads of a token. The lanes of a warp share their computation and put them where the warp's state will be
//! stored later.
//!
//! A lane's fragments of a k-step have columns 2t, 2t + 1 and 2t + 8, 2t + 9 of 16. *Slots* are k-steps in an order
//! that puts both elements of a pair into fragments of the same lane. If pairs have one element in each half of the
//! rotated part, slots alternate between steps of the first half and of the second. If pairs are neighbouring elements,
//! or nothing is rotated, slots are in the order of the steps. Shared memory has an entry of 16 bytes, the sines and
//! cosines of two pairs, for every two slots, each half of their columns, each key and each of four lanes. The angles
//! of these pairs follow, for all keys at once.

use cuda_std::{mma, shared, warp};

use super::{
    KEYS,
    products::column,
    tile::{Chunk, KEY_BLOCKS, LaneOffsets, Logits, Rows},
};
use crate::{
    abi::RotaryParams,
    common::{
        cache::Cache,
        half::Half,
        rotary::{sine_cosine, turn_words, turned, turned_by},
    },
};

/// Bytes of an entry: two sines and two cosines, or two angles.
const ENTRY: u32 = 16;

/// Bytes of the sines and cosines of two slots, for half of their columns.
const SINES: u32 = KEYS * 4 * ENTRY;

/// Where sines, cosines and angles are, and how pairs are arranged in words.
#[derive(Clone, Copy)]
pub struct Turning {
    /// Shared address.
    address: u32,
    /// Steps between the two elements of a pair; 0: they are in the same step.
    apart: u32,
    picks: [u32; 2],
}

impl Turning {
    /// No rotary embedding.
    pub const NONE: Self = Self {
        address: 0,
        apart: 0,
        picks: [0; 2],
    };

    /// With the tables at a shared address.
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

    /// Loads the angles of one of a head's `dim / 4` entries.
    ///
    /// # Safety
    /// The parameters describe memory as they say.
    #[inline(always)]
    pub unsafe fn load(&self, params: &RotaryParams, entry: u32) -> [[u32; 2]; 2] {
        // SAFETY: the caller's promise.
        self.pairs(entry / 4, entry % 4)
            .map(|pair| unsafe { params.turn(pair) })
    }

    /// Writes the angles of an entry to shared memory.
    ///
    /// # Safety
    /// There are [`turning_bytes`](super::turning_bytes) bytes at `address`.
    #[inline(always)]
    pub unsafe fn put(&self, dim: u32, entry: u32, [[a, b], [c, d]]: [[u32; 2]; 2]) {
        // SAFETY: the caller's promise.
        unsafe { shared::store_u32x4(self.turns(dim) + entry * ENTRY, [a, b, c, d]) }
    }

    /// Shared address of the angles.
    #[inline(always)]
    const fn turns(&self, dim: u32) -> u32 {
        self.address + dim / 16 * SINES
    }

    /// Writes the sines and cosines of a chunk's keys; `threads` threads share the work.
    ///
    /// # Safety
    /// A barrier separates this from the writes of all angles, and another one from the reads of what this writes.
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

    /// Writes the sines and cosines of a warp's queries, for each token by its `distance` from the chunk's first key.
    ///
    /// # Safety
    /// The lanes come together; `sines` has room for `dim` numbers of each token, which nobody else uses; the angles
    /// were written.
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

    /// The pairs of a lane in one half of the columns of two slots.
    #[inline(always)]
    const fn pairs(&self, half: u32, lane: u32) -> [u32; 2] {
        if self.picks[0] == 0x3210 {
            // Pairs of neighbours: one of each of two steps.
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
    /// In place of logits, in kernels without rotary embeddings.
    pub const NO_LOGITS: Logits<ROW_BLOCKS> = [[[0.0; 4]; ROW_BLOCKS]; KEY_BLOCKS];

    /// K·Qᵀ of a chunk, for which the queries were rotated.
    ///
    /// # Safety
    /// The lanes come together; the keys are loaded; `turning` was filled.
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
                        // Words 0 and 1 have keys g and g + 8 in the first half of the columns, words 2 and 3 in the
                        // second half.
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

    /// Rotates the queries by the `sines` of their tokens; `token` maps a row to the index of its token among these.
    /// The fragments are stored in the order of slots.
    ///
    /// # Safety
    /// The lanes come together, after [`Rows::start`] and [`Turning::fill_queries`]; Q is still in shared memory.
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
            // Lanes 0–15 give the addresses of the matrices of `step`, lanes 16–31 those of `other`.
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
        // The memory of the sines is free again.
        // SAFETY: the lanes are together.
        unsafe { warp::sync_warp(warp::FULL_MASK) };
    }
}

/// Calls `of` for every other slot. Unrolled by hand: compilers do not unroll such a large body, and each iteration of
/// a loop would wait for the previous one.
#[inline(always)]
fn each_two_slots<const DIM_BLOCKS: usize>(mut of: impl FnMut(u32)) {
    // No kernel of head dimension 80, 96 or 256 rotates keys, but this code is compiled for them before that is known.
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
