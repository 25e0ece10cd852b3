//! What one warp does with a chunk of keys: Sᵀ = K·Qᵀ, softmax, Oᵀ += Vᵀ·Pᵀ.
//!
//! Rows of a tile are columns of fragments: lane `l` holds columns `2·(l % 4)` and the next of each block of 8.

use cuda_std::{
    math::{lg2, rcp},
    misc, mma, shared, warp,
};

use super::{
    KEYS,
    products::{KEY_BLOCKS, LaneOffsets, Logits, Weights},
};
use crate::{
    abi::QueryRow,
    common::{
        cache::Cache,
        half::Half,
        math::exp2,
        softmax::SLACK,
        state::Softmax,
        tree,
        variant::{Pair, Query, Variant},
    },
};

const ALL: u32 = warp::FULL_MASK;

/// A chunk in shared memory.
#[derive(Clone, Copy)]
pub struct Chunk {
    /// Shared address of the keys.
    pub k: u32,
    /// Shared address of the values.
    pub v: u32,
    /// Shared address of the scales of keys, and behind them of values, where each token has its own.
    pub scales: u32,
    /// Position of the first key.
    pub first: u32,
}

/// The keys of an item.
#[derive(Clone, Copy)]
pub struct Keys {
    /// The first.
    pub begin: u32,
    /// One past the last.
    pub end: u32,
    /// As [`AttentionParams::ancestors`](crate::abi::AttentionParams::ancestors).
    pub ancestors: u64,
}

/// Up to `8 · ROW_BLOCKS` query rows of one warp: fragments of Q, the softmax, and the accumulators, for
/// heads of `16 · DIM_BLOCKS` elements.
pub struct Rows<const DIM_BLOCKS: usize, const ROW_BLOCKS: usize> {
    pub(super) q: [[[u32; 2]; ROW_BLOCKS]; DIM_BLOCKS],
    /// Where Q is, for tiles so large that its fragments find no registers.
    pub(super) q_address: u32,
    /// Bytes from a block's rows to those of the next.
    pub(super) q_block: u32,
    /// `[d / 16][row / 8]`: elements d, d of columns 2t, 2t + 1, then the same of d + 8.
    pub out: [[[f32; 4]; ROW_BLOCKS]; DIM_BLOCKS],
    /// What weights are taken relative to and their sum, for the lane's keys alone until [`Rows::finish`]. Without a
    /// softmax that is 0 and 1, so that outputs are sums as they are.
    pub softmax: [[Softmax; 2]; ROW_BLOCKS],
    token: [[u32; 2]; ROW_BLOCKS],
    head: [[u32; 2]; ROW_BLOCKS],
    position: [[i32; 2]; ROW_BLOCKS],
    /// Of 8-bit caches, what products with keys are multiplied by, and the output.
    scale: [[[f32; 2]; 2]; ROW_BLOCKS],
    /// Of the row that the lane has as operand: what brings its queries into f16.
    pub(super) fit: [f32; ROW_BLOCKS],
}

impl<const DIM_BLOCKS: usize, const ROW_BLOCKS: usize> Rows<DIM_BLOCKS, ROW_BLOCKS> {
    pub(super) const ROW_BYTES: u32 = DIM_BLOCKS as u32 * 32;
    /// Whether Q is needed in shared memory no more once [`Rows::start`] has run.
    pub const KEEPS_Q: bool = DIM_BLOCKS * ROW_BLOCKS <= 16;

    /// Nothing.
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

    /// Takes up new rows, having been cleared: Q from `q` (row-major, dense), and what is known of them by `row`,
    /// which gives the token and the query head of a row. Of pairs of KV heads, `pair` is the place in `q` of the lane's row
    /// of the first head, and how many rows further the same row of the second is.
    ///
    /// # Safety
    /// The lanes come together; `q` is the shared address of `8 · ROW_BLOCKS` rows, which stay there unless
    /// [`Rows::KEEPS_Q`], and where they are turned.
    #[inline(always)]
    pub unsafe fn start<C: Cache>(
        &mut self,
        q: u32,
        lane: u32,
        pair: [u32; 2],
        row: impl Fn(u32) -> (QueryRow, u32),
    ) {
        // Matrix i of a load holds elements 8i.. of the lanes' rows: two k-steps in four matrices. Beside 8-bit keys
        // a lane has four neighbouring elements.
        let (row_of_lane, rows_apart, column) = if C::PAIRS {
            (pair[0], pair[1], (lane % 4) * 8)
        } else if C::SCALED {
            (lane / 4, 8, (lane % 4) * 8)
        } else {
            (lane % 8, 8, (lane / 8) * 16)
        };
        self.q_address = q + row_of_lane * Self::ROW_BYTES + column;
        self.q_block = rows_apart * Self::ROW_BYTES;
        if C::SCALED {
            // SAFETY: inside the rows; the lanes are together.
            unsafe { self.fit_queries::<C>(lane) };
        } else if Self::KEEPS_Q && !C::TURNS {
            let mut step = 0;
            while step < DIM_BLOCKS {
                // SAFETY: inside the rows.
                unsafe { self.load_q(step) };
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

    /// Takes up what keys and values are multiplied by, after [`Rows::start`].
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

    /// What products with keys of a column are multiplied by, before scales of the cache.
    #[inline(always)]
    pub(super) fn set_key_scale(&mut self, block: usize, column: usize, scale: f32) {
        self.scale[block][column][0] = scale;
    }

    /// Forgets what was attended to. Right after the result was stored: accumulators that are known to be
    /// empty need no registers while others work on the result.
    #[inline(always)]
    pub fn clear(&mut self) {
        self.out = Self::EMPTY.out;
        self.softmax = Self::EMPTY.softmax;
    }

    /// Attends to the keys of a chunk; with `MASKED`, to those of them that are `keys` and visible. Where keys are turned, the
    /// products with them are `turned`.
    ///
    /// # Safety
    /// The lanes come together; the chunk is there. With `MASKED` its values may be written to.
    #[inline(always)]
    pub unsafe fn attend<C: Cache, V: Variant, const MASKED: bool>(
        &mut self,
        variant: &V,
        lane: u32,
        offsets: &LaneOffsets,
        chunk: Chunk,
        keys: Keys,
        turned: Logits<ROW_BLOCKS>,
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
                zero_values(chunk, lane, offsets.row_bytes, keys);
            }
            let scales = if C::BY_TOKEN {
                TokenScales::load::<MASKED>(chunk, lane, keys)
            } else {
                TokenScales::ONE
            };
            let weights = self.weigh_scaled::<C, V, MASKED>(
                variant,
                lane,
                chunk.first,
                keys,
                logits,
                &scales,
            );
            self.values::<C>(offsets, chunk.v, &weights);
        }
    }

    /// From accumulators to weights, with the first key of the chunk at position `first`. With `MASKED`, keys that
    /// are not `keys` or not visible weigh nothing.
    ///
    /// # Safety
    /// The lanes come together.
    #[inline(always)]
    pub unsafe fn weigh<C: Cache, V: Variant, const MASKED: bool>(
        &mut self,
        variant: &V,
        lane: u32,
        first: u32,
        keys: Keys,
        s: Logits<ROW_BLOCKS>,
    ) -> Weights<ROW_BLOCKS> {
        const { assert!(!C::BY_TOKEN) };
        // SAFETY: the caller's promise.
        unsafe {
            self.weigh_scaled::<C, V, MASKED>(variant, lane, first, keys, s, &TokenScales::ONE)
        }
    }

    /// The same with scales of each token. Those of values go into the weights, whose references are taken from what
    /// they then are: so a weight stays within f16, whatever the scale. The sum is of weights without them.
    ///
    /// # Safety
    /// As [`Rows::weigh`].
    #[inline(always)]
    unsafe fn weigh_scaled<C: Cache, V: Variant, const MASKED: bool>(
        &mut self,
        variant: &V,
        lane: u32,
        first: u32,
        keys: Keys,
        mut s: Logits<ROW_BLOCKS>,
        scales: &TokenScales,
    ) -> Weights<ROW_BLOCKS> {
        const { assert!(V::SOFTMAX || !C::SCALED) };
        let first = first + lane / 4;
        let mut p = [[[0u32; 2]; ROW_BLOCKS]; KEY_BLOCKS];
        let mut block = 0;
        while block < ROW_BLOCKS {
            let mut max = [f32::NEG_INFINITY; 2];
            let mut column = 0;
            while column < 2 {
                let (token, head) = (self.token[block][column], self.head[block][column]);
                let position = self.position[block][column];
                let (low, high) = if MASKED {
                    let (low, high) = variant.visible_keys(position);
                    (low.max(keys.begin as i32), high.min(keys.end as i32 - 1))
                } else {
                    (0, 0)
                };
                // A bit for each of the lane's keys that is of another branch of the row's tree.
                let mut strange = 0_u32;
                if MASKED && keys.ancestors != 0 {
                    // SAFETY: the token is one of the launch's.
                    let ancestors = unsafe { tree::load(keys.ancestors, token) };
                    // Not unrolled, which would take registers.
                    let (mut i, end) = (0, misc::opaque(2 * KEY_BLOCKS as u32));
                    while i < end {
                        let hidden = !tree::descends(ancestors, position, (first + i * 8) as i32);
                        strange |= u32::from(hidden) << i;
                        i += 1;
                    }
                }
                let query = Query {
                    token,
                    head,
                    position,
                };
                let nearest = Pair::new(variant, query, first);
                let mut i = 0;
                while i < 2 * KEY_BLOCKS {
                    let logit = &mut s[i / 2][block][i % 2 * 2 + column];
                    let at = nearest.further(i as u32 * 8);
                    if C::SCALED {
                        *logit *= self.scale[block][column][0];
                    }
                    if C::BY_TOKEN {
                        *logit *= scales.keys[i];
                    }
                    *logit = variant.base_2(*logit, at);
                    if C::BY_TOKEN {
                        *logit += scales.values_log2[i];
                    }
                    if MASKED && ((at.key as i32) < low || at.key as i32 > high)
                        || MASKED && strange >> i & 1 != 0
                        || V::MASKS && !variant.visible(at)
                    {
                        *logit = if V::SOFTMAX { f32::NEG_INFINITY } else { 0.0 };
                    }
                    max[column] = if *logit > max[column] {
                        *logit
                    } else {
                        max[column]
                    };
                    i += 1;
                }
                column += 1;
            }

            let softmax = &mut self.softmax[block];
            if !V::SOFTMAX {
                // The eight lanes of a column make 1.
                *softmax = [Softmax {
                    max: 0.0,
                    sum: 0.125,
                }; 2];
            }
            let grew = max[0] > softmax[0].max + SLACK || max[1] > softmax[1].max + SLACK;
            // SAFETY: the lanes are together.
            if V::SOFTMAX && unsafe { warp::warp_vote_any(ALL, grew) } {
                let mut column = 0;
                while column < 2 {
                    // The lanes of the same columns are 4 apart.
                    let mut stride = 4;
                    while stride < 32 {
                        // SAFETY: the vote is the same in all lanes.
                        let other = unsafe { warp::warp_shuffle_xor(ALL, max[column], stride, 32) };
                        max[column] = if other > max[column] {
                            other
                        } else {
                            max[column]
                        };
                        stride *= 2;
                    }
                    // By the column alone, so that a row's result does not depend on its neighbours.
                    let factor = if max[column] > softmax[column].max + SLACK {
                        softmax[column].raise(max[column])
                    } else {
                        1.0
                    };
                    let mut i = 0;
                    while i < DIM_BLOCKS {
                        self.out[i][block][column] *= factor;
                        self.out[i][block][2 + column] *= factor;
                        i += 1;
                    }
                    column += 1;
                }
            }

            let offset = [softmax[0].offset(), softmax[1].offset()];
            let mut i = 0;
            while i < 2 * KEY_BLOCKS {
                let logits = &s[i / 2][block];
                let mut weights = [logits[i % 2 * 2], logits[i % 2 * 2 + 1]];
                if V::SOFTMAX {
                    weights = [exp2(weights[0] - offset[0]), exp2(weights[1] - offset[1])];
                    let of_sum = if C::BY_TOKEN {
                        scales.values_inverse[i]
                    } else {
                        1.0
                    };
                    softmax[0].sum += weights[0] * of_sum;
                    softmax[1].sum += weights[1] * of_sum;
                }
                // From keys × rows to the B operand, which wants rows × keys.
                // SAFETY: the lanes are together.
                p[i / 2][block][i % 2] =
                    unsafe { mma::movmatrix_trans(C::Product::pack(weights[0], weights[1])) };
                i += 1;
            }
            block += 1;
        }

        p
    }

    /// Sums up the weights over the lanes and normalises the output.
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

/// Scales of a lane's keys in a chunk, and of their values.
pub struct TokenScales {
    keys: [f32; 2 * KEY_BLOCKS],
    values_log2: [f32; 2 * KEY_BLOCKS],
    values_inverse: [f32; 2 * KEY_BLOCKS],
}

impl TokenScales {
    /// Where no token has any.
    const ONE: Self = Self {
        keys: [1.0; 2 * KEY_BLOCKS],
        values_log2: [0.0; 2 * KEY_BLOCKS],
        values_inverse: [1.0; 2 * KEY_BLOCKS],
    };

    /// Smaller scales of values count as this, whose inverse is finite.
    const SMALLEST: f32 = 1e-30;

    /// Of a chunk.
    ///
    /// # Safety
    /// The chunk is there.
    #[inline(always)]
    unsafe fn load<const MASKED: bool>(chunk: Chunk, lane: u32, keys: Keys) -> Self {
        let mut scales = Self::ONE;
        let mut i = 0;
        while i < 2 * KEY_BLOCKS {
            let key = lane / 4 + i as u32 * 8;
            let at = chunk.scales + key * 4;
            // SAFETY: inside the chunk's scales.
            let [of_key, of_value] =
                unsafe { [shared::load_f32(at), shared::load_f32(at + KEYS * 4)] };
            let position = chunk.first + key;
            // There are none of what is no key.
            if !MASKED || position >= keys.begin && position < keys.end {
                scales.keys[i] = of_key;
                let of_value = if of_value < Self::SMALLEST {
                    Self::SMALLEST
                } else {
                    of_value
                };
                scales.values_log2[i] = lg2(of_value);
                scales.values_inverse[i] = rcp(of_value);
            }
            i += 1;
        }
        scales
    }
}

/// Zeroes the values of a chunk that are not among `keys`.
///
/// # Safety
/// The lanes come together; nobody else uses the chunk.
#[inline(always)]
unsafe fn zero_values(chunk: Chunk, lane: u32, row_bytes: u32, keys: Keys) {
    // A row is one line in each slab of its group, however swizzled: as many lines at a time as the lanes fill.
    let width = if row_bytes < 128 { row_bytes } else { 128 };
    let (slabs, lanes) = (row_bytes / width, width / 16);
    let mut line = lane / lanes;
    while line < KEYS * slabs {
        let row = line / (8 * slabs) * 8 + line % 8;
        let position = chunk.first + row;
        if position < keys.begin || position >= keys.end {
            // SAFETY: inside the chunk.
            unsafe { shared::store_u32x4(chunk.v + line * width + lane % lanes * 16, [0; 4]) };
        }
        line += 32 / lanes;
    }
    // SAFETY: the lanes are together.
    unsafe { warp::sync_warp(ALL) };
}
