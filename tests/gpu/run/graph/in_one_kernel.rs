//! A set of all launches runs prefill and decode in one kernel, if plans have no other form that shares SMs.

use half::bf16;
use tandem_attn::{
    exec::gpu::{LaunchSet, WorkspaceOptions},
    plan::{BatchLimits, Bound, PlanOptions, Planner, pod::PodMode},
    problem::{KvLayout, Spec},
};

use crate::{
    common::{Stream, problems::Tensors},
    problem::{OnDevice, Request, batch_of, check_results},
    run::hopper,
};

/// Hybrid batches, decodes and prompts, one after the other in one workspace.
#[test]
fn all_launches_run_batches_in_one_kernel() {
    let Some(gpu) = hopper("all_launches_run_batches_in_one_kernel") else {
        return;
    };
    let options = PlanOptions::default();
    for spec in [Spec::new(64, 4, 64), Spec::new(32, 2, 64)] {
        let device = gpu.device();
        let limits = BatchLimits::decodes(129, 1600, 16).with_query_tokens(640);
        let bound = Bound::new(&spec, &device, &options, &limits).unwrap();
        let launches = LaunchSet::all(&device, &spec).unwrap();
        let set = WorkspaceOptions::default().with_launches(launches);
        let mut workspace = gpu.workspace(&spec, &bound, set).unwrap();
        let stream = Stream::new();
        let mut in_one = 0;
        for (prompt, decodes) in [(64, 64), (0, 40), (512, 128), (300, 0), (512, 128)] {
            let of = |queries| Request {
                parent: 0,
                shared: 0,
                own: 1000,
                queries,
            };
            let mut requests = vec![of(1); decodes];
            if prompt > 0 {
                requests.push(of(prompt));
            }
            let batch = batch_of(&requests, 16, 7);
            let options = options.with_bound(bound);
            let plan = Planner::new().plan(&spec, &batch, &device, &options);
            let plan = plan.unwrap();
            in_one += u32::from(plan.pod.is_some_and(|pod| pod.mode == PodMode::Tickets));
            let tensors = Tensors::<bf16, bf16>::random(&spec, &batch, KvLayout::Nhd, 3);
            let on_device = OnDevice::new(&spec, &batch, &tensors);
            // SAFETY: the stream is ours.
            unsafe { workspace.upload(&plan, stream.0) }.unwrap();
            let got = on_device.run(gpu, &mut workspace, &stream);
            check_results(&spec, &batch, &tensors, &got).unwrap();
        }
        assert!(in_one > 1, "{spec:?}");
    }
}
