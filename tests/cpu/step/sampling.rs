//! Which tokens are drawn, and how often.

use proptest::prelude::*;
use tandem_attn::step::{Draw, Sampling, cpu::sample};

use super::{numeric::Rng, steps::probabilities};

const HOT: Sampling = Sampling {
    temperature: 1.0,
    ..Sampling::GREEDY
};

fn draws(sampling: &Sampling, count: u64) -> Vec<Draw> {
    (0..count)
        .map(|position| sampling.draw(position).expect("a good sampling"))
        .collect()
}

/// What is drawn from one row, again and again.
fn drawn(sampling: &Sampling, logits: &[f32], count: u64) -> Vec<u32> {
    let mut ids = vec![u32::MAX; count as usize];
    let rows = logits.repeat(count as usize);
    sample(&rows, logits.len(), &draws(sampling, count), &mut ids).expect("a good call");
    ids
}

fn frequencies_are_right(sampling: &Sampling, logits: &[f32]) {
    let right = probabilities(
        sampling,
        &logits.iter().map(|&x| x.into()).collect::<Vec<_>>(),
    );
    let count = 20_000;
    let mut counts = vec![0_u32; logits.len()];
    for id in drawn(sampling, logits, count) {
        counts[id as usize] += 1;
    }
    for (id, (&got, &p)) in counts.iter().zip(&right).enumerate() {
        let (mean, deviation) = (p * count as f64, (p * (1.0 - p) * count as f64).sqrt());
        let off = (f64::from(got) - mean).abs();
        assert!(
            off <= 5.0 * deviation + 1e-3,
            "token {id}: {got} of {count}, p = {p}, {sampling:?}"
        );
    }
}

#[test]
fn tokens_come_as_often_as_they_are_probable() {
    let logits = Rng(3).floats(40, -3.0, 3.0);
    for temperature in [0.3, 1.0, 4.0] {
        for (top_k, top_p, min_p) in [
            (0, 1.0, 0.0),
            (5, 1.0, 0.0),
            (0, 0.7, 0.0),
            (0, 1.0, 0.2),
            (12, 0.8, 0.1),
        ] {
            let sampling = Sampling {
                temperature,
                top_k,
                top_p,
                min_p,
                seed: 9,
            };
            frequencies_are_right(&sampling, &logits);
        }
    }
}

/// χ² of drawn tokens, which is at most its mean and six deviations. Tokens that are expected less than five times count as one.
fn draws_fit(sampling: &Sampling, logits: &[f32], right: &[f64], count: u64) {
    let mut counts = vec![0_u32; logits.len()];
    for id in drawn(sampling, logits, count) {
        counts[id as usize] += 1;
    }
    let (mut chi, mut bins, mut rare) = (0.0, 0.0_f64, [0.0; 2]);
    let mut add = |got: f64, mean: f64| {
        chi += (got - mean).powi(2) / mean;
        bins += 1.0;
    };
    for (id, (&got, &p)) in counts.iter().zip(right).enumerate() {
        let (got, mean) = (f64::from(got), p * count as f64);
        assert!(p > 0.0 || got == 0.0, "token {id} of {sampling:?}");
        if mean >= 5.0 {
            add(got, mean);
        } else {
            rare = [rare[0] + got, rare[1] + mean];
        }
    }
    if rare[1] >= 5.0 {
        add(rare[0], rare[1]);
    }
    let most = bins + 6.0 * (2.0 * bins).sqrt() + 6.0;
    assert!(chi <= most, "χ² = {chi} of {bins} tokens, {sampling:?}");
}

#[test]
fn tokens_of_all_groups_come_as_often_as_they_are_probable() {
    // Tokens are drawn by groups of eight.
    for vocabulary in [1, 2, 7, 8, 9, 16, 17, 100, 1001] {
        let logits = Rng(vocabulary as u64).floats(vocabulary, -3.0, 3.0);
        for (temperature, filters) in [
            (0.1, (0, 1.0, 0.0)),
            (0.8, (0, 1.0, 0.0)),
            (3.0, (0, 1.0, 0.0)),
            (1e5, (0, 1.0, 0.0)),
            (0.8, (0, 1.0, 0.1)),
            (2.0, (60, 0.9, 0.0)),
        ] {
            let (top_k, top_p, min_p) = filters;
            let sampling = Sampling {
                temperature,
                top_k,
                top_p,
                min_p,
                seed: 4,
            };
            let wide: Vec<f64> = logits.iter().map(|&x| x.into()).collect();
            draws_fit(&sampling, &logits, &probabilities(&sampling, &wide), 20_000);
        }
    }
}

#[test]
fn equal_logits_are_drawn_alike_at_every_temperature() {
    // At low temperatures, and of such logits, the random part of a score is less than a rounding error.
    for logit in [0.0, 25.0, -1e6, 1e30, f32::MAX, f32::MIN] {
        for temperature in [Sampling::COLDEST, 1.0, 1e10, f32::MAX] {
            let mut logits = vec![f32::NEG_INFINITY; 50];
            let equal = [0, 3, 8, 9, 10, 30, 49];
            let mut right = vec![0.0; 50];
            for token in equal {
                logits[token] = logit;
                right[token] = 1.0 / equal.len() as f64;
            }
            let sampling = Sampling {
                temperature,
                seed: 6,
                ..HOT
            };
            draws_fit(&sampling, &logits, &right, 10_000);
        }
    }
}

#[test]
fn only_the_largest_logit_is_drawn_if_it_is_far_above_the_others() {
    let (nan, none) = (f32::NAN, f32::NEG_INFINITY);
    for (temperature, logits, right) in [
        (1.0, [3e38, 1e38, 0.0, -3e38, nan, none], 0),
        (1e-4, [1e38, 3e38, 2.99e38, -3e38, nan, none], 1),
        (1e-4, [-3e38, -1e38, -1.01e38, nan, none, none], 1),
        (1e-4, [20.0, 20.01, 20.0, 19.9, 20.03, nan], 4),
        (1.0, [none, none, nan, -3e38, none, none], 3),
    ] {
        let sampling = Sampling { temperature, ..HOT };
        // One group, and one for each token.
        assert_eq!(drawn(&sampling, &logits, 300), [right; 300], "{logits:?}");
        let apart: Vec<f32> = logits
            .iter()
            .flat_map(|&logit| [logit, nan, none, none, nan, none, none, none])
            .collect();
        assert_eq!(drawn(&sampling, &apart, 300), [8 * right; 300], "{apart:?}");
    }
}

#[test]
fn draws_of_neighbouring_positions_and_seeds_are_independent() {
    let logits = [0.0; 20];
    let count = 20_000;
    let of_seed = |seed| drawn(&Sampling { seed, ..HOT }, &logits, count);
    let (first, second) = (of_seed(1), of_seed(2));
    let pairs_fit = |pairs: &mut dyn Iterator<Item = (u32, u32)>| {
        let mut counts = [0_u32; 400];
        let mut all = 0.0;
        for (a, b) in pairs {
            counts[(a * 20 + b) as usize] += 1;
            all += 1.0;
        }
        let mean = all / 400.0;
        let chi: f64 = counts
            .iter()
            .map(|&got| (f64::from(got) - mean).powi(2) / mean)
            .sum();
        // 399 ± 28.
        assert!((250.0..570.0).contains(&chi), "χ² = {chi}");
    };
    pairs_fit(&mut first.iter().copied().zip(first[1..].iter().copied()));
    pairs_fit(&mut first.iter().copied().zip(second.iter().copied()));
}

#[test]
fn equal_logits_at_a_limit_stay_together() {
    let logits = [1.0, 2.0, 2.0, 2.0, 0.0];
    for sampling in [Sampling { top_k: 2, ..HOT }, Sampling { top_p: 0.4, ..HOT }] {
        frequencies_are_right(&sampling, &logits);
        let mut ids = drawn(&sampling, &logits, 200);
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids, [1, 2, 3], "{sampling:?}");
    }
}

#[test]
fn greedy_is_the_first_of_the_largest() {
    let nan = f32::NAN;
    for (logits, right) in [
        (&[nan, 1.0, 5.0, 5.0][..], 2),
        (&[f32::NEG_INFINITY; 3], 0),
        (&[nan; 3], 0),
        (&[-1.0, -0.0, 0.0], 1),
        (&[0.0, f32::INFINITY, 3e38], 1),
    ] {
        assert_eq!(drawn(&Sampling::GREEDY, logits, 1), [right], "{logits:?}");
    }
    assert_eq!(drawn(&HOT, &[nan; 3], 1), [0]);
    assert_eq!(drawn(&HOT, &[0.0, f32::INFINITY, nan], 3), [1; 3]);
    let none = f32::NEG_INFINITY;
    assert_eq!(drawn(&HOT, &[nan, none, none], 3), [1; 3]);
    let mut many = [f32::MAX; 30];
    (many[12], many[13], many[25]) = (f32::INFINITY, f32::INFINITY, f32::INFINITY);
    for temperature in [Sampling::COLDEST, 1.0, f32::MAX] {
        let sampling = Sampling { temperature, ..HOT };
        assert_eq!(drawn(&sampling, &many, 100), [12; 100]);
        let filtered = Sampling {
            top_k: 3,
            min_p: 0.5,
            ..sampling
        };
        assert_eq!(drawn(&filtered, &many, 100), [12; 100]);
    }
}

#[test]
fn a_draw_depends_on_seed_and_position_alone() {
    let logits = Rng(4).floats(1000, -2.0, 2.0);
    let sampling = Sampling {
        seed: 77,
        top_p: 0.95,
        ..HOT
    };
    let together = drawn(&sampling, &logits, 50);
    let mut alone = [0];
    for (position, &id) in together.iter().enumerate() {
        let draw = sampling.draw(position as u64).unwrap();
        sample(&logits, 1000, &[draw], &mut alone).unwrap();
        assert_eq!(alone, [id]);
    }
    assert_ne!(
        together,
        drawn(
            &Sampling {
                seed: 78,
                ..sampling
            },
            &logits,
            50
        )
    );
    assert!(together.iter().any(|id| *id != together[0]));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn only_tokens_that_stay_are_drawn(
        seed in any::<u64>(),
        vocabulary in 1..300_usize,
        temperature in prop_oneof![Just(Sampling::COLDEST), 0.1..3.0_f32],
        top_k in 0..20_u32,
        top_p in prop_oneof![Just(1.0_f32), 0.01..1.0_f32],
        min_p in prop_oneof![Just(0.0_f32), 0.0..1.0_f32, Just(1.0)],
    ) {
        let mut logits = Rng(seed).floats(vocabulary, -4.0, 4.0);
        logits[vocabulary / 2] = f32::NEG_INFINITY;
        let sampling = Sampling { temperature, top_k, top_p, min_p, seed };
        let wide: Vec<f64> = logits.iter().map(|&x| x.into()).collect();
        // A little more stays, where rounding may decide.
        let wider = Sampling {
            top_p: (top_p + 1e-5).min(1.0),
            min_p: (min_p - 1e-5).max(0.0),
            ..sampling
        };
        let right = probabilities(&wider, &wide);
        for id in drawn(&sampling, &logits, 8) {
            prop_assert!(vocabulary == 1 || right[id as usize] > 0.0, "token {id} of {logits:?}");
        }
    }
}
