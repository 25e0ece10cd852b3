//! Sampling against the CPU.

use std::cell::Cell;

use half::{bf16, f16};
use proptest::prelude::*;
use tandem_attn::{
    exec::gpu::Gpu,
    problem::Dtype,
    step::{Draw, Sampling, cpu},
    tensor::Element,
};

use super::{
    common::{self, Memory, Rng, Stream, problems::cases, to_f64},
    steps::probabilities,
};

/// What GPU and CPU draw from the same rows, each of so many logits with a gap behind it.
fn both<T: Element>(gpu: &Gpu, rows: &[Vec<T>], gap: usize, draws: &[Draw]) -> [Vec<u32>; 2] {
    let vocabulary = rows[0].len();
    let stride = (vocabulary + gap).next_multiple_of(8);
    let mut padded = Vec::new();
    for row in rows {
        padded.extend_from_slice(row);
        // Larger than all that count.
        padded.resize(padded.len() + stride - vocabulary, T::from_f32(1e4));
    }
    // The last row ends where its memory does.
    padded.truncate((rows.len() - 1) * stride + vocabulary);
    let (logits, draws_memory) = (Memory::new(&padded), Memory::new(draws));
    let tensor = logits
        .tensor(T::DTYPE, [rows.len(), vocabulary])
        .with_stride(0, stride);
    let run = || {
        let (ids, stream) = (Memory::new(&vec![u32::MAX; rows.len()]), Stream::new());
        // SAFETY: everything is there as described until the stream is done.
        unsafe { gpu.sample(&tensor, draws_memory.array(), ids.array(), stream.0) }
            .expect("a good call");
        stream.wait();
        ids.read::<u32>()
    };
    let first = run();
    assert_eq!(first, run(), "the same call draws the same tokens");
    let mut of_cpu = vec![u32::MAX; rows.len()];
    cpu::sample(&rows.concat(), vocabulary, draws, &mut of_cpu).expect("a good call");
    [first, of_cpu]
}

/// The GPU's exponentials are others in their last bits: a draw in hundreds may be the neighbour, none may be a token
/// that does not stay.
fn agree<T: Element>(gpu: &Gpu, rows: &[Vec<T>], gap: usize, samplings: &[Sampling]) -> usize {
    let draws: Vec<Draw> = samplings
        .iter()
        .map(|sampling| sampling.draw(3).unwrap())
        .collect();
    let [got, right] = both(gpu, rows, gap, &draws);
    let mut differing = 0;
    for (((got, right), row), sampling) in got.iter().zip(right).zip(rows).zip(samplings) {
        if *got == right {
            continue;
        }
        differing += 1;
        let wider = Sampling {
            top_p: (sampling.top_p + 1e-4).min(1.0),
            min_p: (sampling.min_p - 1e-4).max(0.0),
            ..*sampling
        };
        let of_token = probabilities(&wider, &to_f64(row));
        let stays = of_token.get(*got as usize).is_some_and(|&p| p > 0.0);
        assert!(
            sampling.temperature > 0.0 && stays,
            "{got} instead of {right} by {sampling:?}"
        );
    }
    differing
}

fn sampling() -> impl Strategy<Value = Sampling> {
    (
        prop_oneof![
            3 => Just(0.0_f32),
            12 => 0.2..2.0_f32,
            1 => Just(Sampling::COLDEST),
            1 => Just(1e6)
        ],
        prop_oneof![2 => Just(0_u32), 2 => 1..60_u32, 1 => 1..3000_u32],
        prop_oneof![1 => Just(1.0_f32), 2 => 0.05..1.0_f32],
        prop_oneof![2 => Just(0.0_f32), 1 => 0.0..0.5_f32],
        any::<u64>(),
    )
        .prop_map(|(temperature, top_k, top_p, min_p, seed)| Sampling {
            temperature,
            top_k,
            top_p,
            min_p,
            seed,
        })
}

fn random_rows<T: Element>(seed: u64, rows: usize, vocabulary: usize, reach: f32) -> Vec<Vec<T>> {
    let mut rng = Rng(seed);
    let mut row = || -> Vec<T> {
        let logits = rng.floats(vocabulary, -reach, reach);
        logits.into_iter().map(T::from_f32).collect()
    };
    (0..rows).map(|_| row()).collect()
}

#[test]
fn gpu_and_cpu_draw_the_same() {
    let Some(gpu) = common::gpu("gpu_and_cpu_draw_the_same") else {
        return;
    };
    let config = cases(96);
    let counts = Cell::new((0, 0));
    let vocabulary = prop_oneof![1..40_usize, 1..5000_usize, Just(8192), Just(20_001)];
    let samplings = prop::collection::vec(sampling(), 1..6);
    let reach = prop_oneof![Just(0.0_f32), Just(1.0), Just(4.0), Just(12.0)];
    proptest!(config, |(vocabulary in vocabulary, samplings in samplings, reach in reach, dtype in 0..3, gap in 0..20_usize, seed in any::<u64>())| {
        let rows = samplings.len();
        let differing = match dtype {
            0 => agree(gpu, &random_rows::<bf16>(seed, rows, vocabulary, reach), gap, &samplings),
            1 => agree(gpu, &random_rows::<f16>(seed, rows, vocabulary, reach), gap, &samplings),
            _ => agree(gpu, &random_rows::<f32>(seed, rows, vocabulary, reach), gap, &samplings),
        };
        let (before, all) = counts.get();
        counts.set((before + differing, all + rows));
    });
    let (differing, all) = counts.get();
    assert!(
        differing * 100 <= all,
        "{differing} of {all} draws are not those of the CPU"
    );
}

/// As models have them: a few tokens share most of the probability, in a vocabulary of Qwen's size and of one that no
/// vector divides.
#[test]
fn whole_vocabularies() {
    let Some(gpu) = common::gpu("whole_vocabularies") else {
        return;
    };
    let hot = Sampling {
        temperature: 0.8,
        seed: 7,
        ..Sampling::GREEDY
    };
    let samplings = [
        Sampling::GREEDY,
        hot,
        Sampling { top_k: 50, ..hot },
        Sampling { top_p: 0.9, ..hot },
        Sampling { min_p: 0.1, ..hot },
        Sampling {
            top_k: 50,
            top_p: 0.95,
            min_p: 0.05,
            ..hot
        },
        Sampling {
            top_k: 5000,
            top_p: 0.999,
            ..hot
        },
    ];
    // Of f32, a warp has more logits than registers for them.
    for vocabulary in [151_936, 50_257] {
        whole_vocabulary::<bf16>(gpu, vocabulary, &samplings);
        whole_vocabulary::<f32>(gpu, vocabulary, &samplings);
    }
}

fn whole_vocabulary<T: Element>(gpu: &Gpu, vocabulary: usize, samplings: &[Sampling]) {
    let mut rows = random_rows::<T>(8, samplings.len(), vocabulary, 4.0);
    for (index, row) in rows.iter_mut().enumerate() {
        let mut rng = Rng(index as u64);
        for _ in 0..60 {
            row[rng.below(vocabulary)] = T::from_f32(rng.between(10.0, 18.0));
        }
    }
    let differing = agree(gpu, &rows, 0, samplings);
    assert!(
        differing <= 1,
        "{differing} draws are not those of the CPU: {vocabulary} {:?}",
        T::DTYPE
    );
}

#[test]
fn a_draw_does_not_depend_on_the_batch() {
    let Some(gpu) = common::gpu("a_draw_does_not_depend_on_the_batch") else {
        return;
    };
    let rows = random_rows::<bf16>(5, 6, 9000, 2.0);
    let draws: Vec<Draw> = (0..6)
        .map(|seed| {
            let min_p = if seed % 2 == 0 { 0.0 } else { 0.02 };
            let sampling = Sampling {
                temperature: 1.0,
                min_p,
                seed,
                ..Sampling::GREEDY
            };
            sampling.draw(seed).unwrap()
        })
        .collect();
    let [together, _] = both(gpu, &rows, 0, &draws);
    for (at, token) in together.iter().enumerate() {
        let [alone, _] = both(gpu, &rows[at..=at], 3, &draws[at..=at]);
        assert_eq!(alone, [*token], "row {at}");
    }
}

/// Rounding leaves little or nothing of the random part of a score.
#[test]
fn equal_logits_at_low_temperatures() {
    let Some(gpu) = common::gpu("equal_logits_at_low_temperatures") else {
        return;
    };
    let cold = Sampling {
        temperature: Sampling::COLDEST,
        ..Sampling::GREEDY
    };
    let draws: Vec<Draw> = (0..24).map(|at| cold.draw(at).unwrap()).collect();
    for logit in [25.0, 3e38] {
        let mut row = vec![f32::MIN; 5000];
        (0..5000).step_by(61).for_each(|token| row[token] = logit);
        let [mut got, right] = both(gpu, &vec![row; draws.len()], 0, &draws);
        assert!(got.iter().all(|token| token % 61 == 0), "{got:?}");
        let differing = got.iter().zip(right).filter(|(got, right)| **got != *right);
        assert!(differing.count() <= 1);
        got.sort_unstable();
        got.dedup();
        // 24 of 82 tokens: 3 draw one that was drawn before, on average.
        assert!(got.len() > 14, "{got:?}");
    }
}

#[test]
fn rows_without_numbers() {
    let Some(gpu) = common::gpu("rows_without_numbers") else {
        return;
    };
    let (nan, none) = (f32::NAN, f32::NEG_INFINITY);
    let rows = [
        vec![nan; 9],
        vec![none; 9],
        vec![nan, none, none, 1.0, 2.0, 2.0, nan, none, -3.0],
        vec![
            0.0,
            1.0,
            f32::INFINITY,
            f32::INFINITY,
            2.0,
            nan,
            none,
            1.0,
            1.0,
        ],
        vec![-0.0, 0.0, -1.0, -2.0, -0.0, 0.0, -9.0, -9.0, none],
    ];
    for sampling in [
        Sampling::GREEDY,
        Sampling {
            temperature: 1.0,
            ..Sampling::GREEDY
        },
        Sampling {
            temperature: 1.0,
            min_p: 0.5,
            ..Sampling::GREEDY
        },
        Sampling {
            temperature: 1.0,
            top_k: 3,
            top_p: 0.5,
            ..Sampling::GREEDY
        },
    ] {
        let draws = [sampling.draw(0).unwrap(); 5];
        let [got, right] = both::<f32>(gpu, &rows, 0, &draws);
        assert_eq!(got, right, "{sampling:?}");
    }
}

#[test]
fn no_rows_draw_nothing() {
    let Some(gpu) = common::gpu("no_rows_draw_nothing") else {
        return;
    };
    let (memory, stream) = (Memory::new(&[0_u64; 2]), Stream::new());
    let logits = memory.tensor(Dtype::BF16, [0, 8]);
    let none = tandem_attn::exec::gpu::DeviceArray::new(0, 0);
    let ids = tandem_attn::exec::gpu::DeviceArray::new(0, 0);
    // SAFETY: nothing is read.
    unsafe { gpu.sample(&logits, none, ids, stream.0) }.expect("nothing to do");
    stream.wait();
}
