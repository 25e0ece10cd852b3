//! Calls with objects that do not belong together.

use tandem_attn::{
    Error,
    exec::gpu::{
        AppendScales, DeviceArray, DeviceTensor, Gpu, KvPool, KvScales, NcclId, QkvStep,
        RankOptions, RunTensors, Stream, WorkspaceOptions,
    },
    plan::{Bound, Plan, PlanError, PlanOptions, Planner},
    problem::{Batch, Compute, Dtype, KvLayout, PageTable, Spec},
    shard::RankError,
};

use crate::driver::{launches, with_graph_driver, with_library, with_young_driver, young_driver};

const A: u64 = 1 << 30;

/// A plan of a decode for each number of keys.
fn decodes(gpu: &Gpu, spec: &Spec, keys: &[u32]) -> Plan {
    let (mut table, mut next) = (PageTable::new(16, 4000), 0);
    for &keys in keys {
        let pages: Vec<_> = (next..next + keys.div_ceil(16)).collect();
        next += pages.len() as u32;
        table.push(&pages, keys);
    }
    let batch = Batch::new((0..=keys.len() as u32).collect(), table);
    Planner::new()
        .plan(spec, &batch, &gpu.device(), &PlanOptions::default())
        .unwrap()
}

#[test]
fn a_workspace_runs_only_on_its_own_gpu() {
    if !with_library(
        a_workspace_runs_only_on_its_own_gpu,
        "threads=1024 devices=2",
        young_driver,
    ) {
        return;
    }
    let [first, second] = [0, 1].map(|ordinal| Gpu::new(ordinal).unwrap());
    // Another `Gpu` of the same device is not another GPU.
    let again = Gpu::new(1).unwrap();
    let spec = Spec::new(8, 2, 128);
    let plan = decodes(&second, &spec, &[100, 30]);
    let mut workspace = second
        .workspace(&spec, &Bound::of(&plan), WorkspaceOptions::default())
        .unwrap();
    let q = DeviceTensor::new(A, Dtype::BF16, [2, 8, 128]);
    let pool = KvPool::new(&spec, KvLayout::Nhd, 16, 4000, A, A);
    // SAFETY: nothing is there to be touched.
    unsafe {
        workspace.upload(&plan, Stream::DEFAULT).unwrap();
        let mut run = |gpu: &Gpu| gpu.run(&mut workspace, &q, &[pool], &q, None, Stream::DEFAULT);
        let error = run(&first).unwrap_err();
        let expected = Error::OtherGpu {
            workspace: 1,
            gpu: 0,
        };
        assert_eq!(error, expected);
        assert_eq!(launches(), 0);
        assert_eq!(run(&second), Ok(()));
        assert_eq!(run(&again), Ok(()));
        assert_eq!(run(&first), Err(expected));
    }
}

/// Results were those of other keys: the strides of a pool of more heads also fit fewer.
#[test]
fn a_pool_of_other_heads_is_refused() {
    if !with_young_driver(a_pool_of_other_heads_is_refused) {
        return;
    }
    let gpu = Gpu::new(0).unwrap();
    let spec = Spec::new(8, 2, 64);
    let plan = decodes(&gpu, &spec, &[100, 30]);
    let mut workspace = gpu
        .workspace(&spec, &Bound::of(&plan), WorkspaceOptions::default())
        .unwrap();
    let q = DeviceTensor::new(A, Dtype::BF16, [2, 8, 64]);
    let stream = Stream::DEFAULT;
    let pool = |spec: &Spec| KvPool::new(spec, KvLayout::Nhd, 16, 4000, A, A);
    let right = pool(&spec);
    let wrong = [
        ("KV heads", Spec::new(8, 4, 64)),
        ("KV heads", Spec::new(8, 8, 64)),
        ("elements in a head of the keys", Spec::new(8, 2, 128)),
        (
            "elements in a head of the values",
            spec.with_head_dim_v(128),
        ),
    ];
    // The heads of a pool of four, given by strides, are those that the caller wants.
    let of_four = pool(&Spec::new(8, 4, 64));
    let first_heads = of_four.with_strides(of_four.k_strides, of_four.v_strides);
    // SAFETY: nothing is there to be touched.
    unsafe {
        workspace.upload(&plan, stream).unwrap();
        let mut run = |pool| gpu.run(&mut workspace, &q, &[pool], &q, None, stream);
        assert_eq!(run(right), Ok(()));
        for (dimension, spec) in wrong {
            // Also after a run of a pool with the same strides, whose launches are kept.
            let strides = pool(&spec).with_strides(pool(&spec).k_strides, pool(&spec).v_strides);
            let _ = run(strides);
            let before = launches();
            let error = run(pool(&spec)).unwrap_err();
            let of_pool = matches!(
                error,
                Error::Extent { tensor: "the KV pool", dimension: said, .. } if said == dimension
            );
            assert!(of_pool, "{error}");
            assert_eq!(launches(), before);
        }
        assert_eq!(run(first_heads), Ok(()));
        assert_eq!(run(right), Ok(()));

        let rows = DeviceTensor::new(A, Dtype::BF16, [5, 2, 64]);
        let slots = DeviceArray::new(A, 5);
        let of_8_bits = spec.with_kv_dtype(Dtype::F8E4M3);
        let step = QkvStep {
            qkv: DeviceTensor::new(A, Dtype::BF16, [5, 12 * 64]),
            bias: None,
            norm: None,
            rope: None,
        };
        let queries = DeviceTensor::new(A, Dtype::BF16, [5, 8, 64]);
        let given = AppendScales::Given;
        let calls = |of: &Spec| {
            let narrow = pool(&of.with_kv_dtype(Dtype::F8E4M3));
            let pool = pool(of);
            [
                gpu.append_paged_kv(&spec, &pool, slots, &rows, &rows, stream),
                gpu.append_quantised(&of_8_bits, &narrow, given, slots, &rows, &rows, stream),
                gpu.qkv_step(&spec, &step, slots, &queries, &pool, given, stream),
                gpu.copy_pages(&spec, &pool, &[], stream),
            ]
        };
        assert_eq!(calls(&spec), [const { Ok(()) }; 4]);
        let before = launches();
        for (_, other) in wrong {
            for result in calls(&other) {
                let error = result.unwrap_err();
                assert!(
                    matches!(
                        error,
                        Error::Extent {
                            tensor: "the KV pool",
                            ..
                        }
                    ),
                    "{error}"
                );
            }
        }
        assert_eq!(launches(), before);
    }
}

/// `supports` knows no scales: the first run said that no kernel takes these, when the cache was full.
#[test]
fn scales_that_no_kernel_takes_are_refused_before_the_first_run() {
    if !with_young_driver(scales_that_no_kernel_takes_are_refused_before_the_first_run) {
        return;
    }
    let gpu = Gpu::new(0).unwrap();
    let pool = |spec: &Spec| KvPool::new(spec, KvLayout::Nhd, 16, 4000, 0, 0);
    // Nothing is read, and no memory needs to be there.
    let of_tokens = {
        let scales = DeviceTensor::new(0, Dtype::F32, [4000, 16, 2]);
        KvScales::Token {
            k: scales,
            v: scales,
        }
    };
    let of_heads = {
        let scales = DeviceTensor::new(0, Dtype::F32, [2]);
        KvScales::Head {
            k: scales,
            v: scales,
        }
    };
    let asked = |spec: &Spec, scales| gpu.supports_pool(spec, &pool(spec).with_scales(scales));
    for dim in [64, 80, 96, 112, 128, 256] {
        let spec = Spec::new(8, 2, dim);
        assert_eq!(asked(&spec, KvScales::One), Ok(()), "{dim}");
        let error = asked(&spec, of_heads).unwrap_err();
        assert!(matches!(error, Error::Shape(_)), "{error}");
        for (dtype, cap) in [
            (Dtype::F8E4M3, None),
            (Dtype::F8E4M3, Some(5.0)),
            (Dtype::F8E5M2, None),
        ] {
            let mut spec = spec.with_kv_dtype(dtype);
            spec.variant.soft_cap = cap;
            if gpu.supports(&spec).is_err() {
                continue;
            }
            for scales in [KvScales::One, of_heads] {
                assert_eq!(asked(&spec, scales), Ok(()), "{spec:?}");
            }
            let supported = asked(&spec, of_tokens);
            match (dtype, cap) {
                (Dtype::F8E4M3, None) => assert_eq!(supported, Ok(()), "{spec:?}"),
                _ => {
                    let error = supported.expect_err(&format!("{spec:?}"));
                    assert!(matches!(error, Error::NoInstance { .. }), "{error}");
                    let text = error.to_string();
                    assert!(text.contains("F8E4M3, without a soft cap"), "{text}");
                }
            }
        }
    }
    let of_8_bits = Spec::new(8, 2, 128).with_kv_dtype(Dtype::F8E4M3);
    let products = of_8_bits.with_compute(Compute::F8);
    assert_eq!(asked(&products, of_heads), Ok(()));
    let error = asked(&products, of_tokens).unwrap_err();
    assert!(matches!(error, Error::NoInstance { .. }), "{error}");

    let latent = Spec::latent(16, 512, 64).with_kv_dtype(Dtype::F8E4M3);
    let rows_656 = KvPool::latent_656(64, 10, 0);
    assert_eq!(gpu.supports_pool(&latent, &rows_656), Ok(()));
    let error = gpu.supports_pool(&latent, &KvPool::latent(&latent, 64, 10, 0));
    assert!(matches!(error, Err(Error::NoInstance { .. })), "{error:?}");

    let error = gpu.supports_pool(&of_8_bits, &pool(&Spec::new(8, 2, 128)));
    assert!(
        matches!(error, Err(Error::DtypesDiffer { .. })),
        "{error:?}"
    );
    let four = Spec::new(8, 4, 128).with_kv_dtype(Dtype::F8E4M3);
    let error = gpu.supports_pool(&of_8_bits, &pool(&four));
    assert!(matches!(error, Err(Error::Extent { .. })), "{error:?}");
    let error = gpu.supports_pool(&Spec::new(8, 2, 272), &pool(&Spec::new(8, 2, 272)));
    assert!(matches!(error, Err(Error::Plan(_))), "{error:?}");
}

/// Without a launch set, a graph has the grids and the items of the plan that it was captured with.
#[test]
fn a_graph_without_a_launch_set_takes_only_plans_of_its_launches() {
    if !with_graph_driver(a_graph_without_a_launch_set_takes_only_plans_of_its_launches) {
        return;
    }
    let gpu = Gpu::new(0).unwrap();
    let spec = Spec::new(8, 2, 128);
    let plan = |keys: &[u32]| decodes(&gpu, &spec, keys);
    // More than 64 keys for each item: CTAs then claim fewer units at a time, which a graph keeps.
    let [short, grown, long] = [[100, 28], [101, 31], [9000, 8000]].map(|keys| plan(&keys));
    assert_ne!(short.items.len(), long.items.len());
    let mut workspace = gpu
        .workspace(&spec, &Bound::of(&long), WorkspaceOptions::default())
        .unwrap();
    let stream = gpu.stream().unwrap();
    let q = DeviceTensor::new(A, Dtype::BF16, [2, 8, 128]);
    let pool = KvPool::new(&spec, KvLayout::Nhd, 16, 4000, A, A);
    // SAFETY: nothing is there to be touched.
    unsafe {
        workspace.upload(&short, *stream).unwrap();
        let graph = stream.capture(|stream| gpu.run(&mut workspace, &q, &[pool], &q, None, stream));
        let graph = graph.unwrap();
        for (plan, expected) in [
            (&short, Ok(())),
            (&long, Err(Error::OtherLaunches)),
            (&grown, Ok(())),
            (&plan(&[100]), Err(Error::OtherLaunches)),
            (&plan(&[]), Err(Error::OtherLaunches)),
            // Merges alone.
            (&plan(&[100, 0]), Err(Error::OtherLaunches)),
            (&short, Ok(())),
        ] {
            workspace.upload(plan, *stream).unwrap();
            assert_eq!(graph.launch(*stream), expected, "{plan}");
        }
    }
}

/// A graph with an upload in it copied its plan again with each launch, over the plan that was uploaded for the launch.
#[test]
fn a_plan_is_not_uploaded_within_a_capture() {
    if !with_graph_driver(a_plan_is_not_uploaded_within_a_capture) {
        return;
    }
    let gpu = Gpu::new(0).unwrap();
    let spec = Spec::new(8, 2, 128);
    let plan = decodes(&gpu, &spec, &[100, 28]);
    let workspace = |checks| {
        let options = WorkspaceOptions::default().with_checks(checks);
        gpu.workspace(&spec, &Bound::of(&plan), options).unwrap()
    };
    let (mut plain, mut checked) = (workspace(false), workspace(true));
    let stream = gpu.stream().unwrap();
    let q = DeviceTensor::new(A, Dtype::BF16, [2, 8, 128]);
    let pool = [KvPool::new(&spec, KvLayout::Nhd, 16, 4000, A, A)];
    let refused = |result: Result<(), Error>, said: &str| {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::InCapture { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains(said) && text.contains("capture"), "{text}");
    };
    // SAFETY: nothing is there to be touched.
    unsafe {
        plain.upload(&plan, *stream).unwrap();
        checked.upload(&plan, *stream).unwrap();
        let graph = stream.capture(|stream| {
            let uploaded = plain.upload(&plan, stream);
            refused(uploaded, "before each launch");
            let ran = gpu.run(&mut checked, &q, &pool, &q, None, stream);
            refused(ran, "WorkspaceOptions::checks");
            // On a stream that is not captured it does what it says. The workspace has its plan still.
            checked.upload(&plan, Stream::DEFAULT)?;
            gpu.run(&mut plain, &q, &pool, &q, None, stream)
        });
        assert_eq!(graph.unwrap().launch(*stream), Ok(()));
        assert_eq!(plain.upload(&plan, *stream), Ok(()));
    }
}

/// Requests without keys: only the merging kernel runs, and writes zeros.
#[test]
fn merges_alone_want_an_output_for_each_token() {
    if !with_young_driver(merges_alone_want_an_output_for_each_token) {
        return;
    }
    let gpu = Gpu::new(0).unwrap();
    let spec = Spec::new(8, 2, 128);
    let plan = decodes(&gpu, &spec, &[0; 4]);
    assert_eq!((plan.items.len(), plan.merges.len()), (0, 4));
    let mut workspace = gpu
        .workspace(&spec, &Bound::of(&plan), WorkspaceOptions::default())
        .unwrap();
    let tensor = |tokens| DeviceTensor::new(A, Dtype::BF16, [tokens, 8, 128]);
    let pool = KvPool::new(&spec, KvLayout::Nhd, 16, 4000, A, A);
    // SAFETY: nothing is there to be touched.
    unsafe {
        workspace.upload(&plan, Stream::DEFAULT).unwrap();
        let mut run = |out: &DeviceTensor<3>, lse: Option<&DeviceTensor<2>>| {
            gpu.run(
                &mut workspace,
                &tensor(4),
                &[pool],
                out,
                lse,
                Stream::DEFAULT,
            )
        };
        for tokens in [1, 5] {
            let error = run(&tensor(tokens), None).unwrap_err();
            let refused = matches!(
                error,
                Error::Extent { tensor: "out", dimension: "tokens", got, .. } if got == tokens
            );
            assert!(refused, "{error}");
        }
        let lse = DeviceTensor::new(A, Dtype::F32, [1, 8]);
        let error = run(&tensor(4), Some(&lse)).unwrap_err();
        assert!(
            matches!(error, Error::Extent { tensor: "lse", .. }),
            "{error}"
        );
        assert_eq!(launches(), 0);
        assert_eq!(run(&tensor(4), None), Ok(()));
        assert_eq!(launches(), 1);
    }
}

/// Results behind the query tokens are those of an earlier step.
#[test]
fn ranks_merge_no_more_rows_than_there_are_queries() {
    if !with_young_driver(ranks_merge_no_more_rows_than_there_are_queries) {
        return;
    }
    let gpu = Gpu::new(0).unwrap();
    let spec = Spec::new(8, 2, 128);
    let plan = decodes(&gpu, &spec, &[40]);
    let mut workspace = gpu
        .workspace(&spec, &Bound::of(&plan), WorkspaceOptions::default())
        .unwrap();
    let tensor = |tokens| DeviceTensor::new(A, Dtype::BF16, [tokens, 8, 128]);
    let pools = [KvPool::new(
        &spec,
        KvLayout::Nhd,
        16,
        4000,
        1 << 33,
        1 << 34,
    )];
    let options = RankOptions::default();
    let refused = |result: Result<(), Error>, got| {
        let error = result.unwrap_err();
        let of_rows = matches!(
            error,
            Error::Extent { tensor: "the rows to merge", got: rows, .. } if rows == got
        );
        assert!(of_rows && error.to_string().contains("as in q"), "{error}");
    };
    let stream = Stream::DEFAULT;
    // SAFETY: nothing is there to be touched.
    unsafe {
        workspace.upload(&plan, stream).unwrap();
        let mut ranks = Gpu::ranks(&[&gpu], &spec, 4, &options).unwrap();
        ranks[0].announce(1).unwrap();
        let (q, out) = (tensor(1), tensor(4));
        let tensors = RunTensors::new(&q, &pools, &out);
        let before = launches();
        let mut run = |rows| ranks[0].run(&gpu, &mut workspace, &tensors, rows, stream);
        refused(run(0..2), 2);
        assert_eq!(launches(), before);
        assert_eq!(run(0..1), Ok(()));

        let id = NcclId::new().unwrap();
        for (place, expected) in [
            ([2, 2], RankError::Number { rank: 2, ranks: 2 }),
            ([0, 9], RankError::Group { got: 9, most: 8 }),
        ] {
            let said = gpu.nccl_rank(&id, place, &spec, 4, &options);
            assert_eq!(said.unwrap_err(), Error::Rank(expected));
        }
        let mut rank = gpu.nccl_rank(&id, [0, 1], &spec, 4, &options).unwrap();
        // What the fake driver reads back are zeros.
        rank.announce(0).unwrap();
        let q = tensor(0);
        let tensors = RunTensors::new(&q, &pools, &out);
        refused(rank.run(&gpu, &mut workspace, &tensors, 0..1, stream), 1);
    }
}

/// A plan that was changed after the planner made it may seem to convert fewer pages than it does. Kernels would write the others
/// past the end of the workspace.
#[test]
fn a_plan_that_converts_more_pages_than_the_bound_is_refused() {
    if !with_young_driver(a_plan_that_converts_more_pages_than_the_bound_is_refused) {
        return;
    }
    let gpu = Gpu::new(0).unwrap();
    let spec = Spec::new(8, 2, 128).with_kv_dtype(Dtype::F8E4M3);
    let mut table = PageTable::new(16, 100);
    table.push(&(0..100).collect::<Vec<_>>(), 1600);
    let batch = Batch::new(vec![0, 1600], table);
    let plan = Planner::new().plan(&spec, &batch, &gpu.device(), &PlanOptions::default());
    let mut plan = plan.unwrap();
    assert_eq!(Bound::of(&plan).converted_pages, 25);
    for item in &mut plan.items {
        item.kv_begin = item.kv_begin.max(16);
    }
    let bound = Bound::of(&plan);
    assert_eq!(bound.converted_pages, 0);
    let workspace = gpu.workspace(&spec, &bound, WorkspaceOptions::default());
    // SAFETY: nothing is there to be touched.
    let uploaded = unsafe { workspace.unwrap().upload(&plan, Stream::DEFAULT) };
    let Err(Error::Plan(PlanError::Bound { needed, bound, .. })) = uploaded else {
        panic!("{uploaded:?}");
    };
    assert_eq!((needed, bound), (25, 0));
}
