//! Every option of a specification and a batch changes the result as the reference says, or is refused.

use tandem_attn::{
    Error,
    exec::Cpu,
    plan::{DeviceDescription, PlanOptions, Planner},
    problem::{Batch, Dtype, KvLayout, Spec},
    tensor::{F8E4M3, HeadTensors, ShapeError},
};

use crate::{
    Result64, agree,
    numeric::Tolerance,
    problems::{OPTIONS, Tensors, plain},
    run, widen,
};

/// What the CPU makes of it; nothing where planning refuses it.
fn result(spec: &Spec, batch: &Batch) -> Option<Result64> {
    let device = DeviceDescription::named("cpu").unwrap();
    let plan = Planner::new().plan(spec, batch, &device, &PlanOptions::default());
    let plan = plan.ok()?;
    let cpu = Cpu::new();
    let (got, right) = if spec.kv_dtype == Dtype::F8E4M3 {
        let tensors = Tensors::<f32, F8E4M3>::random(spec, batch, KvLayout::Nhd, 5);
        (
            widen(&run::<_, _, f32>(&cpu, &plan, &tensors)),
            tensors.reference(spec, batch),
        )
    } else {
        let tensors = Tensors::<f32, f32>::random(spec, batch, KvLayout::Nhd, 5);
        (
            widen(&run::<_, _, f32>(&cpu, &plan, &tensors)),
            tensors.reference(spec, batch),
        )
    };
    let right = (right.out, right.lse);
    agree(spec, &got, &right, Tolerance::of(Dtype::F32)).unwrap();
    Some(got)
}

#[test]
fn each_option_counts_or_is_refused() {
    let (spec, batch) = plain(Dtype::F32);
    let plainly = result(&spec, &batch).expect("nothing is special");
    for (name, change) in OPTIONS {
        let (mut other, mut other_batch) = (spec, batch.clone());
        change(&mut other, &mut other_batch);
        if (&other, &other_batch) == (&spec, &batch) {
            continue; // single precision is what there is already
        }
        let changed = result(&other, &other_batch);
        assert_ne!(changed.as_ref(), Some(&plainly), "{name} changes nothing");
        let kinds = [
            "ancestors ",
            "compute",
            "weights ",
            "sinks without",
            "rotary, wider",
        ];
        let refused = kinds.iter().any(|kind| name.starts_with(kind));
        assert_eq!(changed.is_none(), refused, "{name}");
    }
}

#[test]
fn sinks_are_asked_for_and_not_ignored() {
    let (spec, batch) = plain(Dtype::F32);
    let device = DeviceDescription::named("cpu").unwrap();
    let sinks = [0.5; 8];
    let none = HeadTensors::default();
    for (spec, heads, wrong) in [
        (
            spec.with_sinks(),
            none,
            ShapeError::Missing { name: "sinks" },
        ),
        (
            spec,
            none.with_sinks(&sinks),
            ShapeError::Surplus { name: "sinks" },
        ),
        (
            spec.with_sinks(),
            none.with_sinks(&sinks[..7]),
            ShapeError::Length {
                name: "sinks",
                got: 7,
                shape: "[q_heads]",
                expected: 8,
            },
        ),
    ] {
        let plan = Planner::new().plan(&spec, &batch, &device, &PlanOptions::default());
        let plan = plan.unwrap();
        let tensors = Tensors::<f32, f32>::random(&spec, &batch, KvLayout::Nhd, 5);
        let mut out = vec![7.0_f32; tensors.q.len()];
        let views = tensors.views();
        let got = Cpu::new().run_heads(&plan, &tensors.q, &views, &mut out, None, &heads);
        assert_eq!(got, Err(Error::Shape(wrong)));
        assert!(out.iter().all(|&x| x == 7.0));
    }
}
