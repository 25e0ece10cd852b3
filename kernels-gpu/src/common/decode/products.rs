//! The products of a warp's rows with a chunk: Sᵀ = K·Qᵀ, Oᵀ += Vᵀ·Pᵀ.
//!
//! They are transposed so that keys and head dimension, of which there are plenty, stand on the 16-wide side of
//! the instruction and the few query rows on the 8-wide one.
//!
//! A chunk lies in shared memory as the tensor map of a page delivers it: groups of 8 keys, in a group
//! one kilobyte for each 64 elements of the head, in it 8 rows of 128 bytes, 16-byte units swizzled
//! by the row.

use cuda_std::{misc, mma};

use super::{KEYS, tile::Rows};
use crate::common::half::Half;

/// Blocks of 16 keys in a chunk.
pub(super) const KEY_BLOCKS: usize = KEYS as usize / 16;

/// Products of a chunk's keys: `[key / 16][row / 8]`, keys k, k of columns 2t, 2t + 1, then the same of k + 8.
pub type Logits<const ROW_BLOCKS: usize> = [[[f32; 4]; ROW_BLOCKS]; KEY_BLOCKS];

/// What a chunk's keys weigh, as the operand of the product with their values.
pub type Weights<const ROW_BLOCKS: usize> = [[[u32; 2]; ROW_BLOCKS]; KEY_BLOCKS];

/// Where a lane reads fragments: offsets in a chunk of the first 32-byte column of a half row. Column `c` is
/// at the *address* with `32 · c` XORed into it: the swizzle turns the steps along a row into that.
#[derive(Clone, Copy)]
pub struct LaneOffsets {
    k: u32,
    v: u32,
}

impl LaneOffsets {
    /// For heads of `dim` elements.
    #[inline(always)]
    pub fn new(lane: u32, dim: u32) -> Self {
        let (matrix, row) = (lane / 8, lane % 8);
        let group = dim * 16;
        // K: matrices 1 and 3 hold the next 8 keys, 2 and 3 the next 8 elements. V, which is loaded
        // transposed: the other way round.
        Self {
            k: (matrix % 2) * group + row * 128 + ((matrix / 2) ^ row) * 16,
            v: (matrix / 2) * group + row * 128 + ((matrix % 2) ^ row) * 16,
        }
    }
}

/// An address in a chunk, which begins at a multiple of 128 bytes, moved on by so many 32-byte columns.
#[inline(always)]
fn column(address: u32, columns: usize) -> u32 {
    (address ^ (columns as u32 % 4 * 32)) + columns as u32 / 4 * 1024
}

impl<const DIM_BLOCKS: usize, const ROW_BLOCKS: usize> Rows<DIM_BLOCKS, ROW_BLOCKS> {
    /// Fragments of k-steps `step` and `step + 1`.
    ///
    /// # Safety
    /// The lanes come together, after [`Rows::start`]; the rows are still there.
    #[inline(always)]
    pub(super) unsafe fn load_q(&mut self, step: usize) {
        let mut block = 0;
        while block < ROW_BLOCKS {
            let offset = block as u32 * 8 * Self::ROW_BYTES + step as u32 * 32;
            // SAFETY: inside the rows.
            let [a, b, c, d] = unsafe { mma::ldmatrix_x4(self.q_address + offset) };
            self.q[step][block] = [a, b];
            self.q[step + 1][block] = [c, d];
            block += 1;
        }
    }

    /// K·Qᵀ of the keys of a chunk, which are at `k`.
    ///
    /// # Safety
    /// The lanes come together; the keys are there.
    #[inline(always)]
    pub unsafe fn logits<T: Half>(&self, offsets: &LaneOffsets, k: u32) -> Logits<ROW_BLOCKS> {
        let group = DIM_BLOCKS as u32 * 256;
        let mut s = [[[0.0; 4]; ROW_BLOCKS]; KEY_BLOCKS];
        let first_keys = misc::opaque(k + offsets.k);
        let mut step = 0;
        while step < DIM_BLOCKS {
            let mut q = self.q[step];
            if !Self::KEEPS_Q {
                let mut block = 0;
                while block < ROW_BLOCKS {
                    let offset = block as u32 * 8 * Self::ROW_BYTES + step as u32 * 32;
                    // SAFETY: inside the rows, which are there until this warp is finished with them.
                    q[block] = unsafe { mma::ldmatrix_x2(self.q_address + offset) };
                    block += 1;
                }
            }
            let mut keys = 0;
            while keys < KEY_BLOCKS {
                let at = column(first_keys, step) + keys as u32 * 2 * group;
                // SAFETY: inside the chunk.
                let a = unsafe { mma::ldmatrix_x4(at) };
                let mut block = 0;
                while block < ROW_BLOCKS {
                    // SAFETY: the lanes are together.
                    unsafe { T::mma(&mut s[keys][block], a, q[block]) };
                    block += 1;
                }
                keys += 1;
            }
            step += 1;
        }
        s
    }

    /// Adds the values of a chunk, which are at `v`, as they are weighed.
    ///
    /// # Safety
    /// The lanes come together; the values are there.
    #[inline(always)]
    pub unsafe fn values<T: Half>(
        &mut self,
        offsets: &LaneOffsets,
        v: u32,
        p: &Weights<ROW_BLOCKS>,
    ) {
        let group = DIM_BLOCKS as u32 * 256;
        // Here, where the addresses of the keys need their registers no more.
        let first_values = misc::opaque(v + offsets.v);
        let mut dim = 0;
        while dim < DIM_BLOCKS {
            let mut keys = 0;
            while keys < KEY_BLOCKS {
                let at = column(first_values, dim) + keys as u32 * 2 * group;
                // SAFETY: inside the chunk.
                let a = unsafe { mma::ldmatrix_x4_trans(at) };
                let mut block = 0;
                while block < ROW_BLOCKS {
                    // SAFETY: the lanes are together.
                    unsafe { T::mma(&mut self.out[dim][block], a, p[keys][block]) };
                    block += 1;
                }
                keys += 1;
            }
            dim += 1;
        }
    }
}
