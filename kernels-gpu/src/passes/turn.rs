//! `turn_rows`: queries and keys are turned by their positions before a prefill reads them.
//!
//! Each key that a prefill sees is turned once, into pages of 64 that the prefill then reads; values go with it as they are.
//! The prefill's own loop brings keys to the tensor cores without a register between.
//!
//! The list of a prefill has *entries*: 64 keys of a table with their values, or 64 query tokens. A block takes *pieces*,
//! eighths of an entry: half of its tokens, of some heads. A thread has two vectors of 8 elements, so that pairs are its own
//! (as in `step/qkv.rs`), and with the sines of its token goes from head to head.

/// Threads of a block.
pub const THREADS: u32 = 256;

/// Pieces of an entry.
pub const PIECES: u32 = 8;

/// The kernels: `turn_rows_<element>`.
#[cfg(not(target_arch = "nvptx64"))]
mod rows {
    use super::THREADS;
    use crate::registry::{Arch, Element, Family, KernelInfo, Op, registers};

    macro_rules! rows {
        ($half:ident $element:literal {}) => {
            KernelInfo {
                element: Element::$half,
                threads: THREADS,
                registers: registers(THREADS, 2),
                ..KernelInfo::new(
                    concat!("turn_rows_", $element),
                    Family::Quantise,
                    Arch::Sm90a,
                    Op::Turn,
                )
            }
        };
    }

    /// One for each 16-bit float.
    pub const ROWS: &[KernelInfo] = crate::each_half! { list rows {} };
}
#[cfg(not(target_arch = "nvptx64"))]
pub use rows::ROWS;

#[cfg(target_arch = "nvptx64")]
mod device {
    use cuda_std::prelude::*;

    use super::{PIECES, THREADS};
    use crate::{
        abi::{ConvertedPage, KvStrides, TurnParams},
        common::{
            half::{self, Half},
            rotary::{sine_cosine, turn_words, turned_by},
        },
    };

    /// Heads whose vectors are under way together.
    const TOGETHER: usize = 2;

    /// Tokens of a piece.
    const TOKENS: u32 = ConvertedPage::KEYS / 2;

    /// The sines of a thread's pairs, two pairs each.
    #[derive(Clone, Copy)]
    struct Sines {
        sines: [[f32; 4]; 4],
        /// How words come to hold pairs.
        picks: [u32; 2],
        /// Else vectors stay as they are.
        turns: bool,
    }

    /// What is brought.
    #[derive(Clone, Copy, PartialEq, Eq)]
    enum Of {
        Queries,
        Keys,
        Values,
    }

    /// Some heads of a token: where they are and where they go, in bytes, and from one to the next.
    struct Heads {
        from: u64,
        to: u64,
        from_step: u64,
        to_step: u64,
        count: u32,
        /// Else zeros are written.
        exist: bool,
    }

    /// # Safety
    /// The parameters describe memory as [`TurnParams`] says.
    #[inline(always)]
    unsafe fn turn<T: Half>(p: &TurnParams) {
        let c = &p.convert;
        let tid = thread::thread_idx_x();
        let (lanes, vectors) = (1 << p.lanes_log, 2 << p.lanes_log);
        let (lane, token) = (tid & (lanes - 1), (tid >> p.lanes_log) % TOKENS);
        // Of narrow heads a block has several of a token at a time.
        let (sub, subs) = (tid >> p.lanes_log >> 5, THREADS >> p.lanes_log >> 5);
        // Vectors that hold pairs: of both halves of what is turned, or neighbours.
        let halves = p.rotary.interleaved == 0 && lane < p.rotary.pairs / 8;
        let [a, b] = if halves {
            [lane, lane + p.rotary.pairs / 8]
        } else {
            [2 * lane, 2 * lane + 1]
        };
        // SAFETY: the caller's promise.
        unsafe {
            let [first, entries] = c.of_this_plan(p.record);
            let mut piece = thread::block_idx_x();
            while piece < entries * PIECES {
                let entry = c.list + u64::from(first + piece / PIECES) * 16;
                let [table, key, count, page] = ptr::load_nc_u32x4(entry as *const u32);
                let token = piece % 2 * TOKENS + token;
                let (class, exists) = (piece % PIECES / 2, token < count);
                if page == ConvertedPage::QUERIES {
                    let first = class * subs + sub;
                    if exists && first < p.q_heads {
                        let row = key + token;
                        let from =
                            u64::from(row) * u64::from(p.q_token) + u64::from(first * vectors);
                        let to = (u64::from(row) * u64::from(p.q_heads) + u64::from(first))
                            * u64::from(vectors);
                        let step = u64::from(4 * subs * vectors) * 16;
                        let heads = Heads {
                            from: p.q + from * 16,
                            to: p.to_q + to * 16,
                            from_step: step,
                            to_step: step,
                            count: (p.q_heads - first).div_ceil(4 * subs),
                            exist: true,
                        };
                        let position = table.wrapping_add(token) as i32;
                        heads.bring::<T>([a, b], turning(p, halves, a, position, Of::Queries));
                    }
                } else {
                    let (values, first) = (class >= 2, class % 2 * subs + sub);
                    let mut place = [0, 0];
                    if exists {
                        let (index, offset) = c.page_size.div_rem(key + token);
                        let id = c.page_ids + u64::from(table + index) * 4;
                        place = [ptr::load_nc_u32(id as *const u32), offset];
                    }
                    if first < p.kv_heads {
                        let to = (page * p.kv_heads + first) * ConvertedPage::KEYS + token;
                        let (pool, to_pool) = pick(values, [c.k, c.to_k], [c.v, c.to_v]);
                        let strides = pick_strides(values, &c.k_strides, &c.v_strides);
                        let from = u64::from(place[0]) * u64::from(strides[0])
                            + u64::from(place[1]) * u64::from(strides[1])
                            + u64::from(first) * u64::from(strides[2]);
                        let heads = Heads {
                            from: pool + from * 16,
                            to: to_pool + u64::from(to) * u64::from(vectors) * 16,
                            from_step: u64::from(2 * subs) * u64::from(strides[2]) * 16,
                            to_step: u64::from(2 * subs * ConvertedPage::KEYS * vectors) * 16,
                            count: (p.kv_heads - first).div_ceil(2 * subs),
                            exist: exists,
                        };
                        let of = if values { Of::Values } else { Of::Keys };
                        let sines = turning(p, halves, a, (key + token) as i32, of);
                        heads.bring::<T>([a, b], sines);
                    }
                }
                piece += thread::grid_dim_x();
            }
        }
    }

    /// What turns a thread's pairs at a position: those of halves, or of neighbours from vector `a` on.
    ///
    /// # Safety
    /// As [`turn`].
    #[inline(always)]
    unsafe fn turning(p: &TurnParams, halves: bool, a: u32, position: i32, what: Of) -> Sines {
        let first = if halves { a * 8 } else { a * 4 };
        let has_pairs = halves || p.rotary.interleaved != 0 && first < p.rotary.pairs;
        let mut of = Sines {
            sines: [[0.0; 4]; 4],
            picks: p.rotary.picks(),
            turns: what != Of::Values && has_pairs,
        };
        if of.turns {
            let sines = |i: u32| {
                // Words of both vectors, each of two elements: pairs of halves are two pairs of a word, those of neighbours
                // one of the first vector and one of the second.
                let pair = first + if halves { i } else { i / 2 + i % 2 * 4 };
                // SAFETY: the caller's promise.
                let turned = turned_by(unsafe { p.rotary.turn(pair) }, position);
                let [sine, cosine] = sine_cosine(turned);
                let gain = match what {
                    Of::Keys => p.rotary.gain(pair),
                    _ => 1.0,
                };
                [sine * gain, cosine * gain]
            };
            let word = |j: u32| {
                let ([s0, c0], [s1, c1]) = (sines(2 * j), sines(2 * j + 1));
                [s0, c0, s1, c1]
            };
            of.sines = [word(0), word(1), word(2), word(3)];
        }
        of
    }

    impl Heads {
        /// Brings two vectors of each, turned.
        ///
        /// # Safety
        /// They are there, and nobody else's.
        #[inline(always)]
        unsafe fn bring<T: Half>(mut self, [a, b]: [u32; 2], by: Sines) {
            let at = [u64::from(a) * 16, u64::from(b) * 16];
            while self.count > 0 {
                let mut words = [[[0; 4]; 2]; TOGETHER];
                let mut i = 0;
                // SAFETY: the caller's promise.
                unsafe {
                    while i < TOGETHER {
                        if self.exist && (i as u32) < self.count {
                            let from = self.from + i as u64 * self.from_step;
                            words[i] =
                                at.map(|at| ptr::load_stream_u32x4((from + at) as *const u32));
                        }
                        i += 1;
                    }
                    i = 0;
                    while i < TOGETHER {
                        if by.turns {
                            let [a, b] = words[i];
                            let turn =
                                |j: usize| turn_words::<T>([a[j], b[j]], by.sines[j], by.picks);
                            let [w, x, y, z] = [turn(0), turn(1), turn(2), turn(3)];
                            words[i] = [[w[0], x[0], y[0], z[0]], [w[1], x[1], y[1], z[1]]];
                        }
                        if (i as u32) < self.count {
                            let to = self.to + i as u64 * self.to_step;
                            ptr::store_u32x4((to + at[0]) as *mut u32, words[i][0]);
                            ptr::store_u32x4((to + at[1]) as *mut u32, words[i][1]);
                        }
                        i += 1;
                    }
                }
                self.from += TOGETHER as u64 * self.from_step;
                self.to += TOGETHER as u64 * self.to_step;
                self.count = self.count.saturating_sub(TOGETHER as u32);
            }
        }
    }

    /// Both are loaded: a choice between two addresses of a parameter would copy all of them to the stack.
    #[inline(always)]
    fn pick(second: bool, a: [u64; 2], b: [u64; 2]) -> (u64, u64) {
        if second { (b[0], b[1]) } else { (a[0], a[1]) }
    }

    #[inline(always)]
    fn pick_strides(second: bool, a: &KvStrides, b: &KvStrides) -> [u32; 3] {
        let pick = |a: u32, b: u32| if second { b } else { a };
        [
            pick(a.page, b.page),
            pick(a.token, b.token),
            pick(a.head, b.head),
        ]
    }

    macro_rules! entries {
        ($half:ident $element:literal {}) => {
            const _: () = {
                /// See the module.
                ///
                /// # Safety
                /// The parameters describe memory as [`TurnParams`] says.
                #[kernel(name = ["turn_rows_", $element], max_threads = THREADS, min_blocks = 2)]
                pub unsafe fn entry(params: TurnParams) {
                    // SAFETY: the launch's promise.
                    unsafe { turn::<half::$half>(&params) }
                }
            };
        };
    }

    crate::each_half! { items entries {} }
}
