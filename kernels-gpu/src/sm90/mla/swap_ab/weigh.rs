//! Softmax weights.
//!
//! A weight is 2 to the power of logit + e − reference, where 2ᵉ is the power of two by which the key's scales were
//! divided. It must fit f16: a consumer that finds one above 2¹⁴ sets the row's reference to the largest logit + e, and
//! passes the rescale factor of the outputs on to the other consumer. The softmax sum takes weights times 2⁻ᵉ.

use cuda_std::{
    math::{ex2, fma},
    misc, mma, shared, warp,
};

use super::{convert::Power, products::Logits, shared::Shared};
use crate::{
    common::half::{F16, Half},
    sm90::mla::swapped::{MOST_GROWTH, Swapped as _, first_row},
};

/// The sums of a thread's 16 rows.
pub(super) type Sums = [f32; 16];

/// Undoes the powers of two of keys and queries in the products of the first 512 columns.
///
/// # Safety
/// A whole warp; the queries have been converted.
#[inline(always)]
pub(super) unsafe fn undo<const STAGES: u32>(
    s: Shared<STAGES>,
    powers: [Power; 2],
    logits: &mut Logits,
) {
    let inverses = misc::opaque(s.inverse(first_row()));
    let mut j = 0;
    while j < 8 {
        // SAFETY: the caller's promise.
        let inverses = unsafe { shared::load_f32x2(inverses + j as u32 * 32) };
        let mut i = 0;
        while i < 4 {
            let at = 4 * j + i;
            logits[at] = logits[at] * powers[i / 2].value() * inverses[i % 2];
            i += 1;
        }
        j += 1;
    }
}

/// Stores the weights of two keys at `target`, and adds them to the sums. Returns whether one is too large.
///
/// # Safety
/// A whole warp; no warp reads these weights meanwhile.
#[inline(always)]
pub(super) unsafe fn weigh<const STAGES: u32>(
    s: Shared<STAGES>,
    slot: u32,
    powers: [Power; 2],
    logits: &Logits,
    scale: f32,
    sums: &mut Sums,
    target: u32,
) -> bool {
    let first = misc::opaque(s.reference(slot, first_row()));
    // SAFETY: the caller's promise.
    let references =
        [0, 1, 2, 3, 4, 5, 6, 7].map(|j| unsafe { shared::load_f32x2(first + j * 32) });
    let logs = powers.map(Power::log);
    let inverses = [powers[0].inverse(), powers[1].inverse()];
    let mut largest = f32::NEG_INFINITY;
    let mut fragments = [0; 4];
    let mut j = 0;
    while j < 8 {
        let mut weights = [0.0; 4];
        let mut i = 0;
        while i < 4 {
            let growth = fma(logits[4 * j + i], scale, logs[i / 2]) - references[j][i % 2];
            largest = largest.max(growth);
            weights[i] = ex2(growth);
            let sum = &mut sums[2 * j + i % 2];
            *sum = fma(weights[i], inverses[i / 2], *sum);
            i += 1;
        }
        fragments[j % 2 * 2] = F16::pack(weights[0], weights[1]);
        fragments[j % 2 * 2 + 1] = F16::pack(weights[2], weights[3]);
        if j % 2 == 1 {
            // SAFETY: the caller's promise.
            unsafe { store(target, j as u32 - 1, fragments) };
        }
        j += 1;
    }
    largest > MOST_GROWTH
}

/// Stores a warp's weights of 16 keys × 16 rows.
#[inline(always)]
unsafe fn store(target: u32, first: u32, fragments: [u32; 4]) {
    let lane = misc::opaque(warp::lane_id());
    let chunk = (first + lane / 16) ^ lane % 8;
    // SAFETY: the caller's promise.
    unsafe { mma::stmatrix_x4(target + chunk * 16, fragments) };
}

/// The row address that a lane supplies to `stmatrix`, among the warp's 16 keys.
#[inline(always)]
pub(super) fn store_at(weights: u32, warp: u32) -> u32 {
    let lane = misc::opaque(warp::lane_id());
    weights + (warp * 16 + lane % 16) * 128
}
