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
