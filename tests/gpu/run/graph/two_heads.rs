//! Decodes that read two KV heads at a time, in a graph: fixed splits do not have them.

use half::bf16;
use tandem_attn::{
    Error,
    exec::gpu::{LaunchSet, RunTensors, WorkspaceOptions},
    plan::{BatchLimits, Bound, PlanOptions, Planner, SplitMode},
    problem::{Dtype, KvLayout, Spec},
};

use crate::{
    common::{Stream, problems::Tensors},
    problem::{OnDevice, Request, batch_of},
    run::hopper,
};

#[test]
fn a_graph_that_reads_two_heads_at_a_time_refuses_fixed_splits() {
    let Some(gpu) = hopper("a_graph_that_reads_two_heads_at_a_time_refuses_fixed_splits") else {
        return;
    };
    // So many heads that half as many units keep the GPU busy.
    let heads = 2 * gpu.multiprocessors();
    let spec = Spec::new(heads, heads, 96);
    let device = gpu.device();
    let request = Request {
        parent: 0,
        shared: 0,
        own: 200,
        queries: 1,
    };
    let batch = batch_of(&[request], 16, 7);
    let fixed = PlanOptions::default().with_split(SplitMode::Fixed { tokens: 4096 });
    let limits = BatchLimits::decodes(4, 400, 16);
    let bound = Bound::new(&spec, &device, &PlanOptions::default(), &limits).unwrap();
    let [plan, plan_of_fixed] = [PlanOptions::default(), fixed].map(|options| {
        let options = options.with_bound(bound);
        let plan = Planner::new().plan(&spec, &batch, &device, &options);
        plan.unwrap()
    });
    let tensors = Tensors::<bf16, bf16>::random(&spec, &batch, KvLayout::Nhd, 3);
    let on_device = OnDevice::new(&spec, &batch, &tensors);
    let out = on_device.out.tensor(Dtype::BF16, [1, heads as usize, 96]);
    let tensors = RunTensors::new(&on_device.q, &on_device.pools, &out);
    let set = LaunchSet::new().and(&plan).and(&plan_of_fixed);
    let set = WorkspaceOptions::default().with_launches(set);
    let mut workspace = gpu.workspace(&spec, &bound, set).unwrap();
    let (stream, capturing) = (Stream::new(), gpu.stream().unwrap());
    // The graph that was captured with the plan of fixed splits runs both.
    for captured_with in [&plan, &plan_of_fixed] {
        // SAFETY: the stream is ours, and all tensors live until it was waited for.
        unsafe { workspace.upload(captured_with, stream.0) }.unwrap();
        stream.wait();
        let run = |on| unsafe { gpu.run_with(&mut workspace, &tensors, on) };
        let graph = capturing.capture(run).unwrap();
        for uploaded in [&plan, &plan_of_fixed, &plan] {
            unsafe { workspace.upload(uploaded, stream.0) }.unwrap();
            let launched = unsafe { graph.launch(stream.0) };
            stream.wait();
            let refused = matches!(launched, Err(Error::NotInGraph { .. }));
            let expected = !captured_with.fixed_splits && uploaded.fixed_splits;
            assert_eq!(refused, expected, "{launched:?}");
            assert!(refused || launched.is_ok(), "{launched:?}");
        }
    }
}
