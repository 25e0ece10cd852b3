//! Many rows: the lanes of a vector are query rows.
//!
//! Logits and outputs lie transposed, `[key][row]` and `[element][row]`, in blocks of `R` rows. So the
//! softmax works lane by lane, and both products have one form: each number of a key (or value) is
//! broadcast and multiplied with a vector of queries (or weights), `M × R` sums being kept in registers.

use std::ops::Range;

use kernels_gpu::{state::Softmax, variant::Variant};

use super::{
    simd::{Simd, load},
    unit::{Row, Scratch, Unit, hidden},
};

/// Keys of a tile: 64 of 128 elements as f32 are 32 KiB, which leaves room for the other operand in a
/// first-level cache of 48.
const KEYS: usize = 64;

/// The most keys that are multiplied together: products are computed for a multiple of them.
const MAX_M: usize = 8;

/// The most lanes of a block.
const MAX_R: usize = 32;

/// Some rows and the states of their softmax, in as many lanes as the kernels of the machine take.
pub(super) struct Block<'a> {
    rows: &'a [Row],
    softmax: bool,
    first: [i32; MAX_R],
    last: [i32; MAX_R],
    max: [f32; MAX_R],
    sum: [f32; MAX_R],
}

/// Leaves the states of a unit in `out` and `lse`.
pub(super) fn attend<V: Variant>(
    unit: &Unit<'_, V>,
    scratch: &mut Scratch,
    out: &mut [f32],
    lse: &mut [f32],
) {
    let rows = unit.rows.len();
    let states = out
        .chunks_mut(rows * unit.spec.head_dim_v as usize)
        .zip(lse.chunks_mut(rows));
    for (kv_head, (out, lse)) in unit.kv_heads.clone().zip(states) {
        attend_head(unit, kv_head, scratch, out, lse);
    }
}

fn attend_head<V: Variant>(
    unit: &Unit<'_, V>,
    kv_head: u32,
    scratch: &mut Scratch,
    out: &mut [f32],
    lse: &mut [f32],
) {
    let [small, large] = &unit.isa.kernels().wide;
    let kernels = if unit.rows.len() <= small.rows {
        small
    } else {
        large
    };
    let lanes = kernels.rows;
    let (dim_qk, dim_v) = (
        unit.spec.head_dim_qk as usize,
        unit.spec.head_dim_v as usize,
    );
    let mut blocks: Vec<Block<'_>> = unit
        .rows
        .chunks(lanes)
        .map(|rows| Block::new(rows, V::SOFTMAX))
        .collect();
    let queries = scratch.queries.floats(blocks.len() * dim_qk * lanes);
    let outputs = scratch.outputs.floats(blocks.len() * dim_v * lanes);
    // Products past the last key are computed and never looked at.
    let logits = scratch.logits.floats((KEYS + MAX_M) * lanes);
    let keys = scratch.keys.floats((KEYS + MAX_M) * dim_qk);
    let values = scratch.values.floats((KEYS * dim_v).max(dim_qk));
    for (block, queries) in blocks.iter().zip(queries.chunks_exact_mut(dim_qk * lanes)) {
        pack_queries(unit, kv_head, block.rows, queries, &mut values[..dim_qk]);
    }
    outputs.fill(0.0);

    let mut begin = unit.keys.start;
    while begin < unit.keys.end {
        let tile = begin..unit.keys.end.min(begin + KEYS as u32);
        unit.load_keys(kv_head, tile.clone(), &mut keys[..tile.len() * dim_qk]);
        unit.load_values(kv_head, tile.clone(), &mut values[..tile.len() * dim_v]);
        let operands = queries
            .chunks_exact(dim_qk * lanes)
            .zip(outputs.chunks_exact_mut(dim_v * lanes));
        for (block, (queries, outputs)) in blocks.iter_mut().zip(operands) {
            // Only the keys that some row of the block sees.
            let seen = block.seen(&tile);
            if seen.is_empty() {
                continue;
            }
            let (skip, len) = ((seen.start - tile.start) as usize, seen.len());
            let logits = &mut logits[..len.next_multiple_of(MAX_M) * lanes];
            (kernels.products)(&keys[skip * dim_qk..], dim_qk, queries, logits);
            let logits = &mut logits[..len * lanes];
            if Unit::<V>::HAS_LOGIT_HOOKS {
                unit.isa
                    .wide_hooks(unit, kv_head, block, seen.clone(), logits);
            }
            (kernels.absorb)(block, seen, logits, &values[skip * dim_v..], dim_v, outputs);
        }
        begin = tile.end;
    }
    let states = out.chunks_mut(lanes * dim_v).zip(lse.chunks_mut(lanes));
    for ((block, outputs), (out, lse)) in blocks
        .iter()
        .zip(outputs.chunks_exact(dim_v * lanes))
        .zip(states)
    {
        block.finish(outputs, lanes, out, lse);
    }
}

/// Queries of a block, transposed; rows that are not there are zero.
fn pack_queries<V: Variant>(
    unit: &Unit<'_, V>,
    kv_head: u32,
    rows: &[Row],
    to: &mut [f32],
    query: &mut [f32],
) {
    let lanes = to.len() / query.len();
    to.fill(0.0);
    for (lane, row) in rows.iter().enumerate() {
        unit.load_query(row, kv_head, query);
        to[lane..]
            .iter_mut()
            .step_by(lanes)
            .zip(&*query)
            .for_each(|(to, &x)| *to = x);
    }
}

/// Products of some keys with the queries of a block of `N` vectors. `M` keys are multiplied together.
#[inline(always)]
pub(super) fn products<S: Simd, const N: usize, const M: usize>(
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

/// Adds some keys to the states of a block: hides what is hidden, turns logits into weights, and adds the
/// weighted values to the outputs, `M` elements of them together.
#[inline(always)]
pub(super) fn absorb<S: Simd, const N: usize, const M: usize>(
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
pub(super) fn hooks<V: Variant>(
    unit: &Unit<'_, V>,
    kv_head: u32,
    block: &Block<'_>,
    keys: Range<u32>,
    logits: &mut [f32],
) {
    let lanes = logits.len() / keys.len();
    for (logits, key) in logits.chunks_exact_mut(lanes).zip(keys) {
        for (logit, row) in logits.iter_mut().zip(block.rows) {
            *logit = unit.logit(*logit, row, kv_head, key);
        }
    }
}

impl<'a> Block<'a> {
    fn new(rows: &'a [Row], softmax: bool) -> Self {
        // Lanes without a row see what the last row sees.
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
    fn seen(&self, tile: &Range<u32>) -> Range<u32> {
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

    /// Turns logits into weights; returns what earlier outputs are multiplied by. The rules are those of
    /// [`Softmax`], lane by lane.
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

    /// Normalises the outputs and turns them back: `[row][element]`.
    fn finish(&self, outputs: &[f32], lanes: usize, out: &mut [f32], lse: &mut [f32]) {
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
