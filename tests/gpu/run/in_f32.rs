//! Queries and outputs in F32, beside keys and values of 16 bits or 8.

use half::{bf16, f16};
use tandem_attn::{
    Error,
    exec::gpu::{DeviceTensor, Gpu, LaunchSet, RunTensors, WorkspaceOptions},
    plan::{Bound, MergeMode, Plan, PlanError, PlanOptions, Planner, SplitMode, Unsupported},
    problem::{Batch, Dtype, KvLayout, Spec},
    tensor::{Element, F8E4M3},
};

use super::{
    common::{Memory, Stream, problems::Tensors},
    hooks::batch,
    hopper,
    problem::{OnDevice, check_results},
};

fn plan(gpu: &Gpu, spec: &Spec, batch: &Batch, options: &PlanOptions) -> Plan {
    let plan = Planner::new().plan(spec, batch, &gpu.device(), options);
    let plan = plan.unwrap_or_else(|error| panic!("{spec:?}: {error}"));
    plan.verify(batch).expect("the plan computes the batch");
    plan
}

/// Runs queries that are F32 where the specification says so, on pools that are there. Outputs and LSEs as bytes.
fn run(
    gpu: &Gpu,
    plan: &Plan,
    queries: &[f32],
    on_device: &OnDevice,
    options: WorkspaceOptions,
) -> (Vec<u8>, Vec<u8>) {
    let spec = &plan.spec;
    let (tokens, heads) = (plan.total_q as usize, spec.q_heads as usize);
    let q = match spec.q_dtype {
        Dtype::F32 => Memory::new(queries),
        Dtype::BF16 => Memory::new(
            &queries
                .iter()
                .map(|&q| bf16::from_f32(q))
                .collect::<Vec<_>>(),
        ),
        _ => Memory::new(
            &queries
                .iter()
                .map(|&q| f16::from_f32(q))
                .collect::<Vec<_>>(),
        ),
    };
    let dims = [spec.head_dim_qk, spec.head_dim_v].map(|dim| dim as usize);
    let out_len = tokens * heads * dims[1] * spec.out_dtype.bytes() as usize;
    let (out, lse) = (
        Memory::new(&vec![0xFF_u8; out_len]),
        Memory::new(&vec![0xFF_u8; tokens * heads * 4]),
    );
    let q = q.tensor(spec.q_dtype, [tokens, heads, dims[0]]);
    let to = out.tensor(spec.out_dtype, [tokens, heads, dims[1]]);
    let lse_to = lse.tensor(Dtype::F32, [tokens, heads]);
    let mut given = on_device.tensors(&to, &lse_to);
    given.q = &q;
    let mut workspace = gpu.workspace(spec, &Bound::of(plan), options).unwrap();
    let stream = Stream::new();
    // SAFETY: everything lives until the stream was waited for.
    unsafe {
        workspace.upload(plan, stream.0).unwrap();
        for _ in 0..2 {
            gpu.run_with(&mut workspace, &given, stream.0).unwrap();
        }
    }
    stream.wait();
    (out.read_at(0, out_len), lse.read_at(0, tokens * heads * 4))
}

/// That F32 at one end or at both gives what 16 bits give: from queries rounded by the host, and rounded by the host to the
/// same outputs. With sinks to a unit in the last place: where outputs are F32 the merging kernel takes them.
fn same_bits<T: Element, K: Element>(gpu: &Gpu, spec: &Spec, batch: &Batch, split: SplitMode) {
    let spec = spec.with_dtype(T::DTYPE).with_kv_dtype(K::DTYPE);
    let exact = Tensors::<f32, K>::random(&spec, batch, KvLayout::Nhd, 9);
    let rounded = Tensors {
        q: exact.q.iter().map(|&q| T::from_f32(q)).collect(),
        parts: exact.parts.clone(),
    };
    let on_device = OnDevice::new(&spec, batch, &rounded);
    // Others merge in another order.
    let options = PlanOptions::default()
        .with_split(split)
        .with_merge_mode(MergeMode::Kernel);
    let in_16 = plan(gpu, &spec, batch, &options);
    let right = run(
        gpu,
        &in_16,
        &exact.q,
        &on_device,
        WorkspaceOptions::default(),
    );
    let results = |(out, lse): &(Vec<u8>, Vec<u8>)| {
        let out: Vec<u16> = bytemuck::pod_collect_to_vec(out);
        (out, bytemuck::pod_collect_to_vec(lse))
    };
    check_results(&spec, batch, &rounded, &results(&right)).unwrap();
    for (q, out) in [
        (Dtype::F32, T::DTYPE),
        (T::DTYPE, Dtype::F32),
        (Dtype::F32, Dtype::F32),
    ] {
        let mut other = spec;
        (other.q_dtype, other.out_dtype) = (q, out);
        let name = format!("{other:?}, {split:?}");
        let planned = plan(gpu, &other, batch, &options);
        let got = run(
            gpu,
            &planned,
            &exact.q,
            &on_device,
            WorkspaceOptions::default(),
        );
        if out == T::DTYPE {
            assert_eq!(got.1, right.1, "LSEs of {name}");
            assert!(got.0 == right.0, "outputs of {name}");
            continue;
        }
        let lse = |bytes: &[u8]| bytemuck::pod_collect_to_vec::<_, f32>(bytes);
        for (a, b) in lse(&got.1).into_iter().zip(lse(&right.1)) {
            let near = spec.variant.sinks && (a - b).abs() <= 1e-6 * b.abs().max(1.0);
            assert!(
                near || a.to_bits() == b.to_bits(),
                "LSEs of {name}: {a}, {b}"
            );
        }
        let values: Vec<f32> = bytemuck::pod_collect_to_vec(&got.0);
        let narrowed: Vec<T> = values.iter().map(|&x| T::from_f32(x)).collect();
        // Of 16 bits the next number is the next integer, of one sign.
        let of_16: &[u16] = bytemuck::cast_slice(&narrowed);
        for (&a, b) in of_16
            .iter()
            .zip(bytemuck::pod_collect_to_vec::<_, u16>(&right.0))
        {
            let most = u16::from(spec.variant.sinks);
            assert!(a.abs_diff(b) <= most, "outputs of {name}: {a:#x}, {b:#x}");
        }
        let between = |x: &&f32| T::from_f32(**x).to_f32() != **x;
        assert!(
            values.iter().filter(between).count() > values.len() / 2,
            "{name}: the outputs were rounded to 16 bits"
        );
    }
}

#[test]
fn f32_rounds_queries_once_and_outputs_never() {
    let Some(gpu) = hopper("f32_rounds_queries_once_and_outputs_never") else {
        return;
    };
    let of_64 = Spec::new(8, 2, 64);
    let split = SplitMode::Fixed { tokens: 32 };
    same_bits::<bf16, bf16>(gpu, &of_64, &batch(16, 6), SplitMode::Makespan);
    same_bits::<f16, f16>(gpu, &of_64, &batch(16, 6), split);
    same_bits::<f16, f16>(gpu, &of_64.with_sinks(), &batch(16, 6), split);
    // Row by row; many rows behind a common prefix.
    same_bits::<bf16, bf16>(
        gpu,
        &Spec::new(8, 2, 128),
        &batch(5, 4),
        SplitMode::Makespan,
    );
    same_bits::<bf16, bf16>(
        gpu,
        &Spec::new(24, 2, 128),
        &batch(16, 12),
        SplitMode::Makespan,
    );
    // Caches of 8 bits, and values of another dimension than keys.
    same_bits::<bf16, F8E4M3>(
        gpu,
        &Spec::new(8, 2, 128),
        &batch(16, 4),
        SplitMode::Makespan,
    );
    // Heads that are padded, with kernels of their own for prompts and without.
    for dim in [48, 80, 96, 160, 208] {
        let spec = Spec::new(8, 2, dim);
        same_bits::<bf16, bf16>(gpu, &spec, &batch(16, 6), SplitMode::Makespan);
        same_bits::<f16, f16>(gpu, &spec, &batch(16, 6), split);
    }
    same_bits::<bf16, F8E4M3>(
        gpu,
        &Spec::new(8, 2, 96),
        &batch(16, 4),
        SplitMode::Makespan,
    );
    let uneven = Spec::new(8, 2, 192).with_head_dim_v(128);
    same_bits::<bf16, bf16>(gpu, &uneven, &batch(16, 3), SplitMode::Makespan);
}

#[test]
fn graphs_write_outputs_in_f32() {
    let Some(gpu) = hopper("graphs_write_outputs_in_f32") else {
        return;
    };
    for dim in [64, 80, 160] {
        graph_of(gpu, Spec::new(8, 2, dim));
    }
}

fn graph_of(gpu: &Gpu, mut spec: Spec) {
    let batch = batch(16, 6);
    let exact = Tensors::<f32, bf16>::random(&spec, &batch, KvLayout::Nhd, 9);
    let on_device = OnDevice::new(&spec, &batch, &exact);
    (spec.q_dtype, spec.out_dtype) = (Dtype::F32, Dtype::F32);
    let planned = plan(gpu, &spec, &batch, &PlanOptions::default());
    let mut options = WorkspaceOptions::default();
    options.launches = Some(LaunchSet::all(&gpu.device(), &spec).unwrap());
    let eager = run(
        gpu,
        &planned,
        &exact.q,
        &on_device,
        WorkspaceOptions::default(),
    );
    let as_captured = run(gpu, &planned, &exact.q, &on_device, options);
    assert!(eager == as_captured);
}

#[test]
fn f32_queries_and_outputs_without_a_kernel_are_refused() {
    let Some(gpu) = hopper("f32_queries_and_outputs_without_a_kernel_are_refused") else {
        return;
    };
    let batch = batch(16, 2);
    let mut spec = Spec::new(8, 2, 64);
    (spec.q_dtype, spec.out_dtype) = (Dtype::F32, Dtype::F32);
    let options = PlanOptions::default();
    let refused = |spec: &Spec, options: &PlanOptions| {
        let plan = Planner::new().plan(spec, &batch, &gpu.device(), options);
        match plan.err() {
            Some(PlanError::Unsupported(unsupported)) => unsupported,
            other => panic!("{other:?}"),
        }
    };
    // Keys in F32, merges by those who attend.
    let said = refused(&spec.with_kv_dtype(Dtype::F32), &options);
    let tensor = "keys and values";
    assert!(
        matches!(said, Unsupported::Dtype { tensor: of, .. } if of == tensor),
        "{said}"
    );
    let fused = options.with_merge_mode(MergeMode::Fused);
    let device = gpu.device().name;
    assert_eq!(refused(&spec, &fused), Unsupported::FusedF32 { device });
    let planned = plan(gpu, &spec, &batch, &options);
    let merging = LaunchSet::new().with_merge_mode(MergeMode::Fused);
    let captured = WorkspaceOptions::default().with_launches(merging);
    let workspace = gpu.workspace(&spec, &Bound::of(&planned), captured);
    assert!(matches!(
        workspace.err(),
        Some(Error::Plan(PlanError::Unsupported(
            Unsupported::FusedF32 { .. }
        )))
    ));

    // Tensors of other types, and more tokens than there is room for.
    let tensors = Tensors::<bf16, bf16>::random(&Spec::new(8, 2, 64), &batch, KvLayout::Nhd, 5);
    let on_device = OnDevice::new(&Spec::new(8, 2, 64), &batch, &tensors);
    let mut workspace = gpu
        .workspace(&spec, &Bound::of(&planned), WorkspaceOptions::default())
        .unwrap();
    let stream = Stream::new();
    // SAFETY: the stream is ours.
    unsafe { workspace.upload(&planned, stream.0) }.unwrap();
    let shape = on_device.q.shape;
    let wide = |shape| DeviceTensor::new(1 << 30, Dtype::F32, shape);
    let more = [shape[0] + 1, shape[1], shape[2]];
    let mut said = |q: DeviceTensor<3>, out: DeviceTensor<3>| {
        let given = RunTensors::new(&q, &on_device.pools, &out);
        // SAFETY: refused.
        unsafe { gpu.run_with(&mut workspace, &given, stream.0) }.unwrap_err()
    };
    let differs = |error| matches!(error, Error::DtypesDiffer { .. });
    assert!(differs(said(on_device.q, wide(shape))));
    assert!(differs(said(wide(shape), on_device.q)));
    let few = said(wide(shape), wide(more));
    assert!(matches!(few, Error::Extent { tensor: "out", .. }), "{few}");
    let many = said(wide(more), wide(more));
    assert!(matches!(many, Error::Extent { tensor: "q", .. }), "{many}");
}
