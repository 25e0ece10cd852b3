//! One captured graph, one plan after the other.

mod in_one_kernel;
mod needed;
mod two_heads;

use std::ptr;

use cust::sys;
use half::bf16;
use tandem_attn::{
    Error,
    exec::gpu::{
        Gpu, KvPool, LaunchSet, RunTensors, Stream as Handle, Workspace, WorkspaceOptions,
    },
    plan::{
        Bound, DeviceDescription, Kernel, MergeMode, Plan, PlanOptions, Planner, Tile, TileGroup,
        pod::PodMode,
    },
    problem::{Batch, Dtype, KvLayout, PageTable, Spec},
    tensor::{Element, F8E4M3},
};

use super::{
    common::{
        Memory, Rng, Stream,
        problems::{Pools, Tensors, ancestors, masks},
    },
    hopper,
    problem::{OnDevice, check_results},
};

struct Graph(sys::CUgraphExec);

impl Graph {
    /// What `work` puts on the stream.
    fn capture(stream: &Stream, work: impl FnOnce()) -> Self {
        const THIS_THREAD: sys::CUstreamCaptureMode =
            sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        let ok = |code| assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
        let (mut graph, mut exec) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the stream is ours; handles are written.
        unsafe {
            ok(sys::cuStreamBeginCapture_v2(
                stream.0.as_raw().cast(),
                THIS_THREAD,
            ));
            work();
            ok(sys::cuStreamEndCapture(
                stream.0.as_raw().cast(),
                &mut graph,
            ));
            ok(sys::cuGraphInstantiate_v2(
                &mut exec,
                graph,
                ptr::null_mut(),
                ptr::null_mut(),
                0,
            ));
            ok(sys::cuGraphDestroy(graph));
        }
        Self(exec)
    }

    fn launch(&self, stream: Handle) {
        // SAFETY: everything in it lives.
        let code = unsafe { sys::cuGraphLaunch(self.0, stream.as_raw().cast()) };
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made by us, and done.
        let _ = unsafe { sys::cuGraphExecDestroy(self.0) };
    }
}

/// How the plan in a workspace is run from graphs.
trait Replay {
    /// Whether nothing is allocated after the first rounds.
    const KEEPS_MEMORY: bool;

    /// Leaves the results of so many tokens in `results`, which nothing has to wait for.
    fn replay(
        &mut self,
        gpu: &Gpu,
        workspace: &mut Workspace,
        tensors: &RunTensors<'_>,
        results: (usize, &[&Memory]),
        stream: &Stream,
    );

    /// What must have happened in so many rounds.
    fn end(&self, rounds: usize);
}

/// One graph with all launches of the set.
impl Replay for Option<Graph> {
    const KEEPS_MEMORY: bool = true;

    fn replay(
        &mut self,
        gpu: &Gpu,
        workspace: &mut Workspace,
        tensors: &RunTensors<'_>,
        _: (usize, &[&Memory]),
        stream: &Stream,
    ) {
        let graph = self.get_or_insert_with(|| {
            Graph::capture(stream, || {
                // SAFETY: everything on the device lives until it was waited for.
                unsafe { gpu.run_with(workspace, tensors, stream.0) }.unwrap();
            })
        });
        graph.launch(stream.0);
        stream.wait();
    }

    fn end(&self, _: usize) {}
}

pub fn free_bytes() -> usize {
    let (mut free, mut all) = (0, 0);
    // SAFETY: writes two numbers.
    let code = unsafe { sys::cuMemGetInfo_v2(&mut free, &mut all) };
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
    free
}

pub const PAGE: u32 = 16;
const POOL: u32 = 600;
const TOKENS: u32 = 96;

/// Requests with common prefixes, decodes and a few prefills, on pages of so many tokens.
pub fn random_batch(rng: &mut Rng, prefills: bool, page: u32) -> Batch {
    let mut order: Vec<u32> = (0..POOL).collect();
    rng.shuffle(&mut order);
    let prefix = rng.below(20);
    let mut next = prefix;
    let mut table = PageTable::new(page, POOL);
    let mut qo_indptr = vec![0];
    for _ in 0..rng.below(14) {
        let shared = if rng.below(2) == 0 { prefix } else { 0 };
        let own = 1 + rng.below(40);
        if next + own > POOL as usize {
            break;
        }
        let pages = [&order[..shared], &order[next..next + own]].concat();
        next += own;
        let kv_len = pages.len() as u32 * page - rng.below(page as usize) as u32;
        let queries = match rng.below(8) {
            0 if prefills => 9 + rng.below(30) as u32,
            1 => 2 + rng.below(6) as u32,
            _ => 1,
        };
        // New tokens lie behind what is shared.
        let queries = queries.min(kv_len - shared as u32 * page);
        if qo_indptr[qo_indptr.len() - 1] + queries > TOKENS {
            break;
        }
        qo_indptr.push(qo_indptr[qo_indptr.len() - 1] + queries);
        table.push(&pages, kv_len);
    }
    Batch::new(qo_indptr, table)
}

fn random<T: Element>(rng: &mut Rng, count: u32) -> Vec<T> {
    let values = rng.floats(count as usize, -1.0, 1.0);
    values.into_iter().map(T::from_f32).collect()
}

/// A plan of prefills and decodes together.
fn hybrid(spec: &Spec, device: &DeviceDescription, options: &PlanOptions) -> Plan {
    let mut rng = Rng(1);
    let plans = std::iter::repeat_with(|| {
        let batch = random_batch(&mut rng, true, PAGE);
        Planner::new().plan(spec, &batch, device, options).unwrap()
    });
    let wanted = |plan: &Plan| plan.pod.is_some_and(|pod| pod.mode == options.pod);
    plans.take(100).find(wanted).expect("one of them is")
}

pub fn bound(trees: bool) -> Bound {
    Bound {
        items: 4000,
        rows: 4000,
        page_ids: 14 * (20 + 40),
        merges: TOKENS,
        slots: 4000,
        ancestors: if trees { TOKENS } else { 0 },
        mask_words: 0,
        padded_tokens: 0,
        converted_pages: 14 * 16,
    }
}

/// As many rounds as `TANDEM_ROUNDS` says.
pub fn rounds() -> (usize, bool) {
    let rounds = std::env::var("TANDEM_ROUNDS");
    let rounds = rounds.ok().and_then(|rounds| rounds.parse().ok());
    (rounds.unwrap_or(60), rounds.is_some())
}

/// Keys behind a prefix have a kernel that shares SMs and counts no arrivals at merges. That of the prefix once counted its
/// own: the next plan merged before all states were there.
#[test]
fn plans_follow_those_of_which_some_decodes_leave_merges() {
    let Some(gpu) = hopper("plans_follow_those_of_which_some_decodes_leave_merges") else {
        return;
    };
    let spec = Spec::new(32, 8, 128).with_dtype(Dtype::BF16);
    let mut table = PageTable::new(16, 700);
    for first in [128, 128 + 260] {
        let pages = (0..128).chain(first..first + 260);
        table.push(&pages.collect::<Vec<_>>(), 388 * 16);
    }
    let batch = Batch::new(vec![0, 2, 4], table);
    let mut device = gpu.device();
    device.sms = 132;
    let plan = |merge_mode| {
        let options = PlanOptions::default().with_merge_mode(merge_mode);
        let plan = Planner::new().plan(&spec, &batch, &device, &options);
        plan.unwrap()
    };
    let [mixed, merging] = [MergeMode::Auto, MergeMode::Fused].map(plan);
    let shares = |group: &TileGroup| group.id.is_some_and(|id| id.info().co_resident);
    let [some, all] = [
        mixed.groups.iter().any(shares),
        mixed.groups.iter().all(shares),
    ];
    assert!(some && !all, "{mixed}");
    assert!(!merging.groups.iter().any(shares), "{merging}");

    let set = LaunchSet::decodes(&device, &spec).unwrap();
    let set = set.and(&mixed).and(&merging);
    let options = WorkspaceOptions::default();
    let options = options.with_launches(set.with_merge_mode(MergeMode::Fused));
    let [a, b] = [&mixed, &merging].map(Bound::of);
    let bound = Bound {
        items: a.items.max(b.items),
        merges: a.merges.max(b.merges),
        rows: a.rows.max(b.rows),
        slots: a.slots.max(b.slots),
        ..a
    };
    let mut workspace = gpu.workspace(&spec, &bound, options).unwrap();
    let tensors = Tensors::<bf16, bf16>::random(&spec, &batch, KvLayout::Nhd, 5);
    let on_device = OnDevice::new(&spec, &batch, &tensors);
    let stream = Stream::new();
    for plan in [&mixed, &merging, &mixed, &mixed, &merging, &merging] {
        // SAFETY: the stream is ours, and runs are done when they return.
        unsafe { workspace.upload(plan, stream.0) }.unwrap();
        let results = on_device.run(gpu, &mut workspace, &stream);
        check_results(&spec, &batch, &tensors, &results).unwrap();
    }
}

#[test]
fn a_graph_serves_one_plan_after_the_other() {
    let Some(gpu) = hopper("a_graph_serves_one_plan_after_the_other") else {
        return;
    };
    serves::<bf16>(
        gpu,
        128,
        &[
            (MergeMode::Fused, false, PodMode::Auto, false),
            (MergeMode::Fused, true, PodMode::Auto, false),
            (MergeMode::Kernel, true, PodMode::Auto, false),
            (MergeMode::Kernel, true, PodMode::Tickets, false),
            (MergeMode::Fused, true, PodMode::Auto, true),
            (MergeMode::Kernel, true, PodMode::Tickets, true),
        ],
    );
}

/// What prefills convert differs from plan to plan.
#[test]
fn a_graph_serves_plans_over_8_bit_pages() {
    let Some(gpu) = hopper("a_graph_serves_plans_over_8_bit_pages") else {
        return;
    };
    let modes = [
        (MergeMode::Kernel, true, PodMode::Auto, false),
        (MergeMode::Fused, true, PodMode::Auto, true),
    ];
    serves::<F8E4M3>(gpu, 128, &modes);
}

/// The launches of tiles that do not load pages of one token are left out.
#[test]
fn a_graph_serves_plans_over_pages_of_one_token() {
    let Some(gpu) = hopper("a_graph_serves_plans_over_pages_of_one_token") else {
        return;
    };
    let modes = [
        (MergeMode::Fused, false, PodMode::Auto, false),
        (MergeMode::Kernel, true, PodMode::Auto, true),
    ];
    serves_by::<F8E4M3, Option<Graph>>(gpu, [128, 1], &modes, |_| None);
    serves_by::<bf16, Option<Graph>>(gpu, [64, 1], &modes, |_| None);
    // Prompts of these heads have kernels of their own, which load pages of any size.
    serves_by::<bf16, Option<Graph>>(gpu, [96, 1], &modes, |_| None);
}

/// The launches of a set without a graph, as an emulated GPU has them too.
struct Direct;

impl Replay for Direct {
    const KEEPS_MEMORY: bool = false;

    fn replay(
        &mut self,
        gpu: &Gpu,
        workspace: &mut Workspace,
        tensors: &RunTensors<'_>,
        _: (usize, &[&Memory]),
        stream: &Stream,
    ) {
        // SAFETY: everything on the device lives until it was waited for.
        unsafe { gpu.run_with(workspace, tensors, stream.0) }.unwrap();
        stream.wait();
    }

    fn end(&self, _: usize) {}
}

/// Kernels with room for trees must add sinks as those without.
#[test]
fn a_launch_set_gives_the_bits_of_a_plan_with_sinks() {
    let Some(gpu) = hopper("a_launch_set_gives_the_bits_of_a_plan_with_sinks") else {
        return;
    };
    for (head_dim, pod) in [
        (112, PodMode::Auto),
        (96, PodMode::Auto),
        (128, PodMode::Serial),
    ] {
        let modes = [
            (MergeMode::Kernel, true, pod, true),
            (MergeMode::Fused, true, pod, true),
        ];
        serves_by::<bf16, Direct>(gpu, [head_dim, PAGE], &modes, |_| Direct);
    }
}

/// Its decodes pad the heads, its prefills do not.
#[test]
fn a_graph_serves_plans_of_heads_that_decodes_pad() {
    let Some(gpu) = hopper("a_graph_serves_plans_of_heads_that_decodes_pad") else {
        return;
    };
    let modes = [
        (MergeMode::Kernel, true, PodMode::Auto, false),
        (MergeMode::Fused, true, PodMode::Auto, true),
    ];
    serves::<bf16>(gpu, 112, &modes);
    serves::<bf16>(gpu, 96, &modes);
}

/// Where states are merged, whether there are prefills, how they share the GPU, and whether there are sinks and trees, and masks if
/// a kernel merges.
type Mode = (MergeMode, bool, PodMode, bool);

fn serves<K: Element>(gpu: &Gpu, head_dim: u32, modes: &[Mode]) {
    serves_by::<K, Option<Graph>>(gpu, [head_dim, PAGE], modes, |_| None);
}

fn serves_by<K: Element, R: Replay>(
    gpu: &Gpu,
    [head_dim, page]: [u32; 2],
    modes: &[Mode],
    graphs: impl Fn(&Gpu) -> R,
) {
    let (rounds, alone) = rounds();
    let alone = alone && R::KEEPS_MEMORY;
    for &(merge_mode, prefills, pod, rich) in modes {
        let mut spec = Spec::new(8, 2, head_dim).with_kv_dtype(K::DTYPE);
        spec.variant.sinks = rich;
        let masked = rich && merge_mode == MergeMode::Kernel;
        let bound = || Bound {
            padded_tokens: if head_dim == 128 { 0 } else { TOKENS },
            // Two and up to 15 for each token, or one instead of those: a graph with room for masks reads ancestors as masks.
            mask_words: if masked { TOKENS * 17 } else { 0 },
            ..bound(rich)
        };
        let mut device = gpu.device();
        // Few enough for small batches to be cut.
        device.sms = 16;
        let mut options = WorkspaceOptions::default();
        let mut eager = gpu.workspace(&spec, &bound(), options.clone()).unwrap();
        let by_tickets = pod == PodMode::Tickets;
        // By tickets with the tile that decodes are in the kernel with, also where there is no prefill.
        let plan_options = PlanOptions::default()
            .with_bound(bound())
            .with_merge_mode(merge_mode)
            .with_pod(pod)
            .with_decode_tile(by_tickets.then_some(Tile { m: 16, n: 32 }));
        let launches = match prefills {
            true if by_tickets => LaunchSet::new().and(&hybrid(&spec, &device, &plan_options)),
            true => LaunchSet::all(&device, &spec).unwrap(),
            false => LaunchSet::decodes(&device, &spec).unwrap(),
        };
        options.launches = Some(launches.with_merge_mode(merge_mode));
        let mut workspace = gpu.workspace(&spec, &bound(), options).unwrap();

        let mut rng = Rng(3);
        let strides = KvLayout::Nhd.strides(page, spec.kv_heads, spec.head_dim_qk);
        let pools = Pools {
            k: random::<K>(&mut rng, POOL * strides.page),
            v: random::<K>(&mut rng, POOL * strides.page),
            k_strides: strides,
            v_strides: strides,
        };
        let whole = Tensors {
            q: random::<bf16>(&mut rng, TOKENS * spec.q_heads * spec.head_dim_qk),
            parts: vec![pools],
        };
        let heads = spec.q_heads as usize;
        let row = heads * spec.head_dim_v as usize;
        let mut everything = PageTable::new(page, POOL);
        everything.push(&(0..TOKENS.div_ceil(page)).collect::<Vec<_>>(), TOKENS);
        let everything = Batch::new(vec![0, TOKENS], everything);
        let on_device = OnDevice::new(&spec, &everything, &whole);
        let shape = [TOKENS as usize, heads, spec.head_dim_v as usize];
        let (out, lse) = (
            Memory::new(&vec![u16::MAX; TOKENS as usize * row]),
            Memory::new(&vec![u32::MAX; TOKENS as usize * heads]),
        );
        let (to, lse_to) = (
            out.tensor(bf16::DTYPE, shape),
            lse.tensor(Dtype::F32, [shape[0], shape[1]]),
        );

        let stream = Stream::new();
        let mut planner = Planner::new();
        let mut plan = Plan::empty(spec);
        let mut graphs = graphs(gpu);
        let mut free = 0;
        for round in 0..rounds {
            let mut batch = random_batch(&mut rng, prefills, page);
            if masked && round % 3 == 1 {
                batch = batch.clone().with_masks(masks(&batch, round as u64));
            } else if rich && round % 3 > 0 {
                batch = batch
                    .clone()
                    .with_ancestors(ancestors(&batch, round as u64));
            }
            planner
                .plan_into(&spec, &batch, &device, &plan_options, &mut plan)
                .unwrap();
            let prefill = |group: &TileGroup| group.kernel == Kernel::Prefill;
            if by_tickets && plan.pod.is_none() && plan.groups.iter().any(prefill) {
                // Prefills alone have other tiles.
                continue;
            }
            // SAFETY: the stream is ours; everything on the device lives until it was waited for.
            unsafe {
                workspace.upload(&plan, stream.0).unwrap();
                eager.upload(&plan, stream.0).unwrap();
            }
            let tensors = on_device.tensors(&to, &lse_to);
            let tokens = batch.total_q() as usize;
            let results = (tokens, &[&out, &lse][..]);
            graphs.replay(gpu, &mut workspace, &tensors, results, &stream);
            let replayed = (
                out.read_at::<u16>(0, tokens * row),
                lse.read_at::<u32>(0, tokens * heads),
            );
            let now = on_device.first(tokens).run(gpu, &mut eager, &stream);
            // Without a prefill decodes have another kernel than in the graph.
            let other = by_tickets && plan.pod.is_none();
            assert!(other || replayed == now, "round {round}: {plan}");
            if round % 20 == 0 || other {
                let mut tensors = whole.clone();
                tensors.q.truncate(tokens * row);
                check_results(&spec, &batch, &tensors, &replayed)
                    .unwrap_or_else(|wrong| panic!("round {round}: {wrong}"));
            }
            match round {
                10 => free = free_bytes(),
                11.. if alone => assert_eq!(free_bytes(), free, "round {round}: memory changed"),
                _ => {}
            }
        }
        graphs.end(rounds);
    }
}

#[test]
fn a_plan_for_which_nothing_was_captured_is_refused() {
    let Some(gpu) = hopper("a_plan_for_which_nothing_was_captured_is_refused") else {
        return;
    };
    let spec = Spec::new(8, 2, 128);
    let device = gpu.device();
    let mut options = WorkspaceOptions::default();
    options.launches = Some(LaunchSet::decodes(&device, &spec).unwrap());
    let mut workspace = gpu.workspace(&spec, &bound(false), options).unwrap();
    let mut table = PageTable::new(PAGE, POOL);
    table.push(&[0, 1, 2], 40);
    let batch = Batch::new(vec![0, 40], table);
    let plan = Planner::new()
        .plan(&spec, &batch, &device, &PlanOptions::default())
        .unwrap();
    let stream = Stream::new();
    // SAFETY: refused.
    let error = unsafe { workspace.upload(&plan, stream.0) }.unwrap_err();
    assert!(matches!(error, Error::NotCaptured { .. }), "{error}");
    assert!(error.to_string().contains("prefill_"), "{error}");
}

/// A graph of 2 tokens was once launched for plans of 5, and wrote behind its outputs.
#[test]
fn a_plan_of_more_tokens_than_were_captured_is_refused() {
    let Some(gpu) = hopper("a_plan_of_more_tokens_than_were_captured_is_refused") else {
        return;
    };
    let (spec, device) = (Spec::new(8, 2, 128), gpu.device());
    let mut options = WorkspaceOptions::default();
    let mut eager = gpu
        .workspace(&spec, &bound(false), options.clone())
        .unwrap();
    options.launches = Some(LaunchSet::decodes(&device, &spec).unwrap());
    let mut workspace = gpu.workspace(&spec, &bound(false), options).unwrap();
    let plan_options = PlanOptions::default().with_bound(bound(false));
    let plan = |requests: u32| {
        let mut table = PageTable::new(PAGE, POOL);
        for request in 0..requests {
            table.push(&[2 * request, 2 * request + 1], 20 + request);
        }
        let batch = Batch::new((0..=requests).collect(), table);
        let plan = Planner::new().plan(&spec, &batch, &device, &plan_options);
        plan.unwrap()
    };
    const ROW: usize = 8 * 128;
    let (mut rng, most) = (Rng(5), 8);
    let q = Memory::new(&random::<bf16>(&mut rng, 8 * 8 * 128));
    let pool_elements = POOL * PAGE * 2 * 128;
    let [k, v] = [(); 2].map(|()| Memory::new(&random::<bf16>(&mut rng, pool_elements)));
    let pools = [KvPool::new(
        &spec,
        KvLayout::Nhd,
        PAGE,
        POOL,
        k.address(),
        v.address(),
    )];
    let untouched = vec![u16::MAX; most * ROW];
    let [out, right] = [(); 2].map(|()| Memory::new(&untouched));
    let tensor = |memory: &Memory, tokens| memory.tensor(Dtype::BF16, [tokens, 8, 128]);
    let stream = gpu.stream().unwrap();
    // SAFETY: the stream is ours; everything on the device lives until it was waited for.
    unsafe {
        workspace.upload(&plan(2), *stream).unwrap();
        let captured = stream.capture(|stream| {
            let (q, out) = (tensor(&q, 2), tensor(&out, 2));
            gpu.run(&mut workspace, &q, &pools, &out, None, stream)
        });
        let graph = captured.unwrap();
        workspace.upload(&plan(5), *stream).unwrap();
        let expected = Error::BeyondGraph {
            what: "query tokens",
            planned: 5,
            captured: 2,
        };
        assert_eq!(graph.launch(*stream), Err(expected));
        stream.synchronize().unwrap();
        assert_eq!(out.read::<u16>(), untouched);
        for tokens in [2, 1] {
            let plan = plan(tokens);
            workspace.upload(&plan, *stream).unwrap();
            graph.launch(*stream).unwrap();
            eager.upload(&plan, *stream).unwrap();
            let tokens = tokens as usize;
            let (q, right) = (tensor(&q, tokens), tensor(&right, tokens));
            gpu.run(&mut eager, &q, &pools, &right, None, *stream)
                .unwrap();
            stream.synchronize().unwrap();
        }
        let (out, right) = (out.read::<u16>(), right.read::<u16>());
        assert!(out == right, "the graph has other bits");
        assert!(out[2 * ROW..] == untouched[2 * ROW..]);
        assert!(out[..2 * ROW].iter().all(|&bits| bits != u16::MAX));
    }
}
