//! Whole plans on the GPU against naive attention in f64, in graphs, and from several threads.

mod adversarial_numbers;
mod batch_invariance;
mod blocks;
mod by_head;
mod fixed_hybrids;
mod graph;
mod hooks;
mod in_f32;
mod options;
mod passed_pages;
mod rotary;
mod rounds;
mod sinks;
pub mod wide_prefixes;

use crate::{common, problem};
use common::{
    Stream, gpu,
    problems::{Tensors, cases, enrich, variant, vary_hooks},
};
use half::{bf16, f16};
use proptest::prelude::*;
use tandem_attn::{
    Error,
    exec::gpu::{Arch, DeviceTensor, Gpu, KvPool, LaunchSet, Workspace, WorkspaceOptions},
    plan::{
        Bound, DeviceDescription, Kernel, MergeMode, Plan, PlanOptions, Planner, SplitMode,
        pod::PodMode,
    },
    problem::{Batch, KvLayout, Spec},
    tensor::Element,
};

use graph::rounds;
use problem::{OnDevice, Request, batch_of, check_results, request};

#[derive(Clone, Debug)]
struct Case {
    spec: Spec,
    batch: Batch,
    layout: KvLayout,
    options: PlanOptions,
    /// Whose instructions run it.
    arch: Option<Arch>,
    sms: u32,
    /// With the launches of a captured graph.
    in_set: bool,
    seed: u64,
}

fn case() -> impl Strategy<Value = Case> {
    let padded = prop::sample::select(&[
        16_u32, 32, 48, 80, 96, 112, 144, 160, 176, 192, 208, 224, 240,
    ]);
    case_of(prop_oneof![3 => Just(64_u32), 3 => Just(128), 2 => padded])
}

fn case_of(dim: impl Strategy<Value = u32>) -> impl Strategy<Value = Case> {
    let heads = (1..4_u32, prop_oneof![1..9_u32, Just(16)]);
    let page = prop_oneof![
        4 => Just(16_u32),
        1 => Just(8),
        1 => Just(24),
        1 => Just(64),
        1 => 1..8_u32,
        1 => 9..128_u32,
    ];
    let layout = prop_oneof![Just(KvLayout::Nhd), Just(KvLayout::Hnd)];
    let split = prop_oneof![
        4 => Just(SplitMode::Makespan),
        1 => Just(SplitMode::Off),
        2 => (1..20_u32).prop_map(|pages| SplitMode::Fixed { tokens: pages }),
    ];
    let merge = prop_oneof![Just(MergeMode::Fused), Just(MergeMode::Kernel)];
    let pod = prop_oneof![
        Just(PodMode::Auto),
        Just(PodMode::Serial),
        Just(PodMode::Streams),
        Just(PodMode::Fused),
        Just(PodMode::Tickets),
    ];
    (
        (heads, dim, variant()),
        (
            page,
            prop::collection::vec(request(), 0..9),
            prop::bool::weighted(0.3),
        ),
        (layout, split, merge, pod),
        prop_oneof![Just(1_u32), Just(8), Just(132)],
        any::<u64>(),
    )
        .prop_map(
            |(((kv_heads, group), dim, variant), (page, requests, composed), rest, sms, seed)| {
                let (layout, mut split, merge_mode, pod) = rest;
                // Prompts of most padded heads are loaded by tensor maps.
                let native = matches!(dim, 64 | 128);
                let page = if native || dim > 208 {
                    page
                } else {
                    page.next_multiple_of(8)
                };
                let mut spec = Spec::new(kv_heads * group, kv_heads, dim);
                spec.variant = variant;
                let mut batch = batch_of(&requests, page, seed);
                if composed && variant.window_left.is_none() {
                    batch = batch.share_prefixes();
                }
                if let SplitMode::Fixed { tokens } = &mut split {
                    *tokens *= page;
                }
                Case {
                    spec,
                    batch,
                    layout,
                    options: PlanOptions::default()
                        .with_split(split)
                        .with_merge_mode(merge_mode)
                        .with_pod(pod),
                    arch: (native && seed % 3 == 0).then_some(Arch::Sm80),
                    sms,
                    in_set: false,
                    seed,
                }
            },
        )
}

impl Case {
    fn plan(&self, gpu: &Gpu) -> Plan {
        let mut device = match (self.arch, self.spec.head_dim_qk) {
            // Prefills of Hopper have no counterparts that pad.
            (Some(Arch::Sm80), dim) if !matches!(dim, 64 | 128) => {
                DeviceDescription::named("a100").expect("it is built in")
            }
            _ => gpu.device(),
        };
        device.sms = self.sms;
        if self.seed % 3 == 1 {
            // The keys of few prompts are too many: KV heads and prompts take turns.
            device.l2_bytes = 64 << 10;
        }
        if self.arch.is_some() {
            device.decode.joint = None;
        }
        let plan = Planner::new()
            .plan(&self.spec, &self.batch, &device, &self.options)
            .expect("the case can be planned");
        plan.verify(&self.batch)
            .expect("the plan computes the batch");
        plan
    }

    fn workspace(&self, gpu: &Gpu, plan: &Plan) -> Workspace {
        let mut options = WorkspaceOptions::default();
        options.arch = self.arch;
        let mut bound = Bound::of(plan);
        // No graph has prefills with Ampere's instructions.
        let mut groups = plan.groups.iter();
        let prefills = groups.any(|group| group.kernel == Kernel::Prefill);
        if self.in_set && !(prefills && self.arch == Some(Arch::Sm80)) {
            options.launches = Some(LaunchSet::new().and(plan));
            if self.seed % 4 < 2 {
                // Where there is room for masks, launches read the ancestors of a plan, and that it has neither, as masks.
                bound.mask_words += 3 * plan.total_q;
            }
        }
        gpu.workspace(&self.spec, &bound, options)
            .expect("there is memory for it")
    }

    /// A workspace with the case's plan in it, and the stream of the upload.
    fn uploaded(&self, gpu: &Gpu) -> (Workspace, Stream) {
        let plan = self.plan(gpu);
        let mut workspace = self.workspace(gpu, &plan);
        let stream = Stream::new();
        // SAFETY: the stream is ours.
        unsafe { workspace.upload(&plan, stream.0) }.expect("the bound is the plan's");
        (workspace, stream)
    }
}

fn check<T: Element>(gpu: &Gpu, case: &Case) -> Result<(), TestCaseError> {
    let mut case = case.clone();
    case.spec = case.spec.with_dtype(T::DTYPE);
    enrich(&mut case.spec, &mut case.batch, case.seed / 2);
    if case.arch.is_none() {
        // Variants of a program have no kernels of Ampere.
        vary_hooks(&mut case.spec, case.seed);
    }
    check_as_it_is::<T>(gpu, &case)
}

/// A case whose spec has its types.
fn check_as_it_is<T: Element>(gpu: &Gpu, case: &Case) -> Result<(), TestCaseError> {
    let (mut workspace, stream) = case.uploaded(gpu);
    let tensors = Tensors::<T, T>::random(&case.spec, &case.batch, case.layout, case.seed);
    let device = OnDevice::new(&case.spec, &case.batch, &tensors);
    let runs = [(); 2].map(|()| device.run(gpu, &mut workspace, &stream));
    check_results(&case.spec, &case.batch, &tensors, &runs[0]).map_err(TestCaseError::fail)?;
    prop_assert!(runs[0] == runs[1], "two runs differ");
    Ok(())
}

/// A GPU that has attention kernels.
fn hopper(test: &str) -> Option<&'static Gpu> {
    let gpu = gpu(test)?;
    if gpu.arch() != "sm_90a" {
        eprintln!("skipped: {test}: {} has no kernels for it yet", gpu.arch());
        return None;
    }
    Some(gpu)
}

#[test]
fn a_run_is_the_reference() {
    let Some(gpu) = hopper("a_run_is_the_reference") else {
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

/// Prompts have kernels of these dimensions, decodes and soft caps have not.
#[test]
fn heads_that_some_kernels_pad_are_the_reference() {
    let Some(gpu) = hopper("heads_that_some_kernels_pad_are_the_reference") else {
        return;
    };
    let mut runner = proptest::test_runner::TestRunner::new(cases(60));
    let dims = prop::sample::select(&[80_u32, 96, 112]);
    runner
        .run(&(case_of(dims), any::<bool>()), |(mut case, in_set)| {
            case.in_set = in_set;
            match case.seed % 2 {
                0 => check::<bf16>(gpu, &case),
                _ => check::<f16>(gpu, &case),
            }
        })
        .unwrap();
}

#[test]
fn heads_that_kernels_of_ampere_pad_are_the_reference() {
    let Some(gpu) = hopper("heads_that_kernels_of_ampere_pad_are_the_reference") else {
        return;
    };
    let mut runner = proptest::test_runner::TestRunner::new(cases(100));
    let dims = (1..=16_u32).prop_map(|count| 16 * count);
    runner
        .run(&(case_of(dims), any::<bool>()), |(mut case, in_set)| {
            case.arch = Some(Arch::Sm80);
            case.in_set = in_set && !matches!(case.spec.head_dim_qk, 64 | 128);
            match case.seed % 2 {
                0 => check::<bf16>(gpu, &case),
                _ => check::<f16>(gpu, &case),
            }
        })
        .unwrap();
}

/// Decodes read KV heads of 80 and 96 two at a time, where they lie side by side and there are so many of them.
#[test]
fn pairs_of_kv_heads_that_others_pad_are_the_reference() {
    let Some(gpu) = hopper("pairs_of_kv_heads_that_others_pad_are_the_reference") else {
        return;
    };
    let groups = prop_oneof![Just(1_u32), Just(2), Just(3), Just(8)];
    let cases_of = case_of(prop::sample::select(&[80_u32, 96]));
    let mut runner = proptest::test_runner::TestRunner::new(cases(40));
    runner
        .run(
            &(cases_of, groups, any::<bool>()),
            |(mut case, group, in_set)| {
                let kv_heads = 2 * gpu.multiprocessors();
                let Spec {
                    variant,
                    head_dim_qk,
                    ..
                } = case.spec;
                case.spec = Spec::new(kv_heads * group, kv_heads, head_dim_qk);
                case.spec.variant = variant;
                case.spec.variant.soft_cap = None;
                case.layout = KvLayout::Nhd;
                case.in_set = in_set;
                match case.seed % 2 {
                    0 => check::<bf16>(gpu, &case),
                    _ => check::<f16>(gpu, &case),
                }
            },
        )
        .unwrap();
}

#[test]
fn threads_have_a_workspace_each() {
    let Some(gpu) = hopper("threads_have_a_workspace_each") else {
        return;
    };
    std::thread::scope(|threads| {
        for seed in 0..4_u64 {
            threads.spawn(move || {
                gpu.make_current().unwrap();
                let mut runner = proptest::test_runner::TestRunner::new_with_rng(
                    cases(20),
                    prop::test_runner::TestRng::from_seed(
                        prop::test_runner::RngAlgorithm::ChaCha,
                        &[seed as u8; 32],
                    ),
                );
                runner
                    .run(&case(), |case| check::<bf16>(gpu, &case))
                    .unwrap();
            });
        }
    });
}

#[test]
fn tickets_are_drawn_anew_and_results_stay_the_same() {
    let test = "tickets_are_drawn_anew_and_results_stay_the_same";
    let Some(gpu) = hopper(test) else {
        return;
    };
    let request = |own, queries| Request {
        parent: 0,
        shared: 1,
        own,
        queries,
    };
    let requests = [1, 1, 5, 4, 20, 212].map(|queries| request(300 + 40 * queries, queries));
    for (q_heads, kv_heads, page, arch) in [
        (32, 2, 120, None),
        (8, 2, 16, None),
        (32, 8, 3, Some(Arch::Sm80)),
    ] {
        let spec = Spec::new(q_heads, kv_heads, 128);
        let case = Case {
            spec,
            batch: batch_of(&requests, page, 5),
            layout: KvLayout::Nhd,
            options: PlanOptions::default().with_pod(PodMode::Tickets),
            arch,
            sms: 8,
            in_set: false,
            seed: 3,
        };
        let plan = case.plan(gpu);
        assert_eq!(plan.pod.expect("a hybrid batch").mode, PodMode::Tickets);
        let mut workspace = case.workspace(gpu, &plan);
        let tensors = Tensors::<bf16, bf16>::random(&spec, &case.batch, case.layout, 3);
        let device = OnDevice::new(&spec, &case.batch, &tensors);
        let stream = Stream::new();
        // SAFETY: the stream is ours.
        unsafe { workspace.upload(&plan, stream.0) }.unwrap();
        let first = device.run(gpu, &mut workspace, &stream);
        check_results(&spec, &case.batch, &tensors, &first).unwrap();
        for round in 0..rounds().0 * 5 {
            let again = device.run(gpu, &mut workspace, &stream);
            let wrong = |(a, b): (&u16, &u16)| a != b;
            let at = first.0.iter().zip(&again.0).position(wrong);
            assert_eq!(at, None, "round {round}: {:x?}", at.map(|at| again.0[at]));
            assert!(first.1 == again.1, "round {round}: LSEs differ");
        }
    }
}

#[test]
fn damage_on_the_device_is_named() {
    let Some(gpu) = hopper("damage_on_the_device_is_named") else {
        return;
    };
    let spec = Spec::new(8, 2, 128);
    let request = |own, queries| Request {
        parent: 0,
        shared: 0,
        own,
        queries,
    };
    let batch = batch_of(&[request(100, 1), request(300, 40)], 16, 7);
    let mut plan = Planner::new()
        .plan(&spec, &batch, &gpu.device(), &PlanOptions::default())
        .unwrap();
    let tensors = Tensors::<bf16, bf16>::random(&spec, &batch, KvLayout::Nhd, 7);
    let device = OnDevice::new(&spec, &batch, &tensors);
    let mut options = WorkspaceOptions::default();
    options.checks = true;
    let mut workspace = gpu.workspace(&spec, &Bound::of(&plan), options).unwrap();
    let stream = Stream::new();
    // SAFETY: the stream is ours.
    unsafe { workspace.upload(&plan, stream.0) }.unwrap();
    let results = device.run(gpu, &mut workspace, &stream);
    check_results(&spec, &batch, &tensors, &results).unwrap();
    // An item past the end of the first request's 7 pages.
    let item = plan.items.iter_mut().find(|item| item.table == 0).unwrap();
    item.kv_end = 7 * 16 + 1;
    let out = device.q;
    // SAFETY: refused.
    let error = unsafe {
        workspace.upload(&plan, stream.0).unwrap();
        gpu.run(
            &mut workspace,
            &device.q,
            &device.pools,
            &out,
            None,
            stream.0,
        )
    };
    let error = error.unwrap_err();
    assert!(error.to_string().contains("of request 0"), "{error}");
}

#[test]
fn tensors_that_do_not_fit_the_plan_are_refused_before_anything_runs() {
    let Some(gpu) = hopper("tensors_that_do_not_fit_the_plan_are_refused_before_anything_runs")
    else {
        return;
    };
    let spec = Spec::new(8, 2, 128);
    let request = |own, queries| Request {
        parent: 0,
        shared: 0,
        own,
        queries,
    };
    let batch = batch_of(&[request(100, 1), request(300, 40)], 16, 7);
    let plan = Planner::new()
        .plan(&spec, &batch, &gpu.device(), &PlanOptions::default())
        .unwrap();
    let tensors = Tensors::<bf16, bf16>::random(&spec, &batch, KvLayout::Nhd, 7);
    let device = OnDevice::new(&spec, &batch, &tensors);
    let bound = Bound::of(&plan);
    let mut workspace = gpu
        .workspace(&spec, &bound, WorkspaceOptions::default())
        .unwrap();
    let stream = Stream::new();
    let out = device.q;
    let run = |workspace: &mut Workspace, q: &DeviceTensor<3>, pools: &[KvPool]| {
        // SAFETY: refused.
        unsafe { gpu.run(workspace, q, pools, &out, None, stream.0) }
    };
    assert_eq!(
        run(&mut workspace, &device.q, &device.pools),
        Err(Error::NoPlan)
    );
    // SAFETY: the stream is ours.
    unsafe { workspace.upload(&plan, stream.0) }.unwrap();
    let error = run(&mut workspace, &device.q, &[]).unwrap_err();
    assert_eq!(
        error,
        Error::Pools {
            got: 0,
            expected: 1
        }
    );
    let mut few = device.pools[0];
    few.pages = 1;
    let error = run(&mut workspace, &device.q, &[few]).unwrap_err();
    assert!(
        error.to_string().contains("for the plan's page ids"),
        "{error}"
    );
    let mut short = device.q;
    short.shape[0] -= 1;
    let error = run(&mut workspace, &short, &device.pools).unwrap_err();
    assert!(error.to_string().contains("q has 40 tokens"), "{error}");

    let other = Planner::new()
        .plan(
            &Spec::new(4, 2, 128),
            &batch,
            &gpu.device(),
            &PlanOptions::default(),
        )
        .unwrap();
    // SAFETY: refused.
    let error = unsafe { workspace.upload(&other, stream.0) }.unwrap_err();
    assert!(matches!(error, Error::OtherSpec { .. }), "{error}");
    assert_eq!(
        run(&mut workspace, &device.q, &device.pools),
        Err(Error::NoPlan)
    );
}
