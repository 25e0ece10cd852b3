//! Queries and outputs in F32 of heads that kernels pad, against naive attention in f64.

use half::{bf16, f16};
use tandem_attn::{
    exec::emulated::Emulated,
    plan::{PlanOptions, Planner, SplitMode, pod::PodMode},
    problem::{Dtype, KvLayout, Spec},
    tensor::{Element, F8E4M3},
};

use crate::{
    no_failure,
    numeric::{Tolerance, compare, to_f64},
    problems::{Tensors, heads as of_heads, prefixed, sinks},
    settings,
};

/// Decodes with a common prefix, a chunk and a prompt.
const MIXED: &[(u32, usize, u32)] = &[(70, 0, 1), (9, 2, 1), (40, 1, 20), (150, 0, 70)];

/// Runs queries of `Q` and outputs of `O` on keys of `K`. Queries in F32 are rounded to `T` first, as on a GPU.
fn check<Q: Element, K: Element, O: Element, T: Element>(
    spec: &Spec,
    (requests, page_size): (&[(u32, usize, u32)], u32),
    options: &PlanOptions,
    schedule: u8,
) {
    let _others = no_failure();
    let emulated = Emulated::new(settings(schedule, 3)).expect("the emulator");
    let mut spec = spec.with_kv_dtype(K::DTYPE);
    (spec.q_dtype, spec.out_dtype) = (Q::DTYPE, O::DTYPE);
    let batch = prefixed(requests, page_size, false, 5);
    let exact = Tensors::<Q, K>::random(&spec, &batch, KvLayout::Nhd, 9);
    let rounded = Tensors {
        q: exact.q.iter().map(|q| T::from_f32(q.to_f32())).collect(),
        parts: exact.parts.clone(),
    };
    let plan = Planner::new()
        .plan(&spec, &batch, &emulated.device(), options)
        .unwrap_or_else(|error| panic!("{spec:?}: {error}"));
    plan.verify(&batch).unwrap();
    let [tokens, q_heads] = [plan.total_q, spec.q_heads].map(|extent| extent as usize);
    let mut out = vec![O::from_f32(f32::NAN); tokens * q_heads * spec.head_dim_v as usize];
    let mut lse = vec![f32::NAN; tokens * q_heads];
    let sinks = sinks(&spec);
    emulated
        .run_heads(
            &plan,
            &exact.q,
            &exact.views(),
            &mut out,
            Some(&mut lse),
            &of_heads(&sinks),
        )
        .unwrap_or_else(|error| panic!("{spec:?}: {error}"));
    let mut of_rows = spec;
    of_rows.q_dtype = T::DTYPE;
    let right = rounded.reference(&of_rows, &batch);
    let mut tolerance = Tolerance::of(T::DTYPE);
    tolerance.absolute = match T::DTYPE {
        Dtype::BF16 => 1.0 / 256.0,
        _ => 1.0 / 2048.0,
    };
    let shape = [tokens, q_heads, spec.head_dim_v as usize];
    let name = format!("{spec:?}");
    compare("out", &shape, &to_f64(&out), &right.out, tolerance)
        .unwrap_or_else(|error| panic!("{name}: {error}"));
    let tolerance = Tolerance {
        absolute: 2e-4,
        relative: 1e-5,
    };
    compare("lse", &shape[..2], &to_f64(&lse), &right.lse, tolerance)
        .unwrap_or_else(|error| panic!("{name}: {error}"));
    if O::DTYPE == Dtype::F32 {
        let between = |x: &&O| T::from_f32(x.to_f32()).to_f32() != x.to_f32();
        assert!(
            out.iter().filter(between).count() > out.len() / 2,
            "{name}: the outputs were rounded to 16 bits"
        );
    }
}

#[test]
fn f32_goes_with_heads_that_are_padded() {
    let options = PlanOptions::default();
    let fixed = options.with_split(SplitMode::Fixed { tokens: 32 });
    let of = |dim| Spec::new(4, 2, dim);
    // One to four slabs; 80 and 96 have kernels of their own for prompts, and for decodes of pairs of KV heads.
    for (dim, schedule) in [
        (48, 0),
        (80, 1),
        (96, 2),
        (112, 0),
        (160, 1),
        (208, 2),
        (224, 0),
        (240, 1),
    ] {
        check::<f32, bf16, f32, bf16>(&of(dim), (MIXED, 8), &options, schedule);
    }
    check::<f32, f16, f16, f16>(&of(80), (MIXED, 16), &options, 0);
    check::<f16, f16, f32, f16>(&of(80), (MIXED, 16), &options, 0);
    // Kernels of these heads alone: nothing is padded.
    let prompts = &[(70, 0, 70), (9, 2, 30)];
    check::<f32, bf16, f32, bf16>(&of(80), (prompts, 16), &options, 0);
    check::<f32, bf16, f32, bf16>(&of(96), (prompts, 16), &fixed, 1);
    check::<f32, bf16, bf16, bf16>(&of(160), (MIXED, 16), &options, 0);
    check::<bf16, bf16, f32, bf16>(&of(160).with_sinks(), (MIXED, 16), &options, 0);
}

#[test]
fn f32_goes_with_values_of_512() {
    let options = PlanOptions::default();
    let fixed = options.with_split(SplitMode::Fixed { tokens: 32 });
    for dim in [64, 512] {
        let spec = Spec::new(6, 2, dim).with_head_dim_v(512);
        check::<f32, bf16, f32, bf16>(&spec, (MIXED, 8), &options, 0);
        check::<f32, f16, f16, f16>(&spec.with_window_left(30), (MIXED, 16), &fixed, 1);
        check::<bf16, bf16, f32, bf16>(&spec.with_sinks(), (MIXED, 16), &fixed, 2);
    }
}

#[test]
fn f32_goes_with_padded_heads_in_any_plan() {
    let of = |dim| Spec::new(6, 2, dim);
    let fixed = PlanOptions::default().with_split(SplitMode::Fixed { tokens: 32 });
    check::<f32, bf16, f32, bf16>(&of(96).with_window_left(30), (MIXED, 16), &fixed, 0);
    let streams = PlanOptions::default().with_pod(PodMode::Streams);
    check::<f32, bf16, f32, bf16>(&of(80).with_soft_cap(20.0), (MIXED, 16), &streams, 1);
    let serial = PlanOptions::default().with_pod(PodMode::Serial);
    check::<f32, F8E4M3, f32, bf16>(&of(96), (MIXED, 16), &serial, 2);
    check::<f32, F8E4M3, f16, f16>(&of(32), (MIXED, 16), &serial, 2);
}
