//! Every option of a specification and a batch changes the result as the reference says, or is refused.

use half::{bf16, f16};
use tandem_attn::{
    Error,
    exec::gpu::{DeviceArray, Gpu, RunTensors, WorkspaceOptions},
    plan::{Bound, PlanOptions, Planner},
    problem::{Dtype, KvLayout},
    tensor::{Element, F8E4M3, F8E5M2, ShapeError},
};

use super::{
    common::{
        Stream,
        problems::{Asked, Scales, Tensors, plain},
    },
    hopper,
    problem::{OnDevice, check_results},
};

/// What the GPU makes of it; nothing where planning refuses it.
fn result(gpu: &Gpu, name: &str, asked: &Asked) -> Option<(Vec<u16>, Vec<u32>)> {
    match asked.spec.kv_dtype {
        Dtype::F8E4M3 => result_of::<bf16, F8E4M3>(gpu, name, asked),
        Dtype::F8E5M2 => result_of::<bf16, F8E5M2>(gpu, name, asked),
        Dtype::F16 => result_of::<f16, f16>(gpu, name, asked),
        _ => result_of::<bf16, bf16>(gpu, name, asked),
    }
}

fn result_of<T: Element, K: Element>(
    gpu: &Gpu,
    name: &str,
    asked: &Asked,
) -> Option<(Vec<u16>, Vec<u32>)> {
    let Asked { spec, batch, .. } = asked;
    let plan = Planner::new().plan(spec, batch, &gpu.device(), &PlanOptions::default());
    let plan = plan.ok()?;
    let tensors = asked.tensors::<T, K>(5);
    let device = match spec.q_dtype {
        // Rounding loses nothing of these.
        Dtype::F32 => {
            let wide = Tensors {
                q: tensors.q.iter().map(|q| q.to_f32()).collect(),
                parts: tensors.parts.clone(),
            };
            OnDevice::new(spec, batch, &wide)
        }
        _ => OnDevice::new(spec, batch, &tensors),
    };
    let options = WorkspaceOptions::default();
    let mut workspace = gpu.workspace(spec, &Bound::of(&plan), options).unwrap();
    let stream = Stream::new();
    // SAFETY: the stream is ours.
    unsafe { workspace.upload(&plan, stream.0) }.unwrap();
    let got = device.run(gpu, &mut workspace, &stream);
    check_results(spec, batch, &tensors, &got).unwrap_or_else(|wrong| panic!("{name}: {wrong}"));
    Some(got)
}

#[test]
fn each_option_counts_or_is_refused() {
    let Some(gpu) = hopper("each_option_counts_or_is_refused") else {
        return;
    };
    let plain = Asked::plain(Dtype::BF16);
    let plainly = result(gpu, "nothing", &plain).expect("nothing is special");
    for (name, asked) in Asked::all(Dtype::BF16) {
        // `fp8` has all kinds of scales.
        if asked.scales != Scales::One {
            continue;
        }
        let changed = result(gpu, name, &asked);
        if name == "q_dtype" {
            assert_eq!(changed.as_ref(), Some(&plainly), "the queries are the same");
            continue;
        }
        // Elements that lie elsewhere are the same elements.
        let same = changed.as_ref() == Some(&plainly);
        assert_eq!(same, name.starts_with("layout"), "{name}");
        // There are no kernels whose values alone have heads of 48, or keys of 128, none with products of 8 bits for
        // keys of 16, and those of sigmoid weights have heads of 128.
        let kinds = [
            "ancestors ",
            "masks ",
            "sink_tokens ",
            "head_dim",
            "compute",
            "hooks without",
            "adds_up ",
            "sinks without",
            "rotary, wider",
            "pool_pages ",
            "heads ",
            "indptr ",
            "q_indptr past",
            "qo_indptr of more queries",
        ];
        let refused = kinds.iter().any(|kind| name.starts_with(kind));
        assert_eq!(changed.is_none(), refused, "{name}");
    }
}

#[test]
fn sinks_are_asked_for_and_not_ignored() {
    let Some(gpu) = hopper("sinks_are_asked_for_and_not_ignored") else {
        return;
    };
    let (spec, batch) = plain(Dtype::BF16);
    let sinks = |len| Some(DeviceArray::<f32>::new(1 << 20, len));
    let name = "sinks";
    let length = ShapeError::Length {
        name,
        got: 7,
        shape: "[q_heads]",
        expected: 8,
    };
    for (spec, sinks, wrong) in [
        (spec.with_sinks(), None, ShapeError::Missing { name }),
        (spec, sinks(8), ShapeError::Surplus { name }),
        (spec.with_sinks(), sinks(7), length),
    ] {
        let plan = Planner::new().plan(&spec, &batch, &gpu.device(), &PlanOptions::default());
        let plan = plan.unwrap();
        let tensors = Tensors::<bf16, bf16>::random(&spec, &batch, KvLayout::Nhd, 5);
        let device = OnDevice::new(&spec, &batch, &tensors);
        let options = WorkspaceOptions::default();
        let mut workspace = gpu.workspace(&spec, &Bound::of(&plan), options).unwrap();
        let stream = Stream::new();
        let out = device.q;
        let mut given = RunTensors::new(&device.q, &device.pools, &out);
        given.sinks = sinks;
        // SAFETY: refused.
        let got = unsafe {
            workspace.upload(&plan, stream.0).unwrap();
            gpu.run_with(&mut workspace, &given, stream.0)
        };
        assert_eq!(got, Err(Error::Shape(wrong)));
    }
}
