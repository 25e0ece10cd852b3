//! Keys of 656 bytes whose scales, queries and logits are far from 1, against softmax in f64 of the exact products.

use half::bf16;
use tandem_attn::{
    exec::gpu::{Gpu, WorkspaceOptions},
    plan::{Bound, PlanOptions, Planner, SplitMode},
    problem::{Batch, Dtype, KvLayout, Spec},
    tensor::{Element, F8E4M3},
};

use crate::{
    common::{self, Rng, Stream, problems::Tensors},
    problem::{OnDevice, Request, batch_of},
};

const KEYS: u32 = 330;
/// Heads whose rows are a tile of 16, and a tile of 64.
const HEADS: [usize; 2] = [16, 64];

/// How a problem is made of random numbers.
struct Case {
    name: &'static str,
    /// Of a head, what its queries are multiplied by.
    query: fn(usize) -> f32,
    /// Of a head, what its query's first column that only keys have is.
    rope: fn(usize) -> f32,
    /// Of a key and a group: the log of its scale.
    scale: fn(&mut Rng, u32) -> f32,
    /// Of a key, by the largest of these logs: its element in that column.
    bias: fn(&mut Rng, u32, f32) -> f32,
}

fn two_to(exponent: f32) -> f32 {
    exponent.exp2()
}

const CASES: &[Case] = &[
    Case {
        name: "scales that differ by 2^40, and weights against them",
        query: |head| if head == 5 { 0.0 } else { two_to(-28.0) },
        rope: |head| [1.0, 0.5, 2.0, -0.125][head % 4],
        scale: |noise, _| noise.between(-29.0, 11.0).round() + noise.between(0.0, 1.0),
        bias: |noise, _, log| -(log + 29.0) * 0.7 + noise.between(-8.0, 8.0),
    },
    Case {
        name: "the same, powers of two in one group, logits that rise",
        query: |_| two_to(-28.0),
        rope: |head| [1.0, 0.1, -1.0, 0.0][head % 4],
        scale: |noise, group| match group {
            2 => noise.between(-29.0, 11.0).round(),
            _ => -9.0,
        },
        bias: |noise, key, _| key as f32 + noise.between(-2.0, 2.0),
    },
    Case {
        name: "one group is far below the others, and one is nothing at first",
        query: |_| 2.0,
        rope: |_| 0.0,
        scale: |noise, group| match group {
            1 => -40.0 + noise.between(-1.0, 1.0),
            3 => noise.between(-150.0, -9.0),
            _ => -9.0 + noise.between(-1.0, 1.0),
        },
        bias: |_, _, _| 0.0,
    },
    Case {
        name: "large queries",
        query: |head| if head % 5 == 4 { 0.0 } else { two_to(60.0) },
        rope: |_| 0.0,
        scale: |noise, _| -69.0 + noise.between(-1.0, 1.0),
        bias: |_, _, _| 0.0,
    },
    Case {
        name: "small queries",
        query: |_| two_to(-60.0),
        rope: |head| head as f32,
        scale: |noise, _| 51.0 + noise.between(-1.0, 1.0),
        bias: |noise, _, _| noise.between(-1.0, 1.0),
    },
    Case {
        name: "negative logits of hundreds, queries of nothing",
        query: |_| 0.0,
        rope: |_| 1.0,
        scale: |noise, _| -9.0 + noise.between(-1.0, 1.0),
        bias: |noise, key, _| -300.0 - f32::from(key < 40) * 200.0 + noise.between(-4.0, 4.0),
    },
];

/// A key's elements, and the largest number times its largest scale.
struct Key {
    elements: Vec<f64>,
    largest: f64,
}

/// Queries and keys of a case.
fn problem(case: &Case, spec: &Spec, batch: &Batch) -> (Tensors<bf16, F8E4M3>, Vec<Key>) {
    let mut tensors = Tensors::<bf16, F8E4M3>::random(spec, batch, KvLayout::Nhd, 7);
    let mut noise = Rng(11);
    for (head, query) in tensors.q.chunks_exact_mut(576).enumerate() {
        let factor = (case.query)(head);
        for x in &mut query[..512] {
            *x = bf16::from_f32(x.to_f32() * factor);
        }
        query[512..].fill(bf16::ZERO);
        query[512] = bf16::from_f32((case.rope)(head) / spec.scale);
    }
    let table = &batch.parts[0].table;
    let mut keys = Vec::new();
    for at in 0..KEYS {
        let page = table.pages(0)[(at / table.page_size) as usize];
        let row = (page * table.page_size + at % table.page_size) as usize * 656;
        let row = &mut tensors.parts[0].k[row..][..656];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(row);
        let logs = [0, 1, 2, 3].map(|group| (case.scale)(&mut noise, group));
        let mut key = Key {
            elements: Vec::new(),
            largest: 0.0,
        };
        for (group, log) in logs.into_iter().enumerate() {
            let scale = if log < -100.0 { 0.0 } else { log.exp2() };
            bytes[512 + 4 * group..][..4].copy_from_slice(&scale.to_ne_bytes());
            key.largest = key.largest.max(448.0 * f64::from(scale));
            let numbers = &bytes[128 * group..][..128];
            key.elements.extend(
                numbers
                    .iter()
                    .map(|&x| f64::from(F8E4M3(x).to_f32()) * f64::from(scale)),
            );
        }
        let highest = logs.into_iter().fold(f32::NEG_INFINITY, f32::max);
        let bias = bf16::from_f32((case.bias)(&mut noise, at, highest));
        bytes[528..].fill(0);
        bytes[528..530].copy_from_slice(&bias.to_bits().to_ne_bytes());
        key.elements.push(bias.to_f64());
        keys.push(key);
    }
    (tensors, keys)
}

/// How far off a product of a number and its scale may be, as a part of itself and as one of the largest that the key can have.
struct Rounding {
    own: f64,
    largest: f64,
}

impl Rounding {
    /// The kernel of 16 rows does not round products. That of 64 rows has f16 of them, times a power of two, and of the scales.
    fn of(heads: usize) -> Self {
        let [own, largest] = match heads {
            16 => [0.0; 2],
            _ => [2_f64.powi(-10), 2_f64.powi(-31)],
        };
        Self { own, largest }
    }
}

/// Output, how far off it may be, and log of the sum of a row.
fn exact(
    query: &[bf16],
    keys: &[Key],
    scale: f64,
    rounding: &Rounding,
) -> (Vec<[f64; 2]>, [f64; 2]) {
    let dot = |key: &Key, term: fn(f64) -> f64| -> f64 {
        key.elements
            .iter()
            .zip(query)
            .map(|(k, q)| term(k * q.to_f64()))
            .sum::<f64>()
            * scale
    };
    let logits: Vec<f64> = keys.iter().map(|key| dot(key, |x| x)).collect();
    let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    // Sums in f32, and differences of logits; and what elements are off by.
    let of_query: f64 = query[..512].iter().map(|q| q.to_f64().abs()).sum();
    let off = keys
        .iter()
        .map(|key| {
            dot(key, f64::abs) * (2_f64.powi(-21) + rounding.own)
                + of_query * key.largest * rounding.largest * scale
        })
        .fold(0.0, f64::max);
    let weights: Vec<f64> = logits.iter().map(|logit| (logit - largest).exp()).collect();
    let sum: f64 = weights.iter().sum();
    let small: f64 = weights
        .iter()
        .zip(keys)
        .map(|(w, key)| w / sum * key.largest * rounding.largest)
        .sum();
    let out = (0..512).map(|column| {
        let terms = weights
            .iter()
            .zip(keys)
            .map(|(w, key)| w * key.elements[column] / sum);
        let (mut value, mut magnitudes) = (0.0, 0.0);
        terms.for_each(|term| (value, magnitudes) = (value + term, magnitudes + term.abs()));
        // Weights are rounded to 11 bits, the result to 8.
        let rounded = 2_f64.powi(-8) * value.abs() + 2_f64.powi(-11) * magnitudes;
        let of_elements = rounding.own * magnitudes + small;
        [value, rounded + of_elements + 3.0 * off * magnitudes]
    });
    (
        out.collect(),
        [largest + sum.ln(), off + 1e-5 + 1e-6 * largest.abs()],
    )
}

fn check(gpu: &Gpu, case: &Case, heads: usize, split: SplitMode) {
    let spec = Spec::latent(heads as u32, 512, 64)
        .with_dtype(Dtype::BF16)
        .with_kv_dtype(Dtype::F8E4M3);
    let request = Request {
        parent: 0,
        shared: 0,
        own: KEYS,
        queries: 1,
    };
    let batch = batch_of(&[request], 16, 3);
    let options = PlanOptions::default().with_split(split);
    let plan = Planner::new()
        .plan(&spec, &batch, &gpu.device(), &options)
        .expect("the case can be planned");
    let mut workspace = gpu
        .workspace(&spec, &Bound::of(&plan), WorkspaceOptions::default())
        .expect("there is memory");
    let (tensors, keys) = problem(case, &spec, &batch);
    let on_device = OnDevice::new(&spec, &batch, &tensors);
    let stream = Stream::new();
    // SAFETY: the stream is ours.
    unsafe { workspace.upload(&plan, stream.0) }.expect("the plan fits");
    let (out, lse) = on_device.run(gpu, &mut workspace, &stream);
    let rounding = Rounding::of(heads);
    for (head, query) in tensors.q.chunks_exact(576).enumerate() {
        let (right, [right_lse, lse_off]) = exact(query, &keys, spec.scale.into(), &rounding);
        let got = f64::from(f32::from_bits(lse[head]));
        assert!(
            (got - right_lse).abs() <= lse_off,
            "{}: lse of head {head} of {heads} is {got}, right is {right_lse}",
            case.name
        );
        for (column, [right, off]) in right.into_iter().enumerate() {
            let got = bf16::from_bits(out[head * 512 + column]).to_f64();
            assert!(
                (got - right).abs() <= off,
                "{}: head {head} of {heads}, column {column} is {got:e}, right is {right:e}, off by {:e} of {off:e}",
                case.name,
                (got - right).abs()
            );
        }
    }
}

#[test]
fn scales_of_keys_of_656_bytes_may_be_far_apart() {
    let Some(gpu) = common::gpu("scales_of_keys_of_656_bytes_may_be_far_apart") else {
        return;
    };
    for (case, heads) in CASES
        .iter()
        .flat_map(|case| HEADS.map(|heads| (case, heads)))
    {
        check(gpu, case, heads, SplitMode::Makespan);
        // One unit, in which references are renewed.
        check(gpu, case, heads, SplitMode::Fixed { tokens: 512 });
    }
}
