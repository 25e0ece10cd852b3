//! Attention in f64 where prefills have products of 8 bits: queries and weights are rounded to e4m3 as the kernels round
//! them, everything else is exact.
//!
//! What a kernel may differ by from that is far less than what the rounding itself does: sums that keep 13 bits behind
//! the largest term, f32, and here and there a weight that lies so near the middle between two numbers of e4m3 that it
//! is rounded to the other. The tolerances of a row count those.

use std::ops::Range;

use rayon::prelude::*;
use tandem_attn::{
    abi::WorkItem,
    kv::KvView,
    plan::{Kernel, Plan, TileGroup},
    problem::{Batch, Dtype, Spec},
    tensor::{Element, F8E4M3},
};

/// The tensor cores keep so many bits behind the largest term of a sum of 8-bit products.
const KEPT: f64 = 1.0 / 8192.0;

/// The largest weight of a block.
const LARGEST: f64 = 256.0;

/// What is laid out for the kernels at a time: blocks end where it does.
const PIECE: u32 = 64;

/// Keys of one product of the tensor cores.
const DEPTH: u32 = 32;

/// Results, and what they may be off.
#[derive(Debug)]
pub struct Expected {
    /// `[total_q, q_heads, head_dim_v]`.
    pub out: Vec<f64>,
    pub out_tolerance: Vec<f64>,
    /// `[total_q, q_heads]`, natural log; −∞ where a query sees no key.
    pub lse: Vec<f64>,
    pub lse_tolerance: Vec<f64>,
}

/// How a scale is found: of keys and of values, for a query token and a KV head.
pub type ScaleOf<'a> = &'a (dyn Fn(usize, usize) -> [f32; 2] + Sync);

/// A problem as the kernels get it.
pub struct Problem<'a, T, K> {
    pub spec: &'a Spec,
    pub batch: &'a Batch,
    pub plan: &'a Plan,
    pub q: &'a [T],
    pub view: KvView<'a, K>,
    pub scale_of: ScaleOf<'a>,
    pub sinks: Option<&'a [f32]>,
}

/// Keys of a tile that products of 8 bits are used for.
pub struct InF8 {
    tokens: Range<u32>,
    keys: Range<u32>,
    block: u32,
    /// Where the last block ends.
    end: u32,
}

/// What a logit, whose terms have magnitudes that add up to `terms`, may be off by, in base 2. Each term is cut off by
/// [`KEPT`] of the power of two above the largest: up to twice that.
fn off_by(terms: f64, logit: f64) -> f64 {
    2.0 * KEPT * terms + 1e-6 * (1.0 + logit.abs())
}

fn e4m3(x: f64) -> f64 {
    F8E4M3::from_f32(x as f32).to_f32().into()
}

/// A row of queries as the kernels round it: times the power of two that brings its largest magnitude to [128, 256).
fn rounded<T: Element>(q: &[T]) -> Vec<f64> {
    let most = q.iter().fold(0.0_f32, |most, x| most.max(x.to_f32().abs()));
    let exponent = match most.to_bits() >> 23 {
        _ if most == 0.0 => 0,
        biased => 134 - biased.max(37) as i32,
    };
    let factor = f64::from(exponent).exp2();
    let of = |x: &T| e4m3(f64::from(x.to_f32()) * factor) / factor;
    q.iter().map(of).collect()
}

impl<T: Element, K: Element> Problem<'_, T, K> {
    /// What the plan gives.
    pub fn attention(&self) -> Expected {
        let (heads, dim) = (self.spec.q_heads as usize, self.spec.head_dim_v as usize);
        let tiles = self.tiles();
        let rows: Vec<_> = (0..self.batch.total_q() as usize * heads)
            .into_par_iter()
            .map(|row| self.row(&tiles, row / heads, row % heads))
            .collect();
        let mut expected = Expected {
            out: Vec::with_capacity(rows.len() * dim),
            out_tolerance: Vec::with_capacity(rows.len() * dim),
            lse: Vec::new(),
            lse_tolerance: Vec::new(),
        };
        for (out, tolerance, [lse, lse_tolerance]) in rows {
            expected.out.extend(out);
            expected.out_tolerance.extend(tolerance);
            expected.lse.push(lse);
            expected.lse_tolerance.push(lse_tolerance);
        }
        expected
    }

    /// Whether a run's results are these.
    #[allow(dead_code)] // random calls compare what they have from attention
    pub fn compare(&self, out: &[f64], lse: &[f64]) -> Result<(), String> {
        let Expected {
            out: right,
            out_tolerance,
            lse: right_lse,
            lse_tolerance,
        } = self.attention();
        let rounding = match T::DTYPE {
            Dtype::BF16 => [1e-5, 1.0 / 256.0],
            _ => [1e-5, 1.0 / 2048.0],
        };
        near("out", out, &right, &out_tolerance, rounding)?;
        near("lse", lse, &right_lse, &lse_tolerance, [2e-4, 1e-5])
    }

    /// The tiles of kernels with products of 8 bits. Their items are contiguous and have one tile for each head.
    pub fn tiles(&self) -> Vec<InF8> {
        let plan = self.plan;
        for group in &plan.groups {
            let in_f8 = group.id.is_some_and(|id| id.info().products_of_8_bits);
            assert_eq!(in_f8, group.kernel == Kernel::Prefill, "{group:?}");
        }
        let in_f8 = plan
            .groups
            .iter()
            .filter(|group| group.id.is_some_and(|id| id.info().products_of_8_bits));
        let items =
            in_f8.flat_map(|group| plan.items_of(group).iter().map(move |item| (group, item)));
        let causal = self.spec.variant.causal;
        let tile = |(group, item): (&TileGroup, &WorkItem)| {
            assert!(!item.is_gathered());
            let last = (item.position + item.rows as i32).max(0) as u32;
            let end = if causal {
                last.min(item.kv_end)
            } else {
                item.kv_end
            };
            InF8 {
                tokens: item.rows_begin..item.rows_begin + item.rows,
                keys: item.kv_begin..item.kv_end,
                block: group.tile.n,
                end: end.next_multiple_of(PIECE),
            }
        };
        items.map(tile).collect()
    }

    /// Output, what it may be off, and both of the LSE.
    pub fn row(&self, tiles: &[InF8], token: usize, head: usize) -> (Vec<f64>, Vec<f64>, [f64; 2]) {
        let Self { spec, batch, .. } = self;
        let (dim, dim_v) = (spec.head_dim_qk as usize, spec.head_dim_v as usize);
        let q = &self.q[(token * spec.q_heads as usize + head) * dim..][..dim];
        let exact: Vec<f64> = q.iter().map(|x| x.to_f32().into()).collect();
        let narrow = rounded(q);
        let part = &batch.parts[0];
        let request = batch
            .qo_indptr
            .partition_point(|&start| start as usize <= token)
            - 1;
        let in_request = token as i32 - batch.qo_indptr[request] as i32;
        let position = part.first_position(request) + in_request;
        let kv_head = head / spec.group() as usize;
        let [k_scale, v_scale] = (self.scale_of)(token, kv_head).map(f64::from);
        let page_size = part.table.page_size;
        let place = |key: u32| {
            (
                part.table.pages(request)[(key / page_size) as usize],
                key % page_size,
            )
        };
        let ancestors = batch.ancestors.get(token).copied().unwrap_or(u64::MAX);
        let seen = |key: &u32| {
            let behind = position - *key as i32;
            spec.variant
                .visible(position, part.kv_len(request))
                .contains(key)
                && (!(0..64).contains(&behind) || ancestors >> behind & 1 != 0)
        };
        let mut row = Row::new(dim_v);
        // One logit in base 2, and what it may be off.
        let logit = |key: u32, q: &[f64]| {
            let (page, offset) = place(key);
            let k = self
                .view
                .key(page, offset, kv_head as u32, spec.head_dim_qk);
            let (mut dot, mut most) = (0.0, 0.0);
            for (q, k) in q.iter().zip(k) {
                let product = q * f64::from(k.to_f32()) * k_scale * f64::from(spec.scale);
                dot += product;
                most += product.abs();
            }
            if let Some(cap) = spec.variant.soft_cap.map(f64::from) {
                dot = cap * (dot / cap).tanh();
            }
            [dot, most].map(|x| x * std::f64::consts::LOG2_E)
        };
        let value = |key: u32| {
            let (page, offset) = place(key);
            let v = self
                .view
                .value(page, offset, kv_head as u32, spec.head_dim_v);
            v.iter()
                .map(|v| f64::from(v.to_f32()) * v_scale)
                .collect::<Vec<f64>>()
        };
        let mut left: Vec<u32> = (0..part.kv_len(request)).filter(seen).collect();
        let of_row = tiles
            .iter()
            .filter(|tile| tile.tokens.contains(&(token as u32)));
        for tile in of_row {
            let (mine, others) = left.into_iter().partition(|key| tile.keys.contains(key));
            left = others;
            let mut mine: Vec<u32> = mine;
            while let Some(&last) = mine.last() {
                // Blocks are counted from the tile's end.
                let block = (tile.end - 1 - last) / tile.block;
                let begin = tile.end.saturating_sub((block + 1) * tile.block);
                let first = mine.partition_point(|&key| key < begin);
                let keys = mine.split_off(first).into_iter();
                let end = tile.end - block * tile.block;
                // A block may begin before key 0.
                let step = |key: u32| (tile.block - (end - key)) / DEPTH;
                let of_block = keys.map(|key| Weighed {
                    step: step(key),
                    logit: logit(key, &narrow),
                    value: value(key),
                });
                row.add_in_f8(&of_block.collect::<Vec<_>>());
            }
        }
        for key in left {
            let [logit, _] = logit(key, &exact);
            row.add(logit, &value(key));
        }
        if let Some(sinks) = self.sinks {
            let of_token = token % spec.variant.sink_tokens as usize * spec.q_heads as usize;
            row.add(
                f64::from(sinks[of_token + head]) * std::f64::consts::LOG2_E,
                &vec![0.0; dim_v],
            );
        }
        row.finish()
    }
}

/// A key of a block.
struct Weighed {
    /// Which product of the block has it.
    step: u32,
    /// In base 2, and the sum of the magnitudes of what makes it.
    logit: [f64; 2],
    value: Vec<f64>,
}

/// What is added up for a row. Everything is relative to 2 to the power of `reference`.
struct Row {
    reference: f64,
    sum: f64,
    out: Vec<f64>,
    /// What the tensor cores cut off at most, of products with values and of the logits by which blocks are weighed.
    cut_off: Vec<f64>,
    /// What weights that may be rounded the other way make of each output.
    in_doubt: Vec<f64>,
    /// The most that a logit is off, in base 2.
    logit_error: f64,
}

impl Row {
    fn new(dim: usize) -> Self {
        Self {
            reference: f64::NEG_INFINITY,
            sum: 0.0,
            out: vec![0.0; dim],
            cut_off: vec![0.0; dim],
            in_doubt: vec![0.0; dim],
            logit_error: 0.0,
        }
    }

    fn rescale(&mut self, reference: f64) {
        if reference <= self.reference {
            return;
        }
        let factor = (self.reference - reference).exp2();
        self.reference = reference;
        self.sum *= factor;
        for all in [&mut self.out, &mut self.cut_off, &mut self.in_doubt] {
            all.iter_mut().for_each(|x| *x *= factor);
        }
    }

    /// A key of another kernel: its weight is rounded to 16 bits at most.
    fn add(&mut self, logit: f64, value: &[f64]) {
        self.rescale(logit);
        let weight = (logit - self.reference).exp2();
        self.sum += weight;
        for (at, v) in value.iter().enumerate() {
            self.out[at] += weight * v;
            self.in_doubt[at] += (weight * v).abs() / 2048.0;
        }
    }

    /// A block of keys: weights are e4m3 of what they are relative to the block's largest.
    fn add_in_f8(&mut self, block: &[Weighed]) {
        let logits = block.iter().map(|key| key.logit[0]);
        let most = logits.fold(f64::NEG_INFINITY, f64::max);
        self.rescale(most);
        let unit = (most - self.reference).exp2() / LARGEST;
        // The largest is 2⁸ whatever its logit is off: what the others are off counts relative to it.
        let of_largest = block.iter().filter(|key| key.logit[0] == most);
        let of_largest = of_largest.map(|key| key.logit[1]).fold(0.0, f64::max);
        let mut sums = vec![0.0; self.out.len()];
        for of_step in block.chunk_by(|a, b| a.step == b.step) {
            let mut largest: Vec<f64> = sums.iter().map(|sum: &f64| sum.abs()).collect();
            for Weighed {
                logit: [logit, terms],
                value,
                ..
            } in of_step
            {
                let weight = LARGEST * (logit - most).exp2();
                let off = off_by(terms + of_largest, *logit);
                self.logit_error = self.logit_error.max(off);
                let narrow = e4m3(weight);
                let [low, high] = [-off, off].map(|off| e4m3((weight * off.exp2()).min(LARGEST)));
                let doubt = (high - narrow).max(narrow - low);
                self.sum += weight * unit;
                for (at, v) in value.iter().enumerate() {
                    let product = narrow * v;
                    sums[at] += product;
                    largest[at] = largest[at].max(product.abs());
                    self.in_doubt[at] += doubt * unit * v.abs();
                }
            }
            // Each term is cut off, what was added up before among them, and so is the sum.
            let terms = of_step.len() as f64 + 2.0;
            for (at, largest) in largest.into_iter().enumerate() {
                let largest = largest.max(sums[at].abs());
                self.cut_off[at] += terms * KEPT * largest * unit;
            }
        }
        // So much is what the block weighs beside others off, as its largest logit is.
        let of_block = off_by(of_largest, most) * std::f64::consts::LN_2;
        for (at, sum) in sums.into_iter().enumerate() {
            self.out[at] += sum * unit;
            self.cut_off[at] += of_block * sum.abs() * unit;
        }
    }

    fn finish(self) -> (Vec<f64>, Vec<f64>, [f64; 2]) {
        if self.sum == 0.0 {
            let nothing = vec![0.0; self.out.len()];
            return (nothing.clone(), nothing, [f64::NEG_INFINITY, 0.0]);
        }
        // In the sum, logits are off one way here and the other there; but not by much, and by as much at the most.
        let of_sum = self.logit_error * std::f64::consts::LN_2;
        let tolerance = |at: usize| {
            (self.in_doubt[at] + self.cut_off[at] + of_sum * self.out[at].abs()) / self.sum
        };
        let tolerances = (0..self.out.len()).map(tolerance).collect();
        let out = self.out.iter().map(|out| out / self.sum).collect();
        let lse = (self.reference + self.sum.log2()) * std::f64::consts::LN_2;
        (out, tolerances, [lse, of_sum])
    }
}

/// `Err` with the worst place, if results are off by more than they may: beside what is expected of them, outputs by
/// `relative` of themselves and by `absolute`.
pub fn near(
    name: &str,
    got: &[f64],
    expected: &[f64],
    tolerance: &[f64],
    [absolute, relative]: [f64; 2],
) -> Result<(), String> {
    assert_eq!(got.len(), expected.len(), "length of {name}");
    let (mut wrong, mut worst, mut at) = (0, 0.0_f64, 0);
    for (index, ((&got, &right), tolerance)) in got.iter().zip(expected).zip(tolerance).enumerate()
    {
        let allowed = absolute + relative * right.abs() + tolerance;
        let off = match got == right {
            true => 0.0,
            // NaN is off by more than anything.
            false => ((got - right).abs() / allowed).min(f64::MAX),
        };
        if off > 1.0 || off.is_nan() {
            wrong += 1;
        }
        if off > worst || off.is_nan() {
            (worst, at) = (if off.is_nan() { f64::MAX } else { off }, index);
        }
    }
    match wrong {
        0 => Ok(()),
        _ => Err(format!(
            "{name}: {wrong} of {} differ; worst at {at}: {:e}, right is {:e} ± {:e}, {worst:.1} times what is allowed",
            got.len(),
            got[at],
            expected[at],
            tolerance[at]
        )),
    }
}
