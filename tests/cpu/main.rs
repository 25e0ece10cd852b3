//! The CPU executor against naive attention in f64, and properties that need no oracle.
//!
//! `TANDEM_CASES=100000 cargo test --release --test cpu` is the long run.

#[path = "../common/adversarial.rs"]
mod adversarial;
mod adversarial_numbers;
mod batch_invariance;
#[path = "blocks.rs"]
mod block_masks;
#[path = "../common/blocks.rs"]
mod blocks;
mod by_head;
#[path = "../common/heads.rs"]
mod heads;
mod hooks;
mod latent_656;
#[path = "../common/latent_parts.rs"]
mod latent_parts;
mod masks;
#[path = "../common/numeric.rs"]
mod numeric;
mod options;
#[path = "../common/problems/mod.rs"]
mod problems;
mod refused;
mod results;
mod rotary;
mod scales;
mod step;
mod strided;
mod two_pools;

use half::{bf16, f16};
use numeric::{Tolerance, compare, to_f64};
use problems::{
    Pools, Problem, Tensors, alibi, cases, distance_bias, enrich, heads as of_heads, problem,
    sigmoid, sinks, slopes, small_problem, vary_hooks,
};
use proptest::prelude::*;
use tandem_attn::{
    exec::Cpu,
    plan::{DeviceDescription, Plan, PlanOptions, Planner},
    problem::{Batch, Dtype, KvLayout, PageTable, Spec},
    tensor::{Element, F8E4M3, F8E5M2},
    variants::{DISTANCE_BIAS, SIGMOID},
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
    let spec = &plan.spec;
    let (views, sinks, slopes) = (tensors.views(), sinks(spec), slopes(spec));
    let (q, out_lse, heads) = (&tensors.q, Some(&mut lse[..]), of_heads(&sinks));
    let ran = match spec.variant.hooks {
        Some(name) if name == SIGMOID.name => {
            let sigmoid = sigmoid(spec);
            cpu.run_with(&sigmoid, plan, q, &views, &mut out, out_lse, &heads)
        }
        Some(name) if name == DISTANCE_BIAS.name => {
            let bias = distance_bias(spec, &slopes);
            cpu.run_with(&bias, plan, q, &views, &mut out, out_lse, &heads)
        }
        Some(_) => {
            let alibi = alibi(spec, &slopes);
            cpu.run_with(&alibi, plan, q, &views, &mut out, out_lse, &heads)
        }
        None => cpu.run_heads(plan, q, &views, &mut out, out_lse, &heads),
    };
    ran.expect("plan and tensors fit");
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
    enrich(&mut problem.spec, &mut problem.batch, problem.seed);
    vary_hooks(&mut problem.spec, problem.seed);
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
    #![proptest_config(cases(20_000))]

    /// Many batches of few and short requests: every way that masks, tiles, cuts and merges can meet.
    #[test]
    fn small_batches_are_the_reference(problem in small_problem()) {
        against_reference::<f32, f32, f32>(&Cpu::new(), problem.clone())?;
        against_reference::<bf16, bf16, bf16>(&Cpu::new(), problem)?;
    }
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
        problem.spec.latent = false;
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
