//! Page lists that differ by KV head, and requests without lists beside them.

use half::bf16;
use proptest::prelude::*;
use tandem_attn::{
    exec::gpu::{DeviceArray, DeviceTensor, Gpu, KvPool, LaunchSet, RunTensors, WorkspaceOptions},
    plan::{BatchLimits, Bound, PlanOptions, Planner, SplitMode},
    problem::Dtype,
    tensor::{Element, F8E4M3},
};

use super::{
    common::{Memory, Stream, gpu, heads::Lists, problems::cases},
    hopper,
};

/// The tensors of lists on the GPU.
struct OnDevice {
    q: Memory,
    out: Memory,
    lse: Memory,
    _pool: [Memory; 2],
    pools: [KvPool; 2],
    /// The sinks of the model, and the same less 1 for another layer.
    sinks: Option<[Memory; 2]>,
    kv_heads: usize,
    /// Query tokens of the batch, and heads and elements of each.
    shape: [usize; 3],
}

impl OnDevice {
    fn new<T: Element>(lists: &Lists<T>) -> Self {
        let [heads, kv_heads] =
            [lists.spec.q_heads, lists.spec.kv_heads].map(|heads| heads as usize);
        let dim = lists.spec.head_dim_qk as usize;
        let tokens = lists.q.len() / (heads * dim);
        let [k, v] = lists.pools.each_ref().map(|values| Memory::new(values));
        let (spec, layout) = (&lists.spec, lists.layout);
        let pool = KvPool::new(
            spec,
            layout,
            lists.page_size,
            lists.pages,
            k.address(),
            v.address(),
        );
        let by_head = pool.by_head(spec.kv_heads).expect("a dense pool");
        Self {
            q: Memory::new(&lists.q),
            out: Memory::new(&vec![bf16::NAN; lists.q.len()]),
            lse: Memory::new(&vec![f32::NAN; tokens * heads]),
            _pool: [k, v],
            pools: [by_head, pool],
            sinks: lists.sinks.as_ref().map(|sinks| {
                let of_other: Vec<f32> = sinks.iter().map(|sink| sink - 1.0).collect();
                [Memory::new(&of_other), Memory::new(sinks)]
            }),
            kv_heads,
            shape: [tokens * kv_heads, heads / kv_heads, dim],
        }
    }

    /// Queries and outputs, which are made from those of the model, and LSEs.
    fn tensors(&self) -> (DeviceTensor<3>, DeviceTensor<3>, DeviceTensor<2>) {
        let [tokens, group, dim] = self.shape;
        let kv_heads = self.kv_heads;
        let of_model = [tokens / kv_heads, group * kv_heads, dim];
        let tensor = |memory: &Memory| {
            let tensor = memory.tensor(Dtype::BF16, of_model);
            tensor.by_kv_head(kv_heads as u32).expect("dense tokens")
        };
        let lse = self.lse.tensor(Dtype::F32, [tokens, group]);
        (tensor(&self.q), tensor(&self.out), lse)
    }

    /// The sinks of a layer, if there are some.
    fn sinks(&self, layer: usize) -> Option<DeviceArray<f32>> {
        let heads = self.kv_heads * self.shape[1];
        let sinks = self.sinks.as_ref()?;
        Some(DeviceArray::new(sinks[layer].address(), heads))
    }
}

fn run<T: Element>(gpu: &Gpu, lists: &Lists<T>) -> Result<(), String> {
    run_planned(gpu, lists, &PlanOptions::default())
}

fn run_planned<T: Element>(
    gpu: &Gpu,
    lists: &Lists<T>,
    options: &PlanOptions,
) -> Result<(), String> {
    let by_head = lists.by_head();
    let (batch, spec) = (by_head.batch(), by_head.spec());
    let plan = Planner::new()
        .plan(spec, &batch, &gpu.device(), options)
        .unwrap();
    let mut workspace = gpu
        .workspace(spec, &Bound::of(&plan), WorkspaceOptions::default())
        .unwrap();
    let on_device = OnDevice::new(lists);
    let (q, out, lse) = on_device.tensors();
    let pools = &on_device.pools[..batch.parts.len()];
    let mut tensors = RunTensors::new(&q, pools, &out).with_lse(&lse);
    let stream = Stream::new();
    // SAFETY: everything is there as described until the stream is done. The second run keeps the launches of the first.
    unsafe {
        workspace.upload(&plan, stream.0).unwrap();
        for layer in 0..2 {
            tensors.sinks = on_device.sinks(layer);
            gpu.run_with(&mut workspace, &tensors, stream.0).unwrap();
        }
    }
    stream.wait();
    lists.check(
        &on_device.out.read::<bf16>(),
        &on_device.lse.read::<f32>(),
        true,
    )
}

#[test]
fn each_head_reads_its_own_pages() {
    let Some(gpu) = gpu("each_head_reads_its_own_pages") else {
        return;
    };
    proptest!(cases(24), |(seed in any::<u64>())| {
        run(gpu, &Lists::<bf16>::random(seed)).map_err(TestCaseError::fail)?;
    });
}

#[test]
fn requests_without_lists_run_beside_those_with_lists() {
    let Some(gpu) = gpu("requests_without_lists_run_beside_those_with_lists") else {
        return;
    };
    proptest!(cases(24), |(seed in any::<u64>())| {
        run(gpu, &Lists::<bf16>::mixed(seed)).map_err(TestCaseError::fail)?;
    });
}

#[test]
fn they_do_with_keys_of_8_bits() {
    let Some(gpu) = hopper("they_do_with_keys_of_8_bits") else {
        return;
    };
    proptest!(cases(24), |(seed in any::<u64>())| {
        run(gpu, &Lists::<F8E4M3>::mixed(seed)).map_err(TestCaseError::fail)?;
    });
}

/// The second of two layers has other sinks in the launches of the first.
#[test]
fn sinks_of_lists_are_those_of_the_model() {
    let Some(gpu) = gpu("sinks_of_lists_are_those_of_the_model") else {
        return;
    };
    proptest!(cases(24), |(seed in any::<u64>())| {
        let group = [1, 4, 7, 8, 12, 20, 72][(seed % 7) as usize];
        let split = [SplitMode::Makespan, SplitMode::Fixed { tokens: 80 }][(seed / 7 % 2) as usize];
        let options = PlanOptions::default().with_split(split);
        let lists = Lists::<bf16>::mixed_groups(seed, group).with_sinks(seed);
        run_planned(gpu, &lists, &options).map_err(TestCaseError::fail)?;
        let lists = Lists::<bf16>::random(seed).with_sinks(seed);
        run_planned(gpu, &lists, &options).map_err(TestCaseError::fail)?;
    });
}

#[test]
fn sinks_of_lists_go_with_keys_of_8_bits() {
    let Some(gpu) = hopper("sinks_of_lists_go_with_keys_of_8_bits") else {
        return;
    };
    proptest!(cases(24), |(seed in any::<u64>())| {
        let lists = Lists::<F8E4M3>::mixed(seed).with_sinks(seed);
        run(gpu, &lists).map_err(TestCaseError::fail)?;
    });
}

/// One graph runs lists beside prompts, then lists alone, then the first batch again.
#[test]
fn a_graph_runs_lists_with_prompts_and_without() {
    let Some(gpu) = hopper("a_graph_runs_lists_with_prompts_and_without") else {
        return;
    };
    graph::<bf16>(gpu, false);
    graph::<F8E4M3>(gpu, false);
    graph::<bf16>(gpu, true);
}

fn graph<T: Element>(gpu: &Gpu, sinks: bool) {
    let device = gpu.device();
    let mut seeds = 0..;
    let lists = seeds.find_map(|seed| {
        let lists = Lists::<T>::mixed(seed);
        let parts =
            [&lists, &lists.without_whole()].map(|lists| lists.by_head().batch().parts.len());
        (parts == [2, 1] && !lists.without_whole().q.is_empty()).then_some(lists)
    });
    let whole = lists.expect("some have lists and prompts");
    let whole = match sinks {
        true => whole.with_sinks(1),
        false => whole,
    };
    let alone = whole.without_whole();
    let spec = *whole.by_head().spec();
    let kv_heads = whole.spec.kv_heads;
    let limits = BatchLimits::decodes(8, 400, whole.page_size).with_query_tokens(600);
    let options = PlanOptions::default();
    let bound = Bound::new(&spec, &device, &options, &limits.by_kv_head(kv_heads)).unwrap();
    let options = options.with_bound(bound);
    let launches = LaunchSet::all(&device, &spec).unwrap();
    let launches = launches.with_prompts_of_heads(kv_heads);
    let of_workspace = WorkspaceOptions::default().with_launches(launches);
    let mut workspace = gpu.workspace(&spec, &bound, of_workspace).unwrap();
    let on_device = OnDevice::new(&whole);
    let (q, out, lse) = on_device.tensors();
    let mut tensors = RunTensors::new(&q, &on_device.pools, &out).with_lse(&lse);
    tensors.sinks = on_device.sinks(1);
    let stream = gpu.stream().unwrap();
    let mut planner = Planner::new();
    let mut captured = None;
    for lists in [&whole, &alone, &whole] {
        let batch = lists.by_head().batch();
        let plan = planner.plan(&spec, &batch, &device, &options).unwrap();
        // SAFETY: everything is there as described until the stream is done.
        unsafe { workspace.upload(&plan, *stream).unwrap() };
        let graph = captured.get_or_insert_with(|| {
            // SAFETY: as above.
            let run = |stream| unsafe { gpu.run_with(&mut workspace, &tensors, stream) };
            stream.capture(run).unwrap()
        });
        // SAFETY: as above.
        unsafe { graph.launch(*stream).unwrap() };
        stream.synchronize().unwrap();
        let (out, lse) = (on_device.out.read::<bf16>(), on_device.lse.read::<f32>());
        let rows = lists.q.len() / whole.spec.head_dim_qk as usize;
        lists
            .check(&out[..lists.q.len()], &lse[..rows], true)
            .unwrap();
    }
}
