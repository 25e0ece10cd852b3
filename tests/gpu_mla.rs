//! Latent attention on the GPU, as planned, against naive attention in f64.

mod common;
#[path = "gpu_run/problem.rs"]
#[allow(dead_code)]
mod problem;

use common::{
    Stream,
    problems::{Tensors, cases},
};
use half::{bf16, f16};
use problem::{OnDevice, Request, batch_of, check_results};
use proptest::prelude::*;
use tandem_attn::{
    exec::gpu::{Gpu, LaunchSet, WorkspaceOptions},
    plan::{Bound, PackRule, PlanOptions, Planner, SplitMode},
    problem::{KvLayout, Spec},
    tensor::Element,
};

#[derive(Clone, Debug)]
struct Case {
    spec: Spec,
    requests: Vec<Request>,
    page: u32,
    options: PlanOptions,
    captured: bool,
    seed: u64,
}

fn request() -> impl Strategy<Value = Request> {
    let own = prop_oneof![
        1 => Just(0_u32),
        3 => 1..70_u32,
        4 => (1..12_u32, 0..3_u32).prop_map(|(blocks, off)| blocks * 64 + off - 1),
        2 => 1..1500_u32,
        1 => 1..9000_u32,
    ];
    let queries = prop_oneof![6 => Just(1_u32), 4 => 2..9_u32, 1 => 9..40_u32];
    (any::<u64>(), 0..40_usize, own, queries).prop_map(|(parent, shared, own, queries)| Request {
        parent,
        shared,
        own,
        queries,
    })
}

fn case() -> impl Strategy<Value = Case> {
    let heads = prop_oneof![
        3 => Just(16_u32),
        2 => Just(64),
        2 => Just(128),
        1 => Just(1),
        3 => 1..129_u32,
    ];
    let window = prop_oneof![4 => Just(None), 1 => (0..300_u32).prop_map(Some)];
    let page = prop_oneof![
        4 => Just(64_u32),
        2 => Just(16),
        1 => Just(8),
        1 => Just(24),
        1 => Just(1),
        1 => prop_oneof![Just(2), Just(4), Just(12), Just(17)],
        1 => Just(128),
    ];
    let split = prop_oneof![3 => Just(None), 2 => (1..9_u32).prop_map(Some)];
    let packing = prop_oneof![2 => Just(PackRule::Fastest), 1 => Just(PackRule::Exact), 1 => Just(PackRule::Off)];
    (
        (heads, window, prop::bool::weighted(0.9)),
        prop::collection::vec(request(), 1..12),
        (page, split, packing, any::<bool>()),
        any::<u64>(),
    )
        .prop_map(|((heads, window, causal), requests, rest, seed)| {
            let (page, split, packing, captured) = rest;
            let mut spec = Spec::latent(heads, 512, 64);
            spec.variant.causal = causal;
            spec.variant.window_left = window;
            let mut options = PlanOptions::default().with_packing(packing);
            if let Some(pages) = split {
                let tokens = pages * page;
                options.split = SplitMode::Fixed { tokens };
            }
            Case {
                spec,
                requests,
                page,
                options,
                captured,
                seed,
            }
        })
}

fn check<T: Element>(gpu: &Gpu, case: &Case) -> Result<(), TestCaseError> {
    let spec = case.spec.with_dtype(T::DTYPE);
    let batch = batch_of(&case.requests, case.page, case.seed);
    let device = gpu.device();
    let plan = Planner::new()
        .plan(&spec, &batch, &device, &case.options)
        .expect("the case can be planned");
    plan.verify(&batch).expect("the plan computes the batch");
    let mut options = WorkspaceOptions::default();
    if case.captured {
        options.launches = Some(LaunchSet::decodes(&device, &spec).expect("there are kernels"));
    }
    let mut workspace = gpu
        .workspace(&spec, &Bound::of(&plan), options)
        .expect("there is memory");
    let tensors = Tensors::<T, T>::random(&spec, &batch, KvLayout::Nhd, case.seed);
    let on_device = OnDevice::new(&spec, &batch, &tensors);
    let stream = Stream::new();
    // SAFETY: the stream is ours.
    unsafe { workspace.upload(&plan, stream.0) }.expect("the plan fits");
    let first = on_device.run(gpu, &mut workspace, &stream);
    check_results(&spec, &batch, &tensors, &first).map_err(TestCaseError::fail)?;
    let again = on_device.run(gpu, &mut workspace, &stream);
    prop_assert!(first == again, "two runs differ");
    Ok(())
}

#[test]
fn latent_attention_is_the_reference() {
    let Some(gpu) = common::gpu("latent_attention_is_the_reference") else {
        return;
    };
    let mut runner = proptest::test_runner::TestRunner::new(cases(200));
    runner
        .run(&case(), |case| match case.seed % 2 {
            0 => check::<bf16>(gpu, &case),
            _ => check::<f16>(gpu, &case),
        })
        .unwrap();
}
