//! Biases, penalties and log-probabilities of logits.

use proptest::prelude::*;
use tandem_attn::{
    Error,
    step::{
        AdjustRow, AdjustToken, LOG_PROBS, LogProb, LogProbRow, NO_TOKEN, Penalties, StepError, cpu,
    },
};

use super::{
    numeric::Rng,
    steps::{adjusted, log_probs},
};

const NONE: AdjustToken = AdjustToken {
    token: 0,
    bias: 0.0,
    seen: 0,
    logit: 0.0,
};

fn penalties() -> impl Strategy<Value = Penalties> {
    let subtracted = || prop_oneof![Just(0.0_f32), -2.0..2.0_f32];
    let repetition = prop_oneof![Just(1.0_f32), 0.1..5.0_f32];
    (subtracted(), subtracted(), repetition).prop_map(|(presence, frequency, repetition)| {
        Penalties {
            presence,
            frequency,
            repetition,
        }
    })
}

proptest! {
    #[test]
    fn logits_are_adjusted_by_the_formula_and_restored(
        penalties in penalties(), vocabulary in 1..90_usize, unlisted in any::<bool>(), seed in any::<u64>(),
    ) {
        let mut rng = Rng(seed);
        let before = rng.floats(3 * vocabulary, -6.0, 6.0);
        let (mut rows, mut tokens, mut right) = (Vec::new(), Vec::new(), before.clone());
        let ids = [rng.below(vocabulary) as u32, rng.below(vocabulary) as u32];
        // The row between them stays as it is.
        for (at, row) in [2_u32, 0].into_iter().enumerate() {
            let first = tokens.len();
            for token in (0..vocabulary as u32).filter(|token| token % 3 != 1) {
                if unlisted && token == ids[at] {
                    continue;
                }
                let seen = [0, 1, 4, AdjustToken::IN_PROMPT, AdjustToken::IN_PROMPT + 2][rng.below(5)];
                let bias = [0.0, rng.between(-9.0, 9.0), f32::NEG_INFINITY][rng.below(3)];
                tokens.push(AdjustToken { token, bias, seen, logit: 0.0 });
            }
            let newest = (at == 0).then_some(at as u32);
            let mut counted = tokens[first..].to_vec();
            if let Some(newest) = newest {
                let newest = ids[newest as usize];
                match counted.iter_mut().find(|one| one.token == newest) {
                    Some(listed) => listed.seen += 1,
                    None => counted.push(AdjustToken { token: newest, seen: 1, ..NONE }),
                }
            }
            let of_row = &mut right[row as usize * vocabulary..][..vocabulary];
            for one in &counted {
                let logit = &mut of_row[one.token as usize];
                *logit = adjusted(&penalties, (*logit).into(), one) as f32;
            }
            rows.push(penalties.row(row, first as u32..tokens.len() as u32, newest));
            tokens.push(NONE);
        }
        let mut got = before.clone();
        let listed = tokens.clone();
        cpu::adjust(&mut got, vocabulary, &rows, &mut tokens, &ids).unwrap();
        let adjusted = got.clone();
        for (got, right) in got.iter().zip(&right) {
            let near = got == right || (got - right).abs() <= 1e-5 * right.abs().max(1.0);
            prop_assert!(near, "{got} instead of {right}");
        }
        cpu::restore(&mut got, vocabulary, &rows, &tokens).unwrap();
        prop_assert_eq!(&got, &before);
        // A second call with the same list is as the first: the newest token is counted once.
        for (now, then) in tokens.iter().zip(&listed).filter(|(_, then)| *then != &NONE) {
            prop_assert_eq!(now.seen, then.seen);
        }
        cpu::adjust(&mut got, vocabulary, &rows, &mut tokens, &ids).unwrap();
        prop_assert_eq!(got, adjusted);
    }

    #[test]
    fn log_probabilities_are_those_of_the_softmax(
        vocabulary in 1..200_usize, top in 0..=20_u32, equal in any::<bool>(), seed in any::<u64>(),
    ) {
        let mut rng = Rng(seed);
        let mut logits = rng.floats(2 * vocabulary, -9.0, 9.0);
        if equal {
            logits.iter_mut().for_each(|logit| *logit = logit.round());
        }
        let ids = [0, rng.below(vocabulary) as u32];
        let mut out = vec![LogProb { token: 7, value: 7.0 }; LOG_PROBS as usize];
        cpu::log_probs(&logits, vocabulary, &[LogProbRow { row: 1, top }], &ids, &mut out).unwrap();
        let right = log_probs(&logits[vocabulary..], ids[1], top as usize);
        let (written, rest) = out.split_at(1 + top as usize);
        for (got, (token, value)) in written.iter().zip(right) {
            prop_assert_eq!(got.token, token);
            prop_assert!(token == NO_TOKEN || (f64::from(got.value) - value).abs() < 1e-5);
        }
        prop_assert!(rest.iter().all(|one| one.token == 7));
    }
}

#[test]
fn logits_that_are_no_numbers_have_no_probability() {
    let logits = [f32::NAN, 1.0, f32::NEG_INFINITY, 1.0];
    let mut out = [LogProb::default(); LOG_PROBS as usize];
    let rows = [LogProbRow { row: 0, top: 4 }];
    cpu::log_probs(&logits, 4, &rows, &[2], &mut out).unwrap();
    let tokens: Vec<u32> = out[1..5].iter().map(|one| one.token).collect();
    assert_eq!(tokens, [1, 3, 2, 0]);
    assert_eq!(out[0].value, f32::NEG_INFINITY);
    assert!((out[1].value - 0.5_f32.ln()).abs() < 1e-6);
}

#[test]
fn what_does_not_fit_is_refused() {
    let refused = |rows: &[AdjustRow], tokens: usize, ids: &[u32]| {
        let (mut logits, mut tokens) = ([0.0; 6], vec![NONE; tokens]);
        match cpu::adjust(&mut logits, 3, rows, &mut tokens, ids) {
            Err(Error::Extent { tensor, .. }) => tensor,
            other => panic!("{other:?}"),
        }
    };
    let row = |row, end, newest| Penalties::NONE.row(row, 0..end, newest);
    assert_eq!(refused(&[row(2, 1, None)], 2, &[]), "logits");
    // There is no room for the newest token.
    assert_eq!(refused(&[row(1, 1, None)], 1, &[]), "tokens");
    assert_eq!(refused(&[row(1, 1, Some(1))], 2, &[0]), "ids");
    let asked = |row: u32, top: u32, results: usize| {
        let mut out = vec![LogProb::default(); results];
        cpu::log_probs(&[0.0; 6], 3, &[LogProbRow { row, top }], &[0; 2], &mut out)
    };
    let results = LOG_PROBS as usize;
    assert!(asked(1, 20, results).is_ok());
    assert!(matches!(asked(2, 1, results), Err(Error::Extent { .. })));
    assert!(matches!(asked(1, 21, results), Err(Error::Extent { .. })));
    assert!(matches!(asked(1, 20, results - 1), Err(Error::Shape(_))));
}

#[test]
fn penalties_have_ranges() {
    let wrong = |presence, frequency, repetition| {
        let penalties = Penalties {
            presence,
            frequency,
            repetition,
        };
        match penalties.check() {
            Err(StepError::Sampling { what, .. }) => what,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(wrong(2.01, 0.0, 1.0), "presence_penalty");
    assert_eq!(wrong(0.0, f32::NAN, 1.0), "frequency_penalty");
    assert_eq!(wrong(0.0, 0.0, 0.001), "repetition_penalty");
    assert!(Penalties::NONE.check().is_ok());
}
