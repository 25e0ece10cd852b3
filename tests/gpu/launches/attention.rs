//! Kernels that plans launch.

use half::{bf16, f16};
use kernels_gpu::registry::{Element as Cache, Loads, Op};
use tandem_attn::{
    Error, Hooks,
    abi::KvStrides,
    exec::gpu::{self, Arch, Gpu, KernelInfo, RankOptions, WorkspaceOptions},
    kv::KvScales,
    plan::{
        Bound, DeviceDescription, MergeMode, PlanOptions, Planner, QueryStep, SplitMode, Tile,
        pod::PodMode,
    },
    problem::{Batch, Compute, Dtype, KvLayout, Spec},
    tensor::{Element, F8E4M3, F8E5M2},
};

use super::{Output, dtype_of};
use crate::{
    common::{
        Memory, Rng, Stream,
        problems::{Tensors, has_rows_656, heads, reference_of, rotary, sinks},
    },
    problem::{OnDevice, Request, batch_of},
};

/// A batch, its heads, and the options of the planner.
pub struct Planned {
    pub spec: Spec,
    /// Keys and queries of each request.
    pub requests: Vec<(u32, u32)>,
    /// Leading pages that the others have from the first, in front of their own keys.
    pub shared: usize,
    pub device: DeviceDescription,
    pub options: PlanOptions,
    /// Query tokens see but some of the last keys.
    pub trees: bool,
    /// Kernels merge rows of two items, although splits are fixed.
    pub pieces: bool,
    /// Each token of a cache of 8 bits has scales of its own.
    pub by_token: bool,
    pub arch: Option<Arch>,
    /// Tokens of a page.
    pub page: u32,
    pub layout: KvLayout,
    pub seed: u64,
}

fn spec(row: &KernelInfo, group: u32) -> Spec {
    let spec = match row.latent {
        true => Spec::latent(group, row.value_dim, row.head_dim - row.value_dim),
        false => Spec::new(group, 1, row.head_dim).with_head_dim_v(row.value_dim),
    };
    let mut spec = spec.with_dtype(dtype_of(row));
    match row.cache {
        Some(Cache::E5m2) => spec = spec.with_kv_dtype(Dtype::F8E5M2),
        Some(_) => spec = spec.with_kv_dtype(Dtype::F8E4M3),
        None => (),
    }
    if row.products_of_8_bits {
        spec = spec.with_compute(Compute::F8);
    }
    if row.turns {
        spec = spec.with_rotary(rotary(row.head_dim, group.into()));
    }
    match row.cap {
        true => spec.with_soft_cap(20.0),
        false => spec,
    }
}

/// Kernels with Ampere's instructions that only plans for newer GPUs have a use for.
fn newer(gpu: &Gpu) -> DeviceDescription {
    let mut device = DeviceDescription::named("h200").expect("it is built in");
    device.sms = gpu.multiprocessors();
    device
}

/// A batch that a kernel computes a part of.
fn planned(gpu: &Gpu, row: &KernelInfo) -> Planned {
    let tile = Tile {
        m: row.rows,
        n: row.keys,
    };
    let options = PlanOptions::default().with_pod(PodMode::Serial);
    let mut planned = Planned {
        spec: spec(row, 2),
        requests: vec![(90, 40)],
        shared: 0,
        device: gpu.device(),
        options,
        trees: false,
        pieces: row.merges_pieces,
        by_token: row.by_token,
        arch: (row.arch == Arch::Sm80).then_some(Arch::Sm80),
        page: 16,
        layout: KvLayout::Nhd,
        seed: 0,
    };
    if planned.device.supports(&planned.spec).is_err() {
        planned.device = newer(gpu);
    }
    if row.op != Op::Decode {
        // So few new tokens on 8-bit keys would be decodes.
        planned.device.decode_max_tiles = 0;
    }
    match row.op {
        _ if row.op == Op::Pod || row.co_resident => {
            let decode = row.op == Op::Decode;
            planned.spec = spec(row, if decode && row.rows > 8 { 12 } else { 4 });
            planned.requests = vec![(70, 40), (60, 1), (90, 1)];
            planned.options = options.with_pod(PodMode::Fused);
            let configs = &mut planned.device.pod.configs;
            let bits = 8 * planned.spec.kv_dtype.bytes();
            configs.retain(|config| config.kv_bits.is_none_or(|of| of == bits));
            // The decode that goes with a prefill is found by the prefill; only tiles of 16 rows are not for these heads.
            configs.retain(|config| match (row.co_resident, decode) {
                (true, true) => config.decode == Some(tile),
                (true, false) => {
                    config.prefill == tile && config.decode.is_some_and(|decode| decode.m == 8)
                }
                (false, _) => config.by_tickets,
            });
            if decode && row.name.ends_with("stages2") {
                configs.remove(0);
            }
            configs.truncate(1);
            planned.trees = row.stands_in;
            // One kernel that takes turns by tickets replaces the plan's two.
            planned.arch = (!row.co_resident).then_some(Arch::Sm80);
        }
        Op::Widen => {
            let dtype = dtype_of(row);
            planned.spec = Spec::new(4, 2, 128)
                .with_dtype(dtype)
                .with_kv_dtype(Dtype::F8E4M3);
            planned.by_token = true;
        }
        Op::Turn => {
            let spec = Spec::new(4, 2, 128).with_dtype(dtype_of(row));
            planned.spec = spec.with_rotary(rotary(128, 2));
        }
        Op::Pad => {
            // No kernel has these heads.
            planned.spec = Spec::new(4, 1, 160);
            planned.arch = None;
        }
        Op::Decode if row.latent => {
            // Tokens of several tiles have kernels with long blocks, which few keys would not take.
            let heads = match (row.rows, row.keys) {
                (..=16, _) => 7,
                // Two tokens take 28 rows.
                (..=32, _) => 14,
                (_, ..=32) if row.cache.is_none() => 60,
                _ => 100,
            };
            planned.spec = spec(row, heads);
            if heads == 100 {
                planned.options = options.with_decode_tile(tile);
            }
            planned.requests = vec![(150, 1), (33, 2), (1, 1)];
            planned.page = match (row.stands_in, row.loads) {
                (true, Loads::Rows) => 4,
                _ => 16,
            };
            if row.merges_pieces {
                // Whole groups of 16 rows.
                let whole = match heads {
                    100 => 96,
                    7 => 16,
                    _ => 64,
                };
                planned.spec = spec(row, whole);
                planned.options.split = SplitMode::Fixed { tokens: 96 };
            }
        }
        Op::Decode => {
            planned.spec = spec(row, row.rows.min(100));
            planned.requests = vec![(70, 1), (33, 1), (1, 1)];
            if row.kv_heads > 1 {
                // So many that half as many units keep the GPU as busy.
                let kv_heads = row.kv_heads * gpu.multiprocessors();
                planned.spec.q_heads *= kv_heads;
                planned.spec.kv_heads = kv_heads;
            }
            if row.arch == Arch::Sm90a {
                planned.options = options.with_decode_tile(tile);
            } else {
                planned.spec = spec(row, 8);
            }
            if row.smaller {
                // Larger ones do not fit there.
                planned.device = DeviceDescription::named("rtx4090").expect("it is built in");
                planned.device.sms = gpu.multiprocessors();
                planned.arch = None;
            }
        }
        Op::Merge(_) => {
            let of = |kind| row.name.starts_with(kind);
            planned.spec = Spec::new(4, 1, 64).with_dtype(dtype_of(row));
            planned.requests = match (of("merge_long"), of("merge_few")) {
                (true, _) => vec![(600, 70), (33, 33)],
                (_, true) => vec![(70, 1), (33, 1), (1, 1)],
                _ => vec![(70, 70), (33, 33), (90, 90)],
            };
            planned.options = options
                .with_split(SplitMode::Fixed { tokens: 32 })
                .with_merge_mode(MergeMode::Kernel);
        }
        _ => {
            planned.device.prefill.by_q_len = vec![QueryStep {
                head_dim: None,
                compute: None,
                up_to: None,
                rows: row.rows,
                pack: None,
            }];
            if row.stands_in && row.general {
                // With scales of KV heads.
                planned.spec = planned.spec.with_kv_dtype(Dtype::F8E4M3);
            } else if row.stands_in {
                planned.spec = planned.spec.with_sinks();
                planned.trees = true;
            }
        }
    }
    planned
}

/// Other lengths, heads and masks, of which the same kernel computes a part.
fn vary(planned: &mut Planned, row: &KernelInfo, seed: u64) {
    let mut rng = Rng(seed);
    planned.seed = seed;
    for (keys, queries) in &mut planned.requests {
        if *queries > 4 {
            *queries = (*queries / 2 + rng.below(*queries as usize) as u32).max(20);
        }
        *keys = (1 + rng.below(2 * *keys as usize) as u32).max(*queries);
    }
    // The number of SMs is that of the machine for kernels that its size chooses.
    if !matches!(row.op, Op::Merge(_)) {
        planned.device.sms = [2, 3, 5][rng.below(3)];
    }
    if rng.below(2) == 0 && row.kv_heads == 1 {
        planned.layout = KvLayout::Hnd;
    }
    if row.merges_pieces {
        planned.requests[0].0 = 97 + rng.below(96) as u32;
    } else if row.latent {
        // Few keys are seen, so that each counts, from anywhere in a block on.
        if rng.below(2) == 0 {
            planned.spec.variant.window_left = Some(rng.below(6) as u32);
        }
        if rng.below(2) == 0 {
            planned.options.split = SplitMode::Fixed { tokens: 96 };
        }
        // The first key that is seen, and it alone or one more, in every column of a block.
        if seed % 20 == 7 {
            planned.spec.variant.window_left = Some(rng.below(2) as u32);
            planned.requests = (70..134).map(|keys| (keys, 1)).collect();
        }
    }
    if row.latent || matches!(row.op, Op::Merge(_) | Op::Pad) {
        return;
    }
    if planned.spec.rotary.is_some() {
        planned.spec.rotary = Some(rotary(planned.spec.head_dim_qk, seed));
    }
    if rng.below(3) == 0 {
        planned.spec.kv_heads *= 2;
        planned.spec.q_heads *= 2;
    }
    if rng.below(3) == 0 && row.op != Op::Pod {
        planned.spec.variant.window_left = Some(rng.below(90) as u32);
    }
    if rng.below(3) == 0 && !planned.trees && row.op == Op::Prefill {
        planned.spec.variant.causal = false;
    }
    if rng.below(3) == 0 && row.op == Op::Decode && !row.co_resident {
        planned.options.split = SplitMode::Fixed { tokens: 32 };
    }
}

/// A kernel on a problem of its own.
pub fn run_entry(
    gpu: &Gpu,
    row: &KernelInfo,
    seed: u64,
    checked: bool,
) -> Result<Vec<Output>, String> {
    run_varied(gpu, planned(gpu, row), row, seed, checked)
}

/// The same for the kernel of a variant in the place of one.
pub fn run_hooked(
    gpu: &Gpu,
    hooks: &Hooks,
    row: &KernelInfo,
    seed: u64,
    checked: bool,
) -> Result<Vec<Output>, String> {
    let mut planned = planned(gpu, row);
    planned.spec.variant.soft_cap = None;
    planned.spec = planned.spec.with_hooks(hooks);
    planned.spec.variant.sinks &= hooks.softmax;
    if planned.device.supports(&planned.spec).is_err() {
        planned.device = newer(gpu);
    }
    run_varied(gpu, planned, row, seed, checked)
}

fn run_varied(
    gpu: &Gpu,
    mut planned: Planned,
    row: &KernelInfo,
    seed: u64,
    checked: bool,
) -> Result<Vec<Output>, String> {
    if seed > 0 {
        vary(&mut planned, row, seed);
    }
    run(gpu, &planned, checked)
}

/// One rank of a group, which merges its own results.
pub fn merge_ranks(
    gpu: &Gpu,
    row: &KernelInfo,
    seed: u64,
    checked: bool,
) -> Result<Vec<Output>, String> {
    match dtype_of(row) {
        Dtype::F16 => merge_ranks_of::<f16>(gpu, seed, checked),
        _ => merge_ranks_of::<bf16>(gpu, seed, checked),
    }
}

fn merge_ranks_of<T: Element>(gpu: &Gpu, seed: u64, checked: bool) -> Result<Vec<Output>, String> {
    let text = |error: Error| error.to_string();
    let spec = Spec::new(4, 2, 64).with_dtype(T::DTYPE);
    let request = Request {
        parent: 0,
        shared: 0,
        own: 40,
        queries: 1 + seed as u32 % 5,
    };
    let batch = batch_of(&[request], 16, seed + 3);
    let device = gpu.device();
    let plan = Planner::new().plan(&spec, &batch, &device, &PlanOptions::default());
    let plan = plan.map_err(|error| error.to_string())?;
    let bound = Bound::of(&plan);
    let mut workspace = gpu
        .workspace(&spec, &bound, WorkspaceOptions::default())
        .map_err(text)?;
    let tensors = Tensors::<T, T>::random(&spec, &batch, KvLayout::Nhd, seed + 5);
    let device = OnDevice::new(&spec, &batch, &tensors);
    let tokens = batch.total_q() as usize;
    let group = Gpu::ranks(&[gpu], &spec, tokens, &RankOptions::default());
    let mut rank = group.map_err(text)?.remove(0);
    let (rows, stream) = (tokens * spec.q_heads as usize, Stream::new());
    let out = device.out.tensor(T::DTYPE, [tokens, 4, 64]);
    let lse = device.lse.tensor(Dtype::F32, [tokens, 4]);
    let given = device.tensors(&out, &lse);
    // SAFETY: the stream is ours, and everything lives until it was waited for.
    unsafe {
        workspace.upload(&plan, stream.0).map_err(text)?;
        rank.announce(tokens).map_err(text)?;
        let run = rank.run(gpu, &mut workspace, &given, 0..tokens, stream.0);
        run.map_err(text)?;
    }
    stream.wait();
    rank.check().map_err(text)?;
    let step = match T::DTYPE {
        Dtype::BF16 => 1.0 / 256.0,
        _ => 1.0 / 2048.0,
    };
    let outputs = vec![
        Output::rounded(
            "out",
            T::DTYPE,
            step,
            &device.out.read_at::<u16>(0, rows * 64),
        ),
        Output::rounded("lse", Dtype::F32, 2e-4, &device.lse.read_at::<u32>(0, rows)),
    ];
    if checked {
        let right = tensors.reference(&spec, &batch);
        for (output, right) in outputs.iter().zip([&right.out, &right.lse]) {
            output.near(right)?;
        }
    }
    Ok(outputs)
}

/// Plans and runs.
pub fn run(gpu: &Gpu, planned: &Planned, checked: bool) -> Result<Vec<Output>, String> {
    match (planned.spec.q_dtype, planned.spec.kv_dtype) {
        (Dtype::F16, Dtype::F8E4M3) => run_with::<f16, F8E4M3>(gpu, planned, checked),
        (_, Dtype::F8E4M3) => run_with::<bf16, F8E4M3>(gpu, planned, checked),
        (Dtype::F16, Dtype::F8E5M2) => run_with::<f16, F8E5M2>(gpu, planned, checked),
        (_, Dtype::F8E5M2) => run_with::<bf16, F8E5M2>(gpu, planned, checked),
        (Dtype::F16, _) => run_with::<f16, f16>(gpu, planned, checked),
        _ => run_with::<bf16, bf16>(gpu, planned, checked),
    }
}

/// Scales of a cache of 8 bits, one for each KV head, or one for each of its tokens and heads.
struct CacheScales {
    heads: usize,
    /// Where each token has its own.
    strides: Option<(KvStrides, u32)>,
    values: [Vec<f32>; 2],
    memory: [Memory; 2],
}

impl CacheScales {
    fn new(planned: &Planned, batch: &Batch) -> Self {
        let (heads, table) = (planned.spec.kv_heads, &batch.parts[0].table);
        let strides = planned.by_token.then(|| {
            let strides = planned.layout.strides(table.page_size, heads, 1);
            (strides, table.pool_pages)
        });
        let count = strides.map_or(heads, |(strides, pages)| pages * strides.page);
        let mut rng = Rng(planned.seed + 11);
        let values = [(); 2].map(|()| {
            let mut scales = rng.floats(count as usize, 0.3, 1.5);
            if planned.by_token {
                // Powers of two: nothing is lost where keys are widened to 16 bits.
                scales
                    .iter_mut()
                    .for_each(|scale| *scale = scale.log2().floor().exp2());
            }
            scales
        });
        Self {
            heads: heads as usize,
            strides,
            memory: values.each_ref().map(|scales| Memory::new(scales)),
            values,
        }
    }

    fn on_device(&self) -> gpu::KvScales {
        let Some((strides, pages)) = self.strides else {
            let [k, v] = self
                .memory
                .each_ref()
                .map(|scales| scales.tensor(Dtype::F32, [self.heads]));
            return gpu::KvScales::Head { k, v };
        };
        let of = |scales: &Memory| scales.scales_of_tokens(pages, self.heads as u32, strides);
        let [k, v] = self.memory.each_ref().map(of);
        gpu::KvScales::Token { k, v }
    }

    fn on_host(&self) -> KvScales<'_> {
        let [k, v] = &self.values;
        match self.strides {
            None => KvScales::Head { k, v },
            Some((strides, _)) => KvScales::Token {
                k,
                v,
                k_strides: strides,
                v_strides: strides,
            },
        }
    }
}

fn run_with<T: Element, K: Element>(
    gpu: &Gpu,
    planned: &Planned,
    checked: bool,
) -> Result<Vec<Output>, String> {
    let spec = planned.spec;
    let requests: Vec<Request> = planned
        .requests
        .iter()
        .map(|&(own, queries)| Request {
            parent: 0,
            shared: planned.shared,
            own,
            queries,
        })
        .collect();
    let mut batch = batch_of(&requests, planned.page, planned.seed + 3);
    if planned.trees {
        // Each sees its own key, and of those before it every other one, or two of three.
        let some = |token: u32| [0x5555_5555_5555_5555, 0xb6db_6db6_db6d_b6db][token as usize % 2];
        let ancestors = (0..batch.total_q()).map(some).collect();
        batch = batch.with_ancestors(ancestors);
    }
    let mut plan = Planner::new()
        .plan(&spec, &batch, &planned.device, &planned.options)
        .map_err(|error| error.to_string())?;
    if planned.pieces {
        plan.merge_mode = MergeMode::Fused;
    }
    let mut options = WorkspaceOptions::default();
    options.arch = planned.arch;
    let mut workspace = gpu
        .workspace(&spec, &Bound::of(&plan), options)
        .map_err(|error| error.to_string())?;
    let mut tensors = Tensors::<T, K>::random(&spec, &batch, planned.layout, planned.seed + 5);
    let in_8_bits = spec.compute == Compute::F8;
    if in_8_bits {
        // Nothing is lost of such queries.
        let narrow = |q: &mut T| *q = T::from_f32(F8E4M3::from_f32(q.to_f32()).to_f32());
        tensors.q.iter_mut().for_each(narrow);
    }
    let mut device = OnDevice::new(&spec, &batch, &tensors);
    let eight_bits = spec.kv_dtype.bytes() == 1 && !has_rows_656(&spec);
    let scales = CacheScales::new(planned, &batch);
    if eight_bits {
        for pool in &mut device.pools {
            *pool = pool.with_scales(scales.on_device());
        }
    }
    let stream = Stream::new();
    // SAFETY: the stream is ours.
    unsafe { workspace.upload(&plan, stream.0) }.map_err(|error| error.to_string())?;
    let (out, lse) = device.run(gpu, &mut workspace, &stream);
    // Weights are rounded to 16 bits before they meet the values, whose sum may cancel.
    let step = match T::DTYPE {
        _ if in_8_bits => 1.0 / 16.0,
        Dtype::BF16 => 1.0 / 256.0,
        _ => 1.0 / 2048.0,
    };
    // The tensor cores keep 13 bits of a sum of 8-bit products.
    // Queries and keys are rounded once more when they were turned.
    let turned = spec.rotary.is_some();
    let of_lse = match (in_8_bits, turned) {
        (true, _) => 4e-3,
        (_, true) => 5.0 * step,
        _ => 2e-4,
    };
    let largest = match (eight_bits, turned) {
        (true, _) => 1.5,
        (_, true) => 4.0,
        _ => 1.0,
    };
    let outputs = vec![
        Output::rounded("out", T::DTYPE, step * largest, &out),
        Output::rounded("lse", Dtype::F32, of_lse, &lse),
    ];
    if !checked {
        return Ok(outputs);
    }
    let mut views = tensors.views();
    if eight_bits {
        let views = views.iter_mut();
        views.for_each(|view| *view = view.with_scales(scales.on_host()));
    }
    let sinks = sinks(&spec);
    let right = reference_of(&spec, &batch, &tensors.q, &views, &heads(&sinks));
    let right = right.map_err(|error| error.to_string())?;
    for (output, right) in outputs.iter().zip([&right.out, &right.lse]) {
        output.near(right)?;
    }
    Ok(outputs)
}
