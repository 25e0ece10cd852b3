//! On the threads of the current rayon pool, in single precision.
//!
//! Slices are dense, and of any [`Element`] type. Whatever the number of threads, the bits are the same.

mod logits;
mod qkv;
mod rows;
mod sample;

pub use logits::{adjust, log_probs, restore};
pub use qkv::{QkNorm, QkvStep, qkv};
pub use rows::{embed, gate, rms_norm};
pub use sample::sample;

use crate::{Error, checks::extent, step::RmsNorm, tensor::Element};

/// Checks that a slice has whole rows.
fn rows_of(tensor: &'static str, elements: usize, width: usize) -> Result<usize, Error> {
    if width > 0 && elements.is_multiple_of(width) {
        return Ok(elements / width);
    }
    let (dimension, got, rule) = match width {
        0 => ("elements in a row", 0, "at least 1".into()),
        _ => (
            "elements",
            elements,
            format!("a multiple of the {width} of a row"),
        ),
    };
    Err(extent(tensor, dimension, got, rule))
}

/// The factor of a row, before its weights.
fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    // Several sums, so that they fill a vector of the CPU.
    const LANES: usize = 16;
    let mut sums = [0.0_f32; LANES];
    let chunks = x.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (sum, x) in sums.iter_mut().zip(chunk) {
            *sum += x * x;
        }
    }
    for (sum, x) in sums.iter_mut().zip(rest) {
        *sum += x * x;
    }
    let mean = sums.iter().sum::<f32>() / x.len() as f32;
    1.0 / (mean + eps).sqrt()
}

/// Normalises a row and multiplies it by its weights.
fn normalise<T: Element>(norm: RmsNorm, x: &mut [f32], weight: &[T]) {
    let inverse = inverse_rms(x, norm.eps);
    for (x, weight) in x.iter_mut().zip(weight) {
        *x *= inverse * (norm.offset + weight.to_f32());
    }
}
