//! `turn_rows`: applies rotary embeddings to keys before a prefill reads them. (The prefill rotates its queries
//! itself.)
//!
//! Each key that a prefill sees is rotated once, into pages of 64 keys that the prefill then reads. The prefill cannot
//! do this itself: TMA and wgmma move keys to the tensor cores without passing through registers. Values stay in their
//! pages, unless no tensor map can describe these; then they are copied with the keys.
//!
//! The prefill's list has *entries*: 64 keys of a page table, with their values. Blocks process *pieces*, eighths of an
//! entry: half of its tokens, for some heads. A thread has two vectors of 8 elements, so both elements of a pair are
//! its own (as in `step/qkv/`). It reuses the sines of its token for all its heads.

/// Threads of a block.
pub const THREADS: u32 = 256;

/// Resident blocks per SM.
const BLOCKS: u32 = 2;

/// Pieces per entry.
pub const PIECES: u32 = 8;

/// The kernels: `turn_rows_<element>`.
#[cfg(not(target_arch = "nvptx64"))]
pub const ROWS: &[crate::registry::KernelInfo] = {
    use crate::common::half::half_row;
    crate::each_half! { list half_row { "turn_rows_", Quantise Sm90a Turn, THREADS, BLOCKS } }
};

#[cfg(target_arch = "nvptx64")]
mod device {
    use cuda_std::{griddep, prelude::*};

    use super::{BLOCKS, PIECES, THREADS};
    use crate::{
        abi::{ConvertedPage, KvStrides, TurnParams},
        common::{
            half::{Half, half_entry},
            rotary::{sine_cosine, turn_words, turned},
        },
    };

    /// Heads whose loads are in flight together.
    const TOGETHER: usize = 2;

    /// Tokens per piece.
    const TOKENS: u32 = ConvertedPage::KEYS / 2;

    /// The sines of a thread's pairs, two pairs each.
    #[derive(Clone, Copy)]
    struct Sines {
        sines: [[f32; 4]; 4],
        /// Selectors that gather pairs into words, see [`RotaryParams::picks`](crate::abi::RotaryParams::picks).
        picks: [u32; 2],
        /// If false, vectors are copied unchanged.
        turns: bool,
    }

    /// What a thread copies.
    #[derive(Clone, Copy, PartialEq, Eq)]
    enum Of {
        Keys,
        Values,
    }

    /// Some heads of a token: source and target addresses, and strides between heads, in bytes.
    struct Heads {
        from: u64,
        to: u64,
        from_step: u64,
        to_step: u64,
        count: u32,
        /// If false, zeros are written.
        exist: bool,
    }

    /// # Safety
    /// The parameters describe memory as [`TurnParams`] says.
    #[inline(always)]
    unsafe fn turn<T: Half>(p: &TurnParams) {
        // Dependent launch: the prefill may start as SMs become free. It waits before it reads the pages written here.
        griddep::launch_dependents();
        let c = &p.convert;
        let tid = thread::thread_idx_x();
        let (lanes, vectors) = (1 << p.lanes_log, 2 << p.lanes_log);
        let (lane, token) = (tid & (lanes - 1), (tid >> p.lanes_log) % TOKENS);
        // With small heads a block processes several heads of a token at a time.
        let (sub, subs) = (tid >> p.lanes_log >> 5, THREADS >> p.lanes_log >> 5);
        // The two vectors that hold pairs: one of each half of the rotated part, or two neighbouring ones.
        let halves = p.rotary.interleaved == 0 && lane < p.rotary.pairs / 8;
        let [a, b] = if halves {
            [lane, lane + p.rotary.pairs / 8]
        } else {
            [2 * lane, 2 * lane + 1]
        };
        // SAFETY: the caller's promise.
        unsafe {
            let [first, entries] = c.of_this_plan(p.record);
            let pieces = entries * PIECES;
            let load = |piece: u32| {
                let at = c.list + u64::from(first + piece / PIECES) * 16;
                ptr::load_nc_u32x4(at as *const u32)
            };
            let mut piece = thread::block_idx_x();
            let mut entry = [0; 4];
            if piece < pieces {
                entry = load(piece);
            }
            while piece < pieces {
                let [table, key, seen, page] = entry;
                let [seen, end] = ConvertedPage::seen(seen);
                let next = piece + thread::grid_dim_x();
                if next < pieces {
                    entry = load(next);
                }
                let token = piece % 2 * TOKENS + token;
                let (class, exists) = (piece % PIECES / 2, token >= seen && token < end);
                let mut place = [key + token, 0];
                if exists {
                    let (index, offset) = c.page_size.div_rem(key + token);
                    let id = c.page_ids + u64::from(table + index) * 4;
                    place = [ptr::load_nc_u32(id as *const u32), offset];
                }
                let with_values = c.to_v != 0;
                let classes = if with_values { 2 } else { 4 };
                let (head, apart) = (class % classes * subs + sub, classes * subs);
                // Keys that do not exist, or that no query sees, become zeros.
                if head < p.kv_heads {
                    let (what, from, to, strides) = if with_values && class >= 2 {
                        (Of::Values, c.v, c.to_v, of(&c.v_strides))
                    } else {
                        (Of::Keys, c.k, c.to_k, of(&c.k_strides))
                    };
                    let to_head = ConvertedPage::KEYS * vectors;
                    let to_token = (page * p.kv_heads + head) * ConvertedPage::KEYS + token;
                    let heads = Heads {
                        from: from + at(place, head, strides) * 16,
                        to: to + u64::from(to_token) * u64::from(vectors) * 16,
                        from_step: u64::from(apart) * u64::from(strides[2]) * 16,
                        to_step: u64::from(apart) * u64::from(to_head) * 16,
                        count: (p.kv_heads - head).div_ceil(apart),
                        exist: exists,
                    };
                    heads.bring::<T>([a, b], turning(p, halves, a, key + token, what));
                }
                piece = next;
            }
        }
    }

    /// The offset of a head, in vectors; `place` and `strides` are for page, token and head.
    #[inline(always)]
    fn at(place: [u32; 2], head: u32, strides: [u32; 3]) -> u64 {
        u64::from(place[0]) * u64::from(strides[0])
            + u64::from(place[1]) * u64::from(strides[1])
            + u64::from(head) * u64::from(strides[2])
    }

    #[inline(always)]
    const fn of(strides: &KvStrides) -> [u32; 3] {
        [strides.page, strides.token, strides.head]
    }

    /// The sines and cosines of a thread's pairs at a position. `halves`: pairs are of both halves, otherwise
    /// neighbours from vector `a` on.
    ///
    /// # Safety
    /// As [`turn`].
    #[inline(always)]
    unsafe fn turning(p: &TurnParams, halves: bool, a: u32, position: u32, what: Of) -> Sines {
        let first = if halves { a * 8 } else { a * 4 };
        let has_pairs = halves || p.rotary.interleaved != 0 && first < p.rotary.pairs;
        let mut of = Sines {
            sines: [[0.0; 4]; 4],
            picks: p.rotary.picks(),
            turns: what != Of::Values && has_pairs,
        };
        if of.turns {
            let sines = |i: u32| {
                // Each step handles one word (two elements) of each vector. With halves these hold two consecutive
                // pairs; with neighbours one pair of the first vector and one of the second.
                let pair = first + if halves { i } else { i / 2 + i % 2 * 4 };
                // SAFETY: the caller's promise.
                let turned = turned(unsafe { p.rotary.turn(pair) }, position);
                let [sine, cosine] = sine_cosine(turned);
                let gain = p.rotary.gain(pair);
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
        /// Copies two vectors of each head, rotated.
        ///
        /// # Safety
        /// Source and target are valid, and no other thread accesses the target.
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

    crate::each_half! { items half_entry { "turn_rows_", THREADS, BLOCKS, turn(TurnParams) } }
}
