//! Every hook of a variant, against the reference with the same variant.

use kernels_gpu::{
    abi::VariantParams,
    math::Real,
    variant::{Derived as _, Hook, Key, Pair, Query, Sigmoid, Variant},
};
use proptest::prelude::*;
use tandem_attn::{
    exec::Cpu,
    problem::{Batch, Dtype, PageTable, Spec},
    reference,
    variants::{ALIBI, Alibi},
};

use crate::{
    agree,
    numeric::Tolerance,
    plan_of,
    problems::{Problem, Tensors, alibi, cases, heads as of_heads, problem, sinks},
    tiny, widen,
};

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
    fn params(&self) -> &VariantParams {
        &self.0
    }

    fn logit<R: Real>(&self, dot: R, at: Pair) -> impl Hook<R> {
        let distance = R::from_f32(at.distance);
        dot * R::from_f32(self.0.scale_log2) - distance * R::from_f32(0.01 * (at.head + 1) as f32)
    }

    fn visible(&self, at: Pair) -> impl Hook<bool> {
        !(at.key + at.token + at.head).is_multiple_of(3)
    }

    fn query<R: Real>(&self, x: [R; 2], dim: u32, at: Query) -> impl Hook<[R; 2]> {
        Self::turn(x, at.position as u32 % 64 + dim + at.head)
    }

    fn key<R: Real>(&self, x: [R; 2], dim: u32, at: Key) -> impl Hook<[R; 2]> {
        Self::turn(x, at.position % 64 + dim + at.head)
    }

    fn value<R: Real>(&self, x: [R; 2], dim: u32, at: Key) -> impl Hook<[R; 2]> {
        Self::turn(x, at.position % 7 + dim)
    }

    fn output<R: Real>(&self, x: [R; 2], dim: u32, at: Query) -> impl Hook<[R; 2]> {
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
    let sinks = sinks(spec);
    let (views, heads) = (tensors.views(), of_heads(&sinks));
    let right = reference::attention_with(variant, spec, batch, &tensors.q, &views, &heads)
        .expect("they fit");
    let plan = plan_of(problem);
    let mut out = vec![f32::NAN; right.out.len()];
    let mut lse = vec![f32::NAN; right.lse.len()];
    Cpu::new()
        .run_with(
            variant,
            &plan,
            &tensors.q,
            &views,
            &mut out,
            Some(&mut lse),
            &heads,
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

#[test]
fn a_linear_bias_is_the_slope_times_the_distance() {
    let spec = Spec::new(2, 1, 64).with_hooks(&ALIBI);
    let slopes = [0.5_f32, 0.25];
    let alibi = alibi(&spec, &slopes);
    let query = Query {
        token: 0,
        head: 1,
        position: 10,
    };
    let at = Pair::new(&alibi, query, 4);
    let natural = alibi.base_2(3.0_f64, at) / std::f64::consts::LOG2_E;
    assert!(
        (natural - (3.0 * 0.125 - 0.25 * 6.0)).abs() < 1e-6,
        "{natural}"
    );
    // What kernels compute in its place.
    const { assert!(Alibi::LINEAR && Alibi::KEEPS_UNIT) };
    let logit = 3.0 + f64::from(at.of_row) * f64::from(at.distance);
    assert_eq!(alibi.logit(3.0_f64, at).plain(), logit);
    assert_eq!(at.further(2).distance, 4.0);
}

/// Linear biases from tables: a key that a row does not see has no entry.
#[derive(Clone, Copy)]
struct OnlySeen<'a> {
    params: VariantParams,
    tokens: u32,
    biases: &'a [f32],
}

impl OnlySeen<'_> {
    fn bias(&self, at: Pair) -> f32 {
        assert!(at.token < self.tokens, "token {}", at.token);
        let distance = at.position.checked_sub_unsigned(at.key).expect("a key");
        self.biases[usize::try_from(distance).expect("no later key")]
    }
}

impl Variant for OnlySeen<'_> {
    fn params(&self) -> &VariantParams {
        &self.params
    }

    fn logit<R: Real>(&self, dot: R, at: Pair) -> impl Hook<R> {
        dot * R::from_f32(self.params.scale_log2) - R::from_f32(self.bias(at))
    }

    fn visible(&self, at: Pair) -> impl Hook<bool> {
        self.bias(at) != 3.0
    }
}

/// Few rows and many, whose tiles have keys that only some of their rows see.
#[test]
fn hooks_are_not_asked_for_keys_that_a_row_does_not_see() {
    let biases: Vec<f32> = (0..30_u8).map(f32::from).collect();
    for tokens in [1, 3, 5, 40, 150] {
        let mut spec = Spec::new(4, 2, 32).with_dtype(Dtype::F32);
        spec.variant.window_left = Some(29);
        let mut table = PageTable::new(16, 20);
        table.push(&(0..12).collect::<Vec<_>>(), 180);
        let problem = Problem {
            batch: Batch::new(vec![0, tokens], table),
            ..tiny(&spec)
        };
        let variant = OnlySeen {
            params: spec.variant_params(),
            tokens,
            biases: &biases,
        };
        variant_against_reference(&problem, &variant).unwrap();
    }
}
