//! Few rows: the lanes of a vector are neighbouring elements of a head.
//!
//! This is a decode step, and bound by memory: keys and values pass through the first-level cache once,
//! and all rows are computed while they are there. All heads of a unit take turns on the same tokens, for
//! in most layouts these lie side by side.

use std::ops::Range;

use kernels_gpu::{state::Softmax, variant::Variant};

use super::{
    lanes::{exp2, larger, load, mul_add, reduce},
    unit::{Row, Scratch, Unit, hidden},
};

/// The most rows that are still few.
pub(super) const MAX_ROWS: usize = 8;

/// Keys of a tile.
const KEYS: usize = 32;

/// Logits of a tile: `[row][key]`.
pub(super) type Logits = [[f32; KEYS]; MAX_ROWS];

/// Leaves the states of a unit in `out` and `lse`.
pub(super) fn attend<V: Variant>(
    unit: &Unit<'_, V>,
    scratch: &mut Scratch,
    out: &mut [f32],
    lse: &mut [f32],
) {
    let (rows, heads) = (unit.rows.len(), unit.kv_heads.len());
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
    let queries = scratch.queries.floats(heads * padded * dim_qk);
    let outputs = scratch.outputs.floats(heads * padded * dim_v);
    let keys = scratch.keys.floats(KEYS * dim_qk);
    let values = scratch.values.floats(KEYS * dim_v);
    let mut softmax = vec![V::SOFTMAX.then_some(Softmax::EMPTY); heads * padded];
    let mut logits = [[0.0; KEYS]; MAX_ROWS];
    queries.fill(0.0);
    outputs.fill(0.0);
    for (kv_head, queries) in unit
        .kv_heads
        .clone()
        .zip(queries.chunks_exact_mut(padded * dim_qk))
    {
        for (row, query) in unit.rows.iter().zip(queries.chunks_exact_mut(dim_qk)) {
            unit.load_query(row, kv_head, query);
        }
    }

    let mut begin = unit.keys.start;
    while begin < unit.keys.end {
        let tile = begin..unit.keys.end.min(begin + KEYS as u32);
        let states = outputs
            .chunks_exact_mut(padded * dim_v)
            .zip(softmax.chunks_exact_mut(padded));
        let heads = unit
            .kv_heads
            .clone()
            .zip(queries.chunks_exact(padded * dim_qk));
        for ((kv_head, queries), (outputs, softmax)) in heads.zip(states) {
            unit.load_keys(kv_head, tile.clone(), &mut keys[..tile.len() * dim_qk]);
            (kernels.products)(queries, keys, dim_qk, tile.len(), &mut logits);
            if Unit::<V>::HAS_LOGIT_HOOKS {
                unit.isa
                    .narrow_hooks(unit, kv_head, tile.clone(), &mut logits);
            }
            unit.load_values(kv_head, tile.clone(), &mut values[..tile.len() * dim_v]);
            (kernels.absorb)(
                &unit.rows,
                softmax,
                tile.clone(),
                &mut logits,
                values,
                dim_v,
                outputs,
            );
        }
        begin = tile.end;
    }
    let states = outputs
        .chunks_exact(padded * dim_v)
        .zip(softmax.chunks_exact(padded));
    let targets = out
        .chunks_exact_mut(rows * dim_v)
        .zip(lse.chunks_exact_mut(rows));
    for ((outputs, softmax), (out, lse)) in states.zip(targets) {
        for (r, lse) in lse.iter_mut().enumerate() {
            let norm = softmax[r].map_or(1.0, |softmax| softmax.norm());
            *lse = softmax[r].map_or(0.0, |softmax| softmax.lse());
            let at = r * dim_v..(r + 1) * dim_v;
            out[at.clone()]
                .iter_mut()
                .zip(&outputs[at])
                .for_each(|(out, x)| *out = x * norm);
        }
    }
}

/// Products of `R` queries with `len` keys, `K` of them at a time; what stands behind them is of no meaning.
#[inline(always)]
pub(super) fn products<const R: usize, const K: usize, const L: usize, const FMA: bool>(
    queries: &[f32],
    keys: &[f32],
    dim: usize,
    len: usize,
    logits: &mut Logits,
) {
    for first in (0..len).step_by(K) {
        let mut sums = [[[0.0; L]; R]; K];
        for at in (0..dim).step_by(L) {
            let query: [[f32; L]; R] = std::array::from_fn(|r| load(&queries[r * dim + at..]));
            for (k, sums) in sums.iter_mut().enumerate() {
                let key: [f32; L] = load(&keys[(first + k) * dim + at..]);
                for (sums, query) in sums.iter_mut().zip(&query) {
                    for l in 0..L {
                        sums[l] = mul_add::<FMA>(key[l], query[l], sums[l]);
                    }
                }
            }
        }
        for (k, sums) in sums.into_iter().enumerate() {
            for (r, sums) in sums.into_iter().enumerate() {
                logits[r][first + k] = reduce(sums, |a, b| a + b);
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

/// Adds some keys to the states of `R` rows: hides what is hidden, turns logits into weights, and adds the
/// weighted values to the outputs.
#[inline(always)]
pub(super) fn absorb<const R: usize, const L: usize, const FMA: bool>(
    rows: &[Row],
    softmax: &mut [Option<Softmax>],
    keys: Range<u32>,
    logits: &mut Logits,
    values: &[f32],
    dim: usize,
    outputs: &mut [f32],
) {
    let mut factor = [1.0; R];
    for (r, row) in rows.iter().enumerate().take(R) {
        mask(row, &keys, hidden(softmax[r].is_some()), &mut logits[r]);
        if let Some(softmax) = &mut softmax[r] {
            factor[r] = weigh::<L, FMA>(softmax, &mut logits[r]);
        }
    }
    let whole = dim / 32 * 32;
    for at in (0..whole).step_by(32) {
        accumulate::<R, 32, FMA>(logits, &factor, values, dim, keys.len(), at, outputs);
    }
    if whole < dim {
        accumulate::<R, 16, FMA>(logits, &factor, values, dim, keys.len(), whole, outputs);
    }
}

#[inline(always)]
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
fn weigh<const L: usize, const FMA: bool>(softmax: &mut Softmax, logits: &mut [f32; KEYS]) -> f32 {
    let vectors = logits.as_chunks_mut::<L>().0;
    let mut max = vectors[0];
    for vector in &vectors[1..] {
        for l in 0..L {
            max[l] = larger(max[l], vector[l]);
        }
    }
    let factor = softmax.raise(reduce(max, larger));
    let offset = softmax.offset();
    let mut sum = [0.0; L];
    for vector in vectors {
        for l in 0..L {
            vector[l] = exp2::<FMA>(vector[l] - offset);
            sum[l] += vector[l];
        }
    }
    softmax.sum += reduce(sum, |a, b| a + b);
    factor
}

/// Scales the outputs of `R` rows, and adds the weighted values of the first `len` keys: `N` elements from
/// `at` on.
#[inline(always)]
fn accumulate<const R: usize, const N: usize, const FMA: bool>(
    weights: &Logits,
    factor: &[f32; R],
    values: &[f32],
    dim: usize,
    len: usize,
    at: usize,
    outputs: &mut [f32],
) {
    let mut sums = [[0.0; N]; R];
    for r in 0..R {
        let before: [f32; N] = load(&outputs[r * dim + at..]);
        for n in 0..N {
            sums[r][n] = before[n] * factor[r];
        }
    }
    for (key, value) in values.chunks_exact(dim).take(len).enumerate() {
        let value: [f32; N] = load(&value[at..]);
        for r in 0..R {
            let weight = weights[r][key];
            for n in 0..N {
                sums[r][n] = mul_add::<FMA>(weight, value[n], sums[r][n]);
            }
        }
    }
    for r in 0..R {
        outputs[r * dim + at..][..N].copy_from_slice(&sums[r]);
    }
}
