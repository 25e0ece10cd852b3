//! The inner loops for few rows, compiled once for each instruction set.

use std::ops::Range;

use kernels_gpu::{state::Softmax, variant::Variant};

use super::super::{
    simd::{Simd, load},
    tile::{KEYS, TileRows},
    unit::Unit,
};
use crate::tensor::{Element, with_elements};

/// The most rows that count as few.
pub(in super::super) const MAX_ROWS: usize = 8;

/// Logits of a tile and one KV head: `[row][key]`.
pub(in super::super) type Logits = [[f32; KEYS]; MAX_ROWS];

/// Products of `R` queries with the keys of a tile, `K` keys at a time. Values behind these products have no meaning.
#[inline(always)]
pub(in super::super) fn products<S: Simd, const R: usize, const K: usize>(
    simd: S,
    queries: &[f32],
    rows: &TileRows<'_>,
    logits: &mut Logits,
) {
    with_elements!(Slice(rows.pool), pool => products_with::<S, _, R, K>(simd, queries, pool, rows, logits));
}

#[inline(always)]
fn products_with<S: Simd, T: Element, const R: usize, const K: usize>(
    simd: S,
    queries: &[f32],
    pool: &[T],
    rows: &TileRows<'_>,
    logits: &mut Logits,
) {
    let dim = rows.dim;
    let queries: [&[f32]; R] = std::array::from_fn(|r| &queries[r * dim..][..dim]);
    for first in (0..rows.places.len()).step_by(K) {
        let mut keys: [&[T]; K] = [&[]; K];
        for (k, key) in keys.iter_mut().enumerate() {
            *key = rows.get(pool, first + k);
        }
        let mut asked = (first, 0);
        let mut sums = [[simd.splat(0.0); R]; K];
        for at in (0..dim).step_by(S::LANES) {
            let mut query = [simd.splat(0.0); R];
            for r in 0..R {
                query[r] = simd.load(&queries[r][at..]);
            }
            rows.ask_for(pool, &mut asked, K * S::LANES);
            for k in 0..K {
                let key = simd.widen(&keys[k][at..]);
                for r in 0..R {
                    sums[k][r] = simd.mul_add(key, query[r], sums[k][r]);
                }
            }
        }
        for (index, sums) in sums.as_flattened().as_chunks().0.iter().enumerate() {
            for (i, sum) in simd.sums(*sums).into_iter().enumerate() {
                let (k, r) = ((4 * index + i) / R, (4 * index + i) % R);
                logits[r][first + k] = sum;
            }
        }
    }
}

/// Calls a variant's hooks on products.
#[inline(always)]
pub(in super::super) fn hooks<V: Variant>(
    unit: &Unit<'_, V>,
    kv_head: u32,
    keys: Range<u32>,
    logits: &mut Logits,
) {
    for (row, logits) in unit.rows.iter().zip(logits) {
        // Hooks are not called for hidden keys. Masks overwrite their logits.
        let seen = row.seen(&keys);
        let skipped = (seen.start - keys.start) as usize;
        for (logit, key) in logits[skipped..].iter_mut().zip(seen) {
            *logit = unit.logit(*logit, row, kv_head, key);
        }
    }
}

/// Turns the logits of a row into weights. Returns the factor for earlier outputs.
#[inline(always)]
pub(in super::super) fn weigh<S: Simd>(
    simd: S,
    softmax: &mut Softmax,
    logits: &mut [f32; KEYS],
) -> f32 {
    let mut max = simd.splat(f32::NEG_INFINITY);
    for vector in logits.chunks_exact(S::LANES) {
        max = simd.larger(max, simd.load(vector));
    }
    let factor = softmax.raise(simd.max(max));
    let offset = simd.splat(softmax.offset());
    let mut sum = simd.splat(0.0);
    for vector in logits.chunks_exact_mut(S::LANES) {
        let weight = simd.exp2(simd.sub(simd.load(vector), offset));
        simd.store(weight, vector);
        sum = simd.add(sum, weight);
    }
    softmax.sum += simd.sums([sum; 4])[0];
    factor
}

/// Scales the outputs of `R` rows and adds the weighted values of a tile, `N` vectors at a time.
#[inline(always)]
pub(in super::super) fn accumulate<S: Simd, const R: usize, const N: usize>(
    simd: S,
    weights: &Logits,
    factor: &[f32; MAX_ROWS],
    rows: &TileRows<'_>,
    outputs: &mut [f32],
) {
    with_elements!(Slice(rows.pool), pool => {
        let (mut at, dim) = (0, rows.dim);
        while at + N * S::LANES <= dim {
            accumulate_at::<S, _, R, N>(simd, weights, factor, pool, rows, at, outputs);
            at += N * S::LANES;
        }
        while at < dim {
            accumulate_at::<S, _, R, 1>(simd, weights, factor, pool, rows, at, outputs);
            at += S::LANES;
        }
    });
}

/// As [`accumulate`], for the `N` vectors from element `at` on.
#[inline(always)]
fn accumulate_at<S: Simd, T: Element, const R: usize, const N: usize>(
    simd: S,
    weights: &Logits,
    factor: &[f32; MAX_ROWS],
    pool: &[T],
    rows: &TileRows<'_>,
    at: usize,
    outputs: &mut [f32],
) {
    let dim = rows.dim;
    let mut sums = [[simd.splat(0.0); N]; R];
    for r in 0..R {
        let before: [S::F; N] = load(simd, &outputs[r * dim + at..]);
        for n in 0..N {
            sums[r][n] = simd.mul(before[n], simd.splat(factor[r]));
        }
    }
    // Each of these calls prefetches its part of the rows, from the first on.
    let step = N * S::LANES;
    let before = at * rows.ahead.len();
    let mut asked = (before / dim, before % dim);
    for (key, place) in rows.places.iter().enumerate() {
        let value = &pool[place + rows.head + at..][..step];
        rows.ask_for(pool, &mut asked, step);
        let mut vectors = [simd.splat(0.0); N];
        for n in 0..N {
            vectors[n] = simd.widen(&value[n * S::LANES..]);
        }
        for r in 0..R {
            let weight = simd.splat(weights[r][key]);
            for n in 0..N {
                sums[r][n] = simd.mul_add(weight, vectors[n], sums[r][n]);
            }
        }
    }
    for (r, sums) in sums.into_iter().enumerate() {
        for (n, sum) in sums.into_iter().enumerate() {
            simd.store(sum, &mut outputs[r * dim + at + n * S::LANES..]);
        }
    }
}
