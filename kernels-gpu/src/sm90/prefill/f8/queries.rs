//! Quantisation of queries to e4m3, in place in shared memory.

use cuda_std::{convert::f32x2_to_e4m3x2, fence, prelude::*};

use super::super::{epilogue::staged, shared::Shared};
use crate::common::half::Half;

const WARP: u32 = warp::FULL_MASK;

/// Quantises a warp's 16 rows of queries to e4m3 in place. Returns the scales by which Q·Kᵀ of the thread's two
/// accumulator rows is to be multiplied.
///
/// A row is multiplied by the power of two that brings its largest magnitude to [128, 256): elements that are exact in
/// e4m3 stay exact. The unused half of the rows' bytes is left undefined.
///
/// # Safety
/// A whole warp comes here, which owns the rows; the queries have arrived. All warps of the consumer meet at a barrier
/// before a product reads the result.
#[inline(always)]
pub(super) unsafe fn quantise<T: Half, const VECTORS: usize>(
    s: Shared,
    stage: u32,
    first_row: u32,
) -> [f32; 2] {
    let lane = warp::lane_id();
    let mut scales = [0.0; 2];
    let mut h = 0;
    while h < 2 {
        let row = first_row + lane / 4 + 8 * h as u32;
        // Four lanes share a row. Odd rows start at another vector, so that the loads use all banks.
        let vector = |i: usize| lane % 4 + 4 * (i as u32 ^ (row % 2));
        let mut vectors = [[0; 4]; VECTORS];
        let mut most = 0.0_f32;
        // SAFETY: whole warps; the rows are this warp's.
        unsafe {
            let mut i = 0;
            while i < VECTORS {
                vectors[i] = shared::load_u32x4(staged(s, stage, row, vector(i)));
                let mut k = 0;
                while k < 4 {
                    let [a, b] = T::unpack(vectors[i][k]);
                    most = most.max(a.abs()).max(b.abs());
                    k += 1;
                }
                i += 1;
            }
            most = most.max(warp::warp_shuffle_xor(WARP, most, 1, 32));
            most = most.max(warp::warp_shuffle_xor(WARP, most, 2, 32));
            // A row's result may overwrite other rows of its group of eight: all lanes must have read.
            warp::sync_warp(WARP);
            let exponent = factor_of(most);
            let factor = f32::from_bits(exponent << 23);
            scales[h] = f32::from_bits((254 - exponent) << 23);
            i = 0;
            while i < VECTORS {
                let [a, b, c, d] = vectors[i].map(|pair| {
                    let [first, second] = T::unpack(pair);
                    u32::from(f32x2_to_e4m3x2(first * factor, second * factor))
                });
                let at = place(s, stage, row, vector(i));
                shared::store_u32x2(at, [a | b << 16, c | d << 16]);
                i += 1;
            }
        }
        h += 1;
    }
    fence::proxy_async_shared();
    scales
}

/// The biased f32 exponent of the power of two for a row with this largest magnitude. If that is ∞, the factor is 0: ∞ · 0 makes
/// the row's products NaN, but ∞ in e4m3 would be its largest number.
#[inline(always)]
fn factor_of(most: f32) -> u32 {
    let exponent = most.to_bits() >> 23;
    // The clamp keeps the factor and its inverse finite and normal for tiny magnitudes.
    let exponent = if exponent < 37 { 37 } else { exponent };
    if most == 0.0 {
        127
    } else if exponent == 255 {
        0
    } else {
        261 - exponent
    }
}

/// Address of eight quantised elements: rows of 128 bytes with the 128-byte swizzle, in slabs of 128 columns.
#[inline(always)]
fn place(s: Shared, stage: u32, row: u32, eight: u32) -> u32 {
    let (vector, half) = (eight / 2, eight % 2 * 8);
    staged(s, stage, row, vector) + half
}
