//! Every option of a specification, a batch and its pools changes the result as the reference says, or is refused.

use half::{bf16, f16};
use tandem_attn::{
    Error,
    exec::emulated::Emulated,
    plan::{PlanOptions, Planner},
    problem::Dtype,
    tensor::{Element, F8E4M3, F8E5M2, ShapeError},
};

use crate::{
    no_failure,
    numeric::{Tolerance, compare, to_f64},
    problems::{Asked, ScaleNumbers, Scales, Tensors, heads, reference_of, sinks},
    settings,
};

/// Outputs and LSEs; nothing where planning or the run refuses it.
type Got = Option<(Vec<f64>, Vec<f64>)>;

fn result(emulated: &Emulated, name: &str, asked: &Asked) -> Got {
    let spec = &asked.spec;
    let (wide_q, wide_out) = (spec.q_dtype == Dtype::F32, spec.out_dtype == Dtype::F32);
    match spec.kv_dtype {
        Dtype::F8E4M3 => of::<bf16, F8E4M3, bf16>(emulated, name, asked),
        Dtype::F8E5M2 => of::<bf16, F8E5M2, bf16>(emulated, name, asked),
        Dtype::F16 => of::<f16, f16, f16>(emulated, name, asked),
        _ if wide_q => of::<f32, bf16, bf16>(emulated, name, asked),
        _ if wide_out => of::<bf16, bf16, f32>(emulated, name, asked),
        _ => of::<bf16, bf16, bf16>(emulated, name, asked),
    }
}

fn of<Q: Element, K: Element, O: Element>(emulated: &Emulated, name: &str, asked: &Asked) -> Got {
    let Asked {
        spec,
        batch,
        layout,
        scales,
    } = asked;
    let device = emulated.device();
    let plan = Planner::new().plan(spec, batch, &device, &PlanOptions::default());
    let plan = plan.ok()?;
    let mut tensors = Tensors::<Q, K>::random(spec, batch, *layout, 5);
    // Rounding loses nothing of these.
    let rounded = |q: &Q| Q::from_f32(bf16::from_f32(q.to_f32()).to_f32());
    if Q::DTYPE == Dtype::F32 {
        tensors.q = tensors.q.iter().map(rounded).collect();
    }
    let numbers = ScaleNumbers::of(asked);
    let mut views = tensors.views();
    if *scales != Scales::One {
        views[0] = views[0].with_scales(numbers.view());
    }
    let [tokens, q_heads, dim] =
        [plan.total_q, spec.q_heads, spec.head_dim_v].map(|extent| extent as usize);
    let mut out = vec![O::from_f32(f32::NAN); tokens * q_heads * dim];
    let mut lse = vec![f32::NAN; tokens * q_heads];
    let sinks = sinks(spec);
    let heads = heads(&sinks);
    let ran = emulated.run_heads(&plan, &tensors.q, &views, &mut out, Some(&mut lse), &heads);
    if let Err(error) = ran {
        let scaled = matches!(error, Error::Shape(ShapeError::Scaled { .. }));
        assert!(scaled, "{name}: {error}");
        return None;
    }
    let right = reference_of(spec, batch, &tensors.q, &views, &heads).expect("they fit");
    let mut tolerance = Tolerance::of(spec.out_dtype);
    tolerance.absolute = match K::DTYPE {
        Dtype::F16 => 1.0 / 2048.0,
        _ if *scales == Scales::One => 1.0 / 256.0,
        // Scales are up to 1, but values are not.
        _ => 1.0 / 128.0,
    };
    let mut of_lse = Tolerance {
        absolute: 2e-4,
        relative: 1e-5,
    };
    if spec.rotary.is_some() {
        // Queries and keys are rounded when they were turned.
        tolerance.absolute += 3.0 / 256.0;
        of_lse.absolute = 5.0 / 256.0;
    }
    let (got, states) = (to_f64(&out), to_f64(&lse));
    compare("out", &[tokens, q_heads, dim], &got, &right.out, tolerance)
        .unwrap_or_else(|error| panic!("{name}: {error}"));
    compare("lse", &[tokens, q_heads], &states, &right.lse, of_lse)
        .unwrap_or_else(|error| panic!("{name}: {error}"));
    Some((got, states))
}

#[test]
fn each_option_counts_or_is_refused() {
    let _others = no_failure();
    let emulated = Emulated::new(settings(0, 3)).expect("the emulator");
    let plain = Asked::plain(Dtype::BF16);
    let plainly = result(&emulated, "nothing", &plain).expect("nothing is special");
    for (name, asked) in Asked::all(Dtype::BF16) {
        // Runs on the emulator have no data of hooks.
        if asked.spec.variant.hooks.is_some() {
            continue;
        }
        let changed = result(&emulated, name, &asked);
        if name == "q_dtype" {
            continue;
        }
        // Elements that lie elsewhere are the same elements.
        let same = changed.as_ref() == Some(&plainly);
        assert_eq!(same, name == "layout", "{name}");
        let kinds = [
            "ancestors ",
            "masks ",
            "sink_tokens ",
            "head_dim",
            "compute",
            "adds_up ",
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
