//! Few rows: the lanes of a vector are neighbouring elements of a head.
//!
//! This is a decode step, and bound by memory. All heads of a unit go through the keys together, a tile at a
//! time, for in most layouts they lie side by side. Keys and values become f32 on their way into registers,
//! and while a tile is computed on, the next one is asked for bit by bit: memory has something to do all the
//! time.

use std::ops::Range;

use kernels_gpu::{state::Softmax, variant::Variant};

use super::{
    simd::{Simd, load},
    tile::{Places, TileRows},
    unit::{Pool, Row, Scratch, Unit, hidden},
};
use crate::tensor::{Element, with_elements};

/// The most rows that are still few.
pub(super) const MAX_ROWS: usize = 8;

/// Keys of a tile: one update of the softmax.
pub(super) const KEYS: usize = 32;

/// Logits of a tile and one KV head: `[row][key]`.
pub(super) type Logits = [[f32; KEYS]; MAX_ROWS];

/// A KV head on its way through the keys.
struct Head {
    kv_head: u32,
    logits: Logits,
    softmax: [Softmax; MAX_ROWS],
    /// What earlier outputs are still to be multiplied by.
    factor: [f32; MAX_ROWS],
}

/// Leaves the states of a unit in `out` and `lse`.
pub(super) fn attend<V: Variant>(
    unit: &Unit<'_, V>,
    scratch: &mut Scratch,
    out: &mut [f32],
    lse: &mut [f32],
) {
    let rows = unit.rows.len();
    let kernels = unit
        .isa
        .kernels()
        .narrow
        .iter()
        .find(|kernels| rows <= kernels.rows)
        .expect("the rows are few");
    // Rows up to what the kernel computes are zero, and never looked at.
    let padded = kernels.rows;
    let (dim_qk, dim_v) = (
        unit.spec.head_dim_qk as usize,
        unit.spec.head_dim_v as usize,
    );
    let mut heads: Vec<Head> = unit.kv_heads.clone().map(Head::new).collect();
    let queries = scratch.queries.floats(heads.len() * padded * dim_qk);
    let outputs = scratch.outputs.floats(heads.len() * padded * dim_v);
    // What a variant makes of the keys (or values) of a tile.
    let made = scratch.keys.floats(KEYS * dim_qk.max(dim_v));
    queries.fill(0.0);
    outputs.fill(0.0);
    for (head, queries) in heads.iter().zip(queries.chunks_exact_mut(padded * dim_qk)) {
        for (row, query) in unit.rows.iter().zip(queries.chunks_exact_mut(dim_qk)) {
            unit.load_query(row, head.kv_head, query);
        }
    }

    let end = unit.keys.end;
    let tile_at = |begin: u32| begin.min(end)..end.min(begin.saturating_add(KEYS as u32));
    let mut places = [
        Places::new(unit, Pool::Keys),
        Places::new(unit, Pool::Values),
    ];
    let mut next = tile_at(unit.keys.start);
    for places in &mut places {
        places.advance(unit, &next);
    }
    while !next.is_empty() {
        let tile = next;
        next = tile_at(tile.end);
        for places in &mut places {
            places.advance(unit, &next);
        }
        for (head, queries) in heads.iter_mut().zip(queries.chunks_exact(padded * dim_qk)) {
            let rows = unit.tile_rows(head.kv_head, &tile, &places[0], made);
            (kernels.products)(queries, &rows, &mut head.logits);
            if Unit::<V>::HAS_LOGIT_HOOKS {
                unit.isa
                    .narrow_hooks(unit, head.kv_head, tile.clone(), &mut head.logits);
            }
            for (r, row) in unit.rows.iter().enumerate() {
                mask(row, &tile, hidden(V::SOFTMAX), &mut head.logits[r]);
                if V::SOFTMAX {
                    head.factor[r] = (kernels.weigh)(&mut head.softmax[r], &mut head.logits[r]);
                }
            }
        }
        for (head, outputs) in heads.iter().zip(outputs.chunks_exact_mut(padded * dim_v)) {
            let rows = unit.tile_rows(head.kv_head, &tile, &places[1], made);
            (kernels.accumulate)(&head.logits, &head.factor, &rows, outputs);
        }
    }
    let targets = out
        .chunks_exact_mut(rows * dim_v)
        .zip(lse.chunks_exact_mut(rows));
    for ((head, outputs), (out, lse)) in heads
        .iter()
        .zip(outputs.chunks_exact(padded * dim_v))
        .zip(targets)
    {
        for (r, lse) in lse.iter_mut().enumerate() {
            let norm = if V::SOFTMAX {
                head.softmax[r].norm()
            } else {
                1.0
            };
            *lse = if V::SOFTMAX {
                head.softmax[r].lse()
            } else {
                0.0
            };
            let at = r * dim_v..(r + 1) * dim_v;
            out[at.clone()]
                .iter_mut()
                .zip(&outputs[at])
                .for_each(|(out, x)| *out = x * norm);
        }
    }
}

impl Head {
    fn new(kv_head: u32) -> Self {
        Self {
            kv_head,
            logits: [[0.0; KEYS]; MAX_ROWS],
            softmax: [Softmax::EMPTY; MAX_ROWS],
            factor: [1.0; MAX_ROWS],
        }
    }
}

/// Products of `R` queries with the keys of a tile, `K` of them at a time; what stands behind them is of no
/// meaning.
#[inline(always)]
pub(super) fn products<S: Simd, const R: usize, const K: usize>(
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
pub(super) fn hooks<V: Variant>(
    unit: &Unit<'_, V>,
    kv_head: u32,
    keys: Range<u32>,
    logits: &mut Logits,
) {
    for (row, logits) in unit.rows.iter().zip(logits) {
        for (logit, key) in logits.iter_mut().zip(keys.clone()) {
            *logit = unit.logit(*logit, row, kv_head, key);
        }
    }
}

fn mask(&Row { first, last, .. }: &Row, keys: &Range<u32>, hidden: f32, logits: &mut [f32; KEYS]) {
    let begin = keys.start as i32;
    // The last position that counts: the last one seen, or the tile's last key.
    let last = last.min(keys.end as i32 - 1);
    if first > begin || last < begin + KEYS as i32 - 1 {
        for (logit, key) in logits.iter_mut().zip(begin..) {
            let visible = (first <= key) & (key <= last);
            *logit = if visible { *logit } else { hidden };
        }
    }
}

/// Turns the logits of a row into weights; returns what earlier outputs are multiplied by.
#[inline(always)]
pub(super) fn weigh<S: Simd>(simd: S, softmax: &mut Softmax, logits: &mut [f32; KEYS]) -> f32 {
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
pub(super) fn accumulate<S: Simd, const R: usize, const N: usize>(
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
    // Each of these calls asks for its part of the rows, from the first on.
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
