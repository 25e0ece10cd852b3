//! One key among very many that weighs, prefilled in 8-bit arithmetic.

use super::common::{
    self, Rng, gpu,
    problems::{Pools, Tensors},
};
use super::{Case, in_8_bits, run_twice};
use half::f16;
use tandem_attn::{
    exec::gpu::{Gpu, KvScales},
    kv::KvScales as ScalesOnHost,
    plan::{PlanOptions, Planner, SplitMode},
    problem::{Batch, Compute, Dtype, KvLayout, PageTable, Spec},
    reference,
    tensor::{Element, F8E4M3},
};

const GROUP: u32 = 8;
const TOKENS: u32 = 32;
const PAGE: u32 = 64;

/// How many rows are compared: each takes an attention in f64 over all keys, twice.
const ROWS: usize = 16;

/// Queries, and a pool in which each compared row has a key that weighs about as much as all others together. Values of
/// the first half of the columns are all positive, so that sums grow with the keys; those of the other half have both
/// signs, so that little is left of many.
fn problem(dim: u32, keys: u32, needles: &[(usize, u32)]) -> (Spec, Batch, Tensors<f16, F8E4M3>) {
    let spec = Spec::new(GROUP, 1, dim)
        .with_dtype(Dtype::F16)
        .with_kv_dtype(Dtype::F8E4M3)
        .with_compute(Compute::F8);
    let pages = keys.div_ceil(PAGE);
    let mut table = PageTable::new(PAGE, pages);
    table.push(&(0..pages).collect::<Vec<_>>(), keys);
    let batch = Batch::new(vec![0, TOKENS], table);
    let mut noise = Rng(19);
    let mut random = |count: u32, low: f32, high: f32| noise.floats(count as usize, low, high);
    let q = random(TOKENS * GROUP * dim, -1.0, 1.0);
    let mut k = random(keys * dim, -1.0, 1.0);
    let mut v = random(keys * dim, -1.0, 1.0);
    for (at, v) in v.iter_mut().enumerate() {
        if at % (dim as usize) < dim as usize / 2 {
            *v = 0.5 + 0.5 * *v;
        }
    }
    // Of a query q, the key c · q has the logit c · |q|² · scale, where |q|² is a third of the head dimension; e to it is to be
    // all keys.
    let c = (f64::from(keys)).ln() / (f64::from(dim) / 3.0 * f64::from(spec.scale));
    for &(row, key) in needles {
        let q = &q[row * dim as usize..][..dim as usize];
        let k = &mut k[key as usize * dim as usize..][..dim as usize];
        k.iter_mut().zip(q).for_each(|(k, q)| *k = q * c as f32);
        v[key as usize * dim as usize..][..dim as usize].fill(-3.0);
    }
    let strides = KvLayout::Hnd.strides(PAGE, 1, dim);
    let narrow = |all: Vec<f32>| all.into_iter().map(F8E4M3::from_f32).collect();
    let pools = Pools {
        k: narrow(k),
        v: narrow(v),
        k_strides: strides,
        v_strides: strides,
    };
    let tensors = Tensors {
        q: q.into_iter().map(f16::from_f32).collect(),
        parts: vec![pools],
    };
    (spec, batch, tensors)
}

/// Errors of outputs against exact attention: of a run, and of the same operands of 8 bits added up exactly.
fn worst_errors(gpu: &Gpu, dim: u32, keys: u32) -> [f64; 2] {
    let needles: Vec<_> = (0..ROWS)
        .map(|index| {
            let row = index * (TOKENS * GROUP) as usize / ROWS;
            // From the first key to the last that the first row sees.
            let key = u64::from(keys - TOKENS) * index as u64 / (ROWS - 1) as u64;
            (row, key as u32)
        })
        .collect();
    let (spec, batch, tensors) = problem(dim, keys, &needles);
    let options = PlanOptions::default().with_split(SplitMode::Off);
    let plan = Planner::new()
        .plan(&spec, &batch, &gpu.device(), &options)
        .expect("it can be planned");
    let case = Case {
        spec,
        batch: batch.clone(),
        layout: KvLayout::Hnd,
        options,
        captured: false,
        granularity: 0,
        powers: false,
        query_exponent: 0,
        seed: 0,
    };
    let [(out, _), again] = run_twice(gpu, &case, &plan, &tensors, KvScales::One);
    assert!(out == again.0, "two runs differ");
    let out = common::decode(Dtype::F16, bytemuck::cast_slice(&out));
    let view = tensors.parts[0].view().with_scales(ScalesOnHost::One);
    let same_operands = in_8_bits::Problem {
        spec: &spec,
        batch: &batch,
        plan: &plan,
        q: &tensors.q,
        view,
        scale_of: &|_, _| [1.0; 2],
        sinks: None,
    };
    let tiles = same_operands.tiles();
    let heads = GROUP as usize;
    let mut worst = [0.0_f64; 2];
    for (row, _) in needles {
        let (token, head) = (row / heads, row % heads);
        // The row alone, on the keys that it sees.
        let seen = keys - TOKENS + token as u32 + 1;
        let mut table = PageTable::new(PAGE, batch.parts[0].table.pool_pages);
        let pages: Vec<_> = (0..seen.div_ceil(PAGE)).collect();
        table.push(&pages, seen);
        let alone = Batch::new(vec![0, 1], table);
        let one = Spec::new(1, 1, dim)
            .with_dtype(Dtype::F16)
            .with_kv_dtype(Dtype::F8E4M3);
        let dim = dim as usize;
        let q = &tensors.q[row * dim..][..dim];
        let exact = reference::attention(&one, &alone, q, &[view]).expect("they fit");
        let (rounded, ..) = same_operands.row(&tiles, token, head);
        for at in 0..dim {
            let exact = exact.out[at];
            let rounded = f16::from_f64(rounded[at]).to_f64();
            worst[0] = worst[0].max((out[row * dim + at] - exact).abs());
            worst[1] = worst[1].max((rounded - exact).abs());
        }
    }
    worst
}

/// At 131,072 keys sums in the tensor cores' own accumulators would lose what a key adds.
#[test]
fn a_needle_is_found_in_8_bits() {
    let Some(gpu) = gpu("a_needle_is_found_in_8_bits") else {
        return;
    };
    let keys = std::env::var("TANDEM_KEYS")
        .ok()
        .and_then(|keys| keys.parse().ok());
    for dim in [128, 256] {
        let [got, of_operands] = worst_errors(gpu, dim, keys.unwrap_or(131_072));
        assert!(of_operands > 0.0, "queries and weights are rounded");
        assert!(
            got <= 1.3 * of_operands,
            "heads of {dim}: off by {got:e}, exact sums of the same operands by {of_operands:e}"
        );
        eprintln!(
            "heads of {dim}: worst error {got:e}, {:.3} of that of exact sums",
            got / of_operands
        );
    }
}
