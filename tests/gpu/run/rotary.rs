//! Queries and keys that attention turns by their positions, against the reference in f64, and what is refused.

use half::{bf16, f16};
use proptest::prelude::*;
use tandem_attn::{
    Error,
    exec::gpu::{Arch, DeviceTensor, Gpu, KvPool, RunTensors, WorkspaceOptions},
    plan::{Bound, MergeMode, Plan, PlanError, PlanOptions, Planner, Unsupported},
    problem::{Batch, Dtype, KvLayout, PageTable, Part, Spec},
    step::{Pairing, Rope, RopeScaling, Yarn},
    tensor::Element,
};

use super::{
    Case, case_of,
    common::{
        Memory, Rng, Stream,
        problems::{Tensors, ancestors, cases, rotary},
    },
    hooks::batch,
    hopper,
    problem::{OnDevice, check_results},
};

fn check<T: Element>(gpu: &Gpu, case: &Case) -> Result<(), TestCaseError> {
    let mut case = case.clone();
    let seed = case.seed / 4;
    case.spec = case.spec.with_dtype(T::DTYPE);
    case.spec.variant.soft_cap = None;
    case.spec.variant.sinks = seed % 3 == 1;
    case.spec.rotary = Some(rotary(case.spec.head_dim_qk, case.seed));
    case.arch = None;
    // With a launch set the merging kernel makes all results.
    case.in_set = seed.is_multiple_of(2) && case.options.merge_mode == MergeMode::Kernel;
    if case.spec.variant.causal && seed % 5 < 2 {
        let words = ancestors(&case.batch, seed);
        case.batch = case.batch.with_ancestors(words);
    }
    if case.batch.check(&case.spec).is_err() {
        // A row block of several requests has no positions.
        return Err(TestCaseError::reject("shared row blocks"));
    }
    let plan = case.plan(gpu);
    let mut workspace = case.workspace(gpu, &plan);
    let tensors = Tensors::<T, T>::random(&case.spec, &case.batch, case.layout, case.seed);
    let device = OnDevice::new(&case.spec, &case.batch, &tensors);
    let stream = Stream::new();
    // SAFETY: the stream is ours.
    unsafe { workspace.upload(&plan, stream.0) }.expect("the bound is the plan's");
    let runs = [(); 2].map(|()| device.run(gpu, &mut workspace, &stream));
    check_results(&case.spec, &case.batch, &tensors, &runs[0]).map_err(TestCaseError::fail)?;
    prop_assert!(runs[0] == runs[1], "two runs differ");
    Ok(())
}

#[test]
fn runs_turn_as_the_reference_does() {
    let Some(gpu) = hopper("runs_turn_as_the_reference_does") else {
        return;
    };
    let mut runner = proptest::test_runner::TestRunner::new(cases(100));
    let case = case_of(prop::sample::select(&[64_u32, 128]));
    let case = case.prop_filter("groups that there are kernels for", |case| {
        case.spec.group() <= 8
    });
    runner
        .run(&case, |case| match case.seed % 2 {
            0 => check::<bf16>(gpu, &case),
            _ => check::<f16>(gpu, &case),
        })
        .unwrap();
}

fn plan(gpu: &Gpu, spec: &Spec, batch: &Batch) -> Plan {
    let plan = Planner::new().plan(spec, batch, &gpu.device(), &PlanOptions::default());
    plan.unwrap_or_else(|error| panic!("{spec:?}: {error}"))
}

fn run<T: Element>(
    gpu: &Gpu,
    spec: &Spec,
    batch: &Batch,
    tensors: &Tensors<T, T>,
) -> (Vec<u16>, Vec<u32>) {
    let plan = plan(gpu, spec, batch);
    let device = OnDevice::new(spec, batch, tensors);
    let options = WorkspaceOptions::default().with_checks(true);
    let mut workspace = gpu.workspace(spec, &Bound::of(&plan), options).unwrap();
    let stream = Stream::new();
    // SAFETY: the stream is ours.
    unsafe { workspace.upload(&plan, stream.0) }.unwrap();
    device.run(gpu, &mut workspace, &stream)
}

/// A prompt, decodes behind a common prefix, and short queries, for each pairing, part and scaling.
#[test]
fn prompts_and_decodes_turn_alike() {
    let Some(gpu) = hopper("prompts_and_decodes_turn_alike") else {
        return;
    };
    let llama = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_positions: 64,
    };
    for (heads, dim, rope) in [
        ([8, 2], 64, Rope::new(64, 10_000.0)),
        ([4, 2], 64, Rope::new(32, 10_000.0).with_scaling(llama)),
        (
            [8, 1],
            128,
            Rope::new(96, 5e5).with_scaling(RopeScaling::Yarn(Yarn::new(4.0, 64))),
        ),
        (
            [6, 2],
            128,
            Rope::new(128, 1e6).with_pairing(Pairing::Interleaved),
        ),
        (
            [4, 4],
            64,
            Rope::new(22, 1e4).with_pairing(Pairing::Interleaved),
        ),
    ] {
        for page in [16, 8, 64, 24, 5] {
            let batch = batch(page, 4);
            let spec = Spec::new(heads[0], heads[1], dim).with_rotary(rope);
            for spec in [
                spec,
                spec.with_window_left(40),
                spec.with_sinks(),
                spec.non_causal(),
            ] {
                let spec = spec.with_dtype(Dtype::F16);
                let tensors = Tensors::<f16, f16>::random(&spec, &batch, KvLayout::Hnd, 9);
                let got = run(gpu, &spec, &batch, &tensors);
                check_results(&spec, &batch, &tensors, &got)
                    .unwrap_or_else(|wrong| panic!("{spec:?}, pages of {page}: {wrong}"));
            }
        }
    }
}

/// Behind a million keys that another part would hold, an angle in single precision would be off by more than is allowed.
#[test]
fn far_positions_are_exact() {
    let Some(gpu) = hopper("far_positions_are_exact") else {
        return;
    };
    for (queries, after) in [(1, 1 << 20), (1, 1 << 30), (40, 1 << 30)] {
        let mut table = PageTable::new(16, 12);
        table.push(&[4, 1, 7, 2, 9, 3], 90);
        let part = Part::new(vec![0, queries], table).with_keys_after(vec![after]);
        let batch = Batch::composed(vec![0, queries], vec![part]);
        for pairing in [Pairing::HalfSplit, Pairing::Interleaved] {
            let rope = Rope::new(64, 1e4).with_pairing(pairing);
            let spec = Spec::new(4, 2, 64).with_dtype(Dtype::F16).with_rotary(rope);
            let tensors = Tensors::<f16, f16>::random(&spec, &batch, KvLayout::Nhd, 4);
            let got = run(gpu, &spec, &batch, &tensors);
            check_results(&spec, &batch, &tensors, &got)
                .unwrap_or_else(|wrong| panic!("{queries} behind {after}, {pairing:?}: {wrong}"));
        }
    }
}

/// A run for each layer, whose pools lie elsewhere: keys are turned anew, and values read where they then are.
#[test]
fn layers_have_pools_of_their_own() {
    let Some(gpu) = hopper("layers_have_pools_of_their_own") else {
        return;
    };
    let batch = batch(16, 3);
    let spec = Spec::new(8, 2, 128).with_rotary(Rope::new(128, 1e4));
    for layout in [KvLayout::Nhd, KvLayout::Hnd] {
        let plan = plan(gpu, &spec, &batch);
        let options = WorkspaceOptions::default();
        let mut workspace = gpu.workspace(&spec, &Bound::of(&plan), options).unwrap();
        let stream = Stream::new();
        // SAFETY: the stream is ours.
        unsafe { workspace.upload(&plan, stream.0) }.unwrap();
        for layer in 0..3 {
            let tensors = Tensors::<bf16, bf16>::random(&spec, &batch, layout, layer);
            let device = OnDevice::new(&spec, &batch, &tensors);
            let got = device.run(gpu, &mut workspace, &stream);
            check_results(&spec, &batch, &tensors, &got)
                .unwrap_or_else(|wrong| panic!("{layout:?}, layer {layer}: {wrong}"));
        }
    }
}

/// Heads with a gap behind each, as no tensor map has them: prompts are brought along with their values.
#[test]
fn values_of_any_strides_are_read() {
    let Some(gpu) = hopper("values_of_any_strides_are_read") else {
        return;
    };
    let mut table = PageTable::new(16, 40);
    table.push(&(0..19).collect::<Vec<_>>(), 290);
    let batch = Batch::new(vec![0, 200], table);
    let spec = Spec::new(8, 2, 64).with_rotary(Rope::new(64, 1e4));
    let tensors = Tensors::<bf16, bf16>::random(&spec, &batch, KvLayout::Nhd, 3);
    let mut device = OnDevice::new(&spec, &batch, &tensors);
    let apart = |dense: &[bf16]| {
        let heads = dense.chunks_exact(64);
        let apart: Vec<bf16> = heads
            .flat_map(|head| head.iter().copied().chain([bf16::NAN; 8]))
            .collect();
        Memory::new(&apart)
    };
    let pool = &mut device.pools[0];
    let memory = [apart(&tensors.parts[0].k), apart(&tensors.parts[0].v)];
    [pool.k, pool.v] = memory.each_ref().map(Memory::address);
    for strides in [&mut pool.k_strides, &mut pool.v_strides] {
        (strides.head, strides.token, strides.page) = (72, 144, 16 * 144);
    }
    let plan = plan(gpu, &spec, &batch);
    let options = WorkspaceOptions::default();
    let mut workspace = gpu.workspace(&spec, &Bound::of(&plan), options).unwrap();
    let stream = Stream::new();
    // SAFETY: the stream is ours.
    unsafe { workspace.upload(&plan, stream.0) }.unwrap();
    let got = device.run(gpu, &mut workspace, &stream);
    check_results(&spec, &batch, &tensors, &got).unwrap();
}

/// Trees of drafted tokens, whose tokens stand one behind the other.
#[test]
fn trees_are_turned_by_their_places() {
    let Some(gpu) = hopper("trees_are_turned_by_their_places") else {
        return;
    };
    let batch = batch(16, 4);
    let mut words = vec![u64::MAX; batch.total_q() as usize];
    let tree = Batch::ancestors_of(&[None, Some(0), Some(0), Some(2), Some(1)]);
    words[151..156].copy_from_slice(&tree);
    let batch = batch.with_ancestors(words);
    let spec = Spec::new(8, 2, 64).with_rotary(Rope::new(64, 1e4));
    let tensors = Tensors::<bf16, bf16>::random(&spec, &batch, KvLayout::Nhd, 6);
    let got = run(gpu, &spec, &batch, &tensors);
    check_results(&spec, &batch, &tensors, &got).unwrap();
}

#[test]
fn what_no_kernel_turns_is_refused() {
    let Some(gpu) = hopper("what_no_kernel_turns_is_refused") else {
        return;
    };
    let spec = Spec::new(8, 2, 64).with_rotary(Rope::new(64, 1e4));
    let cap = spec.with_soft_cap(20.0);
    let narrow = spec.with_rotary(Rope::new(16, 1e4));
    for (spec, there) in [
        (cap, "with a soft cap: there are those without"),
        (
            spec.with_kv_dtype(Dtype::F8E4M3),
            "with keys in F8E4M3: there are those of BF16 and F16",
        ),
        (
            Spec::new(8, 2, 256).with_rotary(Rope::new(64, 1e4)),
            "with a head dimension of 256: there are 64, 128",
        ),
        (
            Spec::new(32, 2, 64).with_rotary(Rope::new(64, 1e4)),
            "with 16 query heads for a KV head: there are those of up to 8",
        ),
        (
            narrow,
            "where 16 elements are pairs of halves: there are those of multiples of 32",
        ),
    ] {
        match gpu.device().supports(&spec) {
            Err(PlanError::Unsupported(Unsupported::Rotary { what, .. })) => {
                assert_eq!(what, there);
            }
            other => panic!("{spec:?}: {other:?}"),
        }
    }

    // With the instructions of Ampere, and where values lie otherwise than keys.
    let batch = batch(16, 2);
    let plan = plan(gpu, &spec, &batch);
    let tensors = Tensors::<bf16, bf16>::random(&spec, &batch, KvLayout::Nhd, 5);
    let device = OnDevice::new(&spec, &batch, &tensors);
    let (stream, out) = (Stream::new(), device.q);
    let mut apart = device.pools[0];
    apart.v_strides = KvLayout::Hnd.strides(16, 2, 64);
    for (arch, pool) in [(Some(Arch::Sm80), device.pools[0]), (None, apart)] {
        let options = WorkspaceOptions::default().with_arch(arch);
        let mut workspace = gpu.workspace(&spec, &Bound::of(&plan), options).unwrap();
        let pools: [KvPool; 1] = [pool];
        let given = RunTensors::new(&device.q, &pools, &out);
        // SAFETY: refused.
        let got = unsafe {
            workspace.upload(&plan, stream.0).unwrap();
            gpu.run_with(&mut workspace, &given, stream.0)
        };
        assert!(
            matches!(got, Err(Error::NoInstance { .. } | Error::Stride { .. })),
            "{arch:?}: {got:?}"
        );
    }
}

/// Microseconds of a run, by the host's clock over many in a row, for several specifications in turn.
fn times(gpu: &Gpu, specs: &[Spec], batch: &Batch) -> Vec<f64> {
    let table = &batch.parts[0].table;
    let of = |spec: &Spec| {
        let numbers = |count: usize| -> Vec<bf16> {
            let mut rng = Rng(count as u64);
            let block = rng.floats(1 << 22, -1.0, 1.0);
            let mut block = block.into_iter().map(bf16::from_f32).cycle();
            (0..count).map(|_| block.next().unwrap()).collect()
        };
        let strides = KvLayout::Nhd.strides(table.page_size, spec.kv_heads, spec.head_dim_qk);
        let elements = table.pool_pages as usize * strides.page as usize;
        let part = |elements: usize| Memory::new(&numbers(elements));
        let q = batch.total_q() as usize * (spec.q_heads * spec.head_dim_qk) as usize;
        [part(elements), part(elements), part(q), part(q)]
    };
    let memory = of(&specs[0]);
    let stream = Stream::new();
    let mut runs: Vec<_> = specs
        .iter()
        .map(|spec| {
            let plan = plan(gpu, spec, batch);
            let [k, v, q, out] = memory.each_ref().map(Memory::address);
            let pool = KvPool::new(spec, KvLayout::Nhd, table.page_size, table.pool_pages, k, v);
            let shape = [batch.total_q(), spec.q_heads, spec.head_dim_qk].map(|x| x as usize);
            let tensors = [q, out].map(|at| DeviceTensor::new(at, Dtype::BF16, shape));
            let options = WorkspaceOptions::default();
            let mut workspace = gpu.workspace(spec, &Bound::of(&plan), options).unwrap();
            // SAFETY: the stream is ours.
            unsafe { workspace.upload(&plan, stream.0) }.unwrap();
            (workspace, pool, tensors)
        })
        .collect();
    let mut all = vec![Vec::new(); specs.len()];
    for round in 0..11 {
        for (index, (workspace, pool, [q, out])) in runs.iter_mut().enumerate() {
            let count = 40;
            let begin = std::time::Instant::now();
            for _ in 0..count {
                // SAFETY: everything lives until the stream was waited for.
                unsafe { gpu.run(workspace, q, &[*pool], out, None, stream.0) }.unwrap();
            }
            stream.wait();
            if round > 0 {
                all[index].push(begin.elapsed().as_secs_f64() * 1e6 / f64::from(count));
            }
        }
    }
    all.into_iter()
        .map(|mut times| {
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        })
        .collect()
}

/// What turning costs, on a GPU: `gpu --ignored --nocapture run::rotary::times_beside_those_without`.
#[test]
#[ignore = "a measurement"]
fn times_beside_those_without() {
    let Some(gpu) = hopper("times_beside_those_without") else {
        return;
    };
    let request = |queries: u32, keys: u32, requests: u32| {
        let pages = keys.div_ceil(16);
        let mut shuffled: Vec<u32> = (0..pages * requests).collect();
        Rng(11).shuffle(&mut shuffled);
        let mut table = PageTable::new(16, pages * requests);
        let mut indptr = vec![0];
        for ids in shuffled.chunks_exact(pages as usize) {
            table.push(ids, keys);
            indptr.push(indptr[indptr.len() - 1] + queries);
        }
        Batch::new(indptr, table)
    };
    for (heads, dim, [requests, queries, keys]) in [
        ([32, 8], 128, [64, 1, 8192]),
        ([64, 8], 64, [64, 1, 8192]),
        ([32, 8], 128, [128, 1, 2048]),
        ([32, 8], 128, [16, 1, 1024]),
        ([32, 8], 128, [1, 1, 131_072]),
        ([32, 8], 128, [1, 8192, 8192]),
        ([64, 8], 64, [1, 8192, 8192]),
        ([32, 8], 128, [1, 512, 8192]),
        ([32, 8], 128, [16, 1024, 1024]),
    ] {
        let spec = Spec::new(heads[0], heads[1], dim);
        let halves = spec.with_rotary(Rope::new(dim, 5e5));
        let neighbours = spec.with_rotary(Rope::new(dim, 5e5).with_pairing(Pairing::Interleaved));
        let batch = request(queries, keys, requests);
        let times = times(gpu, &[spec, halves, neighbours], &batch);
        let ratios: Vec<_> = times.iter().map(|time| times[0] / time).collect();
        println!(
            "{requests} x {queries} @ {keys}, {heads:?} x {dim}: {times:.1?} us, rate {ratios:.3?}"
        );
    }
}
