//! Few rows: the lanes of a vector are neighbouring elements of a head.
//!
//! This is a decode step, and bound by memory. All heads of a unit go through the keys together, a few keys
//! at a time, for in most layouts they lie side by side; what is read becomes f32 in a small place that never
//! leaves the first-level cache.

use std::ops::Range;

use kernels_gpu::{state::Softmax, variant::Variant};

use super::{
    simd::{Simd, load},
    unit::{Row, Scratch, Unit, hidden},
};

/// The most rows that are still few.
pub(super) const MAX_ROWS: usize = 8;

/// Keys of a tile: one update of the softmax.
pub(super) const KEYS: usize = 32;

/// Keys that are loaded at a time: as many as have their products in registers together, or a multiple.
const STEP: usize = 8;

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
    // Products past the last key are computed and never looked at.
    let keys = scratch.keys.floats(STEP * dim_qk);
    let values = scratch.values.floats(STEP * dim_v);
    queries.fill(0.0);
    outputs.fill(0.0);
    for (head, queries) in heads.iter().zip(queries.chunks_exact_mut(padded * dim_qk)) {
        for (row, query) in unit.rows.iter().zip(queries.chunks_exact_mut(dim_qk)) {
            unit.load_query(row, head.kv_head, query);
        }
    }

    for tile in pieces(unit.keys.clone(), KEYS) {
        for step in pieces(tile.clone(), STEP) {
            let at = (step.start - tile.start) as usize;
            for (head, queries) in heads.iter_mut().zip(queries.chunks_exact(padded * dim_qk)) {
                unit.load_keys(head.kv_head, step.clone(), keys);
                (kernels.products)(queries, keys, dim_qk, at..at + step.len(), &mut head.logits);
            }
        }
        for head in &mut heads {
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
        for step in pieces(tile.clone(), STEP) {
            let at = (step.start - tile.start) as usize;
            for (head, outputs) in heads
                .iter_mut()
                .zip(outputs.chunks_exact_mut(padded * dim_v))
            {
                unit.load_values(head.kv_head, step.clone(), values);
                let values = &values[..step.len() * dim_v];
                (kernels.accumulate)(&head.logits, at, &head.factor, values, dim_v, outputs);
                head.factor = [1.0; MAX_ROWS];
            }
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

/// A range in pieces of `len`, the last of them shorter.
fn pieces(range: Range<u32>, len: usize) -> impl Iterator<Item = Range<u32>> {
    let end = range.end;
    range
        .step_by(len)
        .map(move |start| start..end.min(start + len as u32))
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

/// Products of `R` queries with keys, `K` of them at a time; what stands behind them is of no meaning. They
/// go to these places of each row's logits.
#[inline(always)]
pub(super) fn products<S: Simd, const R: usize, const K: usize>(
    simd: S,
    queries: &[f32],
    keys: &[f32],
    dim: usize,
    to: Range<usize>,
    logits: &mut Logits,
) {
    let queries: [&[f32]; R] = std::array::from_fn(|r| &queries[r * dim..][..dim]);
    for (first, keys) in to.step_by(K).zip(keys.chunks_exact(K * dim)) {
        let keys: [&[f32]; K] = std::array::from_fn(|k| &keys[k * dim..][..dim]);
        let mut sums = [[simd.splat(0.0); R]; K];
        for at in (0..dim).step_by(S::LANES) {
            let mut query = [simd.splat(0.0); R];
            for r in 0..R {
                query[r] = simd.load(&queries[r][at..]);
            }
            for k in 0..K {
                let key = simd.load(&keys[k][at..]);
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

/// Scales the outputs of `R` rows and adds some weighted values; their weights stand from `first` on.
#[inline(always)]
pub(super) fn accumulate<S: Simd, const R: usize>(
    simd: S,
    weights: &Logits,
    first: usize,
    factor: &[f32; MAX_ROWS],
    values: &[f32],
    dim: usize,
    outputs: &mut [f32],
) {
    let pairs = dim / (2 * S::LANES);
    for pair in 0..pairs {
        accumulate_at::<S, R, 2>(
            simd,
            weights,
            first,
            factor,
            values,
            dim,
            2 * pair * S::LANES,
            outputs,
        );
    }
    for at in (2 * pairs * S::LANES..dim).step_by(S::LANES) {
        accumulate_at::<S, R, 1>(simd, weights, first, factor, values, dim, at, outputs);
    }
}

/// As [`accumulate`], for the `N` vectors from element `at` on.
#[inline(always)]
#[allow(
    clippy::too_many_arguments,
    reason = "those of `accumulate` and one more"
)]
fn accumulate_at<S: Simd, const R: usize, const N: usize>(
    simd: S,
    weights: &Logits,
    first: usize,
    factor: &[f32; MAX_ROWS],
    values: &[f32],
    dim: usize,
    at: usize,
    outputs: &mut [f32],
) {
    let mut sums = [[simd.splat(0.0); N]; R];
    for r in 0..R {
        let before: [S::F; N] = load(simd, &outputs[r * dim + at..]);
        for n in 0..N {
            sums[r][n] = simd.mul(before[n], simd.splat(factor[r]));
        }
    }
    for (key, value) in (first..KEYS).zip(values.chunks_exact(dim)) {
        let value: [S::F; N] = load(simd, &value[at..]);
        for r in 0..R {
            let weight = simd.splat(weights[r][key]);
            for n in 0..N {
                sums[r][n] = simd.mul_add(weight, value[n], sums[r][n]);
            }
        }
    }
    for (r, sums) in sums.into_iter().enumerate() {
        for (n, sum) in sums.into_iter().enumerate() {
            simd.store(sum, &mut outputs[r * dim + at + n * S::LANES..]);
        }
    }
}
