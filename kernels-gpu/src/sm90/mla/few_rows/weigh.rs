//! Softmax weights: 2 to the power of logit − reference.

use cuda_std::{
    math::{ex2, fma},
    mma, shared, warp,
};

use super::shared::Shared;
use crate::{
    common::half::Half,
    sm90::mla::swapped::{MOST_GROWTH, Swapped as _, first_row},
};

/// Stores the weights of a warp's 16 keys, and adds them to the sums. Returns whether one is too large.
///
/// # Safety
/// A whole warp, `warp` of its consumer; no warp reads these weights meanwhile.
#[inline(always)]
pub(super) unsafe fn weigh<
    T: Half,
    const ROWS: u32,
    const STAGES: u32,
    const N: usize,
    const H: usize,
>(
    s: Shared<ROWS, STAGES>,
    slot: u32,
    logits: &[f32; N],
    scale: f32,
    sums: &mut [f32; H],
    weights: u32,
    warp: u32,
) -> bool {
    let mut largest = f32::NEG_INFINITY;
    let mut fragments = [0; 4];
    // `stmatrix` transposes: a row of 8 keys has 16 bytes. Matrices of the keys of a warp's halves, then of the next 8
    // rows.
    let lane = warp::lane_id();
    let chunk = (2 * warp + lane / 8 % 2) ^ lane % 8;
    let target = weights + (lane / 16 * 8 + lane % 8) * 128 + chunk * 16;
    let mut j = 0;
    while j < N / 4 {
        // SAFETY: the caller's promise.
        let references =
            unsafe { shared::load_f32x2(s.reference(slot, first_row() + 8 * j as u32)) };
        let mut of_row = [0.0; 4];
        let mut i = 0;
        while i < 4 {
            let growth = fma(logits[4 * j + i], scale, -references[i % 2]);
            largest = largest.max(growth);
            of_row[i] = ex2(growth);
            sums[2 * j + i % 2] += of_row[i];
            i += 1;
        }
        fragments[j % 2 * 2] = T::pack(of_row[0], of_row[1]);
        fragments[j % 2 * 2 + 1] = T::pack(of_row[2], of_row[3]);
        if j % 2 == 1 {
            // SAFETY: the caller's promise.
            unsafe { mma::stmatrix_x4_trans(target + (j as u32 - 1) * 1024, fragments) };
        }
        j += 1;
    }
    largest > MOST_GROWTH
}
