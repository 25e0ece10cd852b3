//! The products of a warp's rows with a chunk: Sᵀ = K·Qᵀ, Oᵀ += Vᵀ·Pᵀ.
//!
//! The products are transposed: keys and the head dimension, which are large, go to the 16-wide side of the `mma`
//! instruction, and the few query rows to the 8-wide side.
//!
//! A chunk has the layout in shared memory that TMA writes with a page's tensor map. It consists of groups of 8 keys. A
//! group has 1024 bytes for each 64 elements of the head: 8 rows of 128 bytes, whose 16-byte units are swizzled by the
//! row. (With 8-bit elements, 1024 bytes hold 128 elements of 8 keys. Keys of 64 such elements have rows of 64 bytes,
//! swizzled by half the row. Two heads of 80 take 320 bytes: their three lines of 128 bytes begin 96 bytes apart, so
//! that no byte past the end is read.)

use cuda_std::{convert, misc, mma, shared, warp};

use super::tile::{KEY_BLOCKS, LaneOffsets, Logits, Rows, Weights};
use crate::common::{
    cache::{Cache, fit_f16},
    half::Half,
};

const ALL: u32 = warp::FULL_MASK;

/// Moves an address in a chunk, which begins at a multiple of 128 bytes, by `columns` 32-byte columns.
#[inline(always)]
pub(super) const fn column(address: u32, columns: usize) -> u32 {
    column_of(address, columns, 1024)
}

/// The same where a row's lines of 128 bytes are `apart` bytes apart.
#[inline(always)]
const fn column_of(address: u32, columns: usize, apart: u32) -> u32 {
    (address ^ (columns as u32 % 4 * 32)) + columns as u32 / 4 * apart
}

impl<const DIM_BLOCKS: usize, const ROW_BLOCKS: usize> Rows<DIM_BLOCKS, ROW_BLOCKS> {
    /// Loads the Q fragments of k-steps `step` and, if there is one, `step + 1`.
    ///
    /// # Safety
    /// The lanes come together, after [`Rows::start`]; Q is still in shared memory.
    #[inline(always)]
    pub(super) unsafe fn load_q<C: Cache>(&mut self, step: usize) {
        let mut block = 0;
        while block < ROW_BLOCKS {
            let rows = if C::PAIRS {
                self.q_block
            } else {
                8 * Self::ROW_BYTES
            };
            let at = self.q_address + block as u32 * rows + step as u32 * 32;
            // SAFETY: inside the rows.
            unsafe {
                if step + 1 < DIM_BLOCKS {
                    let [a, b, c, d] = mma::ldmatrix_x4(at);
                    self.q[step][block] = [a, b];
                    self.q[step + 1][block] = [c, d];
                } else {
                    self.q[step][block] = mma::ldmatrix_x2(at);
                }
            }
            block += 1;
        }
    }

    /// Loads the Q fragment of a k-step for 8-bit keys, of which a lane has four neighbouring elements; not converted.
    ///
    /// # Safety
    /// As [`load_q`](Self::load_q).
    #[inline(always)]
    unsafe fn load_q_pairs(&self, step: usize, block: usize) -> [u32; 2] {
        let offset = block as u32 * self.q_block + step as u32 * 32;
        // SAFETY: inside the rows.
        unsafe { shared::load_u32x2(self.q_address + offset) }
    }

    /// As [`load_q_pairs`](Self::load_q_pairs); bf16 is scaled into the range of f16 and converted.
    ///
    /// # Safety
    /// As [`load_q`](Self::load_q), after [`fit_queries`](Self::fit_queries).
    #[inline(always)]
    unsafe fn load_q_fitted<C: Cache>(&self, step: usize, block: usize) -> [u32; 2] {
        // SAFETY: the caller's promise.
        let pairs = unsafe { self.load_q_pairs(step, block) };
        if !C::Query::WIDE {
            return C::in_order(pairs);
        }
        let fit = self.fit[block];
        C::in_order(pairs.map(|pair| {
            let [first, second] = convert::bf16x2_to_f32(pair);
            convert::f32x2_to_f16x2(first * fit, second * fit)
        }))
    }

    /// Replaces the rows of Q in shared memory by the lanes' fragments: no conversion in the main loop. Those of four
    /// k-steps change places within their line of 128 bytes, so that no bank is read twice. A lane reads and writes its own
    /// elements alone.
    ///
    /// # Safety
    /// As [`load_q_fitted`](Self::load_q_fitted); the rows are this warp's alone, and begin at a multiple of 128 bytes.
    #[inline(always)]
    unsafe fn replace_q<C: Cache>(&mut self, lane: u32) {
        const { assert!(DIM_BLOCKS.is_multiple_of(4) || !C::OWN_QUERIES || Self::KEEPS_Q) };
        let address = self.q_address + lane / 4 % 4 * 32;
        let mut block = 0;
        while block < ROW_BLOCKS {
            let at = address + block as u32 * self.q_block;
            let mut first = 0;
            while first < DIM_BLOCKS {
                let mut of_line = [[0; 2]; 4];
                // SAFETY: inside the rows.
                unsafe {
                    let mut step = 0;
                    while step < 4 {
                        of_line[step] = self.load_q_fitted::<C>(first + step, block);
                        step += 1;
                    }
                    step = 0;
                    while step < 4 {
                        shared::store_u32x2(column_of(at, first + step, 128), of_line[step]);
                        step += 1;
                    }
                }
                first += 4;
            }
            block += 1;
        }
        self.q_address = address;
    }

    /// Finds the powers of two that scale rows of bf16 into the range of f16, and loads the fragments that stay in
    /// registers.
    ///
    /// # Safety
    /// As [`load_q`](Self::load_q).
    #[inline(always)]
    pub(super) unsafe fn fit_queries<C: Cache>(&mut self, lane: u32) {
        let mut block = 0;
        while block < ROW_BLOCKS {
            // SAFETY: inside the rows; the lanes are together.
            unsafe {
                let mut inverse = 1.0;
                if C::Query::WIDE {
                    let mut largest = 0;
                    let mut step = 0;
                    while step < DIM_BLOCKS {
                        let [a, b] = self.load_q_pairs(step, block);
                        let magnitudes = [a, a << 16, b, b << 16].map(|x| x & 0x7FFF_0000);
                        largest = largest.max(magnitudes[0]).max(magnitudes[1]);
                        largest = largest.max(magnitudes[2]).max(magnitudes[3]);
                        step += 1;
                    }
                    largest = largest.max(warp::warp_shuffle_xor(ALL, largest, 1, 32));
                    largest = largest.max(warp::warp_shuffle_xor(ALL, largest, 2, 32));
                    [self.fit[block], inverse] = fit_f16(largest);
                }
                // The rows of Q are columns of the logits.
                let mut column = 0;
                while column < 2 {
                    let of = (2 * (lane % 4) + column as u32) * 4;
                    let inverse = warp::warp_shuffle_idx(ALL, inverse, of, 32);
                    self.set_key_scale(block, column, inverse);
                    column += 1;
                }
                if Self::KEEPS_Q {
                    let mut step = 0;
                    while step < DIM_BLOCKS {
                        self.q[step][block] = self.load_q_fitted::<C>(step, block);
                        step += 1;
                    }
                }
            }
            block += 1;
        }
        if !Self::KEEPS_Q && C::OWN_QUERIES {
            // SAFETY: the caller's promise.
            unsafe { self.replace_q::<C>(lane) };
        }
    }

    /// KV heads in a row of keys.
    const fn halves<C: Cache>() -> usize {
        if C::PAIRS { 2 } else { 1 }
    }

    /// The column of the chunk in shared memory, four per line, that holds column `of_row` of a row. If lines overlap,
    /// it is in the last line that begins at or before it.
    const fn columns<C: Cache>(of_row: usize) -> usize {
        let in_row = Self::halves::<C>() * DIM_BLOCKS / if C::SCALED { 2 } else { 1 };
        let lines = in_row.div_ceil(4);
        if in_row.is_multiple_of(4) || lines == 1 {
            return of_row;
        }
        let apart = (in_row - 4) / (lines - 1);
        let line = if of_row / apart < lines {
            of_row / apart
        } else {
            lines - 1
        };
        line * 4 + of_row - line * apart
    }

    /// The Q fragments of a k-step, from registers or from shared memory.
    ///
    /// # Safety
    /// As [`load_q`](Self::load_q).
    #[inline(always)]
    unsafe fn q_of<C: Cache>(&self, step: usize) -> [[u32; 2]; ROW_BLOCKS] {
        let mut q = self.q[step];
        if !Self::KEEPS_Q {
            let mut block = 0;
            while block < ROW_BLOCKS {
                // SAFETY: inside the rows, which stay there until this warp is finished with them.
                q[block] = unsafe {
                    if C::OWN_QUERIES {
                        let rows = self.q_address + block as u32 * self.q_block;
                        shared::load_u32x2(column_of(rows, step, 128))
                    } else if C::SCALED {
                        self.load_q_fitted::<C>(step, block)
                    } else {
                        let offset = block as u32 * 8 * Self::ROW_BYTES + step as u32 * 32;
                        mma::ldmatrix_x2(self.q_address + offset)
                    }
                };
                block += 1;
            }
        }
        q
    }

    /// K·Qᵀ of a chunk, whose keys are at `k`.
    ///
    /// # Safety
    /// The lanes come together; the keys are loaded.
    #[inline(always)]
    pub unsafe fn logits<C: Cache>(&self, offsets: &LaneOffsets, k: u32) -> Logits<ROW_BLOCKS> {
        let group = offsets.row_bytes * 8;
        let mut s = [[[0.0; 4]; ROW_BLOCKS]; KEY_BLOCKS];
        let first_keys = misc::opaque(k + offsets.k);
        // K-steps per 32-byte column of a key.
        let steps = if C::SCALED { 2 } else { 1 };
        let mut step = 0;
        while step < DIM_BLOCKS {
            // SAFETY: the caller's promise.
            let (q, next_q) = unsafe {
                (
                    self.q_of::<C>(step),
                    if C::SCALED {
                        self.q_of::<C>(step + 1)
                    } else {
                        [[0; 2]; ROW_BLOCKS]
                    },
                )
            };
            let mut keys = 0;
            while keys < KEY_BLOCKS {
                let s = &mut s[keys];
                let mut half = 0;
                while half < Self::halves::<C>() {
                    let columns = Self::columns::<C>(half * DIM_BLOCKS / steps + step / steps);
                    let at = column(first_keys, columns) + keys as u32 * 2 * group;
                    // SAFETY: inside the chunk; the lanes are together.
                    unsafe {
                        let a = mma::ldmatrix_x4(at);
                        if C::SCALED {
                            // A lane has elements 4t.. of a key: the first two serve as those of column 2t, the other
                            // two as those of 2t + 8.
                            let [lower, upper] = [C::widen(a[0]), C::widen(a[1])];
                            products::<C, ROW_BLOCKS>(
                                s,
                                [lower[0], upper[0], lower[1], upper[1]],
                                &q,
                                half,
                            );
                            let [lower, upper] = [C::widen(a[2]), C::widen(a[3])];
                            products::<C, ROW_BLOCKS>(
                                s,
                                [lower[0], upper[0], lower[1], upper[1]],
                                &next_q,
                                half,
                            );
                        } else {
                            products::<C, ROW_BLOCKS>(s, a, &q, half);
                        }
                    }
                    half += 1;
                }
                keys += 1;
            }
            step += steps;
        }
        s
    }

    /// Adds Vᵀ·Pᵀ of a chunk, whose values are at `v`.
    ///
    /// # Safety
    /// The lanes come together; the values are loaded.
    #[inline(always)]
    pub unsafe fn values<C: Cache>(
        &mut self,
        offsets: &LaneOffsets,
        v: u32,
        p: &Weights<ROW_BLOCKS>,
    ) {
        let group = offsets.row_bytes * 8;
        // Computed here, where the addresses of the keys no longer take registers.
        let first_values = misc::opaque(v + offsets.v);
        let blocks = if C::SCALED { 2 } else { 1 };
        let mut dim = 0;
        while dim < DIM_BLOCKS {
            let mut keys = 0;
            while keys < KEY_BLOCKS {
                let mut half = 0;
                while half < Self::halves::<C>() {
                    let columns = Self::columns::<C>(half * DIM_BLOCKS / blocks + dim / blocks);
                    let at = column(first_values, columns) + keys as u32 * 2 * group;
                    // SAFETY: inside the chunk; the lanes are together.
                    unsafe {
                        let a = mma::ldmatrix_x4_trans(at);
                        let (p, out) = (&p[keys], &mut self.out);
                        if C::SCALED {
                            // A lane has elements 2g, 2g + 1 of values 2t, 2t + 1: the first elements serve as row g,
                            // the second ones as row g + 8.
                            let [a, b, c, d] = a.map(|word| C::widen_transposed(word));
                            let [first, second] =
                                [[a[0], a[1], c[0], c[1]], [b[0], b[1], d[0], d[1]]];
                            products::<C, ROW_BLOCKS>(&mut out[dim], first, p, half);
                            products::<C, ROW_BLOCKS>(&mut out[dim + 1], second, p, half);
                        } else {
                            products::<C, ROW_BLOCKS>(&mut out[dim], a, p, half);
                        }
                    }
                    half += 1;
                }
                keys += 1;
            }
            dim += blocks;
        }
    }
}

/// Multiplies a block of 16 keys or elements with all rows; with a pair of KV heads, with the rows of head `half`.
///
/// # Safety
/// The lanes come together.
#[inline(always)]
unsafe fn products<C: Cache, const ROW_BLOCKS: usize>(
    to: &mut [[f32; 4]; ROW_BLOCKS],
    a: [u32; 4],
    b: &[[u32; 2]; ROW_BLOCKS],
    half: usize,
) {
    let (mut block, end) = match C::PAIRS {
        true => (half * ROW_BLOCKS / 2, (half + 1) * ROW_BLOCKS / 2),
        false => (0, ROW_BLOCKS),
    };
    while block < end {
        // SAFETY: the lanes are together.
        unsafe { C::Product::mma(&mut to[block], a, b[block]) };
        block += 1;
    }
}
