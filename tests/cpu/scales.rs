//! 8-bit keys and values with scales.

use half::bf16;
use proptest::prelude::*;
use tandem_attn::{
    Error,
    exec::Cpu,
    kv::{KvScales, KvView},
    plan::{PlanOptions, Planner},
    problem::{Batch, Dtype, KvLayout, PageTable, Spec},
    reference,
    tensor::{Element, F8E4M3, F8E5M2, ShapeError},
};

use crate::{
    agree,
    numeric::{Rng, Tolerance},
    plan_of,
    problems::{Problem, Tensors, cases, small_problem},
    widen,
};

/// Scales of all granularities, of the size that quantising gives.
struct Scales {
    by_head: [Vec<f32>; 2],
    by_request: [Vec<f32>; 2],
    of_token: Vec<u32>,
    /// For each part, `[pages, page_size, kv_heads]`.
    by_token: Vec<[Vec<f32>; 2]>,
}

const REQUESTS: u32 = 3;

impl Scales {
    fn random(spec: &Spec, batch: &Batch, seed: u64) -> Self {
        let mut noise = Rng(seed ^ 0x5CA1E);
        let mut some = |count: u32| {
            [0; 2].map(|_| {
                (0..count)
                    .map(|_| noise.between(0.2, 3.0))
                    .collect::<Vec<f32>>()
            })
        };
        let by_token = batch
            .parts
            .iter()
            .map(|part| some(part.table.pool_pages * part.table.page_size * spec.kv_heads));
        let by_token = by_token.collect();
        Self {
            by_head: some(spec.kv_heads),
            by_request: some(REQUESTS * spec.kv_heads),
            of_token: (0..batch.total_q()).map(|token| token % REQUESTS).collect(),
            by_token,
        }
    }

    /// Of a granularity, for each part.
    fn of(&self, kind: u32, spec: &Spec, batch: &Batch) -> Vec<KvScales<'_>> {
        let of_part = |part: usize| {
            let page_size = batch.parts[part].table.page_size;
            let strides = KvLayout::Hnd.strides(page_size, spec.kv_heads, 1);
            match kind {
                0 => KvScales::One,
                1 => KvScales::Tensor { k: 0.5, v: 3.0 },
                2 => KvScales::Head {
                    k: &self.by_head[0],
                    v: &self.by_head[1],
                },
                3 => KvScales::Request {
                    k: &self.by_request[0],
                    v: &self.by_request[1],
                    of_token: &self.of_token,
                },
                _ => by_token(&self.by_token[part][0], &self.by_token[part][1], strides),
            }
        };
        (0..batch.parts.len()).map(of_part).collect()
    }
}

fn by_token<'a>(k: &'a [f32], v: &'a [f32], strides: tandem_attn::kv::KvStrides) -> KvScales<'a> {
    KvScales::Token {
        k,
        v,
        k_strides: strides,
        v_strides: strides,
    }
}

fn against_reference<T: Element>(mut problem: Problem, kind: u32) -> Result<(), TestCaseError> {
    problem.spec = problem.spec.with_dtype(Dtype::F32).with_kv_dtype(T::DTYPE);
    let Problem {
        spec,
        batch,
        layout,
        seed,
        ..
    } = &problem;
    let tensors: Tensors<f32, T> = Tensors::random(spec, batch, *layout, *seed);
    let scales = Scales::random(spec, batch, *seed);
    let of_parts = scales.of(kind, spec, batch);
    let views: Vec<KvView<'_, T>> = tensors
        .views()
        .into_iter()
        .zip(of_parts)
        .map(|(view, scales)| view.with_scales(scales))
        .collect();
    let right = reference::attention(spec, batch, &tensors.q, &views).expect("they fit the batch");
    let plan = plan_of(&problem);
    let heads = (plan.total_q * spec.q_heads) as usize;
    let mut got = (
        vec![f32::NAN; heads * spec.head_dim_v as usize],
        vec![f32::NAN; heads],
    );
    Cpu::new()
        .run(&plan, &tensors.q, &views, &mut got.0, Some(&mut got.1))
        .expect("plan and tensors fit");
    agree(
        spec,
        &widen(&got),
        &(right.out, right.lse),
        Tolerance::of(Dtype::F32),
    )
}

proptest! {
    #![proptest_config(cases(4_000))]

    #[test]
    fn scaled_keys_and_values_are_the_reference(problem in small_problem(), kind in 0..5_u32, e5m2: bool) {
        match e5m2 {
            false => against_reference::<F8E4M3>(problem, kind)?,
            true => against_reference::<F8E5M2>(problem, kind)?,
        }
    }
}

/// One request of 20 keys on two pages of 16, and the pools of one KV head.
fn small() -> (Spec, Batch, Vec<bf16>, Vec<F8E4M3>) {
    let mut table = PageTable::new(16, 2);
    table.push(&[1, 0], 20);
    let spec = Spec::new(2, 1, 16).with_kv_dtype(Dtype::F8E4M3);
    let number = |i: usize| (i * 7 % 13) as f32 / 4.0 - 1.5;
    let q = (0..32).map(|i| bf16::from_f32(number(i))).collect();
    let pool = (0..512).map(|i| F8E4M3::from_f32(number(i))).collect();
    (spec, Batch::new(vec![0, 1], table), q, pool)
}

#[test]
fn a_scale_is_a_factor_of_what_is_stored() {
    let (spec, batch, q, pool) = small();
    let view = KvView::new(&spec, KvLayout::Nhd, 16, &pool, &pool);
    let scaled = view.with_scales(KvScales::Tensor { k: 0.25, v: 3.0 });
    let got = reference::attention(&spec, &batch, &q, &[scaled]).unwrap();
    let times = |scale: f32| -> Vec<f32> { pool.iter().map(|x| x.to_f32() * scale).collect() };
    let (k, v) = (times(0.25), times(3.0));
    let plain = KvView::new(&spec, KvLayout::Nhd, 16, &k, &v);
    let right = reference::attention(&spec, &batch, &q, &[plain]).unwrap();
    let close = |a: &[f64], b: &[f64]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-12);
    assert!(close(&got.out, &right.out) && close(&got.lse, &right.lse));
}

#[test]
fn scales_that_do_not_fit_are_refused() {
    let (spec, batch, q, pool) = small();
    let cpu = Cpu::new();
    let plan_for = |spec: &Spec| {
        let options = PlanOptions::default();
        Planner::new()
            .plan(spec, &batch, &cpu.device(), &options)
            .unwrap()
    };
    let plan = plan_for(&spec);
    let view = KvView::new(&spec, KvLayout::Nhd, 16, &pool, &pool);
    let error = |scales| {
        let mut out = vec![bf16::ZERO; 32];
        cpu.run(&plan, &q, &[view.with_scales(scales)], &mut out, None)
    };
    let length = |name, got, shape, expected| {
        Err(Error::Shape(ShapeError::Length {
            name,
            got,
            shape,
            expected,
        }))
    };
    assert_eq!(
        error(KvScales::Head {
            k: &[1.0],
            v: &[1.0]
        }),
        Ok(())
    );
    assert_eq!(
        error(KvScales::Head { k: &[1.0], v: &[] }),
        length("scales of values", 0, "[kv_heads]", 1)
    );
    let of_token: &[u32] = &[];
    assert_eq!(
        error(KvScales::Request {
            k: &[1.0],
            v: &[1.0],
            of_token
        }),
        length("requests of tokens", 0, "[total_q]", 1)
    );
    assert_eq!(
        error(KvScales::Request {
            k: &[1.0; 2],
            v: &[1.0],
            of_token: &[1]
        }),
        length("scales of values", 1, "[requests, kv_heads]", 2)
    );
    let past = ShapeError::NoRequest {
        token: 0,
        got: 2,
        requests: 2,
    };
    assert_eq!(
        error(KvScales::Request {
            k: &[1.0; 2],
            v: &[1.0; 2],
            of_token: &[2]
        }),
        Err(past.into())
    );
    let strides = KvLayout::Nhd.strides(16, 1, 1);
    const ONES: [f32; 32] = [1.0; 32];
    let by_key = |len: usize, page_size| {
        let strides = tandem_attn::kv::KvStrides {
            page_size,
            ..strides
        };
        error(by_token(&ONES[..len], &ONES, strides))
    };
    assert_eq!(by_key(32, 16), Ok(()));
    assert!(matches!(
        by_key(31, 16),
        Err(Error::Shape(ShapeError::PoolTooSmall {
            tensor: "scales of keys",
            got: 31,
            needed: 32,
            ..
        }))
    ));
    assert!(matches!(
        by_key(32, 8),
        Err(Error::Shape(ShapeError::PageSize {
            got: 8,
            expected: 16,
            ..
        }))
    ));

    let wide: Vec<bf16> = pool.iter().map(|x| bf16::from_f32(x.to_f32())).collect();
    let of_16_bits = spec.with_kv_dtype(Dtype::BF16);
    let view = KvView::new(&of_16_bits, KvLayout::Nhd, 16, &wide, &wide);
    let scaled = view.with_scales(KvScales::Tensor { k: 1.0, v: 1.0 });
    let mut out = vec![bf16::ZERO; 32];
    assert_eq!(
        cpu.run(&plan_for(&of_16_bits), &q, &[scaled], &mut out, None),
        Err(ShapeError::Scaled { dtype: Dtype::BF16 }.into())
    );
}
