//! `log_probs`: the log-probability of a row's token, and the most probable tokens with theirs. A block has a row.
//!
//! Each thread reads some vectors of the row and keeps its best token and a sum of powers. Then the best token of all threads is
//! taken, as often as tokens are wanted. The warp of the thread that had it reads that thread's vectors again for the next one.
//! Tokens are ordered by their logits; of equal ones the first comes first.

/// The largest number of most probable tokens of a row.
pub const MOST_TOP: u32 = 20;

/// Results of a row: its token, then the most probable ones.
pub const LOG_PROBS: u32 = 1 + MOST_TOP;

/// Threads of a block.
pub const THREADS: u32 = 512;

/// Resident blocks per SM.
const BLOCKS: u32 = 1;

/// A number for each warp, twice, and the sum of each warp.
pub const SHARED_BYTES: u32 = THREADS / 32 * (8 + 8 + 4);

/// The kernel's name, for its row and for its entry.
#[cfg(any(not(target_arch = "nvptx64"), feature = "step"))]
macro_rules! table {
    ($then:ident) => {
        $then! { "log_probs_f32" }
    };
}

/// The kernel.
#[cfg(not(target_arch = "nvptx64"))]
pub const ROWS: &[crate::registry::KernelInfo] = {
    use crate::registry::{Arch, Element, Family, KernelInfo, Op, registers};
    macro_rules! row {
        ($name:literal) => {
            KernelInfo {
                element: Element::F32,
                threads: THREADS,
                registers: registers(THREADS, BLOCKS),
                shared_bytes: SHARED_BYTES,
                ..KernelInfo::new($name, Family::Step, Arch::Sm80, Op::LogProbs)
            }
        };
    }
    &[table!(row)]
};

#[cfg(all(target_arch = "nvptx64", feature = "step"))]
mod device {
    use core::f32::consts::{LN_2, LOG2_E};

    use cuda_std::{prelude::*, shared};

    use super::{
        super::{
            draw::largest_of_lanes,
            key,
            logits::{F32, Logits, logit_of},
        },
        BLOCKS, LOG_PROBS, MOST_TOP, THREADS,
    };
    use crate::{
        abi::{LogProbsParams, NO_TOKEN},
        common::state::log2,
        math::exp2,
        step::{VECTOR, Vector, begin},
    };

    const WARPS: u32 = THREADS / 32;

    /// A row of logits.
    struct Row {
        logits: u64,
        vocabulary: u32,
    }

    impl Row {
        /// # Safety
        /// The row exists.
        #[inline(always)]
        unsafe fn vector(&self, vector: u32) -> Vector {
            let token = vector * VECTOR;
            let from = self.logits + u64::from(token) * 4;
            // SAFETY: the caller's promise.
            unsafe {
                if token + VECTOR <= self.vocabulary {
                    F32::load(from)
                } else {
                    F32::load_some(from, self.vocabulary - token)
                }
            }
        }

        /// The best token of a vector whose number is below `limit`; 0: none.
        #[inline(always)]
        fn best(&self, vector: u32, x: Vector, limit: u64) -> u64 {
            let (mut best, mut i) = (0, 0);
            while i < VECTOR {
                let token = vector * VECTOR + i;
                let number = number(x[i as usize], token);
                if token < self.vocabulary && number < limit && number > best {
                    best = number;
                }
                i += 1;
            }
            best
        }

        const fn vectors(&self) -> u32 {
            self.vocabulary.div_ceil(VECTOR)
        }
    }

    /// Numbers are ordered like the logits, those of equal ones against the tokens. None is 0.
    #[inline(always)]
    fn number(logit: f32, token: u32) -> u64 {
        u64::from(key(logit)) << 32 | u64::from(!token)
    }

    macro_rules! entry {
        ($name:literal) => {
            /// See the module's documentation.
            ///
            /// # Safety
            /// The parameters describe memory as [`LogProbsParams`] says.
            #[kernel(name = [$name], max_threads = THREADS, min_blocks = BLOCKS)]
            pub unsafe fn entry(params: LogProbsParams) {
                begin();
                let p = &params;
                let block = u64::from(thread::block_idx_x());
                let (me, memory) = (thread::thread_idx_x(), shared::dynamic_shared_address());
                // SAFETY: the launch's promise; all threads of the block have the same number of rounds.
                unsafe {
                    let [index, top] = ptr::load_u32x2((p.rows + block * 8) as *const u32);
                    let row = Row {
                        logits: p.logits + u64::from(index) * p.row * 4,
                        vocabulary: p.vocabulary,
                    };
                    let (mut best, mut largest, mut sum) = (0, f32::NEG_INFINITY, 0.0);
                    let mut vector = me;
                    while vector < row.vectors() {
                        let x = row.vector(vector);
                        let of_vector = row.best(vector, x, u64::MAX);
                        best = if of_vector > best { of_vector } else { best };
                        let larger = largest.max(F32::largest(x));
                        // The first numbers come here with a sum of 0.
                        sum = sum * power(largest, larger) + sum_of(x, larger);
                        largest = larger;
                        vector += THREADS;
                    }
                    let mut exchange = Exchange { memory, half: 0 };
                    let mut next = exchange.largest(best);
                    let most = logit_of((next >> 32) as u32);
                    let sum = exchange.sum(sum * power(largest, most));
                    let log_sum = log2(sum) * LN_2;
                    let out = p.out + block * u64::from(LOG_PROBS) * 8;
                    if me == 0 {
                        let token = ptr::load_u32((p.ids + u64::from(index) * 4) as *const u32);
                        let mut value = f32::NAN;
                        if token < row.vocabulary {
                            let of_token = row.logits + u64::from(token) * 4;
                            value = ptr::load_f32(of_token as *const f32) - most - log_sum;
                        }
                        store(out, token, value);
                    }
                    let (mut rank, top) = (1, if top < MOST_TOP { top } else { MOST_TOP });
                    while rank <= top {
                        // 0 if there are no more tokens.
                        let token = if next == 0 { NO_TOKEN } else { !(next as u32) };
                        if me == 0 {
                            let logit = logit_of((next >> 32) as u32);
                            store(out + u64::from(rank) * 8, token, logit - most - log_sum);
                        }
                        let owner = token / VECTOR % THREADS;
                        if next != 0 && owner / 32 == me / 32 {
                            let of_owner = next_of_thread(&row, owner, next);
                            best = if me == owner { of_owner } else { best };
                        }
                        next = exchange.largest(best);
                        rank += 1;
                    }
                }
            }
        };
    }
    table!(entry);

    /// 2 to the difference of two logits, in units of e; 1 for equal ones.
    #[inline(always)]
    fn power(x: f32, largest: f32) -> f32 {
        if x == largest {
            1.0
        } else {
            exp2((x - largest) * LOG2_E)
        }
    }

    /// NaN counts as 0.
    #[inline(always)]
    fn sum_of(x: Vector, largest: f32) -> f32 {
        let (mut sum, mut i) = (0.0, 0);
        while i < VECTOR as usize {
            sum += if x[i].is_nan() {
                0.0
            } else {
                power(x[i], largest)
            };
            i += 1;
        }
        sum
    }

    /// The best token of a thread below `limit`.
    ///
    /// # Safety
    /// The row exists; all lanes of the thread's warp come here.
    #[inline(always)]
    unsafe fn next_of_thread(row: &Row, owner: u32, limit: u64) -> u64 {
        let (mut best, mut vector) = (0, owner + warp::lane_id() * THREADS);
        // SAFETY: the caller's promise.
        unsafe {
            while vector < row.vectors() {
                let of_vector = row.best(vector, row.vector(vector), limit);
                best = if of_vector > best { of_vector } else { best };
                vector += 32 * THREADS;
            }
            largest_of_lanes(best)
        }
    }

    /// # Safety
    /// `to` is the address of a result that no other thread writes.
    #[inline(always)]
    unsafe fn store(to: u64, token: u32, value: f32) {
        // SAFETY: the caller's promise.
        unsafe { ptr::store_u32x2(to as *mut u32, [token, value.to_bits()]) };
    }

    /// What the warps of a block tell each other.
    struct Exchange {
        memory: u32,
        /// The table that the next call writes. All threads have read it: each call has a barrier.
        half: u32,
    }

    impl Exchange {
        /// The largest number of the block.
        ///
        /// # Safety
        /// All threads of the block come here.
        #[inline(always)]
        unsafe fn largest(&mut self, mine: u64) -> u64 {
            let table = self.memory + self.half * (WARPS * 8);
            self.half ^= 1;
            // SAFETY: the caller's promise; each warp has its own entry.
            unsafe {
                let of_warp = largest_of_lanes(mine);
                if warp::lane_id() == 0 {
                    shared::store_u64(table + thread::thread_idx_x() / 32 * 8, of_warp);
                }
                thread::sync_threads();
                largest_of_lanes(shared::load_u64(table + warp::lane_id() % WARPS * 8))
            }
        }

        /// The sum over the block, in an order that only depends on the threads' indices.
        ///
        /// # Safety
        /// All threads of the block come here, once.
        #[inline(always)]
        unsafe fn sum(&self, mine: f32) -> f32 {
            let table = self.memory + 2 * WARPS * 8;
            // SAFETY: the caller's promise; each warp has its own entry.
            unsafe {
                let of_warp = crate::step::sum_of_lanes(mine, 32);
                if warp::lane_id() == 0 {
                    shared::store_f32(table + thread::thread_idx_x() / 32 * 4, of_warp);
                }
                thread::sync_threads();
                let of_lane = shared::load_f32(table + warp::lane_id() % WARPS * 4);
                crate::step::sum_of_lanes(of_lane, WARPS)
            }
        }
    }
}
