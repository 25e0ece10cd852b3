//! `sample`: a token from the logits of each row.
//!
//! Probabilities are whole numbers, so that their sums do not depend on the order in which threads add them: the
//! largest logit weighs [`ONE`]. All rules are limits of the logit: what stays is what is not below. A CTA has a row,
//! and reads it two to four times, of which all but the first find it in L2.
//!
//! 1. The largest logit. Where nothing is drawn, its first token is all.
//! 2. Where a limit is to be found: the largest logits of the threads give a bound that enough tokens reach. What
//!    reaches it goes to shared memory, where the limit is found bit by bit. Where that was too much, or the bound was
//!    too high, the limit is found in the row itself, which takes as many passes as logits have bits.
//! 3. The weights of what stays, added up by warp and round; then the part in whose sum the random number falls is
//!    looked at once more. Tokens count in the order of their numbers.
//!
//! A row has one SM, whose issue slots are what it waits for: a hundred thousand tokens make 0.6 µs of each instruction.
//! So limits are compared as logits, and eight weights are added in 32 bits.

use crate::math::exp2;

/// The weight of the largest logit: eight of them fit 32 bits.
pub const ONE: u32 = 1 << 28;

/// Threads of a block.
pub const THREADS: u32 = 1024;

/// Tokens that a thread reads at a time, its *round*.
#[cfg(target_arch = "nvptx64")]
const PER_THREAD: u32 = 8;

/// The most tokens of a row.
pub const MOST: u32 = ROUNDS * THREADS * 8;

/// The most rounds.
const ROUNDS: u32 = 40;

const WARPS: u32 = THREADS / 32;

/// Tokens that the search for a limit holds in shared memory.
const CANDIDATES: u32 = 4096;

/// Shared memory of a block: a sum of each warp, twice; the sums of each warp by round; keys and weights of candidates;
/// a number.
pub const SHARED_BYTES: u32 = 2 * WARPS * 8 + ROUNDS * WARPS * 8 + CANDIDATES * 8 + 16;

/// The weight of a logit by the scale of the row, rounded down. The largest is finite.
#[inline(always)]
#[must_use]
pub fn weight(logit: f32, largest: f32, scale: f32) -> u32 {
    // At most 1, or NaN. The fraction with its hidden one, as many places to the right as the exponent is below that
    // of 1: nothing is left where the number is 0, nor of NaN.
    let bits = exp2((logit - largest) * scale).to_bits();
    let fraction = (bits & 0x007F_FFFF | 0x0080_0000) << 5;
    let places = 127_u32.wrapping_sub(bits >> 23);
    if places < 32 { fraction >> places } else { 0 }
}

/// A number that is ordered as the logit: −0 and 0 are one, NaN is the least.
#[inline(always)]
#[must_use]
pub fn key(logit: f32) -> u32 {
    if logit.is_nan() {
        return 0;
    }
    let bits = (logit + 0.0).to_bits();
    if bits >> 31 == 0 {
        bits | 1 << 31
    } else {
        !bits
    }
}

/// The share of a sum, of 2³², but at least 1.
#[inline(always)]
#[must_use]
pub const fn share(sum: u64, of: u32) -> u64 {
    let part = ((sum as u128 * of as u128) >> 32) as u64;
    if part == 0 { 1 } else { part }
}

/// Where a random number falls in a sum: below it.
#[inline(always)]
#[must_use]
pub const fn fall(sum: u64, random: u64) -> u64 {
    ((sum as u128 * random as u128) >> 64) as u64
}

/// The kernels: `sample_<element>`.
#[cfg(not(target_arch = "nvptx64"))]
mod rows {
    use super::{SHARED_BYTES, THREADS};
    use crate::registry::{Arch, Element, Family, KernelInfo, Op, registers};

    macro_rules! rows {
        ($($element:ident $name:literal;)*) => {
            &[$(KernelInfo {
                element: Element::$element,
                threads: THREADS,
                registers: registers(THREADS, 1),
                shared_bytes: SHARED_BYTES,
                ..KernelInfo::new(concat!("sample_", $name), Family::Step, Arch::Sm80, Op::Sample)
            }),*]
        };
    }

    /// One for each type of logits.
    pub const ROWS: &[KernelInfo] = rows! {
        Bf16 "bf16";
        F16 "f16";
        F32 "f32";
    };
}
#[cfg(not(target_arch = "nvptx64"))]
pub use rows::ROWS;

#[cfg(all(target_arch = "nvptx64", feature = "step"))]
mod device {
    use cuda_std::{atomic, prelude::*, shared};

    use super::{CANDIDATES, PER_THREAD, ROUNDS, THREADS, WARPS, fall, key, share, weight};
    use crate::{
        abi::{DrawParams, SampleParams},
        common::half::{Bf16, F16, Half},
        step::{Vector, unpack},
    };

    /// Rounds whose loads are under way together.
    const TOGETHER: usize = 4;
    /// Threads whose largest logits reach the bound: of tokens that are all alike in their logits there is room for
    /// those that do.
    const REACHING: u32 = 896;

    /// Logits of a type.
    trait Logits {
        const BYTES: u64;
        /// Eight of them, as they lie in memory.
        type Eight: Copy;
        /// NaN.
        const NONE: Self::Eight;
        /// # Safety
        /// They are there, at a multiple of 16 bytes.
        unsafe fn load(from: u64) -> Self::Eight;
        /// The first of them; the others are NaN.
        ///
        /// # Safety
        /// So many are there.
        unsafe fn load_some(from: u64, count: u32) -> Self::Eight;
        fn unpack(eight: Self::Eight) -> Vector;
    }

    impl<T: Half> Logits for T {
        const BYTES: u64 = 2;
        type Eight = [u32; 4];
        const NONE: [u32; 4] = [0x7FFF_7FFF; 4];
        #[inline(always)]
        unsafe fn load(from: u64) -> [u32; 4] {
            // SAFETY: the caller's promise.
            unsafe { ptr::load_nc_u32x4(from as *const u32) }
        }
        #[inline(always)]
        unsafe fn load_some(from: u64, count: u32) -> [u32; 4] {
            let mut eight = Self::NONE;
            let mut i = 0;
            while i < 8 {
                if (i as u32) < count {
                    // SAFETY: the caller's promise.
                    let bits = unsafe { ptr::load_nc_u16((from + i as u64 * 2) as *const u16) };
                    let shift = 16 * (i as u32 % 2);
                    eight[i / 2] = eight[i / 2] & !(0xFFFF << shift) | u32::from(bits) << shift;
                }
                i += 1;
            }
            eight
        }
        #[inline(always)]
        fn unpack(eight: [u32; 4]) -> Vector {
            unpack::<T>(eight)
        }
    }

    struct F32;

    impl Logits for F32 {
        const BYTES: u64 = 4;
        type Eight = Vector;
        const NONE: Vector = [f32::NAN; 8];
        #[inline(always)]
        unsafe fn load(from: u64) -> Vector {
            let from = from as *const f32;
            // SAFETY: the caller's promise.
            unsafe {
                let [a, b, c, d] = ptr::load_nc_f32x4(from);
                let [e, f, g, h] = ptr::load_nc_f32x4(from.add(4));
                [a, b, c, d, e, f, g, h]
            }
        }
        #[inline(always)]
        unsafe fn load_some(from: u64, count: u32) -> Vector {
            let mut eight = Self::NONE;
            let mut i = 0;
            while i < 8 {
                if (i as u32) < count {
                    // SAFETY: the caller's promise.
                    eight[i] = unsafe { ptr::load_nc_f32((from + i as u64 * 4) as *const f32) };
                }
                i += 1;
            }
            eight
        }
        #[inline(always)]
        fn unpack(eight: Vector) -> Vector {
            eight
        }
    }

    /// The logit of a key; −∞ for those that none has.
    #[inline(always)]
    fn logit_of(key: u32) -> f32 {
        if key >> 31 != 0 {
            f32::from_bits(key & 0x7FFF_FFFF)
        } else if key > 0x007F_FFFF {
            f32::from_bits(!key)
        } else {
            f32::NEG_INFINITY
        }
    }

    /// A row.
    #[derive(Clone, Copy)]
    struct Row {
        logits: u64,
        vocabulary: u32,
        /// The lowest bit of a key that is not the same in all.
        last_bit: u32,
    }

    impl Row {
        /// Rounds of all threads.
        #[inline(always)]
        fn rounds(self) -> u32 {
            self.vocabulary.div_ceil(THREADS * PER_THREAD)
        }

        /// Eight logits from a token on, a multiple of 8; NaN where there are none.
        ///
        /// # Safety
        /// The row is there.
        #[inline(always)]
        unsafe fn load<L: Logits>(self, token: u32) -> L::Eight {
            let from = self.logits + u64::from(token) * L::BYTES;
            // SAFETY: the caller's promise.
            unsafe {
                if token + PER_THREAD <= self.vocabulary {
                    L::load(from)
                } else if token < self.vocabulary {
                    L::load_some(from, self.vocabulary - token)
                } else {
                    L::NONE
                }
            }
        }

        /// Hands the thread's logits on, round by round: the round, the first token, eight logits. All threads have
        /// all rounds.
        ///
        /// # Safety
        /// The row is there.
        #[inline(always)]
        unsafe fn each<L: Logits>(self, mut take: impl FnMut(u32, u32, Vector)) {
            let (rounds, mut round) = (self.rounds(), 0);
            let first = |round: u32| (round * THREADS + thread::thread_idx_x()) * PER_THREAD;
            while round < rounds {
                let mut eights = [L::NONE; TOGETHER];
                let mut i = 0;
                while i < TOGETHER {
                    // SAFETY: the caller's promise.
                    eights[i] = unsafe { self.load::<L>(first(round + i as u32)) };
                    i += 1;
                }
                i = 0;
                while i < TOGETHER {
                    if round + (i as u32) < rounds {
                        let round = round + i as u32;
                        take(round, first(round), L::unpack(eights[i]));
                    }
                    i += 1;
                }
                round += TOGETHER as u32;
            }
        }
    }

    /// What the threads of a block share: shared addresses.
    struct Block {
        /// A number of each warp, twice: a sum may be read while the next is written.
        sums: u32,
        /// Which half is next.
        half: u32,
        /// By round and warp.
        parts: u32,
        keys: u32,
        weights: u32,
        /// A number that threads change together.
        number: u32,
    }

    impl Block {
        fn new() -> Self {
            let sums = shared::dynamic_shared_address();
            let parts = sums + 2 * WARPS * 8;
            let keys = parts + ROUNDS * WARPS * 8;
            let weights = keys + CANDIDATES * 4;
            Self {
                sums,
                half: 0,
                parts,
                keys,
                weights,
                number: weights + CANDIDATES * 4,
            }
        }

        /// The sum over the block.
        ///
        /// # Safety
        /// All threads come here.
        #[inline(always)]
        unsafe fn sum(&mut self, x: u64) -> u64 {
            // SAFETY: each warp writes its own sum before the barrier; the half that others may still read is not
            // written before all have passed the next barrier.
            unsafe {
                let of_warp = sum_of_warp(x);
                let sums = self.sums + self.half * WARPS * 8;
                self.half ^= 1;
                if warp::lane_id() == 0 {
                    shared::store_u64(sums + thread::thread_idx_x() / 32 * 8, of_warp);
                }
                thread::sync_threads();
                sum_of_warp(shared::load_u64(sums + warp::lane_id() * 8))
            }
        }

        /// The threads of the block for which something holds.
        ///
        /// # Safety
        /// All threads come here.
        #[inline(always)]
        unsafe fn threads(&mut self, holds: bool) -> u32 {
            // SAFETY: as `sum` says.
            unsafe {
                let of_warp = warp::warp_vote_ballot(warp::FULL_MASK, holds).count_ones();
                let sums = self.sums + self.half * WARPS * 8;
                self.half ^= 1;
                if warp::lane_id() == 0 {
                    shared::store_u32(sums + thread::thread_idx_x() / 32 * 8, of_warp);
                }
                thread::sync_threads();
                let of_warp = shared::load_u32(sums + warp::lane_id() * 8);
                warp::warp_reduce_add(warp::FULL_MASK, of_warp)
            }
        }

        /// The number, the same for all, after a barrier.
        ///
        /// # Safety
        /// All threads come here.
        #[inline(always)]
        unsafe fn set_number(&mut self, number: u32) {
            // SAFETY: nobody reads it before the second barrier, nor any more after the first.
            unsafe {
                thread::sync_threads();
                if thread::thread_idx_x() == 0 {
                    shared::store_u32(self.number, number);
                }
                thread::sync_threads();
            }
        }

        /// The count over all tokens of the row that reach a limit.
        ///
        /// # Safety
        /// All threads come here; the row is there.
        #[inline(always)]
        unsafe fn count_row<L: Logits>(&mut self, row: Row, limit: u32, count: Count) -> u64 {
            let (mut sum, limit) = (0, logit_of(limit));
            // SAFETY: the caller's promise.
            unsafe {
                row.each::<L>(|_, _, x| {
                    let (mut part, mut i) = (0, 0);
                    while i < 8 {
                        if x[i] >= limit {
                            part += count.of(x[i]);
                        }
                        i += 1;
                    }
                    sum += u64::from(part);
                });
                self.sum(sum)
            }
        }

        /// The same over the candidates.
        ///
        /// # Safety
        /// All threads come here; there are so many candidates.
        #[inline(always)]
        unsafe fn count(&mut self, candidates: u32, limit: u32, weights: bool) -> u64 {
            let (mut sum, mut i) = (0, thread::thread_idx_x());
            // SAFETY: the caller's promise.
            unsafe {
                while i < candidates {
                    if shared::load_u32(self.keys + i * 4) >= limit {
                        sum += if weights {
                            u64::from(shared::load_u32(self.weights + i * 4))
                        } else {
                            1
                        };
                    }
                    i += THREADS;
                }
                self.sum(sum)
            }
        }
    }

    /// # Safety
    /// All lanes come here.
    #[inline(always)]
    unsafe fn sum_of_warp(mut x: u64) -> u64 {
        let mut distance = 16;
        while distance > 0 {
            // SAFETY: the caller's promise.
            let (low, high) = unsafe {
                (
                    warp::warp_shuffle_xor(warp::FULL_MASK, x as u32, distance, 32),
                    warp::warp_shuffle_xor(warp::FULL_MASK, (x >> 32) as u32, distance, 32),
                )
            };
            x += u64::from(high) << 32 | u64::from(low);
            distance >>= 1;
        }
        x
    }

    /// The sums of a warp's lanes up to each of them.
    ///
    /// # Safety
    /// All lanes come here.
    #[inline(always)]
    unsafe fn sums_up_to(mut x: u64) -> u64 {
        let mut distance = 1;
        while distance < 32 {
            // SAFETY: the caller's promise.
            let (low, high) = unsafe {
                (
                    warp::warp_shuffle_up(warp::FULL_MASK, x as u32, distance, 32),
                    warp::warp_shuffle_up(warp::FULL_MASK, (x >> 32) as u32, distance, 32),
                )
            };
            if warp::lane_id() >= distance {
                x += u64::from(high) << 32 | u64::from(low);
            }
            distance <<= 1;
        }
        x
    }

    /// A lane's number, in all lanes.
    ///
    /// # Safety
    /// All lanes come here.
    #[inline(always)]
    unsafe fn broadcast(x: u64, lane: u32) -> u64 {
        // SAFETY: the caller's promise.
        let (low, high) = unsafe {
            (
                warp::warp_shuffle_idx(warp::FULL_MASK, x as u32, lane, 32),
                warp::warp_shuffle_idx(warp::FULL_MASK, (x >> 32) as u32, lane, 32),
            )
        };
        u64::from(high) << 32 | u64::from(low)
    }

    /// What is counted of the tokens that reach a limit.
    #[derive(Clone, Copy)]
    struct Count {
        largest: f32,
        scale: f32,
        /// Weights, or tokens.
        weights: bool,
    }

    impl Count {
        #[inline(always)]
        fn of(self, logit: f32) -> u32 {
            if self.weights {
                weight(logit, self.largest, self.scale)
            } else {
                1
            }
        }
    }

    /// The largest limit that counts at least so much.
    #[inline(always)]
    fn search(last_bit: u32, needed: u64, mut count: impl FnMut(u32) -> u64) -> u32 {
        let (mut limit, mut bit) = (0, 31);
        loop {
            let next = limit | (1 << bit);
            if count(next) >= needed {
                limit = next;
            }
            if bit == last_bit {
                return limit;
            }
            bit -= 1;
        }
    }

    /// The limit of the rules for `top_k` and `top_p`, as a key.
    ///
    /// # Safety
    /// All threads come here; the row is there. `mine` is the thread's largest key.
    #[inline(always)]
    unsafe fn limit<L: Logits>(
        block: &mut Block,
        row: Row,
        draw: &DrawParams,
        largest: f32,
        mine: u32,
    ) -> u32 {
        let weights = Count {
            largest,
            scale: draw.scale,
            weights: true,
        };
        let tokens = Count {
            weights: false,
            ..weights
        };
        let has_k = draw.top_k > 0 && draw.top_k < row.vocabulary;
        // No fewer tokens than threads reach it.
        let threads = if has_k && draw.top_k < REACHING {
            draw.top_k
        } else {
            REACHING
        };
        let bound = search(row.last_bit, threads.into(), |limit| {
            // SAFETY: all threads search.
            unsafe { block.threads(mine >= limit).into() }
        });
        // SAFETY: the caller's promise; what is shared is read after a barrier. Candidates have places of their own by
        // the atomic addition.
        unsafe {
            block.set_number(0);
            let (mut sum, reaches) = (0, logit_of(bound));
            row.each::<L>(|_, _, x| {
                let (mut part, mut i) = (0, 0);
                while i < 8 {
                    let weight = weights.of(x[i]);
                    part += weight;
                    if x[i] >= reaches {
                        let place = atomic::shared::fetch_add_u32(block.number, 1);
                        if place < CANDIDATES {
                            shared::store_u32(block.keys + place * 4, key(x[i]));
                            shared::store_u32(block.weights + place * 4, weight);
                        }
                    }
                    i += 1;
                }
                sum += u64::from(part);
            });
            let mut total = block.sum(sum);
            let candidates = shared::load_u32(block.number);
            let all_there = candidates <= CANDIDATES;
            let mut limit = 0;
            if has_k {
                let k = u64::from(draw.top_k);
                if all_there && k <= u64::from(candidates) {
                    limit = search(row.last_bit, k, |limit| {
                        block.count(candidates, limit, false)
                    });
                    total = block.count(candidates, limit, true);
                } else {
                    limit = search(row.last_bit, k, |limit| {
                        block.count_row::<L>(row, limit, tokens)
                    });
                    total = block.count_row::<L>(row, limit, weights);
                }
            }
            if draw.top_p > 0 {
                let needed = share(total, draw.top_p);
                let of_p = if all_there && block.count(candidates, 0, true) >= needed {
                    search(row.last_bit, needed, |limit| {
                        block.count(candidates, limit, true)
                    })
                } else {
                    search(row.last_bit, needed, |limit| {
                        block.count_row::<L>(row, limit, weights)
                    })
                };
                limit = if of_p > limit { of_p } else { limit };
            }
            limit
        }
    }

    /// # Safety
    /// The parameters describe memory as [`SampleParams`] says; block `i` has row `i`.
    #[inline(always)]
    unsafe fn sample<L: Logits>(p: &SampleParams) {
        let index = u64::from(thread::block_idx_x());
        let row = Row {
            logits: p.logits + index * p.row * L::BYTES,
            vocabulary: p.vocabulary,
            last_bit: p.last_bit,
        };
        let id_at = (p.ids + index * 4) as *mut u32;
        let mut block = Block::new();
        // SAFETY: the launch's promise; all threads go the same way, since what they decide by is the row's.
        unsafe {
            let draw = load_draw(p.draws + index * size_of::<DrawParams>() as u64);
            let mut mine = f32::NEG_INFINITY;
            row.each::<L>(|_, _, x| {
                let mut i = 0;
                while i < 8 {
                    mine = mine.max(x[i]);
                    i += 1;
                }
            });
            block.set_number(0);
            let top = largest_of_block(&block, mine);
            if draw.scale == 0.0 || top.is_infinite() {
                write_first::<L>(&mut block, row, top, mine, id_at);
                return;
            }
            let mut least = f32::NEG_INFINITY;
            if draw.top_k > 0 && draw.top_k < row.vocabulary || draw.top_p > 0 {
                least = logit_of(limit::<L>(&mut block, row, &draw, top, key(mine)));
            }
            let rule = Rule {
                least,
                min_weight: draw.min_weight,
                top,
                scale: draw.scale,
            };
            write_drawn::<L>(&mut block, row, rule, draw.random, id_at);
        }
    }

    /// The largest of the block.
    ///
    /// # Safety
    /// All threads come here; the number is 0.
    #[inline(always)]
    unsafe fn largest_of_block(block: &Block, mine: f32) -> f32 {
        // SAFETY: the caller's promise; keys are ordered as logits.
        unsafe {
            let of_warp = warp::warp_reduce_max(warp::FULL_MASK, key(mine));
            if warp::lane_id() == 0 {
                atomic::shared::fetch_max_u32(block.number, of_warp);
            }
            thread::sync_threads();
            logit_of(shared::load_u32(block.number))
        }
    }

    /// The first token of the largest logit; 0 where all are NaN.
    ///
    /// # Safety
    /// All threads come here; the row is there.
    #[inline(always)]
    unsafe fn write_first<L: Logits>(
        block: &mut Block,
        row: Row,
        top: f32,
        mine: f32,
        id_at: *mut u32,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            block.set_number(u32::MAX);
            // Few threads look again.
            if mine == top {
                row.each::<L>(|_, token, x| {
                    let mut i = 8;
                    while i > 0 {
                        i -= 1;
                        if x[i] == top {
                            atomic::shared::fetch_min_u32(block.number, token + i as u32);
                        }
                    }
                });
            }
            thread::sync_threads();
            if thread::thread_idx_x() == 0 {
                let first = shared::load_u32(block.number);
                ptr::store_u32(id_at, if first == u32::MAX { 0 } else { first });
            }
        }
    }

    /// What stays, and its weight.
    #[derive(Clone, Copy)]
    struct Rule {
        least: f32,
        min_weight: u32,
        top: f32,
        scale: f32,
    }

    impl Rule {
        #[inline(always)]
        fn weight(self, logit: f32) -> u32 {
            let weight = weight(logit, self.top, self.scale);
            if logit >= self.least && weight >= self.min_weight {
                weight
            } else {
                0
            }
        }

        #[inline(always)]
        fn weights(self, x: &Vector) -> u32 {
            let (mut sum, mut i) = (0, 0);
            while i < 8 {
                sum += self.weight(x[i]);
                i += 1;
            }
            sum
        }
    }

    /// The token in whose weight the random number falls.
    ///
    /// # Safety
    /// All threads come here; the row is there.
    #[inline(always)]
    unsafe fn write_drawn<L: Logits>(
        block: &mut Block,
        row: Row,
        rule: Rule,
        random: u64,
        id_at: *mut u32,
    ) {
        let (me, lane) = (thread::thread_idx_x(), warp::lane_id());
        // SAFETY: the caller's promise; parts are read behind the barrier in the sum.
        unsafe {
            // The sums of each warp in each round: parts, in the order of their tokens.
            let mut sum = 0;
            row.each::<L>(|round, _, x| {
                let part = sum_of_warp(rule.weights(&x).into());
                if lane == 0 {
                    shared::store_u64(block.parts + (round * WARPS + me / 32) * 8, part);
                    sum += part;
                }
            });
            let mut left = fall(block.sum(sum), random);
            // The first warp looks in which part the number falls, then in which token of that.
            if me >= 32 {
                return;
            }
            let mut at = 0;
            loop {
                let part = shared::load_u64(block.parts + (at + lane) * 8);
                let up_to = sums_up_to(part);
                let past = warp::warp_vote_ballot(warp::FULL_MASK, up_to > left);
                if past != 0 {
                    let found = past.trailing_zeros();
                    at += found;
                    left -= broadcast(up_to - part, found);
                    break;
                }
                left -= broadcast(up_to, 31);
                at += 32;
            }
            let token = (at * 32 + lane) * PER_THREAD;
            let x = L::unpack(row.load::<L>(token));
            let part = u64::from(rule.weights(&x));
            let up_to = sums_up_to(part);
            if up_to - part <= left && left < up_to {
                left -= up_to - part;
                let (mut drawn, mut i) = (0, 0);
                let mut before = 0;
                while i < 8 {
                    let weight = u64::from(rule.weight(x[i]));
                    if before <= left && left < before + weight {
                        drawn = token + i as u32;
                    }
                    before += weight;
                    i += 1;
                }
                ptr::store_u32(id_at, drawn);
            }
        }
    }

    /// # Safety
    /// There is one.
    #[inline(always)]
    unsafe fn load_draw(from: u64) -> DrawParams {
        // SAFETY: the caller's promise.
        unsafe {
            let [scale, top_k, top_p, min_weight] = ptr::load_nc_u32x4(from as *const u32);
            DrawParams {
                scale: f32::from_bits(scale),
                top_k,
                top_p,
                min_weight,
                random: ptr::load_nc_u64((from + 16) as *const u64),
                reserved: [0; 2],
            }
        }
    }

    macro_rules! entries {
        ($($element:ident $name:literal;)*) => { $( const _: () = {
            /// See the module.
            ///
            /// # Safety
            /// As [`sample`].
            #[kernel(name = ["sample_", $name], max_threads = THREADS, min_blocks = 1)]
            pub unsafe fn entry(params: SampleParams) {
                // SAFETY: the launch's promise.
                unsafe { sample::<$element>(&params) }
            }
        }; )* };
    }

    entries! {
        Bf16 "bf16";
        F16 "f16";
        F32 "f32";
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_powers_of_two_rounded_down() {
        assert_eq!(weight(3.0, 3.0, 1.0), ONE);
        assert_eq!(weight(2.0, 3.0, 1.0), ONE / 2);
        assert_eq!(weight(-25.0, 3.0, 1.0), 1);
        assert_eq!(weight(-26.0, 3.0, 1.0), 0);
        assert_eq!(weight(f32::NEG_INFINITY, 3.0, 1.0), 0);
        assert_eq!(weight(f32::NAN, 3.0, 1.0), 0);
        for step in 1..4000_u16 {
            let below = f32::from(step) / 128.0;
            let (got, right) = (weight(-below, 0.0, 1.0), (28.0 - f64::from(below)).exp2());
            let off = (f64::from(got) - right).abs();
            assert!(
                off <= 1.0 + right * 3e-7,
                "{got} instead of {right} at {below}"
            );
        }
    }

    #[test]
    fn keys_are_ordered_as_logits() {
        let ordered = [
            f32::NEG_INFINITY,
            f32::MIN,
            -1.0,
            -1e-40,
            0.0,
            1e-40,
            1.0,
            f32::MAX,
            f32::INFINITY,
        ];
        for pair in ordered.windows(2) {
            assert!(key(pair[0]) < key(pair[1]), "{pair:?}");
        }
        assert_eq!(key(-0.0), key(0.0));
        assert!(key(f32::NAN) < key(f32::NEG_INFINITY));
    }
}
