//! More query heads for a KV head than a tile of decodes holds.

use tandem_attn::{
    plan::{
        BatchLimits, Bound, DeviceDescription, Kernel, PlanError, PlanOptions, Planner, SplitMode,
        Tile,
    },
    problem::{Batch, Compute, Dtype, PageTable, Spec},
};

/// Requests of so many new tokens and keys, on pages of 16.
fn batch(requests: &[(u32, u32)]) -> Batch {
    let pages = |keys: u32| keys.div_ceil(16);
    let mut table = PageTable::new(16, requests.iter().map(|&(_, keys)| pages(keys)).sum());
    let (mut indptr, mut next) = (vec![0], 0);
    for &(tokens, keys) in requests {
        let ids: Vec<u32> = (next..next + pages(keys)).collect();
        next += pages(keys);
        table.push(&ids, keys);
        indptr.push(indptr[indptr.len() - 1] + tokens);
    }
    Batch::new(indptr, table)
}

fn bytes(q_heads: u32, head_dim: u32, dtype: Dtype) -> Spec {
    Spec::new(q_heads, 1, head_dim).with_kv_dtype(dtype)
}

/// Heads, and the first group that no tile of decodes holds.
fn groups() -> Vec<(&'static str, Spec, u32)> {
    let [e4m3, e5m2] = [Dtype::F8E4M3, Dtype::F8E5M2];
    vec![
        ("h200", Spec::new(160, 1, 64), 129),
        ("h200", Spec::new(129, 1, 128), 129),
        ("h200", Spec::new(160, 1, 256), 129),
        ("h200", Spec::new(131, 1, 80).with_soft_cap(30.0), 65),
        ("h200", bytes(71, 64, e4m3), 65),
        ("h200", bytes(71, 256, e4m3), 65),
        ("h200", bytes(131, 128, e4m3), 129),
        ("h200", bytes(131, 128, e4m3).with_compute(Compute::F8), 129),
        ("h200", bytes(71, 64, e5m2), 65),
        ("h200", bytes(131, 128, e5m2), 129),
        ("a100", Spec::new(71, 1, 64), 17),
        ("rtx4090", Spec::new(32, 1, 128), 17),
    ]
}

/// They run as prefills, also alone, beside prompts, with fixed splits and within a bound.
#[test]
fn groups_that_no_tile_of_decodes_holds_run_as_prefills() {
    for (name, spec, first) in groups() {
        let device = DeviceDescription::named(name).unwrap();
        device.supports(&spec).unwrap();
        let fixed = PlanOptions::default().with_split(SplitMode::Fixed { tokens: 256 });
        for options in [PlanOptions::default(), fixed] {
            for requests in [
                vec![(1, 1000)],
                vec![(1, 40), (1, 3000), (4, 200)],
                vec![(300, 300), (1, 700), (1, 7)],
            ] {
                let batch = batch(&requests);
                let limits = BatchLimits::decodes(4, 3000, 16).with_query_tokens(310);
                let bound = Bound::new(&spec, &device, &options, &limits).unwrap();
                let options = options.with_bound(bound);
                let plan = Planner::new()
                    .plan(&spec, &batch, &device, &options)
                    .unwrap();
                plan.verify(&batch).unwrap();
                let prefill = |kernel: Kernel| kernel == Kernel::Prefill;
                assert!(
                    plan.groups.iter().all(|group| prefill(group.kernel)),
                    "{name} {spec:?}"
                );
            }
        }
        let mut fewer = spec.with_compute(Compute::F16);
        fewer.q_heads = first - 1;
        let plan = Planner::new()
            .plan(
                &fewer,
                &batch(&[(1, 1000)]),
                &device,
                &PlanOptions::default(),
            )
            .unwrap();
        assert_eq!(plan.groups[0].kernel, Kernel::Decode, "{name} {fewer:?}");
    }
}

/// The CPU has tiles of up to 128 rows for decodes.
#[test]
fn the_cpu_plans_any_group() {
    let device = DeviceDescription::named("cpu").unwrap();
    for spec in [Spec::new(300, 1, 64), Spec::latent(256, 512, 64)] {
        let batch = batch(&[(1, 100), (3, 50)]);
        let plan = Planner::new()
            .plan(&spec, &batch, &device, &PlanOptions::default())
            .unwrap();
        plan.verify(&batch).unwrap();
    }
}

/// A graph of decodes has the prefills that run them.
#[cfg(feature = "cuda")]
#[test]
fn a_launch_set_of_decodes_has_the_prefills_that_run_them() {
    use kernels_gpu::registry::Op;
    use tandem_attn::exec::gpu::LaunchSet;

    let device = DeviceDescription::named("h200").unwrap();
    let set = LaunchSet::decodes(&device, &Spec::new(160, 1, 128)).unwrap();
    assert!(set.has_prefills());
    let set = LaunchSet::decodes(&device, &Spec::new(128, 1, 128)).unwrap();
    let ampere = DeviceDescription::named("a100").unwrap();
    let error = LaunchSet::decodes(&ampere, &Spec::new(71, 1, 128)).unwrap_err();
    assert!(error.to_string().contains("Ampere"), "{error}");
    let mut ops = set.keys().iter().map(|key| key.kernel.info().op);
    assert!(ops.all(|op| op == Op::Decode));
}

fn refused(spec: &Spec, options: &PlanOptions) -> PlanError {
    let device = DeviceDescription::named("h200").unwrap();
    let plan = Planner::new().plan(spec, &batch(&[(1, 100)]), &device, options);
    plan.expect_err("too many heads")
}

/// Heads of 512 have no prefills, and a tile that was asked for is not replaced.
#[test]
fn the_error_names_the_largest_group() {
    let no_prefills = refused(&Spec::new(65, 1, 512), &PlanOptions::default());
    assert!(
        matches!(
            no_prefills,
            PlanError::NoTile {
                kernel: Kernel::Decode,
                group: 65,
                largest: 64,
                ..
            }
        ),
        "{no_prefills:?}"
    );
    assert_eq!(
        no_prefills.to_string(),
        "no Decode tile on h200 holds the 65 query heads of a KV head at head dimensions 512/512 (the largest holds 64): use \
         fewer query heads per KV head, or plan for the CPU"
    );
    let wide_values = Spec::new(65, 1, 64).with_head_dim_v(512);
    let wide_values = refused(&wide_values, &PlanOptions::default()).to_string();
    assert!(
        wide_values.contains("64/512 (the largest holds 64)"),
        "{wide_values}"
    );
    let options = PlanOptions::default().with_decode_tile(Some(Tile { m: 64, n: 64 }));
    let asked = refused(&Spec::new(160, 1, 128), &options);
    assert!(
        matches!(asked, PlanError::NoTile { largest: 64, .. }),
        "{asked:?}"
    );
}
