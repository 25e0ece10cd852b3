//! The CPU executor against naive attention in f64, and properties that need no oracle.
//!
//! `TANDEM_CASES=100000 cargo test --release --test cpu` is the long run.

#[path = "common/numeric.rs"]
mod numeric;
#[path = "common/problems.rs"]
mod problems;

use half::{bf16, f16};
use kernels_gpu::{
    abi::VariantParams,
    math::Real,
    variant::{Key, Pair, Query, Sigmoid, Variant},
};
use numeric::{Tolerance, compare, to_f64};
use problems::{Pools, Problem, Tensors, batch, cases, problem};
use proptest::prelude::*;
use tandem_attn::{
    Error,
    abi::DIRECT,
    exec::Cpu,
    kv::KvView,
    plan::{BrokenPlan, DeviceDescription, Plan, PlanOptions, Planner, SplitMode},
    problem::{Batch, Dtype, KvLayout, PageTable, Spec},
    reference,
    tensor::{Element, F8E4M3, F8E5M2, ShapeError},
};

/// Outputs and LSEs as f64.
type Result64 = (Vec<f64>, Vec<f64>);

fn plan_of(problem: &Problem) -> Plan {
    let Problem {
        spec,
        batch,
        device,
        options,
        ..
    } = problem;
    let plan = Planner::new()
        .plan(spec, batch, device, options)
        .expect("the problem can be planned");
    plan.verify(batch).expect("the plan computes the batch");
    plan
}

fn run<Q: Element, T: Element, O: Element>(
    cpu: &Cpu,
    plan: &Plan,
    tensors: &Tensors<Q, T>,
) -> (Vec<O>, Vec<f32>) {
    let heads = (plan.total_q * plan.spec.q_heads) as usize;
    let mut out = vec![O::from_f32(f32::NAN); heads * plan.spec.head_dim_v as usize];
    let mut lse = vec![f32::NAN; heads];
    cpu.run(plan, &tensors.q, &tensors.views(), &mut out, Some(&mut lse))
        .expect("plan and tensors fit");
    (out, lse)
}

fn widen<O: Element>((out, lse): &(Vec<O>, Vec<f32>)) -> Result64 {
    (to_f64(out), to_f64(lse))
}

fn agree(
    spec: &Spec,
    got: &Result64,
    right: &Result64,
    out: Tolerance,
) -> Result<(), TestCaseError> {
    let heads = spec.q_heads as usize;
    let tokens = right.1.len() / heads;
    let lse = Tolerance {
        absolute: 1e-5,
        relative: 1e-5,
    };
    compare(
        "out",
        &[tokens, heads, spec.head_dim_v as usize],
        &got.0,
        &right.0,
        out,
    )
    .map_err(TestCaseError::fail)?;
    compare("lse", &[tokens, heads, 1], &got.1, &right.1, lse).map_err(TestCaseError::fail)
}

fn against_reference<Q: Element, T: Element, O: Element>(
    cpu: &Cpu,
    mut problem: Problem,
) -> Result<(), TestCaseError> {
    problem.spec.q_dtype = Q::DTYPE;
    problem.spec.kv_dtype = T::DTYPE;
    problem.spec.out_dtype = O::DTYPE;
    let Problem {
        spec,
        batch,
        layout,
        seed,
        ..
    } = &problem;
    let tensors: Tensors<Q, T> = Tensors::random(spec, batch, *layout, *seed);
    let right = tensors.reference(spec, batch);
    let got = run::<Q, T, O>(cpu, &plan_of(&problem), &tensors);
    agree(
        spec,
        &widen(&got),
        &(right.out, right.lse),
        Tolerance::of(O::DTYPE),
    )
}

proptest! {
    #![proptest_config(cases(1500))]

    #[test]
    fn f32_is_the_reference(problem in problem()) {
        against_reference::<f32, f32, f32>(&Cpu::new(), problem)?;
    }

    #[test]
    fn bf16_is_the_reference(problem in problem()) {
        against_reference::<bf16, bf16, bf16>(&Cpu::new(), problem)?;
    }
}

proptest! {
    #![proptest_config(cases(300))]

    #[test]
    fn f16_is_the_reference(problem in problem()) {
        against_reference::<f16, f16, f16>(&Cpu::new(), problem)?;
    }

    #[test]
    fn eight_bit_keys_are_the_reference(problem in problem()) {
        against_reference::<bf16, F8E4M3, bf16>(&Cpu::new(), problem.clone())?;
        against_reference::<f16, F8E5M2, f32>(&Cpu::new(), problem)?;
    }

    #[test]
    fn portable_code_is_the_reference(problem in problem()) {
        against_reference::<f32, f32, f32>(&Cpu::portable(), problem)?;
    }

    /// Same plan, same bits: with any number of threads, with or without LSE, and a second time.
    #[test]
    fn threads_change_no_bit(mut problem in problem()) {
        problem.spec = problem.spec.with_dtype(Dtype::F32);
        let tensors: Tensors<f32, f32> = Tensors::random(&problem.spec, &problem.batch, problem.layout, problem.seed);
        let plan = plan_of(&problem);
        let cpu = Cpu::new();
        let bits = |(out, lse): (Vec<f32>, Vec<f32>)| -> Vec<u32> { out.iter().chain(&lse).map(|x| x.to_bits()).collect() };
        let once = bits(run(&cpu, &plan, &tensors));
        for threads in [1, 2, 5] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads start");
            prop_assert_eq!(&once, &pool.install(|| bits(run(&cpu, &plan, &tensors))));
        }
        let mut out = vec![0.0f32; tensors.q.len() / problem.spec.head_dim_qk as usize * problem.spec.head_dim_v as usize];
        cpu.run(&plan, &tensors.q, &tensors.views(), &mut out, None).expect("plan and tensors fit");
        prop_assert!(out.iter().map(|x| x.to_bits()).eq(once[..out.len()].iter().copied()));
    }

    /// Where all values are the same, so are all outputs.
    #[test]
    fn constant_values_give_that_constant(mut problem in problem()) {
        problem.spec = problem.spec.with_dtype(Dtype::F32);
        let Problem { spec, batch, layout, seed, .. } = &problem;
        let mut tensors: Tensors<f32, f32> = Tensors::random(spec, batch, *layout, *seed);
        for x in tensors.parts.iter_mut().flat_map(|part| &mut part.v).filter(|x| !x.is_nan()) {
            *x = 0.75;
        }
        let (out, lse) = run::<_, _, f32>(&Cpu::new(), &plan_of(&problem), &tensors);
        for (out, lse) in out.chunks(spec.head_dim_v as usize).zip(lse) {
            let right = if lse == f32::NEG_INFINITY { 0.0 } else { 0.75 };
            prop_assert!(out.iter().all(|&x| (x - right).abs() < 1e-5), "{:?} instead of {}", out, right);
        }
    }

    /// The order of requests is the order of their outputs, and nothing else.
    #[test]
    fn permuting_requests_permutes_outputs(
        mut problem in problem(), batch in batch(), order in any::<prop::sample::Index>(),
    ) {
        problem.spec = problem.spec.with_dtype(Dtype::F32);
        problem.batch = batch;
        let fixed = 2 * problem.batch.parts[0].table.page_size;
        // Results are bitwise independent of the rest of the batch only where the cuts are.
        problem.options.split = SplitMode::Fixed { tokens: fixed };
        let spec = problem.spec;
        let tensors: Tensors<f32, f32> = Tensors::random(&spec, &problem.batch, problem.layout, problem.seed);
        let (out, lse) = run::<_, _, f32>(&Cpu::new(), &plan_of(&problem), &tensors);

        let requests = problem.batch.requests();
        let shift = order.index(requests.max(1));
        let order: Vec<usize> = (0..requests).map(|r| (r + shift) % requests).rev().collect();
        let tokens = |r: usize| problem.batch.qo_indptr[r] as usize..problem.batch.qo_indptr[r + 1] as usize;
        let rows = |width: u32, x: &[f32]| -> Vec<f32> {
            let row = (spec.q_heads * width) as usize;
            order.iter().flat_map(|&r| x[tokens(r).start * row..tokens(r).end * row].to_vec()).collect()
        };
        let table = &problem.batch.parts[0].table;
        let mut permuted_table = PageTable::new(table.page_size, table.pool_pages);
        let mut qo_indptr = vec![0];
        for &r in &order {
            permuted_table.push(table.pages(r), table.kv_len(r));
            qo_indptr.push(qo_indptr[qo_indptr.len() - 1] + problem.batch.q_len(r));
        }
        let permuted = Problem { batch: Batch::new(qo_indptr, permuted_table), ..problem.clone() };
        let permuted_tensors = Tensors { q: rows(spec.head_dim_qk, &tensors.q), ..tensors.clone() };
        let got = run::<_, _, f32>(&Cpu::new(), &plan_of(&permuted), &permuted_tensors);
        let right = (rows(spec.head_dim_v, &out), rows(1, &lse));
        agree(&spec, &widen(&got), &widen(&right), Tolerance { absolute: 1e-5, relative: 1e-5 })?;
    }
}

/// ALiBi, a band mask, and a change to each tensor: every hook does something that would be missed.
#[derive(Clone, Copy)]
struct Everything(VariantParams);

impl Everything {
    fn turn<R: Real>([x, y]: [R; 2], angle: u32) -> [R; 2] {
        let (sin, cos) = ((angle as f32 * 0.1).sin(), (angle as f32 * 0.1).cos());
        let (sin, cos) = (R::from_f32(sin), R::from_f32(cos));
        [x * cos - y * sin, x * sin + y * cos]
    }
}

impl Variant for Everything {
    const TRANSFORMS_LOGITS: bool = true;
    const MASKS: bool = true;
    const TRANSFORMS_QUERY: bool = true;
    const TRANSFORMS_KEY: bool = true;
    const TRANSFORMS_VALUE: bool = true;
    const TRANSFORMS_OUTPUT: bool = true;

    fn params(&self) -> &VariantParams {
        &self.0
    }

    fn logit<R: Real>(&self, dot: R, at: Pair) -> R {
        let distance = R::from_f32((at.position - at.key as i32) as f32);
        dot * R::from_f32(self.0.scale_log2) - distance * R::from_f32(0.01 * (at.head + 1) as f32)
    }

    fn visible(&self, at: Pair) -> bool {
        !(at.key + at.token + at.head).is_multiple_of(3)
    }

    fn query<R: Real>(&self, x: [R; 2], dim: u32, at: Query) -> [R; 2] {
        Self::turn(x, at.position as u32 % 64 + dim + at.head)
    }

    fn key<R: Real>(&self, x: [R; 2], dim: u32, at: Key) -> [R; 2] {
        Self::turn(x, at.position % 64 + dim + at.head)
    }

    fn value<R: Real>(&self, x: [R; 2], dim: u32, at: Key) -> [R; 2] {
        Self::turn(x, at.position % 7 + dim)
    }

    fn output<R: Real>(&self, x: [R; 2], dim: u32, at: Query) -> [R; 2] {
        Self::turn(x, at.token + at.head + dim)
    }
}

fn variant_against_reference<V: Variant>(
    problem: &Problem,
    variant: &V,
) -> Result<(), TestCaseError> {
    let Problem {
        spec,
        batch,
        layout,
        seed,
        ..
    } = problem;
    let tensors: Tensors<f32, f32> = Tensors::random(spec, batch, *layout, *seed);
    let right = reference::attention_with(variant, spec, batch, &tensors.q, &tensors.views())
        .expect("they fit");
    let plan = plan_of(problem);
    let mut out = vec![f32::NAN; right.out.len()];
    let mut lse = vec![f32::NAN; right.lse.len()];
    Cpu::new()
        .run_with(
            variant,
            &plan,
            &tensors.q,
            &tensors.views(),
            &mut out,
            Some(&mut lse),
        )
        .expect("they fit");
    // Sums of weights that do not add up to one may be as large as there are keys.
    let absolute = if V::SOFTMAX { 1e-5 } else { 1e-3 };
    agree(
        spec,
        &widen(&(out, lse)),
        &(right.out, right.lse),
        Tolerance {
            absolute,
            relative: 1e-5,
        },
    )
}

proptest! {
    #![proptest_config(cases(300))]

    #[test]
    fn all_hooks_run_as_in_the_reference(mut problem in problem()) {
        problem.spec = problem.spec.with_dtype(Dtype::F32);
        let params = problem.spec.variant_params();
        variant_against_reference(&problem, &Everything(params))?;
        variant_against_reference(&problem, &Sigmoid { params, bias: -1.0 })?;
    }
}

/// One request of one query and one key.
fn tiny(spec: &Spec) -> Problem {
    let mut table = PageTable::new(16, 4);
    table.push(&[2], 1);
    Problem {
        spec: *spec,
        batch: Batch::new(vec![0, 1], table),
        layout: KvLayout::Nhd,
        device: DeviceDescription::named("cpu").expect("it is built in"),
        options: PlanOptions::default(),
        seed: 1,
    }
}

#[test]
fn one_key_gives_its_value() {
    let problem = tiny(&Spec::new(8, 2, 128));
    let tensors: Tensors<bf16, bf16> =
        Tensors::random(&problem.spec, &problem.batch, problem.layout, 1);
    let (out, _) = run::<_, _, bf16>(&Cpu::new(), &plan_of(&problem), &tensors);
    let view = tensors.parts[0].view();
    for (head, out) in out.chunks(128).enumerate() {
        assert_eq!(out, view.value(2, 0, head as u32 / 4, 128), "head {head}");
    }
}

#[test]
fn a_batch_of_nothing_runs() {
    let problem = Problem {
        batch: Batch::new(vec![0], PageTable::new(16, 0)),
        ..tiny(&Spec::new(8, 2, 128))
    };
    let tensors: Tensors<bf16, bf16> =
        Tensors::random(&problem.spec, &problem.batch, problem.layout, 1);
    assert_eq!(
        run::<_, _, bf16>(&Cpu::new(), &plan_of(&problem), &tensors),
        (vec![], vec![])
    );
}

#[test]
fn nan_keys_stay_in_their_rows() {
    let mut table = PageTable::new(4, 8);
    table.push(&[0, 1], 8);
    table.push(&[2, 3], 8);
    let problem = Problem {
        batch: Batch::new(vec![0, 1, 12], table.clone()),
        ..tiny(&Spec::new(4, 1, 32).with_dtype(Dtype::F32).non_causal())
    };
    let mut tensors: Tensors<f32, f32> =
        Tensors::random(&problem.spec, &problem.batch, problem.layout, 1);
    let Pools { k, .. } = &mut tensors.parts[0];
    k[5 * 32] = f32::NAN; // a key of page 1
    let (out, lse) = run::<_, _, f32>(&Cpu::new(), &plan_of(&problem), &tensors);
    assert!(
        out[..4 * 32].iter().chain(&lse[..4]).all(|x| x.is_nan()),
        "a NaN that is seen shows"
    );
    assert!(out[4 * 32..].iter().chain(&lse[4..]).all(|x| x.is_finite()));
}

#[test]
fn wrong_tensors_are_named() {
    let problem = tiny(&Spec::new(8, 2, 128));
    let plan = plan_of(&problem);
    let tensors: Tensors<bf16, bf16> =
        Tensors::random(&problem.spec, &problem.batch, problem.layout, 1);
    let (q, views) = (&tensors.q[..], tensors.views());
    let cpu = Cpu::new();
    let mut out = vec![bf16::ZERO; 1024];
    let mut lse = [0.0; 8];
    let mut error = |q: &[bf16], kv: &[KvView<'_, bf16>], len: usize, lse_len: usize| {
        cpu.run(&plan, q, kv, &mut out[..len], Some(&mut lse[..lse_len]))
            .expect_err("something is wrong")
    };
    let length = |name, got, shape, expected| {
        Error::Shape(ShapeError::Length {
            name,
            got,
            shape,
            expected,
        })
    };
    assert_eq!(
        error(&q[1..], &views, 1024, 8),
        length("q", 1023, "[total_q, q_heads, head_dim_qk]", 1024)
    );
    assert_eq!(
        error(q, &views, 1000, 8),
        length("out", 1000, "[total_q, q_heads, head_dim_v]", 1024)
    );
    assert_eq!(
        error(q, &views, 1024, 7),
        length("lse", 7, "[total_q, q_heads]", 8)
    );
    assert_eq!(
        error(q, &[], 1024, 8),
        Error::Shape(ShapeError::Parts {
            got: 0,
            expected: 1
        })
    );
    let short = KvView {
        k: &views[0].k[..100],
        ..views[0]
    };
    assert!(matches!(
        error(q, &[short], 1024, 8),
        Error::Shape(ShapeError::PoolTooSmall { tensor: "k", .. })
    ));

    let floats = vec![0.0f32; 1024];
    let expected = ShapeError::Dtype {
        name: "q",
        got: Dtype::F32,
        expected: Dtype::BF16,
    };
    assert_eq!(
        cpu.run(&plan, &floats, &views, &mut out, None),
        Err(expected.into())
    );
}

#[test]
fn broken_plans_are_refused() {
    let mut table = PageTable::new(16, 64);
    table.push(&(0..40).collect::<Vec<_>>(), 640);
    table.push(&[50], 3);
    let options = PlanOptions {
        split: SplitMode::Fixed { tokens: 64 },
        ..PlanOptions::default()
    };
    let problem = Problem {
        batch: Batch::new(vec![0, 20, 21], table),
        options,
        ..tiny(&Spec::new(8, 2, 128))
    };
    let tensors: Tensors<bf16, bf16> =
        Tensors::random(&problem.spec, &problem.batch, problem.layout, 1);
    let good = plan_of(&problem);
    let direct = good
        .items
        .iter()
        .position(|item| item.is_gathered())
        .expect("the decode");
    let row = good.items[direct].rows_begin as usize;
    assert_eq!(good.rows[row].slot, DIRECT);
    let error = |break_it: &dyn Fn(&mut Plan)| {
        let mut plan = good.clone();
        break_it(&mut plan);
        let mut out = vec![bf16::ZERO; tensors.q.len()];
        match Cpu::new().run(&plan, &tensors.q, &tensors.views(), &mut out, None) {
            Err(Error::BrokenPlan(BrokenPlan { array, field, .. })) => (array, field),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(error(&|plan| plan.items[0].part = 9), ("items", "part"));
    assert_eq!(
        error(&|plan| plan.items[0].table = 1 << 30),
        ("items", "table")
    );
    assert_eq!(
        error(&|plan| plan.items[0].kv_begin = u32::MAX),
        ("items", "kv_begin")
    );
    assert_eq!(
        error(&|plan| plan.items[0].rows = u32::MAX),
        ("items", "rows_begin")
    );
    assert_eq!(
        error(&|plan| plan.items[direct].rows_begin = u32::MAX),
        ("items", "rows_begin")
    );
    assert_eq!(error(&|plan| plan.rows[row].token = 0), ("merges", "token"));
    assert_eq!(
        error(&|plan| plan.rows[row].token = 1000),
        ("items", "token")
    );
    assert_eq!(
        error(&|plan| plan.rows[row].slot = plan.slots),
        ("items", "slot")
    );
    assert_eq!(error(&|plan| plan.rows[row].slot = 0), ("items", "slot"));
    assert_eq!(
        error(&|plan| plan.merge_slots[0] = plan.slots),
        ("merges", "slot")
    );
    assert_eq!(
        error(&|plan| plan.merges[0].slots = 1 << 30),
        ("merges", "slots_begin")
    );
    assert_eq!(
        error(&|plan| plan.merges.truncate(3)),
        ("tokens", "number of items")
    );
    assert_eq!(error(&|plan| plan.page_ids.truncate(3)), ("parts", "pages"));
}

/// Merging the states of any cut is the state of the whole: the same batch under every split.
#[test]
fn any_split_is_no_split() {
    let mut table = PageTable::new(16, 200);
    table.push(&(0..130).collect::<Vec<_>>(), 2075);
    let spec = Spec::new(8, 2, 64).with_dtype(Dtype::F32);
    let problem = Problem {
        batch: Batch::new(vec![0, 1], table),
        ..tiny(&spec)
    };
    let tensors: Tensors<f32, f32> = Tensors::random(&spec, &problem.batch, problem.layout, 3);
    let with = |split| {
        let options = PlanOptions {
            split,
            ..PlanOptions::default()
        };
        let plan = plan_of(&Problem {
            options,
            ..problem.clone()
        });
        (
            plan.items.len(),
            widen(&run::<_, _, f32>(&Cpu::new(), &plan, &tensors)),
        )
    };
    let (items, whole) = with(SplitMode::Off);
    assert_eq!(items, 1);
    for tokens in [16, 48, 512, 2064] {
        let (items, cut) = with(SplitMode::Fixed { tokens });
        assert_eq!(items, 2075usize.div_ceil(tokens as usize));
        agree(&spec, &cut, &whole, Tolerance::of(Dtype::F32)).unwrap();
    }
}
