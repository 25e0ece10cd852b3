//! Heads of 512, and keys of 64 with values of 512, on the GPU, as planned, against naive attention in f64.

use crate::common::{
    self, Stream,
    problems::{Tensors, ancestors, cases},
};
use crate::problem::{OnDevice, Request, batch_of, check_results, uploaded};
use half::{bf16, f16};
use proptest::prelude::*;
use tandem_attn::{
    exec::gpu::Gpu,
    plan::{Kernel, MergeMode, PackRule, PlanError, PlanOptions, Planner, SplitMode},
    problem::{Batch, Dtype, KvLayout, PageTable, Spec},
    tensor::Element,
};

#[derive(Clone, Debug)]
struct Case {
    spec: Spec,
    batch: Batch,
    layout: KvLayout,
    options: PlanOptions,
    captured: bool,
    sms: u32,
    seed: u64,
}

fn request() -> impl Strategy<Value = Request> {
    let own = prop_oneof![
        1 => Just(0_u32),
        4 => 1..70_u32,
        4 => (1..6_u32, 0..3_u32).prop_map(|(blocks, off)| blocks * 64 + off - 1),
        2 => 1..700_u32,
    ];
    let queries = prop_oneof![1 => Just(0_u32), 6 => Just(1), 4 => 2..9_u32, 2 => 9..40_u32, 1 => 40..150_u32];
    (any::<u64>(), 0..12_usize, own, queries).prop_map(|(parent, shared, own, queries)| Request {
        parent,
        shared,
        own,
        queries,
    })
}

/// Heads with keys of `dim` elements and values of 512.
fn of(q_heads: u32, kv_heads: u32, dim: u32) -> Spec {
    Spec::new(q_heads, kv_heads, dim).with_head_dim_v(512)
}

fn case(dim: u32) -> impl Strategy<Value = Case> {
    let group = prop_oneof![4 => Just(8_u32), 2 => 1..17_u32, 1 => Just(64), 1 => 17..64_u32];
    let window = prop_oneof![4 => Just(None), 1 => (0..300_u32).prop_map(Some)];
    let page = prop_oneof![
        4 => Just(16_u32),
        2 => Just(64),
        1 => Just(8),
        1 => Just(24),
        1 => Just(32),
        1 => Just(128),
    ];
    let layout = prop_oneof![Just(KvLayout::Nhd), Just(KvLayout::Hnd)];
    let split = prop_oneof![
        3 => Just(None),
        1 => (1..9_u32).prop_map(Some),
    ];
    let packing = prop_oneof![2 => Just(PackRule::Fastest), 1 => Just(PackRule::Exact), 1 => Just(PackRule::Off)];
    (
        (
            1..3_u32,
            group,
            window,
            prop::bool::weighted(0.9),
            any::<bool>(),
        ),
        prop::collection::vec(request(), 1..7),
        (
            page,
            split,
            packing,
            layout,
            any::<bool>(),
            prop::bool::weighted(0.2),
        ),
        prop_oneof![Just(1_u32), Just(8), Just(132)],
        any::<u64>(),
    )
        .prop_map(move |(heads, requests, rest, sms, seed)| {
            let (kv_heads, group, window, causal, sinks) = heads;
            let (page, split, packing, layout, captured, composed) = rest;
            let mut spec = of(kv_heads * group, kv_heads, dim);
            spec.variant.causal = causal;
            spec.variant.window_left = window;
            spec.variant.sinks = sinks;
            let mut batch = batch_of(&requests, page, seed);
            if composed && window.is_none() {
                batch = batch.share_prefixes();
            }
            if causal && batch.parts.len() == 1 && seed % 5 < 2 {
                let words = ancestors(&batch, seed);
                batch = batch.with_ancestors(words);
            }
            let mut options = PlanOptions::default().with_packing(packing);
            if let Some(pages) = split {
                let tokens = pages * page;
                options.split = SplitMode::Fixed { tokens };
            }
            Case {
                spec,
                captured: captured && batch.parts.len() == 1 && batch.ancestors.is_empty(),
                batch,
                layout,
                options,
                sms,
                seed,
            }
        })
}

fn check<T: Element>(gpu: &Gpu, case: &Case) -> Result<(), TestCaseError> {
    let spec = case.spec.with_dtype(T::DTYPE);
    let batch = &case.batch;
    let mut device = gpu.device();
    device.sms = case.sms;
    let plan = Planner::new()
        .plan(&spec, batch, &device, &case.options)
        .expect("the case can be planned");
    plan.verify(batch).expect("the plan computes the batch");
    let tensors = Tensors::<T, T>::random(&spec, batch, case.layout, case.seed);
    let on_device = OnDevice::new(&spec, batch, &tensors);
    let stream = Stream::new();
    let mut workspace = uploaded(gpu, &spec, &device, &plan, case.captured, &stream);
    let first = on_device.run(gpu, &mut workspace, &stream);
    check_results(&spec, batch, &tensors, &first).map_err(TestCaseError::fail)?;
    let again = on_device.run(gpu, &mut workspace, &stream);
    prop_assert!(first == again, "two runs differ");
    Ok(())
}

fn are_the_reference(test: &str, dim: u32) {
    let Some(gpu) = common::gpu(test) else {
        return;
    };
    let mut runner = proptest::test_runner::TestRunner::new(cases(200));
    runner
        .run(&case(dim), |case| match case.seed % 2 {
            0 => check::<bf16>(gpu, &case),
            _ => check::<f16>(gpu, &case),
        })
        .unwrap();
}

#[test]
fn heads_of_512_are_the_reference() {
    are_the_reference("heads_of_512_are_the_reference", 512);
}

#[test]
fn keys_of_64_with_values_of_512_are_the_reference() {
    are_the_reference("keys_of_64_with_values_of_512_are_the_reference", 64);
}

/// A batch of one request.
fn one(queries: u32, keys: u32, page_size: u32) -> Batch {
    let pages = keys.div_ceil(page_size);
    let mut table = PageTable::new(page_size, pages);
    table.push(&(0..pages).collect::<Vec<_>>(), keys);
    Batch::new(vec![0, queries], table)
}

/// New tokens and prompts are in tiles of 64 rows, all query heads of a KV head in each.
#[test]
fn prompts_are_decodes_of_64_rows() {
    let device = tandem_attn::plan::DeviceDescription::named("h200").unwrap();
    let rows = |dim, queries| {
        let batch = one(queries, 4096, 16);
        let plan = Planner::new()
            .plan(&of(16, 2, dim), &batch, &device, &PlanOptions::default())
            .unwrap();
        plan.verify(&batch).unwrap();
        let groups = plan.groups.iter();
        assert!(groups.clone().all(|group| group.kernel == Kernel::Decode));
        let most = plan.items.iter().map(|item| item.rows).max();
        let tiles = groups.map(|group| group.tile.m).collect::<Vec<_>>();
        (tiles, most.unwrap())
    };
    for dim in [64, 512] {
        assert_eq!(rows(dim, 1), (vec![64], 1));
        assert_eq!(rows(dim, 7), (vec![64], 7));
        assert_eq!(rows(dim, 4096), (vec![64], 8));
    }
}

/// What the kernels do not have is refused before anything runs.
#[test]
fn soft_caps_and_fused_merges_of_heads_of_512_are_refused() {
    let device = tandem_attn::plan::DeviceDescription::named("h200").unwrap();
    let options = PlanOptions::default();
    let refused = |spec: &Spec, page_size, options: &PlanOptions| {
        let batch = one(1, 100, page_size);
        match Planner::new().plan(spec, &batch, &device, options) {
            Err(PlanError::Unsupported(error)) => error.to_string(),
            other => panic!("{other:?}"),
        }
    };
    for (dim, words) in [(512, "512"), (64, "64 with values of 512")] {
        let spec = of(16, 2, dim);
        let capped = refused(&spec.with_soft_cap(30.0), 16, &options);
        assert!(
            capped.contains(&format!("{words} with a soft cap; supported: ")),
            "{capped}"
        );
        let fused = options.with_merge_mode(MergeMode::Fused);
        let fused = refused(&spec, 16, &fused);
        assert!(
            fused.contains("MergeMode::Auto") && fused.contains(words),
            "{fused}"
        );
        let pages = refused(&spec, 12, &options);
        assert!(
            pages.contains("pages of 12 tokens") && pages.contains("multiple of 8"),
            "{pages}"
        );
        let bytes = refused(&spec.with_kv_dtype(Dtype::F8E4M3), 16, &options);
        assert!(bytes.contains(words), "{bytes}");
        let wide = Planner::new().plan(&of(65, 1, dim), &one(1, 100, 16), &device, &options);
        assert!(
            matches!(wide, Err(PlanError::NoTile { group: 65, .. })),
            "{wide:?}"
        );
        // Other GPUs have no such kernels.
        let a100 = tandem_attn::plan::DeviceDescription::named("a100").unwrap();
        let error = a100.supports(&spec).unwrap_err().to_string();
        assert!(
            error.contains(&format!("head dimension of {words}")),
            "{error}"
        );
    }
}
