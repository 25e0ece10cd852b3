//! Measures the limits of the CPU: reading, copying, multiplying and adding.

use std::{hint::black_box, time::Instant};

use rayon::prelude::*;

use super::Ceilings;

/// Loops of debug builds are many times as slow and measure nothing of use: tests run them, but do not wait for them.
const DEBUG: bool = cfg!(debug_assertions);
/// In words: 256 MB, larger than most caches; in debug builds 8 MB.
const WORDS: usize = if DEBUG { 1 << 20 } else { 32 << 20 };
/// Memory that the measurement needs: the source and the target of the copy.
pub(super) const BYTES: u64 = 2 * (WORDS * size_of::<u64>()) as u64;
/// Words that a thread processes at a time.
const PIECE: usize = 1 << 16;
/// Repetitions. The best one counts, because a ceiling is an upper limit.
const TIMES: usize = 5;

/// Measures all three limits.
pub(super) fn measure() -> Ceilings {
    let source: Vec<u64> = (0..WORDS as u64).into_par_iter().collect();
    let mut target = vec![0u64; WORDS];
    let bytes = (WORDS * size_of::<u64>()) as f64;
    let read = best_seconds(|| {
        let sum: u64 = source
            .par_chunks(PIECE)
            .map(|piece| piece.iter().fold(0u64, |sum, &x| sum.wrapping_add(x)))
            .reduce(|| 0, u64::wrapping_add);
        black_box(sum);
    });
    let copy = best_seconds(|| {
        target
            .par_chunks_mut(PIECE)
            .zip(source.par_chunks(PIECE))
            .for_each(|(to, from)| to.copy_from_slice(from));
        black_box(&mut target);
    });
    Ceilings {
        read_bytes_per_s: bytes / read,
        copy_bytes_per_s: 2.0 * bytes / copy,
        flops_per_s: flops_per_second(),
        flops_from_description: false,
    }
}

/// Evicts the contents of the caches by writing other memory.
pub(super) fn flush(memory: &mut Vec<u64>) {
    memory.resize(WORDS, 0);
    memory
        .par_chunks_mut(PIECE)
        .for_each(|piece| piece.iter_mut().for_each(|x| *x = x.wrapping_add(1)));
    black_box(memory);
}

fn best_seconds(mut work: impl FnMut()) -> f64 {
    let times = (0..TIMES).map(|_| {
        let begin = Instant::now();
        work();
        begin.elapsed().as_secs_f64()
    });
    times.fold(f64::INFINITY, f64::min)
}

/// Independent sums: enough to hide the latency of a multiply-add on all machines.
const SUMS: usize = 12;
const STEPS: usize = if DEBUG { 1 << 16 } else { 4 << 20 };

fn flops_per_second() -> f64 {
    let (multiply_add, lanes) = fastest();
    let threads = rayon::current_num_threads();
    let seconds = best_seconds(|| {
        (0..threads)
            .into_par_iter()
            .with_max_len(1)
            .for_each(|_| multiply_add(STEPS));
    });
    (2 * threads * STEPS * SUMS * lanes) as f64 / seconds
}

/// The loop for the widest vectors of this machine, and their width.
fn fastest() -> (fn(usize), usize) {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the feature was detected.
            return (|steps| unsafe { x86::avx512(steps) }, 16);
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: the features were detected.
            return (|steps| unsafe { x86::avx2(steps) }, 8);
        }
    }
    (portable, 4)
}

/// A factor and a term that keep sums below 1. The compiler must not know them.
fn factor_and_term() -> (f32, f32) {
    black_box((0.999, 0.001))
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::{
        arch::x86_64::{_mm256_fmadd_ps, _mm256_set1_ps, _mm512_fmadd_ps, _mm512_set1_ps},
        hint::black_box,
    };

    use super::{SUMS, factor_and_term};

    #[target_feature(enable = "avx512f")]
    pub(super) fn avx512(steps: usize) {
        let (factor, term) = factor_and_term();
        let (factor, term) = (_mm512_set1_ps(factor), _mm512_set1_ps(term));
        let mut sums = [term; SUMS];
        for _ in 0..steps {
            for sum in &mut sums {
                *sum = _mm512_fmadd_ps(*sum, factor, term);
            }
        }
        black_box(sums);
    }

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn avx2(steps: usize) {
        let (factor, term) = factor_and_term();
        let (factor, term) = (_mm256_set1_ps(factor), _mm256_set1_ps(term));
        let mut sums = [term; SUMS];
        for _ in 0..steps {
            for sum in &mut sums {
                *sum = _mm256_fmadd_ps(*sum, factor, term);
            }
        }
        black_box(sums);
    }
}

/// Vectors of 4 elements, which the baseline of every target has. Fused multiply-add is used if the baseline has it.
fn portable(steps: usize) {
    const FUSED: bool = cfg!(any(target_arch = "aarch64", target_feature = "fma"));
    let (factor, term) = factor_and_term();
    let mut sums = [[term; 4]; SUMS];
    for _ in 0..steps {
        for sum in &mut sums {
            *sum = sum.map(|sum| {
                // Without the instruction, `mul_add` would call a slow function.
                if FUSED {
                    sum.mul_add(factor, term)
                } else {
                    sum * factor + term
                }
            });
        }
    }
    black_box(sums);
}
