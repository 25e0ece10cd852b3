//! Sinks that are much larger and much smaller than the logits of keys.
// Each program uses its own part of this.
#![allow(dead_code)]

use super::{
    numeric::{Tolerance, compare, to_f64},
    problems::{Tensors, heads, prefixed, reference_of},
};
use half::bf16;
use tandem_attn::{
    plan::{MergeMode, PlanOptions, SplitMode, pod::PodMode},
    problem::{Batch, Spec},
};

/// A sink for each query head. In base 2 they are around 2¹²⁵ and 2¹²⁸ times the weight of a key, too, where sums overflow.
pub fn sinks(spec: &Spec) -> Vec<f32> {
    const KINDS: [f32; 11] = [
        0.5,
        f32::NEG_INFINITY,
        200.0,
        -1e4,
        6.0,
        88.0,
        -2.0,
        89.5,
        3.0,
        86.5,
        -80.0,
    ];
    (0..spec.sinks()).map(|i| KINDS[i % KINDS.len()]).collect()
}

/// Heads, windows and soft caps. With 8 query heads for a KV head, tiles of prompts have several heads; with 5, rows without a
/// query.
pub fn specs(dim: u32) -> impl Iterator<Item = Spec> {
    let heads = [(8, 1), (10, 2), (16, 1), (3, 3)];
    heads.into_iter().enumerate().map(move |(i, (q, kv))| {
        let mut spec = Spec::new(q, kv, dim).with_sinks();
        spec.variant.window_left = (i % 2 == 0).then_some(40);
        spec.variant.soft_cap = (i >= 2).then_some(20.0);
        spec
    })
}

/// Prompts and decodes of few and of many keys. A prompt and a decode have none: their results are the sinks alone.
pub fn batch() -> Batch {
    let requests = [(90, 0, 70), (130, 0, 1), (300, 0, 1), (45, 0, 3)];
    let some = prefixed(&requests, 16, false, 3);
    let (mut qo_indptr, mut table) = (some.qo_indptr, some.parts[0].table.clone());
    for queries in [1, 30] {
        table.push(&[], 0);
        qo_indptr.push(qo_indptr[qo_indptr.len() - 1] + queries);
    }
    Batch::new(qo_indptr, table)
}

/// Whole rows, in kernels that share SMs and in others, and partial states that are merged in both ways.
pub fn options() -> [PlanOptions; 4] {
    let of = |split, merge| {
        PlanOptions::default()
            .with_split(split)
            .with_merge_mode(merge)
            .with_pod(PodMode::Serial)
    };
    let fixed = SplitMode::Fixed { tokens: 32 };
    [
        of(SplitMode::Off, MergeMode::Kernel).with_pod(PodMode::Fused),
        of(SplitMode::Off, MergeMode::Fused),
        of(fixed, MergeMode::Fused),
        of(fixed, MergeMode::Kernel),
    ]
}

/// Compares with attention in f64 with these sinks.
pub fn check(
    spec: &Spec,
    batch: &Batch,
    tensors: &Tensors<bf16, bf16>,
    (out, lse): (&[bf16], &[f32]),
) {
    let sinks = Some(sinks(spec));
    let right = reference_of(spec, batch, &tensors.q, &tensors.views(), &heads(&sinks));
    let right = right.expect("the reference takes it");
    let shape = [batch.total_q(), spec.q_heads, spec.head_dim_v].map(|extent| extent as usize);
    let near = |absolute, relative| Tolerance { absolute, relative };
    let outs = compare(
        "out",
        &shape,
        &to_f64(out),
        &right.out,
        near(1.0 / 256.0, 1e-2),
    );
    outs.unwrap_or_else(|error| panic!("{spec:?}: {error}"));
    let lses = compare(
        "lse",
        &shape[..2],
        &to_f64(lse),
        &right.lse,
        near(2e-4, 1e-5),
    );
    lses.unwrap_or_else(|error| panic!("{spec:?}: {error}"));
}
