//! Normalisation, gates, embeddings.

use half::{bf16, f16};
use tandem_attn::{
    step::{
        Activation, RmsNorm,
        cpu::{embed, gate, rms_norm},
    },
    tensor::Element,
};

use super::{
    numeric::{Rng, Tolerance, to_f64},
    steps,
};

fn random<T: Element>(seed: u64, count: usize, reach: f32) -> Vec<T> {
    let floats = Rng(seed).floats(count, -reach, reach);
    floats.into_iter().map(T::from_f32).collect()
}

fn compare<T: Element>(what: &str, got: &[T], right: &[f64]) {
    assert_eq!(got.len(), right.len());
    let tolerance = Tolerance::of(T::DTYPE);
    for (i, (&got, &right)) in got.iter().zip(right).enumerate() {
        let off = (f64::from(got.to_f32()) - right).abs();
        let limit = tolerance.absolute + tolerance.relative * right.abs();
        assert!(off <= limit, "{what}[{i}] is {got:?} instead of {right}");
    }
}

fn norms<T: Element>() {
    for (tokens, width) in [(3, 1), (5, 7), (2, 4096), (9, 80)] {
        for norm in [RmsNorm::new(1e-6), RmsNorm::gemma(1e-5)] {
            let (x, weight) = (
                random::<T>(1, tokens * width, 3.0),
                random::<T>(2, width, 1.5),
            );
            let mut out = vec![T::zeroed(); x.len()];
            rms_norm(norm, &x, &weight, None, &mut out).expect("a good call");
            let right = steps::rms_norm(norm, &to_f64(&x), &to_f64(&weight));
            compare("out", &out, &right);

            let mut residual = random::<T>(3, x.len(), 30.0);
            let sums: Vec<_> = to_f64(&residual)
                .iter()
                .zip(to_f64(&x))
                .map(|(a, b)| a + b)
                .collect();
            rms_norm(norm, &x, &weight, Some(&mut residual), &mut out).expect("a good call");
            compare("the residual", &residual, &sums);
            let right = steps::rms_norm(norm, &to_f64(&residual), &to_f64(&weight));
            compare("out behind the residual", &out, &right);
        }
    }
}

#[test]
fn norms_are_those_of_the_formula() {
    norms::<f32>();
    norms::<bf16>();
    norms::<f16>();
}

fn gates<T: Element>() {
    for activation in [Activation::Silu, Activation::GeluTanh] {
        let (tokens, width) = (7, 33);
        let mut both = random::<T>(4, tokens * 2 * width, 9.0);
        both[0] = T::from_f32(-300.0);
        both[1] = T::from_f32(300.0);
        let mut out = vec![T::zeroed(); tokens * width];
        gate(activation, &both, width, &mut out).expect("a good call");
        let both = to_f64(&both);
        let right: Vec<f64> = both
            .chunks(2 * width)
            .flat_map(|row| {
                let (gates, ups) = row.split_at(width);
                let one = |(&gate, up): (&f64, &f64)| steps::activate(activation, gate) * up;
                gates.iter().zip(ups).map(one).collect::<Vec<_>>()
            })
            .collect();
        compare("out", &out, &right);
    }
}

#[test]
fn gates_are_those_of_the_formulas() {
    gates::<f32>();
    gates::<bf16>();
    gates::<f16>();
}

#[test]
fn embeddings_are_rows_times_the_scale() {
    let table = random::<bf16>(5, 11 * 24, 1.0);
    let ids = [10, 0, 3, 3, 7];
    for scale in [1.0, 33.5] {
        let mut out = vec![bf16::ZERO; ids.len() * 24];
        embed(&table, 24, &ids, scale, &mut out).expect("a good call");
        for (out, &id) in out.chunks(24).zip(&ids) {
            for (&out, &x) in out.iter().zip(&table[id as usize * 24..]) {
                assert_eq!(out, bf16::from_f32(x.to_f32() * scale));
            }
        }
    }
}
