//! A random batch on 8-bit pages, and its check.

use super::*;

#[derive(Clone, Debug)]
pub(super) struct Case {
    pub(super) spec: Spec,
    pub(super) batch: Batch,
    pub(super) layout: KvLayout,
    pub(super) options: PlanOptions,
    /// Whether the launches are those of a captured graph, which claim one unit at a time.
    pub(super) captured: bool,
    pub(super) granularity: u32,
    /// Whether scales are powers of two: then keys that were multiplied by them are exact.
    pub(super) powers: bool,
    /// Factor of all queries, as a power of two: bf16 has a range that f16 has not.
    pub(super) query_exponent: i32,
    pub(super) seed: u64,
}

impl Case {
    /// Gives it other heads; the variant stays.
    pub(super) fn set_heads(&mut self, spec: Spec) {
        let variant = self.spec.variant;
        self.spec = spec;
        self.spec.variant = variant;
    }

    /// Gives two of five causal batches token trees.
    pub(super) fn add_ancestors(&mut self) {
        if self.spec.variant.causal && self.seed % 5 < 2 {
            let ancestors = ancestors(&self.batch, self.seed);
            self.batch = self.batch.clone().with_ancestors(ancestors);
        }
    }
}

/// Requests of at most so many queries, scales up to a granularity.
pub(super) fn case(most_queries: u32, granularities: u32) -> impl Strategy<Value = Case> {
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
pub(super) struct Scales {
    pub(super) k: Vec<f32>,
    pub(super) v: Vec<f32>,
    pub(super) of_token: Vec<u32>,
}

pub(super) const REQUESTS: u32 = 3;

impl Scales {
    pub(super) fn random(case: &Case) -> Self {
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

    pub(super) fn on_host(&self, case: &Case) -> KvScales<'_> {
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
pub(super) fn scales_of(scales: &Scales, case: &Case, token: usize, head: usize) -> [f32; 2] {
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
pub(super) fn by_token(case: &Case) -> KvStrides {
    let page_size = case.batch.parts[0].table.page_size;
    case.layout.strides(page_size, case.spec.kv_heads, 1)
}

/// Scales that no key has are NaN.
pub(super) fn poison_scales(case: &Case, scales: &mut [f32]) {
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
pub(super) fn on_device(case: &Case, [k, v, of_token]: &[Memory; 3]) -> gpu::KvScales {
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
            let pages = case.batch.parts[0].table.pool_pages;
            let of = |scales: &Memory| {
                scales.scales_of_tokens(pages, case.spec.kv_heads, by_token(case))
            };
            let [k, v] = [k, v].map(of);
            gpu::KvScales::Token { k, v }
        }
    }
}

/// Bytes that nobody owns are a NaN, of e4m3 one of its two.
pub(super) fn poison<K: Element>(pool: &mut [K], seed: u64) {
    let nan: u8 = if seed.is_multiple_of(2) { 0x7F } else { 0xFF };
    pool.iter_mut()
        .filter(|x| x.to_f32().is_nan())
        .for_each(|x| *x = bytemuck::cast(nan));
}

pub(super) fn check<T: Element, K: Element>(gpu: &Gpu, case: &Case) -> Result<(), TestCaseError> {
    check_on::<T, K>(gpu, &gpu.device(), case)
}

/// As [`check`], planned for a description of the GPU.
pub(super) fn check_on<T: Element, K: Element>(
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
pub(super) fn rounded<T: Element, K: Element>(
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
pub(super) fn places(table: &PageTable, heads: u32) -> impl Iterator<Item = (u32, u32, u32)> {
    let keys = (0..table.row_blocks()).flat_map(move |row_block| {
        (0..table.kv_len(row_block)).map(move |key| (table.pages(row_block), key))
    });
    keys.flat_map(move |(pages, key)| {
        let page = pages[(key / table.page_size) as usize];
        (0..heads).map(move |head| (page, key % table.page_size, head))
    })
}

/// Whether results are between two others, or close to one of them.
pub(super) fn near<T: Element>(
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
pub(super) fn run_twice<T: Element, K: Element>(
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
pub(super) fn check_any(gpu: &Gpu, case: &Case) -> Result<(), TestCaseError> {
    check_any_on(gpu, &gpu.device(), case)
}

/// As [`check_any`], planned for a description of the GPU.
pub(super) fn check_any_on(
    gpu: &Gpu,
    device: &DeviceDescription,
    case: &Case,
) -> Result<(), TestCaseError> {
    let e5m2 = case.spec.variant.soft_cap.is_none() && case.granularity < 4;
    match (case.seed % 3, e5m2 && (case.seed / 3).is_multiple_of(3)) {
        (0, false) => check_on::<f16, F8E4M3>(gpu, device, case),
        (_, false) => check_on::<bf16, F8E4M3>(gpu, device, case),
        (0, true) => check_on::<f16, F8E5M2>(gpu, device, case),
        (_, true) => check_on::<bf16, F8E5M2>(gpu, device, case),
    }
}
