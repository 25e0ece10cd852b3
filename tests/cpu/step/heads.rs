//! Fused projections.

use half::{bf16, f16};
use proptest::prelude::*;
use tandem_attn::{
    abi::NO_SLOT,
    kv::{AppendScales, KvScales, KvViewMut},
    problem::{Dtype, KvLayout, Spec},
    step::{
        RmsNorm, Rope,
        cpu::{QkNorm, QkvStep, qkv},
    },
    tensor::{Element, F8E4M3},
};

use super::{
    numeric::{Rng, Tolerance, to_f64},
    steps::{self, Qkv},
};

#[derive(Clone, Debug)]
struct Shape {
    heads: [u32; 2],
    dim: u32,
    tokens: usize,
    layout: KvLayout,
    page_size: u32,
    bias: bool,
    norm: Option<RmsNorm>,
    rope: Option<Rope>,
    seed: u64,
}

fn rope(dim: u32) -> impl Strategy<Value = Option<Rope>> {
    let rope = steps::rope((1..=dim / 2).prop_map(|pairs| 2 * pairs));
    prop_oneof![1 => Just(None), 3 => rope.prop_map(Some), 2 => Just(Some(Rope::new(dim, 1e6)))]
}

fn shape() -> impl Strategy<Value = Shape> {
    let dim = (1..17_u32).prop_map(|eighth| 8 * eighth);
    let norm = steps::norm();
    let layout = prop_oneof![Just(KvLayout::Nhd), Just(KvLayout::Hnd)];
    let sizes = (1..4_u32, 1..4_u32, 0..20_usize, layout, 1..17_u32);
    dim.prop_flat_map(move |dim| {
        (
            sizes.clone(),
            any::<bool>(),
            norm.clone(),
            rope(dim),
            any::<u64>(),
        )
            .prop_map(
                move |((kv_heads, group, tokens, layout, page_size), bias, norm, rope, seed)| {
                    Shape {
                        heads: [kv_heads * group, kv_heads],
                        dim,
                        tokens,
                        layout,
                        page_size,
                        bias,
                        norm,
                        rope,
                        seed,
                    }
                },
            )
    })
}

fn check<T: Element>(shape: &Shape) {
    let [q_heads, kv_heads] = shape.heads;
    let spec = Spec::new(q_heads, kv_heads, shape.dim).with_dtype(T::DTYPE);
    let dim = shape.dim as usize;
    let row = (q_heads + 2 * kv_heads) as usize * dim;
    let mut rng = Rng(shape.seed);
    let mut random = |count: usize| -> Vec<T> {
        rng.floats(count, -2.0, 2.0)
            .into_iter()
            .map(T::from_f32)
            .collect()
    };
    let (source, bias) = (random(shape.tokens * row), random(row));
    let weights = [random(dim), random(dim)];
    let positions: Vec<u32> = (0..shape.tokens)
        .map(|_| rng.below(131_072) as u32)
        .collect();
    let pages = (shape.tokens as u32 + 3).div_ceil(shape.page_size);
    let mut slots: Vec<u32> = (0..pages * shape.page_size).collect();
    rng.shuffle(&mut slots);
    slots.truncate(shape.tokens);
    if let Some(slot) = slots.get_mut(2) {
        *slot = NO_SLOT;
    }

    let table = shape
        .rope
        .map(|rope| rope.table().expect("a good embedding"));
    let step = QkvStep {
        qkv: &source,
        bias: shape.bias.then_some(&bias[..]),
        norm: shape.norm.map(|norm| QkNorm {
            norm,
            q: &weights[0],
            k: &weights[1],
        }),
        rope: table.as_ref().map(|table| (table, &positions[..])),
    };
    let marker = T::from_f32(-77.0);
    let elements = (pages * shape.page_size * kv_heads) as usize * dim;
    let (mut k, mut v) = (vec![marker; elements], vec![marker; elements]);
    let mut q = vec![marker; shape.tokens * q_heads as usize * dim];
    let mut pool = KvViewMut::new(&spec, shape.layout, shape.page_size, &mut k, &mut v);
    let scales = AppendScales::Given(KvScales::One);
    qkv(&spec, &step, &slots, &mut q, &mut pool, pages, scales).expect("a good call");

    let (source, bias) = (to_f64(&source), to_f64(&bias));
    let weights = weights.each_ref().map(|weights| to_f64(weights));
    let [right_q, right_k, right_v] = Qkv {
        heads: shape.heads.map(|heads| heads as usize),
        dim,
        qkv: &source,
        bias: shape.bias.then_some(&bias),
        norm: shape
            .norm
            .map(|norm| (norm, [&weights[0], &weights[1]].map(|w| &w[..]))),
        rope: shape.rope.map(|rope| (rope, &positions[..])),
    }
    .parts();
    let tolerance = Tolerance::of(T::DTYPE);
    let near = |name: &str, got: T, right: f64| {
        let off = (f64::from(got.to_f32()) - right).abs();
        // Sums of two products of about 2 cancel.
        assert!(
            off <= tolerance.absolute.max(2e-6) + tolerance.relative * right.abs(),
            "{name} is {got:?} instead of {right}, {shape:?}"
        );
    };
    for (&got, right) in q.iter().zip(right_q) {
        near("q", got, right);
    }
    let strides = shape.layout.strides(shape.page_size, kv_heads, shape.dim);
    for (name, pool, right) in [("k", &mut k, right_k), ("v", &mut v, right_v)] {
        for (token, &slot) in slots
            .iter()
            .enumerate()
            .filter(|&(_, &slot)| slot != NO_SLOT)
        {
            let (page, offset) = (slot / shape.page_size, slot % shape.page_size);
            for head in 0..kv_heads {
                let at = page * strides.page + offset * strides.token + head * strides.head;
                let from = (token * kv_heads as usize + head as usize) * dim;
                let row = &mut pool[at as usize..][..dim];
                for (got, &right) in row.iter_mut().zip(&right[from..]) {
                    near(name, std::mem::replace(got, marker), right);
                }
            }
        }
        assert!(
            pool.iter().all(|x| x.to_f32() == -77.0),
            "written beside the slots of {name}"
        );
    }
}

#[test]
fn heads_are_those_of_the_formulas() {
    let config = ProptestConfig {
        cases: 128,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    proptest!(config, |(shape in shape(), dtype in 0..3)| match dtype {
        0 => check::<f32>(&shape),
        1 => check::<bf16>(&shape),
        _ => check::<f16>(&shape),
    });
}

/// Keys and values go to 8 bits from single precision, not from what 16 bits leave of it.
#[test]
fn eight_bit_pages_get_scaled_keys_and_values() {
    let spec = Spec::new(2, 2, 16).with_kv_dtype(Dtype::F8E4M3);
    let mut rng = Rng(11);
    let source: Vec<bf16> = rng
        .floats(3 * 6 * 16, -4.0, 4.0)
        .into_iter()
        .map(bf16::from_f32)
        .collect();
    let rope = Rope::new(16, 1e4);
    let (table, positions) = (rope.table().unwrap(), [5, 70, 1000]);
    let step = QkvStep {
        qkv: &source,
        bias: None,
        norm: None,
        rope: Some((&table, &positions)),
    };
    let right = Qkv {
        heads: [2, 2],
        dim: 16,
        qkv: &to_f64(&source),
        bias: None,
        norm: None,
        rope: Some((rope, &positions)),
    };
    let [_, right_k, right_v] = right.parts();
    let run = |scales: AppendScales<'_>| {
        let (mut k, mut v) = (vec![F8E4M3(0); 4 * 32], vec![F8E4M3(0); 4 * 32]);
        let mut pool = KvViewMut::new(&spec, KvLayout::Nhd, 4, &mut k, &mut v);
        let mut q = vec![bf16::ZERO; 3 * 32];
        qkv(&spec, &step, &[0, 1, 2], &mut q, &mut pool, 1, scales).expect("a good call");
        [k, v]
    };
    let near = |got: F8E4M3, scale: f32, right: f64| {
        let off = (f64::from(got.to_f32() * scale) - right).abs();
        let step = right.abs().max(f64::from(scale) / 64.0);
        assert!(
            off <= step / 15.9,
            "{got:?} times {scale} instead of {right}"
        );
    };
    let [k, v] = run(AppendScales::Given(KvScales::Head {
        k: &[0.5, 2.0],
        v: &[0.25, 1.0],
    }));
    for i in 0..96 {
        let head = i / 16 % 2;
        near(k[i], [0.5, 2.0][head], right_k[i]);
        near(v[i], [0.25, 1.0][head], right_v[i]);
    }
    let (mut k_scales, mut v_scales) = (vec![0.0; 8], vec![0.0; 8]);
    let strides = KvLayout::Nhd.strides(4, 2, 1);
    let [k, v] = run(AppendScales::Computed {
        k: &mut k_scales,
        v: &mut v_scales,
        k_strides: strides,
        v_strides: strides,
    });
    for i in 0..96 {
        near(k[i], k_scales[i / 16], right_k[i]);
        near(v[i], v_scales[i / 16], right_v[i]);
    }
}
