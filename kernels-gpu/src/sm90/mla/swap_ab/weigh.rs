//! Softmax weights.
//!
//! A weight is 2 to the power of logit + e − reference, where 2ᵉ is the power of two by which the key's scales were
//! divided. It must fit f16: a consumer that finds one above 2¹⁴ sets the row's reference to the largest logit + e, and
//! passes the rescale factor of the outputs on to the other consumer. The softmax sum takes weights times 2⁻ᵉ.

use cuda_std::{
    barrier,
    math::{ex2, fma},
    misc, mma, shared, warp,
};

use super::{
    convert::Power,
    products::{Logits, Outputs, TILES},
    shared::Shared,
};
use crate::common::half::{F16, Half};

const WARP: u32 = warp::FULL_MASK;

/// The reference of a row that has seen no key: the weight of its first key becomes infinite, which triggers [`renew`].
pub(super) const NONE: f32 = -1e38;
/// Base-2 log of the largest weight for which a reference is kept. The largest f16 is below 2¹⁶.
const MOST_GROWTH: f32 = 14.0;

/// The sums of a thread's 16 rows.
pub(super) type Sums = [f32; 16];

/// A lane's first row; of each 8 rows it has this one and the next.
#[inline(always)]
fn first_row() -> u32 {
    misc::opaque(warp::lane_id()) % 4 * 2
}

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

/// Sets logits of keys that a row does not see to −∞. `first` is a lane's first key; `there` says whether it and the
/// one 8 further exist.
///
/// # Safety
/// A whole warp; the rows' visible keys are stored.
#[inline(always)]
pub(super) unsafe fn hide<const STAGES: u32>(
    s: Shared<STAGES>,
    first: u32,
    there: [bool; 2],
    logits: &mut Logits,
) {
    let seen = misc::opaque(s.seen(first_row()));
    let mut j = 0;
    while j < 8 {
        // SAFETY: the caller's promise.
        let of_two = unsafe { shared::load_u32x4(seen + j as u32 * 64) };
        let mut i = 0;
        while i < 4 {
            let [begin, end] = [of_two[i % 2 * 2], of_two[i % 2 * 2 + 1]];
            let key = (first + i as u32 / 2 * 8) as i32;
            if !(there[i / 2] && begin as i32 <= key && key <= end as i32) {
                logits[4 * j + i] = f32::NEG_INFINITY;
            }
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

/// Sets new references for rows with a weight that is too large. Only a row's own logits decide, so its result does not
/// depend on its neighbours.
///
/// # Safety
/// All warps of a consumer come here; the products of outputs are waited for.
#[inline(always)]
pub(super) unsafe fn renew<const STAGES: u32>(
    s: Shared<STAGES>,
    consumer: u32,
    slot: u32,
    powers: [Power; 2],
    logits: &Logits,
    scale: f32,
    thread: u32,
    barrier: u32,
) {
    let lane = misc::opaque(warp::lane_id());
    let warp = misc::opaque(thread) / 32;
    let logs = powers.map(Power::log);
    // SAFETY: the caller's promise.
    unsafe {
        let said = s.said(consumer, warp, lane % 4 * 2);
        let mut j = 0;
        while j < 8 {
            let mut largest = [0, 1].map(|e| {
                let of = |h: usize| fma(logits[4 * j + 2 * h + e], scale, logs[h]);
                of(0).max(of(1))
            });
            let mut distance = 4;
            while distance < 32 {
                largest = largest.map(|x| x.max(warp::warp_shuffle_xor(WARP, x, distance, 32)));
                distance *= 2;
            }
            if lane < 4 {
                shared::store_f32x2(said + j as u32 * 32, largest);
            }
            j += 1;
        }
        barrier::bar_sync(barrier, 128);
        let row = misc::opaque(thread);
        if row < 64 {
            let of = |warp: u32| shared::load_f32(s.said(consumer, warp, row));
            let largest = of(0).max(of(1)).max(of(2).max(of(3)));
            let old = shared::load_f32(s.reference(slot, row));
            let new = if largest - old > MOST_GROWTH {
                largest
            } else {
                old
            };
            shared::store_f32(s.reference(slot, row), new);
            shared::store_f32(s.factor(consumer, row), ex2(old - new));
        }
        barrier::bar_sync(barrier, 128);
    }
}

/// Multiplies sums by the factors of a consumer's latest block.
///
/// # Safety
/// A whole warp; the factors have been stored, and a barrier completed.
#[inline(always)]
pub(super) unsafe fn adopt_sums<const STAGES: u32>(
    s: Shared<STAGES>,
    consumer: u32,
    sums: &mut Sums,
) {
    let factors = misc::opaque(s.factor(consumer, first_row()));
    let mut j = 0;
    while j < 8 {
        // SAFETY: the caller's promise.
        let factors = unsafe { shared::load_f32x2(factors + j as u32 * 32) };
        sums[2 * j] *= factors[0];
        sums[2 * j + 1] *= factors[1];
        j += 1;
    }
}

/// Multiplies outputs by these factors.
///
/// # Safety
/// A whole warp; the factors have been stored, and a barrier completed; products of outputs are waited for.
#[inline(always)]
pub(super) unsafe fn adopt<const STAGES: u32>(s: Shared<STAGES>, consumer: u32, o: &mut Outputs) {
    let factors = misc::opaque(s.factor(consumer, first_row()));
    let mut j = 0;
    while j < 8 {
        // SAFETY: the caller's promise.
        let factors = unsafe { shared::load_f32x2(factors + j as u32 * 32) };
        let mut tile = 0;
        while tile < TILES {
            let mut i = 0;
            while i < 4 {
                o[tile][4 * j + i] *= factors[i % 2];
                i += 1;
            }
            tile += 1;
        }
        j += 1;
    }
}
