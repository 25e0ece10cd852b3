//! Queries and keys that attention turns by their positions, against the reference in f64, and what is refused.

use half::{bf16, f16};
use proptest::prelude::*;
use tandem_attn::{
    Error,
    exec::gpu::{Arch, Gpu, RunTensors, WorkspaceOptions},
    plan::{Bound, MergeMode, Plan, PlanError, PlanOptions, Planner, Unsupported},
    problem::{Batch, Dtype, KvLayout, PageTable, Part, Spec},
    step::{Pairing, Rope, RopeScaling, Yarn},
    tensor::Element,
};

use super::{
    Case, case_of, check_as_it_is,
    common::{
        Memory, Stream,
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
    check_as_it_is::<T>(gpu, &case)
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

/// Runs random numbers, and compares the results.
fn compare<T: Element>(
    gpu: &Gpu,
    spec: &Spec,
    batch: &Batch,
    layout: KvLayout,
) -> Result<(), String> {
    let plan = plan(gpu, spec, batch);
    let tensors = Tensors::<T, T>::random(spec, batch, layout, 9);
    let device = OnDevice::new(spec, batch, &tensors);
    let options = WorkspaceOptions::default().with_checks(true);
    let mut workspace = gpu.workspace(spec, &Bound::of(&plan), options).unwrap();
    let stream = Stream::new();
    // SAFETY: the stream is ours.
    unsafe { workspace.upload(&plan, stream.0) }.unwrap();
    let got = device.run(gpu, &mut workspace, &stream);
    check_results(spec, batch, &tensors, &got)
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
                compare::<f16>(gpu, &spec, &batch, KvLayout::Hnd)
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
            compare::<f16>(gpu, &spec, &batch, KvLayout::Nhd)
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
    table.push(&(19..40).collect::<Vec<_>>(), 331);
    let batch = Batch::new(vec![0, 200, 202], table);
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
    compare::<bf16>(gpu, &spec, &batch, KvLayout::Nhd).unwrap();
}

#[test]
fn rotary_embeddings_without_a_kernel_are_refused() {
    let Some(gpu) = hopper("rotary_embeddings_without_a_kernel_are_refused") else {
        return;
    };
    let spec = Spec::new(8, 2, 64).with_rotary(Rope::new(64, 1e4));
    let cap = spec.with_soft_cap(20.0);
    let narrow = spec.with_rotary(Rope::new(16, 1e4));
    for (spec, there) in [
        (cap, "with a soft cap (supported: no soft cap)"),
        (
            spec.with_kv_dtype(Dtype::F8E4M3),
            "with keys in F8E4M3 (supported: BF16, F16)",
        ),
        (
            Spec::new(8, 2, 256).with_rotary(Rope::new(64, 1e4)),
            "with a head dimension of 256 (supported: 64, 128)",
        ),
        (
            Spec::new(32, 2, 64).with_rotary(Rope::new(64, 1e4)),
            "with 16 query heads per KV head (supported: up to 8)",
        ),
        (
            narrow,
            "with 16 rotated elements in pairs of halves (supported: multiples of 32)",
        ),
    ] {
        match gpu.device().supports(&spec) {
            Err(PlanError::Unsupported(Unsupported::Rotary { what, .. })) => {
                assert_eq!(what, there);
            }
            other => panic!("{spec:?}: {other:?}"),
        }
    }

    // With the instructions of Ampere.
    let batch = batch(16, 2);
    let plan = plan(gpu, &spec, &batch);
    let tensors = Tensors::<bf16, bf16>::random(&spec, &batch, KvLayout::Nhd, 5);
    let device = OnDevice::new(&spec, &batch, &tensors);
    let (stream, out) = (Stream::new(), device.q);
    let options = WorkspaceOptions::default().with_arch(Some(Arch::Sm80));
    let mut workspace = gpu.workspace(&spec, &Bound::of(&plan), options).unwrap();
    let given = RunTensors::new(&device.q, &device.pools, &out);
    // SAFETY: refused.
    let got = unsafe {
        workspace.upload(&plan, stream.0).unwrap();
        gpu.run_with(&mut workspace, &given, stream.0)
    };
    assert!(matches!(got, Err(Error::NoInstance { .. })), "{got:?}");
}
