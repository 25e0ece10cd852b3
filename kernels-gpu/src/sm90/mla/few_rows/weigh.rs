//! Softmax weights.
//!
//! Weights are 2 to the power of logit − reference. References are shared by both consumers and kept until a weight
//! exceeds 2¹⁴; the consumer that finds one sets the row's reference to the largest logit, and passes the rescale
//! factor of the outputs on to the other.

use cuda_std::{
    barrier,
    math::{ex2, fma},
    misc, mma, shared, warp,
};

use super::{products::Outputs, shared::Shared};
use crate::common::half::Half;

const WARP: u32 = warp::FULL_MASK;

/// The reference of a row that has seen no key: the weight of its first key becomes infinite, which triggers [`renew`].
pub(super) const NONE: f32 = -1e38;
/// Base-2 log of the largest weight for which a reference is kept. The largest f16 is below 2¹⁶.
const MOST_GROWTH: f32 = 14.0;

/// A lane's first row; of each 8 rows it has this one and the next.
#[inline(always)]
fn first_row() -> u32 {
    warp::lane_id() % 4 * 2
}

/// Sets logits of keys that a row does not see to −∞. `first` is a lane's first key; its other one is 8 further.
///
/// # Safety
/// A whole warp; the rows' visible keys are stored.
#[inline(always)]
pub(super) unsafe fn hide<const ROWS: u32, const STAGES: u32, const N: usize>(
    s: Shared<ROWS, STAGES>,
    slot: u32,
    first: u32,
    logits: &mut [f32; N],
) {
    let mut j = 0;
    while j < N / 4 {
        // SAFETY: the caller's promise.
        let of_two = unsafe { shared::load_u32x4(s.seen(slot, first_row() + 8 * j as u32)) };
        let mut i = 0;
        while i < 4 {
            let [begin, end] = [of_two[i % 2 * 2], of_two[i % 2 * 2 + 1]];
            let key = (first + i as u32 / 2 * 8) as i32;
            if !(begin as i32 <= key && key <= end as i32) {
                logits[4 * j + i] = f32::NEG_INFINITY;
            }
            i += 1;
        }
        j += 1;
    }
}

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

/// Sets new references for rows with a weight that is too large. Only a row's own logits decide, so its result does not
/// depend on its neighbours.
///
/// # Safety
/// All warps of a consumer come here; the products of outputs are waited for.
#[inline(always)]
pub(super) unsafe fn renew<const ROWS: u32, const STAGES: u32, const N: usize>(
    s: Shared<ROWS, STAGES>,
    consumer: u32,
    slot: u32,
    logits: &[f32; N],
    scale: f32,
    thread: u32,
    barrier: u32,
) {
    let lane = misc::opaque(warp::lane_id());
    let warp = misc::opaque(thread) / 32;
    // SAFETY: the caller's promise.
    unsafe {
        let said = s.said(slot, consumer, warp, lane % 4 * 2);
        let mut j = 0;
        while j < N / 4 {
            let mut largest = [0, 1].map(|e| logits[4 * j + e].max(logits[4 * j + 2 + e]) * scale);
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
        if row < ROWS {
            let of = |warp: u32| shared::load_f32(s.said(slot, consumer, warp, row));
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
pub(super) unsafe fn adopt_sums<const ROWS: u32, const STAGES: u32, const H: usize>(
    s: Shared<ROWS, STAGES>,
    consumer: u32,
    sums: &mut [f32; H],
) {
    let factors = misc::opaque(s.factor(consumer, first_row()));
    let mut j = 0;
    while j < H / 2 {
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
pub(super) unsafe fn adopt<const ROWS: u32, const STAGES: u32, const N: usize>(
    s: Shared<ROWS, STAGES>,
    consumer: u32,
    o: &mut Outputs<N>,
) {
    let factors = misc::opaque(s.factor(consumer, first_row()));
    let mut j = 0;
    while j < N / 4 {
        // SAFETY: the caller's promise.
        let factors = unsafe { shared::load_f32x2(factors + j as u32 * 32) };
        for of_tile in &mut *o {
            let mut i = 0;
            while i < 4 {
                of_tile[4 * j + i] *= factors[i % 2];
                i += 1;
            }
        }
        j += 1;
    }
}
