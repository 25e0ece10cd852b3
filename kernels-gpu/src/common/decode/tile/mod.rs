//! The work of one warp on a chunk of keys: Sᵀ = K·Qᵀ, softmax, Oᵀ += Vᵀ·Pᵀ.
//!
//! Rows of a tile are columns of the accumulator fragments: in each block of 8, lane `l` holds columns `2·(l % 4)` and
//! `2·(l % 4) + 1`.

mod scales;
mod weigh;

use cuda_std::{barrier, shared, warp};

use self::scales::TokenScales;
use super::KEYS;
use crate::{
    abi::QueryRow,
    common::{cache::Cache, masks::Masks, state::Softmax, variant::Variant},
};

const ALL: u32 = warp::FULL_MASK;

/// Blocks of 16 keys in a chunk.
pub(super) const KEY_BLOCKS: usize = KEYS as usize / 16;

/// S of a chunk: `[key / 16][row / 8]`, each with key `k` of columns `2t`, `2t + 1`, then the same of key `k + 8`.
pub type Logits<const ROW_BLOCKS: usize> = [[[f32; 4]; ROW_BLOCKS]; KEY_BLOCKS];

/// Two factors of each of a lane's rows, `[row / 8][column]`: of its products with 8-bit keys, and of its output.
pub type ScalesOfRows<const ROW_BLOCKS: usize> = [[[f32; 2]; 2]; ROW_BLOCKS];

/// P of a chunk, as B operand of the product with the values.
pub type Weights<const ROW_BLOCKS: usize> = [[[u32; 2]; ROW_BLOCKS]; KEY_BLOCKS];

/// Where a lane reads fragments: offsets in a chunk of the first 32-byte column of a line. Column `c` of the line is at
/// the *address* XOR `32 · c`, because the swizzle turns steps along a row into that.
#[derive(Clone, Copy)]
pub struct LaneOffsets {
    pub(super) k: u32,
    pub(super) v: u32,
    pub(super) row_bytes: u32,
}

impl LaneOffsets {
    /// For keys of `row_bytes` bytes.
    #[inline(always)]
    pub fn new(lane: u32, row_bytes: u32) -> Self {
        let (matrix, row) = (lane / 8, lane % 8);
        let group = row_bytes * 8;
        let (line, swizzle) = if row_bytes < 128 {
            (row * 64, row / 2)
        } else {
            (row * 128, row)
        };
        // K: matrices 1 and 3 hold the next 8 keys, matrices 2 and 3 the next 16 bytes. V, which is loaded transposed,
        // has these the other way round.
        Self {
            k: (matrix % 2) * group + line + ((matrix / 2) ^ swizzle) * 16,
            v: (matrix / 2) * group + line + ((matrix % 2) ^ swizzle) * 16,
            row_bytes,
        }
    }
}

/// A chunk in shared memory.
#[derive(Clone, Copy)]
pub struct Chunk {
    /// Shared address of the keys.
    pub k: u32,
    /// Shared address of the values.
    pub v: u32,
    /// Shared address of the keys' scales, followed by the values', if there are scales per token.
    pub scales: u32,
    /// Position of the first key.
    pub first: u32,
}

/// The warps that share a chunk, each with rows of its own.
#[derive(Clone, Copy)]
pub struct Sharers {
    /// How many.
    pub warps: u32,
    /// This warp's index among them.
    pub index: u32,
    /// Their named barrier.
    pub barrier: u32,
}

/// The keys of an item.
#[derive(Clone, Copy)]
pub struct Keys {
    /// The first.
    pub begin: u32,
    /// One past the last.
    pub end: u32,
    /// The launch's masks.
    pub masks: Masks,
}

/// Up to `8 · ROW_BLOCKS` query rows of one warp: fragments of Q, the state of the softmax, and the accumulators, for
/// head dimension `16 · DIM_BLOCKS`.
pub struct Rows<const DIM_BLOCKS: usize, const ROW_BLOCKS: usize> {
    pub(super) q: [[[u32; 2]; ROW_BLOCKS]; DIM_BLOCKS],
    /// Shared address of the lane's part of Q, from which Q is reread if its fragments do not fit into registers.
    pub(super) q_address: u32,
    /// Bytes from the rows of a block to those of the next block.
    pub(super) q_block: u32,
    /// `[d / 16][row / 8]`: element d of columns 2t, 2t + 1, then the same of element d + 8.
    pub out: [[[f32; 4]; ROW_BLOCKS]; DIM_BLOCKS],
    /// The reference (lazily updated maximum) and the sum of weights. Until [`Rows::finish`], the sum is over the
    /// lane's keys alone. Without a softmax, these are 0 and 1: outputs are plain sums.
    pub softmax: [[Softmax; 2]; ROW_BLOCKS],
    token: [[u32; 2]; ROW_BLOCKS],
    head: [[u32; 2]; ROW_BLOCKS],
    position: [[i32; 2]; ROW_BLOCKS],
    /// With 8-bit caches.
    scale: ScalesOfRows<ROW_BLOCKS>,
    /// The power of two that scales the lane's row of the B operand into the range of f16.
    pub(super) fit: [f32; ROW_BLOCKS],
}

impl<const DIM_BLOCKS: usize, const ROW_BLOCKS: usize> Rows<DIM_BLOCKS, ROW_BLOCKS> {
    pub(super) const ROW_BYTES: u32 = DIM_BLOCKS as u32 * 32;
    /// Whether Q stays in registers. Its shared memory is free once [`Rows::start`] has run, unless queries are
    /// rotated.
    pub const KEEPS_Q: bool = DIM_BLOCKS * ROW_BLOCKS <= 16;

    /// No rows.
    pub const EMPTY: Self = Self {
        q: [[[0; 2]; ROW_BLOCKS]; DIM_BLOCKS],
        q_address: 0,
        q_block: 0,
        out: [[[0.0; 4]; ROW_BLOCKS]; DIM_BLOCKS],
        softmax: [[Softmax::EMPTY; 2]; ROW_BLOCKS],
        token: [[0; 2]; ROW_BLOCKS],
        head: [[0; 2]; ROW_BLOCKS],
        position: [[0; 2]; ROW_BLOCKS],
        scale: [[[1.0; 2]; 2]; ROW_BLOCKS],
        fit: [1.0; ROW_BLOCKS],
    };

    /// Starts new rows, after [`Rows::clear`]. Q is at `q` (row-major, dense); `row` gives the token and the query head
    /// of a row. With pairs of KV heads, `pair` has the index in `q` of the lane's row of the first head, and the
    /// number of rows from there to the same row of the second head.
    ///
    /// # Safety
    /// The lanes come together; `q` is the shared address of `8 · ROW_BLOCKS` rows. They stay there unless
    /// [`Rows::KEEPS_Q`], and also if they are to be rotated.
    #[inline(always)]
    pub unsafe fn start<C: Cache>(
        &mut self,
        q: u32,
        lane: u32,
        pair: [u32; 2],
        row: impl Fn(u32) -> (QueryRow, u32),
    ) {
        // Matrix i of a load holds elements 8i.. of the rows: two k-steps in four matrices. For 8-bit keys, a lane has
        // four neighbouring elements.
        let (row_of_lane, column) = if C::SCALED {
            (lane / 4, (lane % 4) * 8)
        } else {
            (lane % 8, (lane / 8) * 16)
        };
        let [row_of_lane, rows_apart] = if C::PAIRS { pair } else { [row_of_lane, 8] };
        self.q_address = q + row_of_lane * Self::ROW_BYTES + column;
        self.q_block = rows_apart * Self::ROW_BYTES;
        if C::SCALED {
            // SAFETY: inside the rows; the lanes are together.
            unsafe { self.fit_queries::<C>(lane) };
        } else if Self::KEEPS_Q && !C::TURNS {
            let mut step = 0;
            while step < DIM_BLOCKS {
                // SAFETY: inside the rows.
                unsafe { self.load_q::<C>(step) };
                step += 2;
            }
        }
        let mut block = 0;
        while block < ROW_BLOCKS {
            let mut column = 0;
            while column < 2 {
                let (info, head) = row(block as u32 * 8 + 2 * (lane % 4) + column as u32);
                self.token[block][column] = info.token;
                self.head[block][column] = head;
                self.position[block][column] = info.position;
                column += 1;
            }
            block += 1;
        }
    }

    /// Applies the scales of keys and values, after [`Rows::start`].
    ///
    /// # Safety
    /// The lanes come together.
    #[inline(always)]
    pub unsafe fn take_scales(&mut self, of: impl Fn(u32) -> [f32; 2], lane: u32) {
        let mut block = 0;
        while block < ROW_BLOCKS {
            let mut column = 0;
            while column < 2 {
                let [k, v] = of(block as u32 * 8 + 2 * (lane % 4) + column as u32);
                self.scale[block][column][0] *= k;
                self.scale[block][column][1] = v;
                column += 1;
            }
            block += 1;
        }
    }

    /// Applies factors of the lane's rows, after [`Rows::start`]. Without 8-bit keys they do nothing.
    #[inline(always)]
    pub fn take_scales_of_rows(&mut self, scales: ScalesOfRows<ROW_BLOCKS>) {
        let mut i = 0;
        while i < ROW_BLOCKS * 2 {
            let [k, v] = scales[i / 2][i % 2];
            self.scale[i / 2][i % 2][0] *= k;
            self.scale[i / 2][i % 2][1] = v;
            i += 1;
        }
    }

    /// Sets the factor of a column's products with keys, before scales of the cache are multiplied in.
    #[inline(always)]
    pub(super) fn set_key_scale(&mut self, block: usize, column: usize, scale: f32) {
        self.scale[block][column][0] = scale;
    }

    /// Clears the accumulators and the softmax. Call it right after storing the result: accumulators that the compiler
    /// knows to be zero take no registers while the result is combined and written.
    #[inline(always)]
    pub fn clear(&mut self) {
        self.out = Self::EMPTY.out;
        self.softmax = Self::EMPTY.softmax;
    }

    /// Attention to the keys of a chunk; with `MASKED`, to those among `keys` that are visible. Kernels that rotate
    /// keys pass the logits as `turned`.
    ///
    /// # Safety
    /// The lanes of all sharers come together; the chunk is loaded. With `MASKED`, its values may be overwritten.
    #[inline(always)]
    pub unsafe fn attend<C: Cache, V: Variant, const MASKED: bool>(
        &mut self,
        variant: &V,
        lane: u32,
        offsets: &LaneOffsets,
        chunk: Chunk,
        keys: Keys,
        turned: Logits<ROW_BLOCKS>,
        sharers: Sharers,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            let logits = if C::TURNS {
                turned
            } else {
                self.logits::<C>(offsets, chunk.k)
            };
            if MASKED {
                // Memory past the last key may hold NaN, and 0 · NaN is NaN.
                zero_values(chunk, lane, offsets.row_bytes, keys, sharers);
            }
            let kv_heads = if C::PAIRS { 2 } else { 1 };
            let load = |head| match C::BY_TOKEN {
                true => {
                    let chunk = [chunk.scales, chunk.first];
                    TokenScales::load::<MASKED>(chunk, lane, keys, kv_heads, head)
                }
                false => TokenScales::ONE,
            };
            let of_all = if C::PAIRS { TokenScales::ONE } else { load(0) };
            // With pairs, each block of rows belongs to one of the KV heads.
            let scales = |block: usize| match C::PAIRS {
                true => load(block as u32),
                false => of_all,
            };
            let weights =
                self.weigh_scaled::<C, V, MASKED>(variant, lane, chunk.first, keys, logits, scales);
            self.values::<C>(offsets, chunk.v, &weights);
        }
    }

    /// Sums the weights over the lanes, and normalises the output.
    ///
    /// # Safety
    /// The lanes come together.
    #[inline(always)]
    pub unsafe fn finish<C: Cache>(&mut self) {
        let mut block = 0;
        while block < ROW_BLOCKS {
            let mut column = 0;
            while column < 2 {
                let softmax = &mut self.softmax[block][column];
                let mut stride = 4;
                while stride < 32 {
                    // SAFETY: the lanes are together.
                    softmax.sum += unsafe { warp::warp_shuffle_xor(ALL, softmax.sum, stride, 32) };
                    stride *= 2;
                }
                let mut norm = softmax.norm();
                if C::SCALED {
                    norm *= self.scale[block][column][1];
                }
                let mut i = 0;
                while i < DIM_BLOCKS {
                    self.out[i][block][column] *= norm;
                    self.out[i][block][2 + column] *= norm;
                    i += 1;
                }
                column += 1;
            }
            block += 1;
        }
    }
}

/// Zeroes the values of a chunk that are not among `keys`.
///
/// # Safety
/// The lanes of all sharers come together; nobody else uses the chunk.
#[inline(always)]
unsafe fn zero_values(chunk: Chunk, lane: u32, row_bytes: u32, keys: Keys, sharers: Sharers) {
    // A row has one line in each slab of its group, whatever the swizzle. An iteration handles as many lines as the
    // lanes cover.
    let width = if row_bytes < 128 { row_bytes } else { 128 };
    let (slabs, lanes) = (row_bytes / width, width / 16);
    let at_a_time = 32 / lanes;
    let mut line = sharers.index * at_a_time + lane / lanes;
    while line < KEYS * slabs {
        let row = line / (8 * slabs) * 8 + line % 8;
        let position = chunk.first + row;
        if position < keys.begin || position >= keys.end {
            // SAFETY: inside the chunk.
            unsafe { shared::store_u32x4(chunk.v + line * width + lane % lanes * 16, [0; 4]) };
        }
        line += sharers.warps * at_a_time;
    }
    // SAFETY: the lanes are together.
    unsafe {
        warp::sync_warp(ALL);
        if sharers.warps > 1 {
            barrier::bar_sync(sharers.barrier, sharers.warps * 32);
        }
    }
}
