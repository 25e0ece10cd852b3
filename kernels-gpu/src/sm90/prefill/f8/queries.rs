//! Queries of 8 bits.

use cuda_std::{convert::f32x2_to_e4m3x2, fence, prelude::*, wgmma::Swizzle};

use super::super::{epilogue::staged, shared::Shared};
use crate::common::half::Half;

const WARP: u32 = warp::FULL_MASK;

/// Turns a warp's 16 rows of queries into e4m3 where they lie, and returns what products of the thread's two rows, those
/// of its accumulators, are to be multiplied by.
///
/// The factor of a row is the power of two that brings its largest magnitude to [128, 256): what e4m3 holds of the row
/// as it is, it holds afterwards. The other bytes of the rows may be anything.
///
/// # Safety
/// A whole warp comes here, whose rows these are; the queries have arrived. Who has a product read them fences first.
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
        // Four lanes have a row. Neighbouring rows begin elsewhere, so that all banks are read.
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
            // Rows are written over others of their eight.
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

/// The exponent, as f32 has it, of the power of two for a row of this largest magnitude.
#[inline(always)]
fn factor_of(most: f32) -> u32 {
    let exponent = most.to_bits() >> 23;
    // Zeros, and what is nearly that, stay within f32 on both sides.
    let exponent = if exponent < 37 { 37 } else { exponent };
    if most == 0.0 { 127 } else { 261 - exponent }
}

/// Where eight elements of a row lie: rows of 128 bytes with a swizzle of 128, 128 columns after the other; at head
/// dimension 64 rows of 64 bytes with a swizzle of 64, eight of them in the place of eight of 16 bits.
#[inline(always)]
fn place(s: Shared, stage: u32, row: u32, eight: u32) -> u32 {
    let (vector, half) = (eight / 2, eight % 2 * 8);
    if s.shape.head_dim == 64 {
        let group = s.queries(stage) + row / 8 * 1024;
        return group + Swizzle::B64.apply(row % 8 * 64 + vector * 16) + half;
    }
    staged(s, stage, row, vector) + half
}
