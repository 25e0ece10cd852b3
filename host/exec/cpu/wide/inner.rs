//! The inner loops for many rows, compiled once for each instruction set.

use std::ops::Range;

use kernels_gpu::{state::Softmax, variant::Variant};

use super::super::{
    simd::{Simd, load},
    unit::{Row, Unit, hidden},
};

/// The most keys that are multiplied together: products are computed for a multiple of them.
pub(super) const MAX_M: usize = 8;

/// The most lanes of a block.
const MAX_R: usize = 32;

/// Some rows and the states of their softmax, in as many lanes as the machine's kernels have.
pub(in super::super) struct Block<'a> {
    pub(super) rows: &'a [Row<'a>],
    softmax: bool,
    first: [i32; MAX_R],
    last: [i32; MAX_R],
    max: [f32; MAX_R],
    sum: [f32; MAX_R],
}

/// Products of some keys with the queries of a block of `N` vectors. `M` keys are multiplied together.
#[inline(always)]
pub(in super::super) fn products<S: Simd, const N: usize, const M: usize>(
    simd: S,
    keys: &[f32],
    dim: usize,
    queries: &[f32],
    logits: &mut [f32],
) {
    let lanes = N * S::LANES;
    for (keys, logits) in keys
        .chunks_exact(M * dim)
        .zip(logits.chunks_exact_mut(M * lanes))
    {
        let keys: [&[f32]; M] = std::array::from_fn(|m| &keys[m * dim..][..dim]);
        let mut sums = [[simd.splat(0.0); N]; M];
        for (d, query) in queries.chunks_exact(lanes).enumerate().take(dim) {
            let query: [S::F; N] = load(simd, query);
            for m in 0..M {
                let key = simd.splat(keys[m][d]);
                for n in 0..N {
                    sums[m][n] = simd.mul_add(key, query[n], sums[m][n]);
                }
            }
        }
        store(simd, &sums, logits);
    }
}

/// Adds some keys to the states of a block: hides keys, turns logits into weights, and adds the weighted values to the
/// outputs, `M` elements at a time.
#[inline(always)]
pub(in super::super) fn absorb<S: Simd, const N: usize, const M: usize>(
    simd: S,
    block: &mut Block<'_>,
    keys: Range<u32>,
    logits: &mut [f32],
    values: &[f32],
    dim: usize,
    outputs: &mut [f32],
) {
    let lanes = N * S::LANES;
    block.mask(keys, lanes, logits);
    let factor = if block.softmax {
        block.weigh::<S, N>(simd, logits)
    } else {
        [simd.splat(1.0); N]
    };
    let weights = &*logits;
    for (group, outputs) in outputs.chunks_exact_mut(M * lanes).enumerate() {
        let mut sums = [[simd.splat(0.0); N]; M];
        for (weight, value) in weights.chunks_exact(lanes).zip(values.chunks_exact(dim)) {
            let weight: [S::F; N] = load(simd, weight);
            let value = &value[group * M..][..M];
            for m in 0..M {
                let value = simd.splat(value[m]);
                for n in 0..N {
                    sums[m][n] = simd.mul_add(value, weight[n], sums[m][n]);
                }
            }
        }
        for (output, sums) in outputs.chunks_exact(lanes).zip(&mut sums) {
            for n in 0..N {
                let before = simd.load(&output[n * S::LANES..]);
                sums[n] = simd.mul_add(before, factor[n], sums[n]);
            }
        }
        store(simd, &sums, outputs);
    }
}

#[inline(always)]
fn store<S: Simd, const N: usize, const M: usize>(simd: S, sums: &[[S::F; N]; M], to: &mut [f32]) {
    let vectors = sums.as_flattened();
    for (vector, to) in vectors.iter().zip(to.chunks_exact_mut(S::LANES)) {
        simd.store(*vector, to);
    }
}

/// Calls a variant's hooks on products.
#[inline(always)]
pub(in super::super) fn hooks<V: Variant>(
    unit: &Unit<'_, V>,
    kv_head: u32,
    block: &Block<'_>,
    keys: Range<u32>,
    logits: &mut [f32],
) {
    let lanes = logits.len() / keys.len();
    // The keys that all rows see: no row has to be asked.
    let all = block.rows.iter().fold(keys.clone(), |all, row| {
        let seen = row.seen(&keys);
        all.start.max(seen.start)..all.end.min(seen.end)
    });
    for (logits, key) in logits.chunks_exact_mut(lanes).zip(keys) {
        let rows = logits.iter_mut().zip(block.rows);
        if all.contains(&key) {
            for (logit, row) in rows {
                *logit = unit.logit(*logit, row, kv_head, key);
            }
        } else {
            // Hooks are not called for hidden keys. Masks overwrite their logits.
            for (logit, row) in rows.filter(|(_, row)| row.sees(key)) {
                *logit = unit.logit(*logit, row, kv_head, key);
            }
        }
    }
}

impl<'a> Block<'a> {
    pub(super) fn new(rows: &'a [Row], softmax: bool) -> Self {
        // Lanes without a row see the same keys as the last row.
        let row = |lane: usize| rows[lane.min(rows.len() - 1)];
        Self {
            rows,
            softmax,
            first: std::array::from_fn(|lane| row(lane).first),
            last: std::array::from_fn(|lane| row(lane).last),
            max: [f32::NEG_INFINITY; MAX_R],
            sum: [0.0; MAX_R],
        }
    }

    /// The keys of a tile from the first to the last that any row sees.
    pub(super) fn seen(&self, tile: &Range<u32>) -> Range<u32> {
        let first = self
            .first
            .iter()
            .fold(i32::MAX, |min, &first| min.min(first));
        let last = self.last.iter().fold(i32::MIN, |max, &last| max.max(last));
        let begin = (first.max(0) as u32).clamp(tile.start, tile.end);
        let end = (last.saturating_add(1).max(0) as u32).clamp(begin, tile.end);
        begin..end
    }

    #[inline(always)]
    fn mask(&self, keys: Range<u32>, lanes: usize, logits: &mut [f32]) {
        let (begin, end) = (keys.start as i32, keys.end as i32);
        let (first, last) = (&self.first[..lanes], &self.last[..lanes]);
        let all_seen =
            first.iter().all(|&first| first <= begin) && last.iter().all(|&last| end - 1 <= last);
        if all_seen {
            return;
        }
        let hidden = hidden(self.softmax);
        for (logits, key) in logits.chunks_exact_mut(lanes).zip(begin..) {
            for ((logit, &first), &last) in logits.iter_mut().zip(first).zip(last) {
                let visible = (first <= key) & (key <= last);
                *logit = if visible { *logit } else { hidden };
            }
        }
    }

    /// Turns logits into weights. Returns the factor for earlier outputs. The rules are those of [`Softmax`], lane by
    /// lane.
    #[inline(always)]
    fn weigh<S: Simd, const N: usize>(&mut self, simd: S, logits: &mut [f32]) -> [S::F; N] {
        let lanes = N * S::LANES;
        let mut max: [S::F; N] = load(simd, &self.max);
        for logits in logits.chunks_exact(lanes) {
            for (n, max) in max.iter_mut().enumerate() {
                *max = simd.larger(*max, simd.load(&logits[n * S::LANES..]));
            }
        }
        let (mut factor, mut offset) = ([0.0; MAX_R], [0.0; MAX_R]);
        for (n, &max) in max.iter().enumerate() {
            simd.store(max, &mut offset[n * S::LANES..]);
        }
        for ((factor, offset), max) in factor.iter_mut().zip(&mut offset).zip(&mut self.max) {
            let before = std::mem::replace(max, *offset);
            *factor = if before == f32::NEG_INFINITY {
                0.0
            } else {
                before - *offset
            };
            *offset = if *offset == f32::NEG_INFINITY {
                0.0
            } else {
                *offset
            };
        }
        let (mut factor, offset): ([S::F; N], [S::F; N]) =
            (load(simd, &factor), load(simd, &offset));
        for factor in &mut factor {
            *factor = simd.exp2(*factor);
        }
        let mut sum = [simd.splat(0.0); N];
        for logits in logits.chunks_exact_mut(lanes) {
            for n in 0..N {
                let weight = simd.exp2(simd.sub(simd.load(&logits[n * S::LANES..]), offset[n]));
                simd.store(weight, &mut logits[n * S::LANES..]);
                sum[n] = simd.add(sum[n], weight);
            }
        }
        for n in 0..N {
            let to = &mut self.sum[n * S::LANES..];
            simd.store(simd.mul_add(simd.load(to), factor[n], sum[n]), to);
        }
        factor
    }

    /// Normalises the outputs and transposes them back: `[row][element]`.
    pub(super) fn finish(&self, outputs: &[f32], lanes: usize, out: &mut [f32], lse: &mut [f32]) {
        let dim = outputs.len() / lanes;
        for (r, (out, lse)) in out.chunks_exact_mut(dim).zip(lse).enumerate() {
            let softmax = Softmax {
                max: self.max[r],
                sum: self.sum[r],
            };
            let norm = if self.softmax { softmax.norm() } else { 1.0 };
            *lse = if self.softmax { softmax.lse() } else { 0.0 };
            out.iter_mut()
                .zip(outputs[r..].iter().step_by(lanes))
                .for_each(|(out, x)| *out = x * norm);
        }
    }
}
