//! The step around attention on the GPU, against its formulas in f64 and against the CPU.

#[path = "../../common/steps.rs"]
mod steps;

mod graph;
mod heads;
mod logits;
mod refused;
mod rows;
mod sampling;

use crate::common;
use common::Tolerance;
use half::{bf16, f16};
use tandem_attn::{problem::Dtype, tensor::Element};

/// A 16-bit number that nobody computes here: NaN.
const POISON: u16 = 0x7FE1;

/// Random numbers of a type, as bits.
fn random(rng: &mut common::Rng, dtype: Dtype, count: usize, reach: f32) -> Vec<u16> {
    let bits = |x: f32| match dtype {
        Dtype::BF16 => bf16::from_f32(x).to_bits(),
        _ => f16::from_f32(x).to_bits(),
    };
    rng.floats(count, -reach, reach)
        .into_iter()
        .map(bits)
        .collect()
}

/// 16-bit numbers.
fn wide(dtype: Dtype, bits: &[u16]) -> Vec<f64> {
    common::decode(dtype, bytemuck::cast_slice(bits))
}

/// Whether numbers are right, in rows that have gaps between them, which are poison still.
fn check(what: &str, dtype: Dtype, got: &[u16], right: &[f64], width: usize, stride: usize) {
    let tolerance = Tolerance::of(dtype);
    for (row, right) in right.chunks(width).enumerate() {
        let all = &got[row * stride..(row * stride + stride).min(got.len())];
        let (got, gap) = all.split_at(width);
        for (at, (got, right)) in wide(dtype, got).into_iter().zip(right).enumerate() {
            // Sine and cosine have an absolute error, and what they multiply cancels.
            let limit = 4e-5 + tolerance.relative * right.abs();
            assert!(
                (got - right).abs() <= limit,
                "{what}: {got} instead of {right} at {at} of row {row}"
            );
        }
        assert!(
            gap.iter().all(|&x| x == POISON),
            "{what}: written between rows {row} and the next"
        );
    }
}

/// Whether a computed scale makes the largest of these numbers the largest of e4m3.
fn is_scale_of(got: f32, right: &[f64]) -> bool {
    let largest = right.iter().fold(0.0_f64, |most, x| most.max(x.abs()));
    // Sine and cosine have an absolute error.
    (f64::from(got) * 448.0 - largest).abs() <= largest * 1e-5 + 4e-5
}

/// The nearest of 8 bits, and a little more.
fn near_in_8_bits(got: tandem_attn::tensor::F8E4M3, scale: f32, right: f64) -> bool {
    let got = f64::from(got.to_f32() * scale);
    // Half a step of the type, and the absolute error of sine and cosine.
    (got - right).abs() <= right.abs().max(f64::from(scale) / 64.0) / 15.9 + 1e-5
}
