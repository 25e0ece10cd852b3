//! The two products of a warp's rows with a block of keys and its values.

use cuda_std::{mma, prelude::*};

use super::tile::Shared;
use crate::{common::half::Half, common::softmax::Rows, common::variant::Variant};

/// A lane's `ldmatrix` row addresses for 16 × 16 elements, as offsets from the first row's slab.
#[derive(Clone, Copy)]
pub(super) struct Lane {
    /// For A fragments of queries and (transposed) B fragments of values: matrices 1 and 3 are the next 8 rows, 2 and 3
    /// the next 8 columns.
    rows_first: u32,
    /// For B fragments of keys: rows and columns exchanged.
    columns_first: u32,
}

impl Lane {
    #[inline(always)]
    pub(super) fn new() -> Self {
        let (matrix, row) = (warp::lane_id() / 8, warp::lane_id() % 8);
        let offset = |down, right| (down * 8 + row) * 128 + (right ^ row) * 16;
        Self {
            rows_first: offset(matrix % 2, matrix / 2),
            columns_first: offset(matrix / 2, matrix % 2),
        }
    }
}

/// Address of columns `16 · step ..` of rows `16 · block ..`.
#[inline(always)]
fn fragment(matrix: u32, slab: u32, lane: u32, block: u32, step: u32) -> u32 {
    // The swizzle changes only bits 4 to 6, and within a slab the step changes only these bits.
    ((matrix + lane) ^ (step % 4 * 32)) + step / 4 * slab + block * 2048
}

/// Four elements of an accumulator: those of one `m16n8`.
///
/// # Safety
/// `4 * index + 4` is at most `N`.
#[inline(always)]
unsafe fn part<const N: usize>(accumulator: &mut [f32; N], index: usize) -> &mut [f32; 4] {
    // SAFETY: the caller's promise.
    unsafe { &mut *accumulator.as_mut_ptr().add(4 * index).cast() }
}

/// S = Q·Kᵀ.
///
/// # Safety
/// Whole warps come here; queries and keys have arrived.
#[inline(always)]
pub(super) unsafe fn queries_keys<T: Half, const S: usize, const HALVES: usize>(
    logits: &mut [[f32; S]; HALVES],
    s: Shared,
    lane: Lane,
    keys: u32,
) {
    let q = s.queries() + thread::thread_idx_x() / 32 * (s.shape.warp_rows() * 128);
    *logits = [[0.0; S]; HALVES];
    let mut step = 0;
    while step < s.shape.head_dim / 16 {
        // SAFETY: whole warps; queries and keys have arrived.
        unsafe {
            let mut a = [[0; 4]; HALVES];
            let mut half = 0;
            while half < HALVES {
                let slab = s.shape.query_slab();
                a[half] = mma::ldmatrix_x4(fragment(q, slab, lane.rows_first, half as u32, step));
                half += 1;
            }
            let mut block = 0;
            while block < S / 8 {
                let slab = s.shape.block_slab();
                let at = fragment(keys, slab, lane.columns_first, block as u32, step);
                let [b0, b1, b2, b3] = mma::ldmatrix_x4(at);
                half = 0;
                while half < HALVES {
                    T::mma(part(&mut logits[half], 2 * block), a[half], [b0, b1]);
                    half += 1;
                }
                half = 0;
                while half < HALVES {
                    T::mma(part(&mut logits[half], 2 * block + 1), a[half], [b2, b3]);
                    half += 1;
                }
                block += 1;
            }
        }
        step += 1;
    }
}

/// O += P·V. The weights are computed from the logits 16 keys at a time: their exponentials overlap with the products
/// of the previous 16 keys.
///
/// # Safety
/// Whole warps come here; the values have arrived.
#[inline(always)]
pub(super) unsafe fn weights_values<
    T: Half,
    V: Variant,
    const S: usize,
    const O: usize,
    const HALVES: usize,
>(
    o: &mut [[f32; O]; HALVES],
    logits: &[[f32; S]; HALVES],
    rows: &mut [Rows; HALVES],
    scale: impl Fn() -> [[f32; 2]; HALVES],
    s: Shared,
    lane: Lane,
    values: u32,
) {
    let mut weigh = |step: usize| {
        let mut weights = [[0; 4]; HALVES];
        let scale = scale();
        let mut half = 0;
        while half < HALVES {
            // SAFETY: `step < S / 8`.
            let slice: &[f32; 8] = unsafe { &*logits[half].as_ptr().add(8 * step).cast() };
            rows[half].weigh::<V, 8, 4>(slice, scale[half], &mut weights[half], T::pack);
            half += 1;
        }
        weights
    };
    let mut next = weigh(0);
    let mut step = 0;
    while step < S / 8 {
        let weights = next;
        if step + 1 < S / 8 {
            next = weigh(step + 1);
        }
        let mut columns = 0;
        while columns < O / 8 {
            let slab = s.shape.block_slab();
            let at = fragment(values, slab, lane.rows_first, step as u32, columns as u32);
            // SAFETY: whole warps; the values have arrived.
            unsafe {
                let [b0, b1, b2, b3] = mma::ldmatrix_x4_trans(at);
                let mut half = 0;
                while half < HALVES {
                    T::mma(part(&mut o[half], 2 * columns), weights[half], [b0, b1]);
                    half += 1;
                }
                half = 0;
                while half < HALVES {
                    T::mma(part(&mut o[half], 2 * columns + 1), weights[half], [b2, b3]);
                    half += 1;
                }
            }
            columns += 1;
        }
        step += 1;
    }
}
