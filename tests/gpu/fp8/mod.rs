//! 8-bit keys and values on the GPU against naive attention in f64 on the same pool.

mod hybrids;
mod in_8_bits;
mod nan_scales;
mod needle;
mod prefixes;
mod wide;

use crate::common;
use common::{
    Memory, Rng, Stream, Tolerance, compare, gpu,
    problems::{Pools, Tensors, ancestors, cases, heads, kv_len, prefixed, sinks, variant},
};
use half::{bf16, f16};
use proptest::prelude::*;
use tandem_attn::{
    Error,
    abi::KvStrides,
    exec::{
        Cpu,
        gpu::{self, DeviceTensor, Gpu, KvPool, LaunchSet, RunTensors, WorkspaceOptions},
    },
    kv::{AppendScales, KvScales, KvView, KvViewMut},
    plan::{
        BatchLimits, Bound, DeviceDescription, Kernel, MergeMode, Plan, PlanError, PlanOptions,
        Planner, SplitMode, TileGroup, WorkspaceLayout,
    },
    problem::{Batch, Compute, Dtype, KvLayout, PageTable, Spec},
    reference,
    tensor::{Element, F8E4M3, F8E5M2, ShapeError},
};

#[derive(Clone, Debug)]
struct Case {
    spec: Spec,
    batch: Batch,
    layout: KvLayout,
    options: PlanOptions,
    /// Whether the launches are those of a captured graph, which claim one unit at a time.
    captured: bool,
    granularity: u32,
    /// Whether scales are powers of two: then keys that were multiplied by them are exact.
    powers: bool,
    /// Factor of all queries, as a power of two: bf16 has a range that f16 has not.
    query_exponent: i32,
    seed: u64,
}

impl Case {
    /// Gives it other heads; the variant stays.
    fn set_heads(&mut self, spec: Spec) {
        let variant = self.spec.variant;
        self.spec = spec;
        self.spec.variant = variant;
    }

    /// Gives two of five causal batches token trees.
    fn add_ancestors(&mut self) {
        if self.spec.variant.causal && self.seed % 5 < 2 {
            let ancestors = ancestors(&self.batch, self.seed);
            self.batch = self.batch.clone().with_ancestors(ancestors);
        }
    }
}

/// Requests of at most so many queries, scales up to a granularity.
fn case(most_queries: u32, granularities: u32) -> impl Strategy<Value = Case> {
    let heads = (1..5_u32, 1..17_u32);
    let dim = prop_oneof![Just(64_u32), Just(128), Just(256)];
    let page = prop_oneof![
        4 => Just(16_u32), 1 => Just(8), 1 => Just(24), 1 => Just(64), 1 => Just(128),
        1 => Just(1), 1 => Just(5)
    ];
    let layout = prop_oneof![Just(KvLayout::Nhd), Just(KvLayout::Hnd)];
    let request = (kv_len(), 0..12_usize, 1..=most_queries);
    let split = prop_oneof![
        3 => Just(SplitMode::Makespan),
        2 => (1..20_u32).prop_map(|pages| SplitMode::Fixed { tokens: pages })
    ];
    let merge = prop_oneof![Just(MergeMode::Fused), Just(MergeMode::Kernel)];
    (
        (heads, dim, variant()),
        (
            page,
            prop::collection::vec(request, 1..10),
            prop::bool::weighted(0.5),
        ),
        (
            layout,
            split,
            merge,
            0..=granularities,
            prop_oneof![2 => Just(0), 1 => -60..60_i32],
        ),
        any::<u64>(),
    )
        .prop_map(
            |(((kv_heads, group), dim, variant), (page, requests, one_token), rest, seed)| {
                let (layout, mut split, merge_mode, mut granularity, query_exponent) = rest;
                if variant.soft_cap.is_some() {
                    // Decodes with a soft cap do not take scales of each token.
                    granularity = granularity.min(3);
                }
                let mut spec = Spec::new(kv_heads * group, kv_heads, dim);
                spec.variant = variant;
                if let SplitMode::Fixed { tokens } = &mut split {
                    *tokens *= page;
                }
                Case {
                    spec,
                    batch: prefixed(&requests, page, one_token, seed),
                    layout,
                    options: PlanOptions::default()
                        .with_split(split)
                        .with_merge_mode(merge_mode),
                    captured: (seed / 9).is_multiple_of(3),
                    granularity,
                    powers: false,
                    query_exponent,
                    seed,
                }
            },
        )
}

/// Scales on the host, `[requests or 1, kv heads or 1]`.
struct Scales {
    k: Vec<f32>,
    v: Vec<f32>,
    of_token: Vec<u32>,
}

const REQUESTS: u32 = 3;

impl Scales {
    fn random(case: &Case) -> Self {
        let mut noise = Rng(case.seed ^ 0x5CA1E);
        let heads = case.spec.kv_heads;
        let table = &case.batch.parts[0].table;
        let by_token = table.pool_pages * table.page_size * heads;
        let count = [0, 1, heads, REQUESTS * heads, by_token][case.granularity as usize];
        let mut some = |largest| {
            let scales = (0..count).map(|_| noise.between(0.1, largest));
            let scales = scales.map(|scale: f32| match case.powers {
                true => scale.log2().round().exp2(),
                false => scale,
            });
            scales.collect()
        };
        Self {
            k: some(1.5),
            v: some(3.0),
            of_token: (0..case.batch.total_q())
                .map(|token| token * 7 % REQUESTS)
                .collect(),
        }
    }

    fn on_host(&self, case: &Case) -> KvScales<'_> {
        let Self { k, v, of_token } = self;
        let strides = by_token(case);
        match case.granularity {
            0 => KvScales::One,
            1 => KvScales::Tensor { k: k[0], v: v[0] },
            2 => KvScales::Head { k, v },
            3 => KvScales::Request { k, v, of_token },
            _ => KvScales::Token {
                k,
                v,
                k_strides: strides,
                v_strides: strides,
            },
        }
    }
}

/// Scales of keys and of values, for a query token and a KV head; not those of each token.
fn scales_of(scales: &Scales, case: &Case, token: usize, head: usize) -> [f32; 2] {
    let heads = case.spec.kv_heads as usize;
    let at = match case.granularity {
        0 => return [1.0; 2],
        1 => 0,
        2 => head,
        _ => scales.of_token[token] as usize * heads + head,
    };
    [scales.k[at], scales.v[at]]
}

/// How the scales of a case's tokens lie: as its pages do.
fn by_token(case: &Case) -> KvStrides {
    let page_size = case.batch.parts[0].table.page_size;
    case.layout.strides(page_size, case.spec.kv_heads, 1)
}

/// Scales that no key has are NaN.
fn poison_scales(case: &Case, scales: &mut [f32]) {
    let (table, strides) = (&case.batch.parts[0].table, by_token(case));
    let mut owned = vec![false; scales.len()];
    for (page, offset, head) in places(table, case.spec.kv_heads) {
        let at = page * strides.page + offset * strides.token + head * strides.head;
        owned[at as usize] = true;
    }
    let unowned = scales.iter_mut().zip(owned).filter(|(_, owned)| !owned);
    unowned.for_each(|(scale, _)| *scale = f32::NAN);
}

/// The same in device memory.
fn on_device(case: &Case, [k, v, of_token]: &[Memory; 3]) -> gpu::KvScales {
    let heads = case.spec.kv_heads as usize;
    match case.granularity {
        0 => gpu::KvScales::One,
        1 => gpu::KvScales::Tensor {
            k: k.tensor(Dtype::F32, [1]),
            v: v.tensor(Dtype::F32, [1]),
        },
        2 => gpu::KvScales::Head {
            k: k.tensor(Dtype::F32, [heads]),
            v: v.tensor(Dtype::F32, [heads]),
        },
        3 => gpu::KvScales::Request {
            k: k.tensor(Dtype::F32, [REQUESTS as usize, heads]),
            v: v.tensor(Dtype::F32, [REQUESTS as usize, heads]),
            of_token: of_token.array(),
        },
        _ => {
            let (table, strides) = (&case.batch.parts[0].table, by_token(case));
            let shape = [table.pool_pages as usize, table.page_size as usize, heads];
            let [k, v] = [k, v].map(|scales| {
                scales
                    .tensor(Dtype::F32, shape)
                    .with_stride(0, strides.page as usize)
                    .with_stride(1, strides.token as usize)
                    .with_stride(2, strides.head as usize)
            });
            gpu::KvScales::Token { k, v }
        }
    }
}

/// Bytes that nobody owns are a NaN, of e4m3 one of its two.
fn poison<K: Element>(pool: &mut [K], seed: u64) {
    let nan: u8 = if seed.is_multiple_of(2) { 0x7F } else { 0xFF };
    pool.iter_mut()
        .filter(|x| x.to_f32().is_nan())
        .for_each(|x| *x = bytemuck::cast(nan));
}

fn check<T: Element, K: Element>(gpu: &Gpu, case: &Case) -> Result<(), TestCaseError> {
    check_on::<T, K>(gpu, &gpu.device(), case)
}

/// As [`check`], planned for a description of the GPU.
fn check_on<T: Element, K: Element>(
    gpu: &Gpu,
    device: &DeviceDescription,
    case: &Case,
) -> Result<(), TestCaseError> {
    let mut case = case.clone();
    let mut spec = case.spec.with_dtype(T::DTYPE).with_kv_dtype(K::DTYPE);
    let mut tensors = Tensors::<T, K>::random(&spec, &case.batch, case.layout, case.seed);
    let Pools { k, v, .. } = &mut tensors.parts[0];
    poison(k, case.seed);
    poison(v, case.seed);
    // Queries far from 1, and logits as before.
    if T::DTYPE == Dtype::BF16 {
        let factor = (case.query_exponent as f32).exp2();
        let scaled = |q: &mut T| *q = T::from_f32(q.to_f32() * factor);
        tensors.q.iter_mut().for_each(scaled);
        spec.scale /= factor;
    }
    spec.compute = case.spec.compute;
    spec.variant.sinks = case.spec.variant.sinks;
    case.spec = spec;
    let Case { batch, options, .. } = &case;
    let mut scales = Scales::random(&case);
    if case.granularity == 4 {
        poison_scales(&case, &mut scales.k);
        poison_scales(&case, &mut scales.v);
    }
    let pool = &tensors.parts[0];
    let view: KvView<'_, K> = pool.view().with_scales(scales.on_host(&case));

    let plan = Planner::new()
        .plan(&spec, batch, device, options)
        .expect("the case can be planned");
    plan.verify(batch).expect("the plan computes the batch");
    let memory = [
        Memory::new(&[&scales.k[..], &[f32::NAN]].concat()),
        Memory::new(&[&scales.v[..], &[f32::NAN]].concat()),
        Memory::new(&scales.of_token),
    ];
    let runs = run_twice(gpu, &case, &plan, &tensors, on_device(&case, &memory));
    let shape = [batch.total_q(), spec.q_heads, spec.head_dim_v].map(|extent| extent as usize);
    let out = common::decode(T::DTYPE, bytemuck::cast_slice(&runs[0].0));
    let lse = runs[0].1.iter().map(|&x| f32::from_bits(x).into());
    let lse: Vec<f64> = lse.collect();
    prop_assert!(runs[0] == runs[1], "two runs differ");
    if spec.compute == Compute::F8 {
        let sinks = sinks(&spec);
        let expected = in_8_bits::Problem {
            spec: &spec,
            batch,
            plan: &plan,
            q: &tensors.q,
            view: pool.view(),
            scale_of: &|token, head| scales_of(&scales, &case, token, head),
            sinks: sinks.as_deref(),
        };
        return expected.compare(&out, &lse).map_err(TestCaseError::fail);
    }
    let sinks = sinks(&spec);
    let heads = heads(&sinks);
    let exact = reference::attention_heads(&spec, batch, &tensors.q, &[view], &heads);
    let exact = exact.expect("they fit");
    let prefills = |group: &&TileGroup| group.kernel == Kernel::Prefill;
    let widened = match case.granularity {
        4 => plan.groups.iter().filter(prefills).count(),
        _ => 0,
    };
    // Of what decodes and prefills computed together is known that it lies between the two.
    if widened == 0 {
        return near::<T>(&shape, &out, &lse, [&exact; 2]);
    }
    let wide = rounded(&case, &tensors, &scales);
    let spec = spec.with_kv_dtype(T::DTYPE);
    let of_wide = reference::attention_heads(&spec, batch, &tensors.q, &[wide.view()], &heads);
    let of_wide = &of_wide.expect("they fit");
    let decodes = widened < plan.groups.len();
    near::<T>(
        &shape,
        &out,
        &lse,
        [if decodes { &exact } else { of_wide }, of_wide],
    )
}

/// The pool as prefills read it where each token has scales: every number times its scale, rounded to 16 bits.
fn rounded<T: Element, K: Element>(
    case: &Case,
    tensors: &Tensors<T, K>,
    scales: &Scales,
) -> Pools<T> {
    let (pool, table) = (&tensors.parts[0], &case.batch.parts[0].table);
    let (of_pool, of_scales) = (pool.k_strides, by_token(case));
    let round = |numbers: &[K], scales: &[f32]| {
        let mut wide = vec![T::from_f32(f32::NAN); numbers.len()];
        for (page, offset, head) in places(table, case.spec.kv_heads) {
            let at = |strides: KvStrides| {
                (page * strides.page + offset * strides.token + head * strides.head) as usize
            };
            for at_number in at(of_pool)..at(of_pool) + case.spec.head_dim_qk as usize {
                let scale = scales.get(at(of_scales)).unwrap_or(&1.0);
                let product = numbers[at_number].to_f32() * scale;
                wide[at_number] = T::from_f32(product);
            }
        }
        wide
    };
    Pools {
        k: round(&pool.k, &scales.k),
        v: round(&pool.v, &scales.v),
        k_strides: pool.k_strides,
        v_strides: pool.v_strides,
    }
}

/// Page, offset and KV head of each key that there is.
fn places(table: &PageTable, heads: u32) -> impl Iterator<Item = (u32, u32, u32)> {
    let keys = (0..table.row_blocks()).flat_map(move |row_block| {
        (0..table.kv_len(row_block)).map(move |key| (table.pages(row_block), key))
    });
    keys.flat_map(move |(pages, key)| {
        let page = pages[(key / table.page_size) as usize];
        (0..heads).map(move |head| (page, key % table.page_size, head))
    })
}

/// Whether results are between two others, or close to one of them.
fn near<T: Element>(
    shape: &[usize; 3],
    out: &[f64],
    lse: &[f64],
    bounds: [&reference::Output; 2],
) -> Result<(), TestCaseError> {
    let nearest = |got: &[f64], [a, b]: [&[f64]; 2]| -> Vec<f64> {
        let between = |((&x, &a), &b): ((&f64, &f64), &f64)| x.max(a.min(b)).min(a.max(b));
        got.iter().zip(a).zip(b).map(between).collect()
    };
    // Weights are rounded to f16, values may be three times as large as without scales.
    let mut tolerance = Tolerance::of(T::DTYPE);
    tolerance.absolute = match T::DTYPE {
        Dtype::BF16 => 3.0 / 256.0,
        _ => 3.0 / 2048.0,
    };
    let right = nearest(out, bounds.map(|bound| &bound.out[..]));
    compare("out", shape, out, &right, tolerance).map_err(TestCaseError::fail)?;
    let tolerance = Tolerance {
        absolute: 2e-4,
        relative: 1e-5,
    };
    let right = nearest(lse, bounds.map(|bound| &bound.lse[..]));
    compare("lse", &[shape[0], shape[1], 1], lse, &right, tolerance).map_err(TestCaseError::fail)
}

/// Outputs and LSEs of two runs, as bits.
fn run_twice<T: Element, K: Element>(
    gpu: &Gpu,
    case: &Case,
    plan: &Plan,
    tensors: &Tensors<T, K>,
    scales: gpu::KvScales,
) -> [(Vec<u16>, Vec<u32>); 2] {
    let (spec, table) = (&case.spec, &case.batch.parts[0].table);
    let pool = &tensors.parts[0];
    let (k, v, q) = (
        Memory::new(&pool.k),
        Memory::new(&pool.v),
        Memory::new(&tensors.q),
    );
    let kv = KvPool::new(
        spec,
        case.layout,
        table.page_size,
        table.pool_pages,
        k.address(),
        v.address(),
    )
    .with_scales(scales);
    let launches = case.captured.then(|| LaunchSet::new().and(plan));
    let options = WorkspaceOptions::default().with_launches(launches);
    let mut workspace = gpu
        .workspace(spec, &Bound::of(plan), options)
        .expect("there is memory for it");
    let stream = Stream::new();
    // SAFETY: the stream is ours.
    unsafe { workspace.upload(plan, stream.0) }.expect("the bound is the plan's");
    let shape = [plan.total_q, spec.q_heads, spec.head_dim_v].map(|extent| extent as usize);
    let rows = shape[0] * shape[1];
    let q = q.tensor(T::DTYPE, shape);
    let sinks = sinks(spec).map(|sinks| Memory::new(&sinks));
    [(); 2].map(|()| {
        let out = Memory::new(&vec![u16::MAX; rows * shape[2]]);
        let lse = Memory::new(&vec![u32::MAX; rows]);
        let (to, lse_to) = (
            out.tensor(T::DTYPE, shape),
            lse.tensor(Dtype::F32, [shape[0], shape[1]]),
        );
        let pools = [kv];
        let mut tensors = RunTensors::new(&q, &pools, &to).with_lse(&lse_to);
        if let Some(sinks) = &sinks {
            tensors = tensors.with_sinks(sinks.array());
        }
        // SAFETY: everything lives until the stream was waited for.
        unsafe { gpu.run_with(&mut workspace, &tensors, stream.0) }.expect("the run is right");
        stream.wait();
        (out.read(), lse.read())
    })
}

/// With elements that the case's seed draws. Decodes of e5m2 have neither a soft cap nor scales of each token.
fn check_any(gpu: &Gpu, case: &Case) -> Result<(), TestCaseError> {
    let e5m2 = case.spec.variant.soft_cap.is_none() && case.granularity < 4;
    match (case.seed % 3, e5m2 && (case.seed / 3).is_multiple_of(3)) {
        (0, false) => check::<f16, F8E4M3>(gpu, case),
        (_, false) => check::<bf16, F8E4M3>(gpu, case),
        (0, true) => check::<f16, F8E5M2>(gpu, case),
        (_, true) => check::<bf16, F8E5M2>(gpu, case),
    }
}

#[test]
fn decode_of_8_bit_pages_is_the_reference() {
    let Some(gpu) = gpu("decode_of_8_bit_pages_is_the_reference") else {
        return;
    };
    let mut runner = proptest::test_runner::TestRunner::new(cases(300));
    runner
        .run(&case(8, 4), |case| check_any(gpu, &case))
        .unwrap();
}

/// A CTA has more units of one chunk than chunks that it claims ahead, and more of these than slots.
#[test]
fn graphs_decode_many_units_of_one_chunk() {
    let Some(gpu) = gpu("graphs_decode_many_units_of_one_chunk") else {
        return;
    };
    for (group, dim, granularity) in [
        (16, 128, 0),
        (16, 128, 4),
        (8, 128, 0),
        (16, 256, 0),
        (8, 256, 0),
        (16, 64, 0),
    ] {
        let kv_heads = 4;
        let requests = 12 * gpu.multiprocessors() / kv_heads;
        let mut table = PageTable::new(16, 2 * requests);
        for request in 0..requests {
            let keys = 1 + request % 32;
            let pages = 2 * request..2 * request + keys.div_ceil(16);
            table.push(&pages.collect::<Vec<_>>(), keys);
        }
        let case = Case {
            spec: Spec::new(kv_heads * group, kv_heads, dim),
            batch: Batch::new((0..=requests).collect(), table),
            layout: KvLayout::Nhd,
            options: PlanOptions::default(),
            captured: true,
            granularity,
            powers: false,
            query_exponent: 0,
            seed: 1,
        };
        check::<bf16, F8E4M3>(gpu, &case).unwrap();
    }
}

/// Heads of 64 that lie side by side, and so many of them that they are read two at a time.
#[test]
fn decode_of_pairs_of_kv_heads_is_the_reference() {
    let Some(gpu) = gpu("decode_of_pairs_of_kv_heads_is_the_reference") else {
        return;
    };
    let groups = prop_oneof![Just(1_u32), Just(2), Just(3), Just(8)];
    let mut runner = proptest::test_runner::TestRunner::new(cases(60));
    runner
        .run(&(case(4, 4), groups), |(mut case, group)| {
            let kv_heads = 2 * gpu.multiprocessors();
            case.set_heads(Spec::new(kv_heads * group, kv_heads, 64));
            case.layout = KvLayout::Nhd;
            match case.seed % 3 {
                0 => check::<f16, F8E4M3>(gpu, &case),
                _ => check::<bf16, F8E4M3>(gpu, &case),
            }
        })
        .unwrap();
}

/// Heads between those of the kernels, which decodes copy row by row, prompts too.
#[test]
fn padded_heads_of_8_bits_are_the_reference() {
    let Some(gpu) = gpu("padded_heads_of_8_bits_are_the_reference") else {
        return;
    };
    let dims = prop::sample::select(&[16_u32, 48, 80, 96, 112, 144, 160, 176, 192, 208, 224, 240]);
    let mut runner = proptest::test_runner::TestRunner::new(cases(60));
    runner
        .run(&(case(30, 4), dims), |(mut case, dim)| {
            let Spec {
                q_heads, kv_heads, ..
            } = case.spec;
            case.set_heads(Spec::new(q_heads, kv_heads, dim));
            match case.seed % 3 {
                0 => check::<f16, F8E4M3>(gpu, &case),
                _ => check::<bf16, F8E4M3>(gpu, &case),
            }
        })
        .unwrap();
}

/// Against the same arithmetic in f64: queries and weights rounded to e4m3, everything else exact.
#[test]
fn prefill_in_8_bits_is_f64_of_the_same_operands() {
    let Some(gpu) = gpu("prefill_in_8_bits_is_f64_of_the_same_operands") else {
        return;
    };
    let mut runner = proptest::test_runner::TestRunner::new(cases(100));
    runner
        .run(&case(700, 3), |mut case| {
            let dim = [128, 256][case.seed as usize / 4 % 2];
            let spec = Spec::new(case.spec.q_heads, case.spec.kv_heads, dim);
            case.set_heads(spec.with_compute(Compute::F8));
            case.spec.variant.sinks = case.seed % 4 == 1;
            case.add_ancestors();
            match case.seed % 3 {
                0 => check::<f16, F8E4M3>(gpu, &case),
                _ => check::<bf16, F8E4M3>(gpu, &case),
            }
        })
        .unwrap();
}

/// Splits of one key: each is a block, and what they weigh beside each other is off by their logits.
#[test]
fn blocks_of_one_key_in_8_bits_are_f64_of_the_same_operands() {
    let Some(gpu) = gpu("blocks_of_one_key_in_8_bits_are_f64_of_the_same_operands") else {
        return;
    };
    for (seed, dim) in (0..8).zip([128, 256].into_iter().cycle()) {
        let batch = prefixed(&[(0, 0, 17), (0, 0, 33)], 1, false, seed);
        let mut spec = Spec::new(1, 1, dim).with_compute(Compute::F8);
        spec.variant.causal = false;
        let case = Case {
            spec,
            batch,
            layout: KvLayout::Nhd,
            options: PlanOptions::default().with_split(SplitMode::Fixed { tokens: 1 }),
            captured: false,
            granularity: 3,
            powers: false,
            query_exponent: 0,
            seed,
        };
        check::<bf16, F8E4M3>(gpu, &case).unwrap();
    }
}

#[test]
fn prefill_of_8_bit_pages_is_the_reference() {
    let Some(gpu) = gpu("prefill_of_8_bit_pages_is_the_reference") else {
        return;
    };
    let mut runner = proptest::test_runner::TestRunner::new(cases(100));
    runner
        .run(&case(700, 4), |case| check_any(gpu, &case))
        .unwrap();
}

/// Prefills are those of the kernel for 16 bits on a pool of the same numbers, each times the scale of its token if it has
/// one: pages of 64 keys, head after head. In a captured graph they convert the keys themselves, otherwise a launch before them
/// does if few rows see a key.
fn converted<T: Element>(gpu: &Gpu, seed: u64, granularity: u32) {
    const PAGE: u32 = 64;
    let mut noise = Rng(seed);
    let dim = [64, 128, 256][seed as usize % 3];
    let heads = [(4, 4), (8, 2), (12, 1)][noise.below(3)];
    let mut spec = Spec::new(heads.0, heads.1, dim).with_dtype(T::DTYPE);
    if noise.below(3) == 0 {
        spec = spec.with_window_left(noise.below(200) as u32);
    }
    spec.variant.causal = noise.below(4) > 0;
    let requests: Vec<_> = (0..1 + noise.below(4))
        .map(|_| {
            // Requests of up to 256 rows are decodes.
            let least = (256 / spec.group() + 1).max(70);
            let queries = least + noise.below(500) as u32;
            (1 + noise.below(700) as u32, noise.below(5), queries)
        })
        .collect();
    let batch = prefixed(&requests, PAGE, false, seed);
    let layout = KvLayout::Hnd;
    let narrow = spec.with_kv_dtype(Dtype::F8E4M3);
    let tensors = Tensors::<T, F8E4M3>::random(&narrow, &batch, layout, seed);
    let case = |spec: Spec| Case {
        spec,
        batch: batch.clone(),
        layout,
        options: PlanOptions::default().with_split(SplitMode::Off),
        captured: false,
        granularity,
        powers: false,
        query_exponent: 0,
        seed,
    };
    let plan = |case: &Case| {
        let plan = Planner::new().plan(&case.spec, &batch, &gpu.device(), &case.options);
        let plan = plan.expect("it can be planned");
        let are_prefills = plan.groups.iter().all(|of| of.kernel == Kernel::Prefill);
        assert!(are_prefills, "seed {seed}: {:?}", case.spec);
        plan
    };
    let (narrow, spec) = (case(narrow), case(spec));
    let captured = Case {
        captured: true,
        ..case(narrow.spec)
    };
    let scales = Scales::random(&narrow);
    let memory = [
        Memory::new(&[&scales.k[..], &[f32::NAN]].concat()),
        Memory::new(&[&scales.v[..], &[f32::NAN]].concat()),
        Memory::new(&scales.of_token),
    ];
    let wide = Tensors::<T, T> {
        q: tensors.q.clone(),
        parts: vec![rounded(&narrow, &tensors, &scales)],
    };
    let scales = on_device(&narrow, &memory);
    let [got, again] = run_twice(gpu, &narrow, &plan(&narrow), &tensors, scales);
    let [by_itself, _] = run_twice(gpu, &captured, &plan(&narrow), &tensors, scales);
    let [right, _] = run_twice(gpu, &spec, &plan(&spec), &wide, gpu::KvScales::One);
    assert!(got == right, "seed {seed}: {:?}", narrow.spec);
    assert!(got == again, "seed {seed}: two runs differ");
    assert!(got == by_itself, "seed {seed}: a captured launch");
}

#[test]
fn prefill_of_8_bit_pages_is_that_of_converted_ones_to_the_bit() {
    let Some(gpu) = gpu("prefill_of_8_bit_pages_is_that_of_converted_ones_to_the_bit") else {
        return;
    };
    for seed in 0..cases(60).cases.into() {
        let granularity = if seed / 2 % 3 == 2 { 4 } else { 0 };
        match seed % 2 {
            0 => converted::<bf16>(gpu, seed / 2, granularity),
            _ => converted::<f16>(gpu, seed / 2, granularity),
        }
    }
}

/// A workspace with room for fewer converted keys than a plan has prefills of.
#[test]
fn more_keys_of_prefills_than_the_bound_has_are_refused() {
    let Some(gpu) = gpu("more_keys_of_prefills_than_the_bound_has_are_refused") else {
        return;
    };
    let spec = Spec::new(8, 2, 128).with_kv_dtype(Dtype::F8E4M3);
    let mut table = PageTable::new(16, 40);
    table.push(&(0..40).collect::<Vec<_>>(), 640);
    let batch = Batch::new(vec![0, 100], table);
    let limits = BatchLimits::decodes(4, 640, 16).with_query_tokens(100);
    let options = PlanOptions::default();
    let plan = |prefill_keys| {
        let limits = limits.with_prefill_keys(prefill_keys);
        let bound = Bound::new(&spec, &gpu.device(), &options, &limits).expect("limits");
        let options = options.with_bound(bound);
        let bytes = WorkspaceLayout::new(&spec, &bound).bytes;
        let plan = Planner::new().plan(&spec, &batch, &gpu.device(), &options);
        (bytes, plan.map(drop))
    };
    let ((more, fits), (less, refused)) = (plan(640), plan(64));
    assert_eq!(fits, Ok(()));
    assert!(
        matches!(
            refused,
            Err(PlanError::Bound {
                needed: 10,
                bound: 5,
                ..
            })
        ),
        "{refused:?}"
    );
    // Keys and values of 2 heads of 128, 16 bits each.
    assert!(more - less >= (640 - 64) * 2 * 2 * 128 * 2);
}

/// A pool of a head dimension in some layout, and new tokens for it, on host and device.
fn appended<T: Element, K: Element>(
    gpu: &Gpu,
    dim: u32,
    layout: KvLayout,
    granularity: u32,
    seed: u64,
) {
    const HEADS: u32 = 3;
    const PAGES: u32 = 5;
    const PAGE: u32 = 8;
    const TOKENS: usize = 23;
    let spec = Spec::new(6, HEADS, dim)
        .with_dtype(T::DTYPE)
        .with_kv_dtype(K::DTYPE);
    let largest = if K::DTYPE == Dtype::F8E4M3 {
        600.0
    } else {
        60_000.0
    };
    let mut noise = Rng(seed);
    // Some beyond the largest number, a NaN, an infinity, a row of zeros.
    let mut rows = || -> Vec<T> {
        let row = TOKENS * (HEADS * dim) as usize;
        let mut rows: Vec<T> = (0..row)
            .map(|_| T::from_f32(noise.between(-largest, largest)))
            .collect();
        rows[5] = T::from_f32(f32::NAN);
        rows[dim as usize + 3] = T::from_f32(f32::NEG_INFINITY);
        rows[2 * dim as usize..3 * dim as usize].fill(T::from_f32(0.0));
        rows
    };
    let (k, v) = (rows(), rows());
    let mut slots: Vec<u32> = (0..PAGES * PAGE).collect();
    noise.shuffle(&mut slots);
    slots.truncate(TOKENS);
    slots[4] = u32::MAX;
    let of_token: Vec<u32> = (0..TOKENS as u32).map(|token| token % REQUESTS).collect();
    let scales: Vec<f32> = (0..PAGES * PAGE * HEADS)
        .map(|_| noise.between(0.3, 4.0))
        .collect();
    let pool = vec![bytemuck::cast::<u8, K>(0x55); (PAGES * PAGE * HEADS * dim) as usize];
    let by_token = KvLayout::Hnd.strides(PAGE, HEADS, 1);

    // On the host.
    let (mut k_pool, mut v_pool) = (pool.clone(), pool.clone());
    let (mut k_scales, mut v_scales) = (scales.clone(), scales.clone());
    let mut view = KvViewMut::new(&spec, layout, PAGE, &mut k_pool, &mut v_pool);
    let of_heads = &scales[..HEADS as usize];
    let of_requests = &scales[..(REQUESTS * HEADS) as usize];
    let given = match granularity {
        0 => AppendScales::Given(KvScales::One),
        1 => AppendScales::Given(KvScales::Head {
            k: of_heads,
            v: of_heads,
        }),
        2 => AppendScales::Given(KvScales::Request {
            k: of_requests,
            v: of_requests,
            of_token: &of_token,
        }),
        3 => AppendScales::Given(KvScales::Token {
            k: &scales,
            v: &scales,
            k_strides: by_token,
            v_strides: by_token,
        }),
        _ => AppendScales::Computed {
            k: &mut k_scales,
            v: &mut v_scales,
            k_strides: by_token,
            v_strides: by_token,
        },
    };
    Cpu::append_quantised(&spec, PAGES, &slots, &k, &v, &mut view, given).expect("it fits");

    // On the device.
    let memory = [Memory::new(&pool), Memory::new(&pool)];
    let on_device = [Memory::new(&scales), Memory::new(&scales)];
    let (k, v, slots, of_token) = (
        Memory::new(&k),
        Memory::new(&v),
        Memory::new(&slots),
        Memory::new(&of_token),
    );
    let heads = HEADS as usize;
    let side = |memory: &Memory, shape: [usize; 2]| memory.tensor(Dtype::F32, shape);
    let by_token = |memory: &Memory| {
        let page = (PAGE * HEADS) as usize;
        memory
            .tensor(Dtype::F32, [PAGES as usize, PAGE as usize, heads])
            .with_stride(0, page)
            .with_stride(1, 1)
            .with_stride(2, PAGE as usize)
    };
    let scales_of_pool = match granularity {
        0 => gpu::KvScales::One,
        1 => gpu::KvScales::Head {
            k: on_device[0].tensor(Dtype::F32, [heads]),
            v: on_device[1].tensor(Dtype::F32, [heads]),
        },
        2 => gpu::KvScales::Request {
            k: side(&on_device[0], [REQUESTS as usize, heads]),
            v: side(&on_device[1], [REQUESTS as usize, heads]),
            of_token: of_token.array(),
        },
        _ => gpu::KvScales::Token {
            k: by_token(&on_device[0]),
            v: by_token(&on_device[1]),
        },
    };
    let kv = KvPool::new(
        &spec,
        layout,
        PAGE,
        PAGES,
        memory[0].address(),
        memory[1].address(),
    )
    .with_scales(scales_of_pool);
    let from = match granularity {
        4 => gpu::AppendScales::Computed,
        _ => gpu::AppendScales::Given,
    };
    let shape = [TOKENS, heads, dim as usize];
    let stream = Stream::new();
    let [k, v] = [&k, &v].map(|rows| rows.tensor(T::DTYPE, shape));
    // SAFETY: everything lives until the stream was waited for; slots differ.
    unsafe { gpu.append_quantised(&spec, &kv, from, slots.array(), &k, &v, stream.0) }
        .expect("the launch is right");
    stream.wait();
    // Any NaN is as good as another.
    let bits = |pool: &[K]| -> Vec<u8> {
        pool.iter()
            .map(|x| {
                if x.to_f32().is_nan() {
                    0x7F
                } else {
                    bytemuck::cast(*x)
                }
            })
            .collect()
    };
    assert_eq!(
        bits(&memory[0].read()),
        bits(&k_pool),
        "keys, {dim} {layout:?} {granularity}"
    );
    assert_eq!(
        bits(&memory[1].read()),
        bits(&v_pool),
        "values, {dim} {layout:?} {granularity}"
    );
    assert_eq!(on_device[0].read::<f32>(), k_scales);
    assert_eq!(on_device[1].read::<f32>(), v_scales);
}

#[test]
fn appending_quantises_as_the_cpu_does() {
    let Some(gpu) = gpu("appending_quantises_as_the_cpu_does") else {
        return;
    };
    for seed in 0..120 {
        let dim = [64, 80, 128, 256][seed as usize % 4];
        let layout = [KvLayout::Nhd, KvLayout::Hnd][seed as usize / 4 % 2];
        match (seed % 3, seed < 60) {
            (0, true) => appended::<f16, F8E4M3>(gpu, dim, layout, seed as u32 % 5, seed),
            (_, true) => appended::<bf16, F8E4M3>(gpu, dim, layout, seed as u32 % 5, seed),
            (0, _) => appended::<f16, F8E5M2>(gpu, dim, layout, seed as u32 % 5, seed),
            _ => appended::<bf16, F8E5M2>(gpu, dim, layout, seed as u32 % 5, seed),
        }
    }
}

/// One request of 20 keys, and a plan for it.
fn small(spec: &Spec, gpu: &Gpu) -> Plan {
    let mut table = PageTable::new(16, 2);
    table.push(&[1, 0], 20);
    let batch = Batch::new(vec![0, 1], table);
    Planner::new()
        .plan(spec, &batch, &gpu.device(), &PlanOptions::default())
        .expect("it can be planned")
}

#[test]
fn scales_that_do_not_fit_are_refused_before_anything_is_launched() {
    let Some(gpu) = gpu("scales_that_do_not_fit_are_refused_before_anything_is_launched") else {
        return;
    };
    let memory = Memory::of_bytes(1 << 16);
    let address = memory.address();
    let error = |dtype: Dtype, scales| -> Error {
        // Kernels with a soft cap take no scales of each token.
        let cap = matches!(scales, gpu::KvScales::Token { .. }).then_some(30.0);
        let mut spec = Spec::new(8, 2, 128).with_kv_dtype(dtype);
        spec.variant.soft_cap = cap;
        let plan = small(&spec, gpu);
        let mut workspace = gpu
            .workspace(&spec, &Bound::of(&plan), WorkspaceOptions::default())
            .expect("there is memory for it");
        let stream = Stream::new();
        let pool = KvPool::new(&spec, KvLayout::Nhd, 16, 2, address, address).with_scales(scales);
        let q = memory.tensor(Dtype::BF16, [1, 8, 128]);
        // SAFETY: refused before anything is launched.
        unsafe {
            workspace
                .upload(&plan, stream.0)
                .expect("the bound is the plan's");
            let refused = gpu.run(&mut workspace, &q, &[pool], &q, None, stream.0);
            stream.wait();
            refused.expect_err("the scales are wrong")
        }
    };
    let one = |len: usize| memory.tensor(Dtype::F32, [len]);
    let heads = |k: DeviceTensor<1>, v: DeviceTensor<1>| gpu::KvScales::Head { k, v };
    let e4m3 = Dtype::F8E4M3;
    assert!(matches!(
        error(e4m3, heads(one(3), one(2))),
        Error::Extent { got: 3, .. }
    ));
    assert!(matches!(
        error(e4m3, heads(one(2), one(1))),
        Error::Extent { got: 1, .. }
    ));
    let missing = DeviceTensor::new(0, Dtype::F32, [2]);
    assert!(matches!(
        error(e4m3, heads(one(2), missing)),
        Error::NullPointer { .. }
    ));
    let odd = DeviceTensor::new(address + 2, Dtype::F32, [2]);
    assert!(matches!(
        error(e4m3, heads(odd, one(2))),
        Error::Misaligned { .. }
    ));
    let narrow = memory.tensor(Dtype::BF16, [2]);
    assert!(matches!(
        error(e4m3, heads(narrow, one(2))),
        Error::Dtype { .. }
    ));
    let by_token = memory.tensor(Dtype::F32, [2, 16, 2]);
    let by_token = gpu::KvScales::Token {
        k: by_token,
        v: by_token,
    };
    assert!(matches!(error(e4m3, by_token), Error::NoInstance { .. }));
    let by_request = |requests: usize| gpu::KvScales::Request {
        k: memory.tensor(Dtype::F32, [4, 2]),
        v: memory.tensor(Dtype::F32, [requests, 2]),
        of_token: memory.array(),
    };
    assert!(matches!(
        error(e4m3, by_request(3)),
        Error::Extent { got: 3, .. }
    ));
    assert!(matches!(
        error(Dtype::BF16, heads(one(2), one(2))),
        Error::Shape(ShapeError::Scaled { dtype: Dtype::BF16 })
    ));
}
