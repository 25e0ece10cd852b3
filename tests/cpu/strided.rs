//! Tensors with gaps between their rows, and with types known only when the program runs.

use half::{bf16, f16};
use proptest::prelude::*;
use tandem_attn::{
    Error,
    abi::KvStrides,
    exec::Cpu,
    kv::{KvScales, KvTensors, KvView},
    plan::{PlanOptions, Planner},
    problem::{Batch, Dtype, KvLayout, PageTable, Spec},
    tensor::{Element, F8E4M3, ShapeError, TensorMut, TensorRef},
};

use crate::{
    plan_of,
    problems::{Pools, Problem, Tensors, cases, small_problem},
    run, tiny,
};

/// A pool as a tensor of `[pages, page_size, kv_heads, head_dim]`.
fn erased<'a, T: Element>(
    problem: &Problem,
    part: usize,
    pool: &'a [T],
    dim: u32,
) -> TensorRef<'a, 4> {
    let table = &problem.batch.parts[part].table;
    let (heads, pages) = (problem.spec.kv_heads as usize, table.pool_pages as usize);
    let (page, dim) = (table.page_size as usize, dim as usize);
    match problem.layout {
        KvLayout::Nhd => TensorRef::new(pool, [pages, page, heads, dim]).unwrap(),
        KvLayout::Hnd => TensorRef::new(pool, [pages, heads, page, dim])
            .unwrap()
            .swap_axes(1, 2),
    }
}

fn kv<'a, T: Element>(problem: &Problem, parts: &'a [Pools<T>]) -> Vec<KvTensors<'a>> {
    let spec = &problem.spec;
    let of_part = |(part, pools): (usize, &'a Pools<T>)| {
        let k = erased(problem, part, &pools.k, spec.head_dim_qk);
        let [pages, page_size, heads, _] = k.shape();
        let shape = [pages, page_size, heads, spec.head_dim_v as usize];
        let v = match spec.latent {
            true => TensorRef::strided(&pools.k, shape, k.strides()).unwrap(),
            false => erased(problem, part, &pools.v, spec.head_dim_v),
        };
        KvTensors {
            k,
            v,
            scales: KvScales::One,
        }
    };
    parts.iter().enumerate().map(of_part).collect()
}

/// The rows of a dense tensor `[tokens, heads, dim]` with so many elements of `fill` between heads and tokens.
fn spread<T: Element>(dense: &[T], heads: usize, dim: usize, gaps: [usize; 2], fill: T) -> Vec<T> {
    let gap = |len| std::iter::repeat_n(fill, len);
    let token = |token: &[T]| -> Vec<T> {
        let heads = token
            .chunks(dim)
            .flat_map(|head| head.iter().copied().chain(gap(gaps[0])));
        heads.chain(gap(gaps[1])).collect()
    };
    dense.chunks(heads * dim).flat_map(token).collect()
}

fn the_same_as_dense<Q: Element, T: Element, O: Element>(
    mut problem: Problem,
    gaps: [usize; 2],
) -> Result<(), TestCaseError> {
    problem.spec = problem.spec.with_dtype(O::DTYPE).with_kv_dtype(T::DTYPE);
    problem.spec.q_dtype = Q::DTYPE;
    let (spec, plan, cpu) = (problem.spec, plan_of(&problem), Cpu::new());
    let tensors: Tensors<Q, T> =
        Tensors::random(&spec, &problem.batch, problem.layout, problem.seed);
    let (dense, dense_lse) = run::<Q, T, O>(&cpu, &plan, &tensors);

    let (tokens, heads) = (plan.total_q as usize, spec.q_heads as usize);
    let (qk, v) = (spec.head_dim_qk as usize, spec.head_dim_v as usize);
    let strides = |dim: usize| [heads * (dim + gaps[0]) + gaps[1], dim + gaps[0], 1];
    let q = spread(&tensors.q, heads, qk, gaps, Q::from_f32(f32::NAN));
    let seven = O::from_f32(7.0);
    let mut out = vec![seven; tokens * strides(v)[0]];
    let mut lse = vec![7.0; tokens * heads];
    cpu.run_tensors(
        &plan,
        &TensorRef::strided(&q, [tokens, heads, qk], strides(qk)).unwrap(),
        &kv(&problem, &tensors.parts),
        TensorMut::strided(&mut out, [tokens, heads, v], strides(v)).unwrap(),
        Some(&mut lse),
    )
    .unwrap();
    // To the bit, and nothing is written in the gaps.
    let right = spread(&dense, heads, v, gaps, seven);
    prop_assert_eq!(
        bytemuck::cast_slice::<_, u8>(&out),
        bytemuck::cast_slice::<_, u8>(&right)
    );
    prop_assert_eq!(
        bytemuck::cast_slice::<_, u8>(&lse),
        bytemuck::cast_slice::<_, u8>(&dense_lse)
    );
    Ok(())
}

proptest! {
    #![proptest_config(cases(500))]

    #[test]
    fn gaps_and_erased_types_change_no_bit(problem in small_problem(), gaps in [0..40_usize, 0..40_usize]) {
        the_same_as_dense::<f32, f32, f32>(problem.clone(), gaps)?;
        the_same_as_dense::<bf16, f16, f32>(problem.clone(), gaps)?;
        the_same_as_dense::<f16, f16, f16>(problem, gaps)?;
    }
}

/// The stride of the only token does not matter, not even if it is less than the heads take.
#[test]
fn one_token_may_have_gaps_between_its_heads() {
    let problem = tiny(&Spec::new(4, 2, 16).with_dtype(Dtype::F32).non_causal());
    let (plan, cpu) = (plan_of(&problem), Cpu::new());
    assert_eq!(plan.total_q, 1);
    let tensors: Tensors<f32, f32> =
        Tensors::random(&problem.spec, &problem.batch, problem.layout, 3);
    let (dense, dense_lse) = run::<_, _, f32>(&cpu, &plan, &tensors);
    let right = spread(&dense, 4, 16, [24, 0], 7.0);
    let q = TensorRef::new(&tensors.q, [1, 4, 16]).unwrap();
    for token in [0, 16, 64, 160, 1000] {
        let (mut out, mut lse) = (vec![7.0_f32; 160], vec![7.0; 4]);
        let to = TensorMut::strided(&mut out, [1, 4, 16], [token, 40, 1]).unwrap();
        cpu.run_tensors(&plan, &q, &kv(&problem, &tensors.parts), to, Some(&mut lse))
            .unwrap();
        assert_eq!((&out, &lse), (&right, &dense_lse), "{token}");
    }
}

#[test]
fn queries_may_have_their_heads_before_their_tokens() {
    let mut problem = tiny(&Spec::new(4, 2, 16).with_dtype(Dtype::F32).non_causal());
    problem.batch.qo_indptr = vec![0, 2];
    problem.batch.parts[0].q_indptr = vec![0, 2];
    let (plan, cpu) = (plan_of(&problem), Cpu::new());
    let mut tensors: Tensors<f32, f32> =
        Tensors::random(&problem.spec, &problem.batch, problem.layout, 3);
    let (dense, _) = run::<_, _, f32>(&cpu, &plan, &tensors);
    // [heads, tokens, dim] instead of [tokens, heads, dim].
    let rows: Vec<_> = tensors.q.chunks(16).map(<[f32]>::to_vec).collect();
    tensors.q = (0..8)
        .flat_map(|at| rows[at % 2 * 4 + at / 2].clone())
        .collect();
    let q = TensorRef::new(&tensors.q, [4, 2, 16])
        .unwrap()
        .swap_axes(0, 1);
    let mut out = vec![0.0_f32; dense.len()];
    let to = TensorMut::new(&mut out, [2, 4, 16]).unwrap();
    cpu.run_tensors(&plan, &q, &kv(&problem, &tensors.parts), to, None)
        .unwrap();
    assert_eq!(out, dense);
}

#[test]
fn tensors_that_do_not_fit_the_plan_are_named_and_nothing_is_written() {
    let mut problem = tiny(&Spec::new(4, 2, 16).with_dtype(Dtype::F32).non_causal());
    problem.batch.qo_indptr = vec![0, 2];
    problem.batch.parts[0].q_indptr = vec![0, 2];
    let plan = plan_of(&problem);
    let tensors: Tensors<f32, f32> =
        Tensors::random(&problem.spec, &problem.batch, problem.layout, 1);
    let right = kv(&problem, &tensors.parts);
    let right_q = TensorRef::new(&tensors.q, [2, 4, 16]).unwrap();
    let error = |q: &TensorRef<'_, 3>,
                 kv: &[KvTensors<'_>],
                 shape: [usize; 3],
                 strides: [usize; 3],
                 lse: usize| {
        let (mut out, mut lse) = (vec![7.0_f32; 1000], vec![7.0; lse]);
        let to = TensorMut::strided(&mut out, shape, strides).unwrap();
        let error = Cpu::new()
            .run_tensors(&plan, q, kv, to, Some(&mut lse))
            .unwrap_err();
        assert!(out.iter().chain(&lse).all(|&x| x == 7.0), "{error}");
        error
    };
    let (shape, strides) = ([2, 4, 16], [64, 16, 1]);
    let with_q = |q: &TensorRef<'_, 3>| error(q, &right, shape, strides, 8);
    let with_kv = |k, v| {
        error(
            &right_q,
            &[KvTensors {
                k,
                v,
                scales: KvScales::One,
            }],
            shape,
            strides,
            8,
        )
    };
    let with_out = |shape, strides| error(&right_q, &right, shape, strides, 8);
    let dtype = |name, got| {
        Error::Shape(ShapeError::Dtype {
            name,
            got,
            expected: Dtype::F32,
        })
    };
    let half = [f16::ONE; 2048];
    let half_q = TensorRef::new(&half, [2, 4, 16]).unwrap();
    assert_eq!(with_q(&half_q), dtype("q", Dtype::F16));
    let pool = right[0].v;
    let half_pool = TensorRef::new(&half, pool.shape()).unwrap();
    assert_eq!(with_kv(right[0].k, half_pool), dtype("v", Dtype::F16));
    let extent = |error| match error {
        Error::Extent {
            tensor,
            dimension,
            got,
            ..
        } => (tensor, dimension, got),
        other => panic!("{other:?}"),
    };
    let less_q = TensorRef::new(&tensors.q, [1, 4, 16]).unwrap();
    assert_eq!(extent(with_q(&less_q)), ("q", "tokens", 1));
    assert_eq!(
        extent(with_out([2, 2, 16], strides)),
        ("out", "query heads", 2)
    );
    let [pages, page_size, heads, dim] = pool.shape();
    let floats = vec![0.0_f32; 1 << 16];
    let shaped = |shape| TensorRef::new(&floats, shape).unwrap();
    let fewer = shaped([0, page_size, heads, dim]);
    assert_eq!(extent(with_kv(fewer, pool)), ("the key pool", "pages", 0));
    let longer = shaped([pages, page_size + 1, heads, dim]);
    assert_eq!(
        extent(with_kv(pool, longer)),
        ("the value pool", "tokens in a page", page_size + 1)
    );
    let wider = shaped([pages, page_size, heads, dim * 2]);
    assert_eq!(
        extent(with_kv(pool, wider)),
        ("the value pool", "elements in a head", dim * 2)
    );
    let stride = |error| match error {
        Error::Stride {
            tensor,
            dimension,
            got,
            ..
        } => (tensor, dimension, got),
        other => panic!("{other:?}"),
    };
    // The elements of a head stand side by side, and rows of the output do not overlap.
    let apart = shaped([dim, page_size, heads, pages.max(2)]).swap_axes(0, 3);
    let apart_shape = apart.shape();
    assert_eq!(apart_shape, [pages.max(2), page_size, heads, dim]);
    assert_eq!(stride(with_kv(apart, pool)).1, "the elements of a head");
    assert_eq!(stride(with_out(shape, [16, 32, 1])), ("out", "tokens", 16));
    assert_eq!(stride(with_out(shape, [64, 8, 1])), ("out", "heads", 8));
    assert_eq!(
        stride(with_out(shape, [64, 16, 2])),
        ("out", "the elements of a head", 2)
    );
    assert_eq!(
        error(&right_q, &[], shape, strides, 8),
        Error::Shape(ShapeError::Parts {
            got: 0,
            expected: 1
        })
    );
    let lse = error(&right_q, &right, shape, strides, 7);
    assert!(matches!(
        lse,
        Error::Shape(ShapeError::Length {
            name: "lse",
            got: 7,
            ..
        })
    ));
}

/// Places in a pool are more than 32 bits count. Nothing but its first elements takes memory.
#[test]
fn heads_may_be_gigabytes_apart() {
    const APART: usize = 1 << 31;
    let Ok(mut pool) = bytemuck::allocation::try_zeroed_vec::<u8>(2 * APART + 16) else {
        return;
    };
    for head in 0..3 {
        let value = F8E4M3::from_f32(1.0 + head as f32).0;
        pool[head * APART..][..16].fill(value);
    }
    let pool: &[F8E4M3] = bytemuck::cast_slice(&pool);
    let strides = KvStrides {
        page: 16,
        token: 16,
        head: APART as u32,
        page_size: 1,
    };
    let view = KvView {
        k: pool,
        v: pool,
        k_strides: strides,
        v_strides: strides,
        scales: KvScales::One,
        rope: None,
    };
    // By the kernel of few rows, and by that of many.
    for queries in [1, 100] {
        let mut spec = Spec::new(3, 3, 16)
            .with_dtype(Dtype::F32)
            .with_kv_dtype(Dtype::F8E4M3);
        spec.variant.causal = false;
        let mut table = PageTable::new(1, 1);
        table.push(&[0], 1);
        let (cpu, batch) = (Cpu::new(), Batch::new(vec![0, queries], table));
        let plan = Planner::new().plan(&spec, &batch, &cpu.device(), &PlanOptions::default());
        let q = vec![1.0_f32; queries as usize * 48];
        let mut out = vec![0.0_f32; q.len()];
        cpu.run(&plan.unwrap(), &q, &[view], &mut out, None)
            .unwrap();
        for out in out.chunks(16) {
            let head = out[0] - 1.0;
            assert!(out.iter().all(|&x| x == 1.0 + head), "{out:?}");
        }
        let heads: Vec<f32> = out.chunks(16).take(3).map(|head| head[0]).collect();
        assert_eq!(heads, [1.0, 2.0, 3.0]);
    }
}
