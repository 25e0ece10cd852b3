//! Every option of a specification, a batch and its pools changes the result as the reference says, or is refused.

use half::f16;
use tandem_attn::{
    Error,
    exec::Cpu,
    plan::{DeviceDescription, Plan, PlanOptions, Planner},
    problem::{Dtype, KvLayout},
    tensor::{Element, F8E4M3, F8E5M2, HeadTensors, ShapeError},
};

use crate::{
    Result64, agree,
    numeric::Tolerance,
    problems::{Asked, ScaleNumbers, Scales, Tensors, plain, reference_of, unlisted},
    run, widen,
};

/// What the CPU makes of it; nothing where planning or the run refuses it.
fn result(asked: &Asked) -> Option<Result64> {
    let Asked { spec, batch, .. } = asked;
    let device = DeviceDescription::named("cpu").unwrap();
    let plan = Planner::new().plan(spec, batch, &device, &PlanOptions::default());
    let plan = plan.ok()?;
    match (spec.q_dtype, spec.kv_dtype) {
        (_, Dtype::F8E4M3) => result_of::<f32, F8E4M3>(asked, &plan),
        (_, Dtype::F8E5M2) => result_of::<f32, F8E5M2>(asked, &plan),
        (Dtype::F16, _) => result_of::<f16, f16>(asked, &plan),
        _ => result_of::<f32, f32>(asked, &plan),
    }
}

fn result_of<Q: Element, K: Element>(asked: &Asked, plan: &Plan) -> Option<Result64> {
    let Asked {
        spec,
        batch,
        scales,
        ..
    } = asked;
    let cpu = Cpu::new();
    let tensors = asked.tensors::<Q, K>(5);
    let (got, right) = if *scales == Scales::One {
        let got = widen(&run::<_, _, Q>(&cpu, plan, &tensors));
        (got, tensors.reference(spec, batch))
    } else {
        let numbers = ScaleNumbers::of(asked);
        let views = [tensors.views()[0].with_scales(numbers.view())];
        let mut out = vec![Q::from_f32(f32::NAN); tensors.q.len()];
        let mut lse = vec![f32::NAN; (plan.total_q * spec.q_heads) as usize];
        let ran = cpu.run(plan, &tensors.q, &views, &mut out, Some(&mut lse));
        if let Err(error) = ran {
            assert!(
                matches!(error, Error::Shape(ShapeError::Scaled { .. })),
                "{error}"
            );
            return None;
        }
        let none = HeadTensors::default();
        let right = reference_of(spec, batch, &tensors.q, &views, &none).unwrap();
        (widen(&(out, lse)), right)
    };
    let right = (right.out, right.lse);
    agree(spec, &got, &right, Tolerance::of(Q::DTYPE)).unwrap();
    Some(got)
}

#[test]
fn each_option_counts_or_is_refused() {
    let plain = Asked::plain(Dtype::F32);
    let plainly = result(&plain).expect("nothing is special");
    for (name, asked) in Asked::all(Dtype::F32) {
        if asked == plain {
            continue; // single precision is what there is already
        }
        let changed = result(&asked);
        // Elements that lie elsewhere are the same elements.
        let same = changed.as_ref() == Some(&plainly);
        assert_eq!(same, name.starts_with("layout"), "{name}");
        let kinds = [
            "ancestors ",
            "masks ",
            "sink_tokens ",
            "compute",
            "adds_up ",
            "sinks without",
            "rotary, wider",
            "scales of numbers of 16 bits",
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

/// A new field of a specification, a batch or the planner's options has to be among the options.
#[test]
fn every_field_is_among_the_options() {
    assert_eq!(unlisted(), Vec::<String>::new());
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
