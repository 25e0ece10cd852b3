//! Graphs and launch sets: which plans they take, which pools and tensors these need.

use tandem_attn::{
    Error,
    exec::gpu::{Arch, DeviceTensor, Gpu, KvPool, LaunchSet, Stream, Workspace, WorkspaceOptions},
    plan::{BatchLimits, Bound, MergeMode, Plan, PlanOptions, Planner},
    problem::{Batch, Dtype, KvLayout, PageTable, Spec},
};

use crate::driver::{launches, with_graph_driver, with_young_driver};

/// What is captured while a plan has one part is also for plans with two.
#[test]
fn a_launch_set_wants_pools_for_all_its_parts() {
    if !with_young_driver(a_launch_set_wants_pools_for_all_its_parts) {
        return;
    }
    let gpu = Gpu::new(0).unwrap();
    let spec = Spec::new(8, 2, 128);
    let mut table = PageTable::new(16, 20);
    table.push(&[1, 2, 3], 40);
    table.push(&[1, 2, 4], 45);
    let whole = Batch::new(vec![0, 1, 2], table);
    let batches = [whole.share_prefixes(), whole];
    let plan = |batch: &Batch| {
        let options = PlanOptions::default().with_merge_mode(MergeMode::Kernel);
        let plan = Planner::new().plan(&spec, batch, &gpu.device(), &options);
        plan.unwrap()
    };
    let [two_parts, one_part] = batches.each_ref().map(plan);
    let set = LaunchSet::new().and(&two_parts).and(&one_part);
    let options = WorkspaceOptions::default().with_launches(set);
    let bound = Bound {
        page_ids: 6,
        ..Bound::of(&two_parts)
    };
    let mut workspace = gpu.workspace(&spec, &bound, options).unwrap();
    let stream = Stream::DEFAULT;
    let q = DeviceTensor::new(1 << 30, Dtype::BF16, [2, 8, 128]);
    let pool = KvPool::new(&spec, KvLayout::Nhd, 16, 20, 1 << 30, 1 << 30);
    // SAFETY: nothing is there to be touched.
    unsafe { workspace.upload(&one_part, stream) }.unwrap();
    let mut run = |pools: &[KvPool]| {
        // SAFETY: as above.
        unsafe { gpu.run(&mut workspace, &q, pools, &q, None, stream) }
    };
    let (got, expected) = (1, 2);
    assert_eq!(run(&[pool]), Err(Error::Pools { got, expected }));
    assert_eq!(run(&[pool; 2]), Ok(()));
    // The graph reads the pool of the part that this plan lacks for later plans.
    let without_tokens = KvPool::new(&spec, KvLayout::Nhd, 0, 20, 1 << 30, 1 << 30);
    let error = run(&[pool, without_tokens]).unwrap_err();
    assert!(matches!(error, Error::Problem(_)), "{error}");
    let strides = |page_size| KvLayout::Nhd.strides(page_size, 2, 128);
    let other_values = pool.with_strides(strides(16), strides(8));
    let error = run(&[pool, other_values]).unwrap_err();
    assert!(matches!(error, Error::Extent { got: 8, .. }), "{error}");
    let one_head = KvPool::new(&spec, KvLayout::Nhd, 16, 20, 1 << 30, 1 << 30);
    let mut by_head = strides(16);
    by_head.head = by_head.token;
    let error = run(&[pool, one_head.with_strides(by_head, by_head)]).unwrap_err();
    assert!(matches!(error, Error::Shape(_)), "{error}");
    let other_pages = KvPool::new(&spec, KvLayout::Nhd, 8, 1, 1 << 30, 1 << 30);
    assert_eq!(run(&[pool, other_pages]), Ok(()));
}

/// Tiles of Ampere's kernels have one table. A graph of them once took plans with joint tiles and left those out.
#[test]
fn a_graph_without_joint_tiles_takes_no_plan_that_has_them() {
    if !with_young_driver(a_graph_without_joint_tiles_takes_no_plan_that_has_them) {
        return;
    }
    let gpu = Gpu::new(0).unwrap();
    let spec = Spec::new(4, 2, 64);
    let mut device = gpu.device();
    device.sms = 1;
    let plan = |second: &[u32]| {
        let mut table = PageTable::new(16, 20);
        table.push(&[1, 2, 3], 39);
        table.push(second, 38);
        let batch = Batch::new(vec![0, 1, 2], table);
        let plan = Planner::new().plan(&spec, &batch, &device, &PlanOptions::default());
        plan.unwrap()
    };
    let [apart, joint] = [plan(&[4, 5, 6]), plan(&[1, 2, 6])];
    let is_joint = |plan: &Plan| plan.items.iter().any(|item| item.is_joint());
    assert!(!is_joint(&apart) && is_joint(&joint), "{joint}");
    let set = LaunchSet::new().and(&apart).and(&joint);
    let options = WorkspaceOptions::default().with_launches(set);
    let options = options.with_arch(Arch::Sm80);
    let bound = Bound {
        items: 10,
        rows: 10,
        page_ids: 10,
        merges: 10,
        slots: 10,
        ..Bound::default()
    };
    let mut workspace = gpu.workspace(&spec, &bound, options).unwrap();
    let q = DeviceTensor::new(1 << 30, Dtype::BF16, [2, 4, 64]);
    let pool = KvPool::new(&spec, KvLayout::Nhd, 16, 20, 1 << 30, 1 << 30);
    let stream = Stream::DEFAULT;
    // SAFETY: nothing is there to be touched.
    unsafe {
        workspace.upload(&joint, stream).unwrap();
        let error = gpu.run(&mut workspace, &q, &[pool], &q, None, stream);
        assert!(matches!(error, Err(Error::NoInstance { .. })), "{error:?}");
        workspace.upload(&apart, stream).unwrap();
        gpu.run(&mut workspace, &q, &[pool], &q, None, stream)
            .unwrap();
        let error = workspace.upload(&joint, stream).unwrap_err();
        assert!(matches!(error, Error::NotCaptured { .. }), "{error}");
        assert!(error.to_string().contains("joint tiles"), "{error}");
        workspace.upload(&apart, stream).unwrap();
    }
}

/// A graph keeps the tensors and pools of its runs. It was once launched for plans with more tokens, and the kernels read and
/// wrote behind the tensors.
#[test]
fn a_graph_takes_no_plan_beyond_its_tensors_and_pools() {
    if !with_graph_driver(a_graph_takes_no_plan_beyond_its_tensors_and_pools) {
        return;
    }
    let gpu = Gpu::new(0).unwrap();
    let (spec, device) = (Spec::new(8, 2, 128), gpu.device());
    let limits = BatchLimits::decodes(8, 200, 16);
    let mut options = PlanOptions::default();
    let bound = Bound::new(&spec, &device, &options, &limits).unwrap();
    options.bound = Some(bound);
    let plan = |page: u32, requests: u32, first_page: u32| {
        let mut table = PageTable::new(page, 100);
        for request in 0..requests {
            table.push(&[first_page + request], page);
        }
        let batch = Batch::new((0..=requests).collect(), table);
        let plan = Planner::new().plan(&spec, &batch, &device, &options);
        plan.unwrap()
    };
    let set =
        WorkspaceOptions::default().with_launches(LaunchSet::decodes(&device, &spec).unwrap());
    let workspace = || gpu.workspace(&spec, &bound, set.clone()).unwrap();
    let [mut one, mut other] = [workspace(), workspace()];
    let stream = gpu.stream().unwrap();
    let tensor = |tokens| DeviceTensor::new(1 << 30, Dtype::BF16, [tokens, 8, 128]);
    let pool = |pages| KvPool::new(&spec, KvLayout::Nhd, 16, pages, 1 << 30, 1 << 30);
    let refused = |what, planned, captured| {
        Err(Error::BeyondGraph {
            what,
            planned,
            captured,
        })
    };
    // SAFETY: nothing is there to be touched.
    unsafe {
        one.upload(&plan(16, 2, 0), *stream).unwrap();
        other.upload(&plan(16, 2, 0), *stream).unwrap();
        let layers = |stream| {
            let run = |workspace: &mut Workspace, tokens, pages| {
                let q = tensor(tokens);
                gpu.run(workspace, &q, &[pool(pages)], &q, None, stream)
            };
            run(&mut one, 4, 50)?;
            run(&mut one, 4, 60)?;
            run(&mut other, 3, 50)
        };
        let graph = stream.capture(layers).unwrap();
        // As if the stream were of another crate.
        let alone = gpu.capture(*stream, |stream| {
            let q = tensor(8);
            gpu.run(&mut one, &q, &[pool(50)], &q, None, stream)
        });
        let alone = alone.unwrap();

        let before = launches();
        one.upload(&plan(16, 5, 0), *stream).unwrap();
        assert_eq!(graph.launch(*stream), refused("query tokens", 5, 4));
        assert_eq!(launches(), before);
        // Another graph of the same workspace has the room.
        assert_eq!(alone.launch(*stream), Ok(()));
        one.upload(&plan(16, 4, 0), *stream).unwrap();
        assert_eq!(graph.launch(*stream), Ok(()));
        other.upload(&plan(16, 4, 0), *stream).unwrap();
        assert_eq!(graph.launch(*stream), refused("query tokens", 4, 3));
        other.upload(&plan(16, 0, 0), *stream).unwrap();
        assert_eq!(graph.launch(*stream), Ok(()));
        one.upload(&plan(16, 1, 50), *stream).unwrap();
        assert_eq!(graph.launch(*stream), refused("pages of a KV pool", 51, 50));
        one.upload(&plan(8, 1, 0), *stream).unwrap();
        assert_eq!(graph.launch(*stream), refused("tokens in a page", 8, 16));
        // An upload that was refused leaves no plan, as for `Gpu::run`.
        let foreign = Plan::empty(Spec::new(4, 2, 128));
        one.upload(&foreign, *stream).unwrap_err();
        assert_eq!(graph.launch(*stream), Err(Error::NoPlan));
        one.upload(&plan(16, 1, 49), *stream).unwrap();
        assert_eq!(graph.launch(*stream), Ok(()));
        assert_eq!(launches(), before + 4);

        let count = 100_000;
        let start = std::time::Instant::now();
        for _ in 0..count {
            graph.launch(*stream).unwrap();
        }
        let each = start.elapsed().as_nanos() / count;
        println!("{each} ns of host time a launch of a graph of three runs");
        assert!(each < 20_000, "{each} ns");
    }
}
