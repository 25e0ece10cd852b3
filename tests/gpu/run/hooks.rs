//! Kernels of a variant: linear biases against the reference in f64, and what is refused.

use half::{bf16, f16};
use tandem_attn::{
    Error, Hooks, HooksName,
    exec::gpu::{Gpu, RunTensors, WorkspaceOptions},
    plan::{Bound, DeviceDescription, PlanError, PlanOptions, Planner, SplitMode},
    problem::{Batch, Dtype, KvLayout, PageTable, ProblemError, Spec},
    tensor::{Element, ShapeError},
    variants::{ALIBI, BiasTable, DISTANCE_BIAS, SIGMOID, SigmoidBias, Slopes},
};

use super::{
    common::{Stream, problems::Tensors},
    hopper,
    problem::{OnDevice, check_results},
};

/// A prompt, decodes that share 96 tokens, and a short query.
pub fn batch(page_size: u32, decodes: u32) -> Batch {
    let common: Vec<u32> = (0..96_u32.div_ceil(page_size)).collect();
    let (mut table, mut used) = (PageTable::new(page_size, 1024), common.len() as u32);
    let mut own = |tokens: u32| {
        let pages = tokens.div_ceil(page_size);
        used += pages;
        (used - pages..used).collect::<Vec<_>>()
    };
    table.push(&own(150), 150);
    let mut queries = vec![0, 150];
    for request in 0..decodes {
        let len = common.len() as u32 * page_size + 20 + request;
        let mut pages = common.clone();
        pages.extend(own(20 + request));
        table.push(&pages, len);
        queries.push(queries[queries.len() - 1] + if request == 1 { 5 } else { 1 });
    }
    Batch::new(queries, table)
}

fn check<T: Element>(gpu: &Gpu, spec: &Spec, batch: &Batch) -> Result<(), String> {
    check_with::<T>(gpu, spec, batch, &PlanOptions::default())
}

fn check_with<T: Element>(
    gpu: &Gpu,
    spec: &Spec,
    batch: &Batch,
    options: &PlanOptions,
) -> Result<(), String> {
    let spec = spec.with_dtype(T::DTYPE);
    let plan = Planner::new().plan(&spec, batch, &gpu.device(), options);
    let plan = plan.map_err(|error| error.to_string())?;
    let tensors = Tensors::<T, T>::random(&spec, batch, KvLayout::Nhd, 9);
    let device = OnDevice::new(&spec, batch, &tensors);
    let bound = Bound::of(&plan);
    let mut workspace = gpu
        .workspace(&spec, &bound, WorkspaceOptions::default())
        .map_err(|error| error.to_string())?;
    let stream = Stream::new();
    // SAFETY: the stream is ours.
    unsafe { workspace.upload(&plan, stream.0) }.map_err(|error| error.to_string())?;
    let runs = [(); 2].map(|()| device.run(gpu, &mut workspace, &stream));
    check_results(&spec, batch, &tensors, &runs[0])?;
    match runs[0] == runs[1] {
        true => Ok(()),
        false => Err("two runs differ".into()),
    }
}

#[test]
fn linear_biases_are_those_of_the_reference() {
    let Some(gpu) = hopper("linear_biases_are_those_of_the_reference") else {
        return;
    };
    for (heads, dim, page, decodes) in [
        ([8, 2], 64, 16, 6),
        ([8, 2], 128, 16, 6),
        // Many rows behind a common prefix, and groups that are no power of two.
        ([24, 2], 128, 16, 12),
        ([16, 1], 64, 8, 20),
        // Row by row, and heads that are padded.
        ([8, 2], 128, 5, 4),
        ([6, 2], 96, 16, 4),
    ] {
        let spec = Spec::new(heads[0], heads[1], dim).with_hooks(&ALIBI);
        let batch = batch(page, decodes);
        for spec in [spec, spec.with_sinks(), spec.with_window_left(40)] {
            let name = || format!("{spec:?}, pages of {page}");
            check::<bf16>(gpu, &spec, &batch).unwrap_or_else(|wrong| panic!("{}: {wrong}", name()));
            check::<f16>(gpu, &spec, &batch).unwrap_or_else(|wrong| panic!("{}: {wrong}", name()));
        }
    }
}

/// Long prompts have tiles of 192 rows. The window leaves few keys to compute.
#[test]
fn linear_biases_of_long_prompts_are_those_of_the_reference() {
    let Some(gpu) = hopper("linear_biases_of_long_prompts_are_those_of_the_reference") else {
        return;
    };
    let mut table = PageTable::new(16, 300);
    table.push(&(0..300).rev().collect::<Vec<_>>(), 4750);
    let batch = Batch::new(vec![0, 4500], table);
    for dim in [64, 128] {
        let spec = Spec::new(1, 1, dim).with_hooks(&ALIBI);
        let spec = spec.with_window_left(300);
        check::<bf16>(gpu, &spec, &batch).unwrap_or_else(|wrong| panic!("{spec:?}: {wrong}"));
        check::<f16>(gpu, &spec, &batch).unwrap_or_else(|wrong| panic!("{spec:?}: {wrong}"));
    }
}

#[test]
fn biases_by_distance_are_those_of_the_reference() {
    let Some(gpu) = hopper("biases_by_distance_are_those_of_the_reference") else {
        return;
    };
    for (heads, dim, page, decodes) in [
        ([8, 2], 64, 16, 6),
        // Many rows behind a common prefix, and groups that are no power of two.
        ([24, 2], 64, 16, 12),
        ([16, 1], 64, 8, 20),
        // Row by row, and heads that are padded.
        ([8, 2], 64, 5, 4),
        ([6, 2], 48, 16, 4),
    ] {
        let spec = Spec::new(heads[0], heads[1], dim).with_hooks(&DISTANCE_BIAS);
        let batch = batch(page, decodes);
        for spec in [
            spec,
            spec.with_sinks(),
            spec.with_window_left(40),
            spec.non_causal(),
        ] {
            check::<bf16>(gpu, &spec, &batch)
                .unwrap_or_else(|wrong| panic!("{spec:?}, pages of {page}: {wrong}"));
        }
    }
}

#[test]
fn tables_of_other_heads_are_refused() {
    let Some(gpu) = hopper("tables_of_other_heads_are_refused") else {
        return;
    };
    let (spec, batch) = (Spec::new(8, 2, 64).with_hooks(&DISTANCE_BIAS), batch(16, 2));
    let plan = Planner::new().plan(&spec, &batch, &gpu.device(), &PlanOptions::default());
    let plan = plan.unwrap();
    let tensors = Tensors::<bf16, bf16>::random(&spec, &batch, KvLayout::Nhd, 5);
    let device = OnDevice::new(&spec, &batch, &tensors);
    let options = WorkspaceOptions::default();
    let mut workspace = gpu.workspace(&spec, &Bound::of(&plan), options).unwrap();
    let (stream, out) = (Stream::new(), device.q);
    // SAFETY: the stream is ours.
    unsafe { workspace.upload(&plan, stream.0) }.unwrap();
    let right = BiasTable::new(1 << 20, 8 * 32, 8, 0).unwrap();
    let mut heads = right;
    heads.heads = 7;
    let mut none = right;
    none.entries = 0;
    let mut odd = right;
    odd.address += 2;
    for (own, name, got) in [
        (heads, "heads of the table", 7),
        (none, "entries of a head", 0),
        (odd, "address", (1 << 20) + 2),
    ] {
        let given = RunTensors::new(&device.q, &device.pools, &out).with_own(&own);
        // SAFETY: refused.
        let said = unsafe { gpu.run_with(&mut workspace, &given, stream.0) };
        match said {
            Err(Error::Shape(ShapeError::Own {
                name: said,
                got: seen,
                ..
            })) => assert_eq!((said, seen), (name, got)),
            said => panic!("{name}: {said:?}"),
        }
    }
}

#[test]
fn weights_that_add_up_are_those_of_the_reference() {
    let Some(gpu) = hopper("weights_that_add_up_are_those_of_the_reference") else {
        return;
    };
    for (heads, dim, page, decodes) in [
        ([8, 2], 128, 16, 6),
        // Many rows behind a common prefix, and groups that are no power of two.
        ([24, 2], 128, 16, 12),
        ([16, 1], 128, 8, 20),
        // Row by row, and heads that are padded.
        ([8, 2], 128, 5, 4),
        ([6, 2], 96, 16, 4),
    ] {
        let spec = Spec::new(heads[0], heads[1], dim).with_hooks(&SIGMOID);
        let batch = batch(page, decodes);
        for spec in [spec, spec.with_window_left(40)] {
            // States of splits, merged in decodes and behind them.
            for split in [SplitMode::Off, SplitMode::Fixed { tokens: 4 * page }] {
                let split = PlanOptions::default().with_split(split);
                check_with::<bf16>(gpu, &spec, &batch, &split)
                    .unwrap_or_else(|wrong| panic!("{spec:?}, pages of {page}: {wrong}"));
            }
        }
    }
}

#[test]
fn sinks_without_a_softmax_are_refused() {
    let Some(gpu) = hopper("sinks_without_a_softmax_are_refused") else {
        return;
    };
    let (spec, batch) = (Spec::new(8, 2, 128).with_hooks(&SIGMOID), batch(16, 2));
    let plan =
        |spec: &Spec| Planner::new().plan(spec, &batch, &gpu.device(), &PlanOptions::default());
    let refused = |what| PlanError::Problem(ProblemError::NoSoftmax { what });
    assert_eq!(plan(&spec.with_sinks()).err(), Some(refused("sinks")));
    let mut nobody = Spec::new(8, 2, 128);
    nobody.variant.adds_up = true;
    let what = "no hooks that make the weights";
    assert_eq!(plan(&nobody).err(), Some(refused(what)));
    // The name alone does not say it.
    let mut unsaid = spec;
    unsaid.variant.adds_up = false;
    let plan = plan(&unsaid).expect("the plan does not depend on it");
    let tensors = Tensors::<bf16, bf16>::random(&spec, &batch, KvLayout::Nhd, 5);
    let device = OnDevice::new(&spec, &batch, &tensors);
    let options = WorkspaceOptions::default();
    let mut workspace = gpu.workspace(&unsaid, &Bound::of(&plan), options).unwrap();
    let (stream, out, own) = (Stream::new(), device.q, SigmoidBias { bias: 0.0 });
    let given = RunTensors::new(&device.q, &device.pools, &out).with_own(&own);
    // SAFETY: refused.
    let got = unsafe {
        workspace.upload(&plan, stream.0).unwrap();
        gpu.run_with(&mut workspace, &given, stream.0)
    };
    let softmax = false;
    assert_eq!(got, Err(Error::Shape(ShapeError::Softmax { softmax })));
}

#[test]
fn heads_and_caches_without_a_kernel_of_the_variant_are_refused() {
    let Some(gpu) = hopper("heads_and_caches_without_a_kernel_of_the_variant_are_refused") else {
        return;
    };
    let batch = batch(16, 2);
    let plan =
        |spec: &Spec| Planner::new().plan(spec, &batch, &gpu.device(), &PlanOptions::default());
    // The library's own comes in two head dimensions and for 16-bit caches.
    let spec = Spec::new(8, 2, 128).with_hooks(&ALIBI);
    for spec in [
        Spec::new(8, 2, 256).with_hooks(&ALIBI),
        spec.with_kv_dtype(Dtype::F8E4M3),
        spec.with_soft_cap(30.0),
    ] {
        let error = plan(&spec).expect_err("there is no kernel for it");
        assert!(
            matches!(error, PlanError::Unsupported(_) | PlanError::Problem(_)),
            "{error:?}"
        );
    }
    let run = |spec: &Spec, own: &[u8]| {
        // A description that does not know which variants there are.
        let device = DeviceDescription {
            variants: None,
            ..gpu.device()
        };
        let plan = Planner::new().plan(spec, &batch, &device, &PlanOptions::default());
        let plan = plan.expect("the plan does not depend on it");
        let tensors =
            Tensors::<bf16, bf16>::random(&Spec::new(8, 2, 128), &batch, KvLayout::Nhd, 5);
        let device = OnDevice::new(&Spec::new(8, 2, 128), &batch, &tensors);
        let options = WorkspaceOptions::default();
        let mut workspace = gpu.workspace(spec, &Bound::of(&plan), options).unwrap();
        let (stream, out) = (Stream::new(), device.q);
        let mut given = RunTensors::new(&device.q, &device.pools, &out);
        given.own = own;
        // SAFETY: refused.
        unsafe {
            workspace.upload(&plan, stream.0).unwrap();
            gpu.run_with(&mut workspace, &given, stream.0)
        }
    };
    let bytes = |hooks, got, expected| {
        Err(Error::Shape(ShapeError::OwnBytes {
            hooks,
            got,
            expected,
        }))
    };
    let slopes = Slopes { address: 1 << 20 };
    assert_eq!(
        run(&spec, &[]),
        bytes(Some(ALIBI.name), 0, size_of::<Slopes>())
    );
    assert_eq!(
        run(&Spec::new(8, 2, 128), bytemuck::bytes_of(&slopes)),
        bytes(None, 8, 0)
    );
    let asked = HooksName::new("unheard_of").unwrap();
    let unknown = Hooks {
        name: asked,
        ..ALIBI
    };
    let there = vec![ALIBI.name, DISTANCE_BIAS.name, SIGMOID.name];
    let refused = Err(Error::NoVariant { asked, there });
    let spec = Spec::new(8, 2, 128).with_hooks(&unknown);
    assert_eq!(run(&spec, &[]), refused);
    let error = plan(&spec).expect_err("the GPU was opened without it");
    assert!(matches!(error, PlanError::Unsupported(_)), "{error:?}");
}
