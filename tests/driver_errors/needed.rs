//! Graphs of the launches that plans need, each beside the others over one workspace.

use std::collections::BTreeSet;

use tandem_attn::{
    Error,
    exec::gpu::{DeviceTensor, Gpu, KvPool, LaunchSet, Workspace, WorkspaceOptions},
    plan::{BatchLimits, Bound, MergeMode, Plan, PlanOptions, Planner},
    problem::{Batch, Dtype, KvLayout, PageTable, Spec},
};

use crate::driver::{launches, with_graph_driver};

#[test]
fn a_graph_takes_no_plan_that_needs_what_was_left_out() {
    if !with_graph_driver(a_graph_takes_no_plan_that_needs_what_was_left_out) {
        return;
    }
    let gpu = Gpu::new(0).unwrap();
    let (spec, device) = (Spec::new(32, 8, 128), gpu.device());
    let limits = BatchLimits::decodes(8, 8000, 16).with_query_tokens(64);
    let mut options = PlanOptions::default().with_merge_mode(MergeMode::Kernel);
    let bound = Bound::new(&spec, &device, &options, &limits).unwrap();
    options.bound = Some(bound);
    // New tokens and keys of each request.
    let plan = |requests: &[(u32, u32)]| {
        let (mut table, mut qo_indptr) = (PageTable::new(16, 4000), vec![0]);
        for (request, &(new, keys)) in (0..).zip(requests) {
            let first = 500 * request;
            let pages: Vec<_> = (first..first + keys.div_ceil(16)).collect();
            table.push(&pages, keys);
            qo_indptr.push(qo_indptr[qo_indptr.len() - 1] + new);
        }
        let batch = Batch::new(qo_indptr, table);
        let plan = Planner::new().plan(&spec, &batch, &device, &options);
        plan.unwrap()
    };
    let [short, long, drafts, empty] = [
        plan(&[(1, 100); 3]),
        plan(&[(1, 8000), (1, 100)]),
        plan(&[(8, 8000)]),
        plan(&[]),
    ];
    let count = |plan: &Plan| (plan.groups.len(), plan.merges.len().min(1));
    let expected = [(1, 0), (1, 1), (1, 1), (0, 0)];
    assert_eq!([&short, &long, &drafts, &empty].map(count), expected);
    assert_eq!(short.groups[0].id, long.groups[0].id);
    assert_ne!(drafts.groups[0].id, long.groups[0].id);

    let set = LaunchSet::decodes(&device, &spec).unwrap();
    let all = set.keys().len() as i32 + 1;
    let with_set = WorkspaceOptions::default().with_launches(set);
    let mut workspace = gpu.workspace(&spec, &bound, with_set).unwrap();
    let stream = gpu.stream().unwrap();
    let q = DeviceTensor::new(1 << 30, Dtype::BF16, [64, 32, 128]);
    let pool = KvPool::new(&spec, KvLayout::Nhd, 16, 4000, 1 << 30, 1 << 30);
    let none = workspace.needed_launches();
    // SAFETY: nothing is there to be touched, here and below.
    let layer = |workspace: &mut Workspace, stream| unsafe {
        gpu.run(workspace, &q, &[pool], &q, None, stream)
    };
    // Captures two layers and returns the number of launches of each.
    let capture = |workspace: &mut Workspace| {
        let before = launches();
        let layers = |stream| {
            layer(workspace, stream)?;
            layer(workspace, stream)
        };
        let graph = stream.capture(layers).unwrap();
        (graph, (launches() - before) / 2)
    };
    let upload = |workspace: &mut Workspace, plan: &Plan| unsafe {
        workspace.upload(plan, *stream).unwrap();
        workspace.needed_launches()
    };
    let plans = [&short, &long, &drafts, &empty];
    let keys = plans.map(|plan| upload(&mut workspace, plan));
    assert_eq!(keys[3], none);
    let different: BTreeSet<_> = keys.iter().collect();
    assert_eq!(different.len(), 4);

    let graphs = plans.map(|plan| {
        upload(&mut workspace, plan);
        // Launches that were made for all of the set are made again.
        layer(&mut workspace, *stream).unwrap();
        workspace.launch_only_needed();
        let (graph, made) = capture(&mut workspace);
        let (groups, merges) = count(plan);
        assert_eq!(made, (groups + merges) as i32, "{plan}");
        graph
    });
    upload(&mut workspace, &short);
    let (whole, made) = capture(&mut workspace);
    assert_eq!(made, all, "an upload ends it");

    // By plan, the graphs that run it.
    let runs = [
        [true, true, false, false],
        [false, true, false, false],
        [false, false, true, false],
        [true; 4],
    ];
    for (plan, runs) in plans.iter().zip(runs) {
        upload(&mut workspace, plan);
        unsafe { whole.launch(*stream) }.unwrap();
        for (graph, runs) in graphs.iter().zip(runs) {
            let before = launches();
            let launched = unsafe { graph.launch(*stream) };
            assert_eq!(launches() - before, i32::from(runs), "{plan}");
            match launched {
                Ok(()) => assert!(runs),
                Err(error @ Error::NotInGraph { .. }) => {
                    let kernel = plan.groups[0].id.map(|id| id.to_string());
                    let text = error.to_string();
                    let named = text.contains(&kernel.unwrap()) || text.contains("merges");
                    assert!(named && text.contains("capture again"), "{text}");
                }
                Err(other) => panic!("{other}"),
            }
        }
    }
    // Nothing is needed after an upload that was refused.
    let foreign = Plan::empty(Spec::new(4, 2, 128));
    unsafe { workspace.upload(&foreign, *stream) }.unwrap_err();
    assert_eq!(workspace.needed_launches(), none);
    assert_eq!(unsafe { graphs[0].launch(*stream) }, Err(Error::NoPlan));

    // Without a launch set, there is nothing to leave out.
    let mut eager = gpu
        .workspace(&spec, &bound, WorkspaceOptions::default())
        .unwrap();
    assert_eq!(upload(&mut eager, &long), none);
    eager.launch_only_needed();
    let q = DeviceTensor::new(1 << 30, Dtype::BF16, [2, 32, 128]);
    let before = launches();
    unsafe { gpu.run(&mut eager, &q, &[pool], &q, None, *stream) }.unwrap();
    assert_eq!(launches() - before, 2);
}
