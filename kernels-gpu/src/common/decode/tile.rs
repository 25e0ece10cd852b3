//! What one warp does with a chunk of keys: Sᵀ = K·Qᵀ, softmax, Oᵀ += Vᵀ·Pᵀ.
//!
//! Rows of a tile are columns of fragments: lane `l` holds columns `2·(l % 4)` and the next of each block of 8.

use cuda_std::{misc, mma, shared, warp};

use super::{
    KEYS,
    products::{KEY_BLOCKS, LaneOffsets, Logits, Weights},
};
use crate::{
    abi::QueryRow,
    common::{
        half::Half,
        math::exp2,
        softmax::SLACK,
        state::Softmax,
        tree,
        variant::{Pair, Variant},
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
    /// `[d / 16][row / 8]`: elements d, d of columns 2t, 2t + 1, then the same of d + 8.
    pub out: [[[f32; 4]; ROW_BLOCKS]; DIM_BLOCKS],
    /// What weights are taken relative to and their sum, for the lane's keys alone until [`Rows::finish`].
    pub softmax: [[Softmax; 2]; ROW_BLOCKS],
    token: [[u32; 2]; ROW_BLOCKS],
    head: [[u32; 2]; ROW_BLOCKS],
    position: [[i32; 2]; ROW_BLOCKS],
}

impl<const DIM_BLOCKS: usize, const ROW_BLOCKS: usize> Rows<DIM_BLOCKS, ROW_BLOCKS> {
    pub(super) const ROW_BYTES: u32 = DIM_BLOCKS as u32 * 32;
    /// Whether Q is needed in shared memory no more once [`Rows::start`] has run.
    pub const KEEPS_Q: bool = DIM_BLOCKS * ROW_BLOCKS <= 16;

    /// Nothing.
    pub const EMPTY: Self = Self {
        q: [[[0; 2]; ROW_BLOCKS]; DIM_BLOCKS],
        q_address: 0,
        out: [[[0.0; 4]; ROW_BLOCKS]; DIM_BLOCKS],
        softmax: [[Softmax::EMPTY; 2]; ROW_BLOCKS],
        token: [[0; 2]; ROW_BLOCKS],
        head: [[0; 2]; ROW_BLOCKS],
        position: [[0; 2]; ROW_BLOCKS],
    };

    /// Takes up new rows, having been cleared: Q from `q` (row-major, dense), and what is known of them by `row`,
    /// which gives the token and the query head of a row.
    ///
    /// # Safety
    /// The lanes come together; `q` is the shared address of `8 · ROW_BLOCKS` rows, which stay there unless
    /// [`Rows::KEEPS_Q`].
    #[inline(always)]
    pub unsafe fn start(&mut self, q: u32, lane: u32, row: impl Fn(u32) -> (QueryRow, u32)) {
        // Matrix i of a load holds elements 8i.. of the lanes' rows: two k-steps in four matrices.
        self.q_address = q + (lane % 8) * Self::ROW_BYTES + (lane / 8) * 16;
        if Self::KEEPS_Q {
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

    /// Forgets what was attended to. Right after the result was stored: accumulators that are known to be
    /// empty need no registers while others work on the result.
    #[inline(always)]
    pub fn clear(&mut self) {
        self.out = Self::EMPTY.out;
        self.softmax = Self::EMPTY.softmax;
    }

    /// Attends to the keys of a chunk; with `MASKED`, to those of them that are `keys` and visible.
    ///
    /// # Safety
    /// The lanes come together; the chunk is there. With `MASKED` its values may be written to.
    #[inline(always)]
    pub unsafe fn attend<T: Half, V: Variant, const MASKED: bool>(
        &mut self,
        variant: &V,
        lane: u32,
        offsets: &LaneOffsets,
        chunk: Chunk,
        keys: Keys,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            let logits = self.logits::<T>(offsets, chunk.k);
            if MASKED {
                // Memory past the last key may hold NaN, and 0 · NaN is NaN.
                zero_values(chunk, lane, DIM_BLOCKS as u32 * 256, keys);
            }
            let weights = self.weigh::<T, V, MASKED>(variant, lane, chunk.first, keys, logits);
            self.values::<T>(offsets, chunk.v, &weights);
        }
    }

    /// From accumulators to weights, with the first key of the chunk at position `first`. With `MASKED`, keys that
    /// are not `keys` or not visible weigh nothing.
    ///
    /// # Safety
    /// The lanes come together.
    #[inline(always)]
    pub unsafe fn weigh<T: Half, V: Variant, const MASKED: bool>(
        &mut self,
        variant: &V,
        lane: u32,
        first: u32,
        keys: Keys,
        mut s: Logits<ROW_BLOCKS>,
    ) -> Weights<ROW_BLOCKS> {
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
                let mut i = 0;
                while i < 2 * KEY_BLOCKS {
                    let logit = &mut s[i / 2][block][i % 2 * 2 + column];
                    let at = Pair {
                        token,
                        head,
                        position,
                        key: first + i as u32 * 8,
                    };
                    *logit = variant.logit(*logit, at);
                    if MASKED && ((at.key as i32) < low || at.key as i32 > high)
                        || MASKED && strange >> i & 1 != 0
                        || V::MASKS && !variant.visible(at)
                    {
                        *logit = f32::NEG_INFINITY;
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
            let grew = max[0] > softmax[0].max + SLACK || max[1] > softmax[1].max + SLACK;
            // SAFETY: the lanes are together.
            if unsafe { warp::warp_vote_any(ALL, grew) } {
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
                let weights = [
                    exp2(logits[i % 2 * 2] - offset[0]),
                    exp2(logits[i % 2 * 2 + 1] - offset[1]),
                ];
                softmax[0].sum += weights[0];
                softmax[1].sum += weights[1];
                // From keys × rows to the B operand, which wants rows × keys.
                // SAFETY: the lanes are together.
                p[i / 2][block][i % 2] =
                    unsafe { mma::movmatrix_trans(T::pack(weights[0], weights[1])) };
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
    pub unsafe fn finish(&mut self) {
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
                let norm = softmax.norm();
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
/// The lanes come together; nobody else uses the chunk.
#[inline(always)]
unsafe fn zero_values(chunk: Chunk, lane: u32, group: u32, keys: Keys) {
    // A row is one line of 128 bytes in each kilobyte of its group, however swizzled: four lines at a time.
    let mut line = lane / 8;
    while line < KEYS / 8 * group / 128 {
        let row = line / (group / 128) * 8 + line % 8;
        let position = chunk.first + row;
        if position < keys.begin || position >= keys.end {
            // SAFETY: inside the chunk.
            unsafe { shared::store_u32x4(chunk.v + line * 128 + lane % 8 * 16, [0; 4]) };
        }
        line += 4;
    }
    // SAFETY: the lanes are together.
    unsafe { warp::sync_warp(ALL) };
}
