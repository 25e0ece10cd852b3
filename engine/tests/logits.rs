//! Biases, bans, penalties and log-probabilities, against a loop that computes the whole text again for each token.

mod common;

use common::{adjusted, answers, ends, engine, expected, logits};
use tandem_engine::{
    Engine, Error, Event, Finish, Generation, Limits, LogProbs, LogitRules, Penalties, Sampling,
};

const NEW: u32 = 16;

/// Greedy answers: the token with the largest logit by the formulas.
fn naive(engine: &mut Engine, asked: &Generation) -> Vec<u32> {
    let mut answer = Vec::new();
    while answer.len() < asked.max_new_tokens as usize {
        let adjusted = adjusted(engine, asked, &answer);
        let tokens = (0..adjusted.len()).rev();
        let token = tokens.max_by(|&a, &b| adjusted[a].total_cmp(&adjusted[b]));
        let token = token.expect("a vocabulary") as u32;
        if ends(engine, asked).contains(&token) {
            break;
        }
        answer.push(token);
    }
    answer
}

fn greedy(family: &str, keep: usize, rules: LogitRules) -> Generation {
    Generation {
        rules,
        ignore_ends: true,
        ..Generation::greedy(expected(family).prompt[..keep].to_vec(), NEW)
    }
}

fn penalties(presence: f32, frequency: f32, repetition: f32) -> LogitRules {
    LogitRules {
        penalties: Penalties {
            presence,
            frequency,
            repetition,
        },
        bias: Vec::new(),
    }
}

#[test]
fn penalised_answers_are_those_of_a_naive_loop() {
    let mut one = engine("llama3", Limits::default());
    let plain = greedy("llama3", 20, LogitRules::default());
    let first = naive(&mut one, &plain)[0];
    let biased = LogitRules {
        bias: vec![(first, -1.5), (5, 0.25)],
        ..penalties(0.3, 0.1, 1.2)
    };
    let asked = [
        greedy("llama3", 20, penalties(1.5, 0.0, 1.0)),
        greedy("llama3", 33, penalties(0.0, 1.0, 1.0)),
        greedy("llama3", 20, penalties(-2.0, 0.0, 1.0)),
        greedy("llama3", 20, penalties(0.0, -1.0, 1.0)),
        greedy("llama3", 48, penalties(0.0, 0.0, 3.0)),
        greedy("llama3", 20, penalties(0.0, 0.0, 0.5)),
        greedy("llama3", 7, biased),
    ];
    let free = asked.clone().map(|asked| Generation {
        rules: LogitRules::default(),
        ..asked
    });
    let free = answers(&mut engine("llama3", Limits::default()), &free);
    let right: Vec<_> = asked.iter().map(|asked| naive(&mut one, asked)).collect();
    let changed = free
        .iter()
        .zip(&right)
        .filter(|(free, right)| free != right);
    assert!(changed.count() >= 5, "the rules change too little");
    // Together, in small steps. The step that draws a token has begun before the host knows the token before it.
    let limits = Limits {
        step_tokens: 24,
        ..Limits::default()
    };
    for ahead in [false, true] {
        let mut together = engine("llama3", limits).running_ahead(ahead);
        assert_eq!(answers(&mut together, &asked), right, "ahead: {ahead}");
    }
}

/// Penalties count what was generated before a request was preempted.
#[test]
fn penalties_survive_preemption() {
    let prompt = expected("llama3").prompt;
    let asked: Vec<_> = [48, 40, 32, 24, 16, 8]
        .into_iter()
        .map(|keep| Generation {
            ignore_ends: true,
            rules: penalties(0.5, 0.2, 1.3),
            ..Generation::greedy(prompt[..keep].to_vec(), 200)
        })
        .collect();
    let mut together = engine("llama3", Limits::default()).running_ahead(true);
    let given = answers(&mut together, &asked);
    assert!(together.composer().lost_tokens() > 0);
    for (asked, given) in asked.into_iter().zip(given) {
        let mut alone = engine("llama3", Limits::default()).running_ahead(false);
        assert_eq!(answers(&mut alone, &[asked]), [given]);
    }
}

#[test]
fn a_bias_forces_a_token_and_another_bans_it() {
    let mut engine = engine("qwen2", Limits::default());
    let with = |bias: &[(u32, f32)]| LogitRules {
        bias: bias.to_vec(),
        ..LogitRules::default()
    };
    let forced = greedy("qwen2", 12, with(&[(77, 100.0)]));
    assert_eq!(answers(&mut engine, &[forced]), [[77; NEW as usize]]);
    let plain = greedy("qwen2", 12, LogitRules::default());
    let [free] = &answers(&mut engine, &[plain])[..] else {
        panic!("one answer")
    };
    let hot = Generation {
        sampling: Sampling {
            temperature: 0.8,
            ..Sampling::GREEDY
        },
        ..greedy(
            "qwen2",
            12,
            with(
                &free
                    .iter()
                    .map(|&token| (token, -100.0))
                    .collect::<Vec<_>>(),
            ),
        )
    };
    let [banned] = &answers(&mut engine, &[hot])[..] else {
        panic!("one answer")
    };
    assert!(
        banned.iter().all(|token| !free.contains(token)),
        "{banned:?}"
    );
}

/// Before the minimum a token that would end the answer is not drawn; the next likely one is.
#[test]
fn ends_are_not_drawn_before_the_minimum() {
    let mut one = engine("llama3", Limits::default());
    let plain = greedy("llama3", 20, LogitRules::default());
    let free = naive(&mut one, &plain);
    for min_new_tokens in [0, 5, NEW] {
        let asked = Generation {
            min_new_tokens,
            ignore_ends: false,
            stop_tokens: vec![free[0], free[3]],
            ..plain.clone()
        };
        let right = naive(&mut one, &asked);
        assert!(right.len() >= min_new_tokens as usize);
        for ahead in [false, true] {
            let mut engine = engine("llama3", Limits::default()).running_ahead(ahead);
            let given = answers(&mut engine, std::slice::from_ref(&asked));
            assert_eq!(given[0], right, "at least {min_new_tokens}");
            let early = &right[..min_new_tokens as usize];
            assert!(early.iter().all(|token| !asked.stop_tokens.contains(token)));
        }
    }
}

fn with_log_probs(engine: &mut Engine, asked: Generation) -> Vec<(u32, LogProbs)> {
    let mut given = Vec::new();
    engine.submit(asked).expect("it fits");
    while !engine.is_idle() {
        let step = engine.step(&mut |event| match event {
            Event::Token {
                token, log_probs, ..
            } => {
                given.push((token, log_probs.expect("they are asked for")));
            }
            Event::Finished { reason, .. } => assert_eq!(reason, Finish::Length),
            Event::Started { .. } => {}
        });
        step.expect("a step");
    }
    given
}

/// They are those of the model, whatever is done to the logits before a token is drawn.
#[test]
fn log_probabilities_are_those_of_the_model() {
    let mut one = engine("llama3", Limits::default());
    let hot = Sampling {
        temperature: 3.0,
        top_k: 50,
        seed: 3,
        ..Sampling::GREEDY
    };
    let biased = LogitRules {
        bias: vec![(9, 3.0), (11, -100.0)],
        ..penalties(0.5, 0.5, 1.5)
    };
    for (rules, sampling, top) in [
        (LogitRules::default(), Sampling::GREEDY, 0),
        (LogitRules::default(), hot, 5),
        (biased.clone(), Sampling::GREEDY, 20),
        (biased, hot, 20),
    ] {
        let mut asked = Generation {
            sampling,
            log_probs: Some(top),
            ..greedy("llama3", 20, rules)
        };
        let mut ahead = engine("llama3", Limits::default()).running_ahead(true);
        let given = with_log_probs(&mut ahead, asked.clone());
        assert_eq!(given.len(), NEW as usize);
        let mut text = asked.prompt.clone();
        for (token, log_probs) in &given {
            let raw = logits(&mut one, &text);
            let sum: f64 = raw.iter().map(|&logit| f64::from(logit).exp()).sum();
            let right = |token: u32| f64::from(raw[token as usize]) - sum.ln();
            let near = |token: u32, got: f32| (f64::from(got) - right(token)).abs() < 1e-4;
            assert!(near(*token, log_probs.token), "{token}: {log_probs:?}");
            let mut order: Vec<u32> = (0..raw.len() as u32).collect();
            order.sort_by(|&a, &b| raw[b as usize].total_cmp(&raw[a as usize]).then(a.cmp(&b)));
            let tokens: Vec<u32> = log_probs.top.iter().map(|one| one.token).collect();
            assert_eq!(tokens, order[..top as usize]);
            assert!(log_probs.top.iter().all(|one| near(one.token, one.value)));
            text.push(*token);
        }
        // Asking changes nothing.
        asked.log_probs = None;
        let tokens: Vec<u32> = given.iter().map(|(token, _)| *token).collect();
        assert_eq!(answers(&mut one, &[asked]), [tokens]);
    }
}

#[test]
fn rules_out_of_their_ranges_are_refused() {
    let mut engine = engine("llama3", Limits::default());
    let outside = LogitRules {
        bias: vec![(100_000, 1.0)],
        ..LogitRules::default()
    };
    let refused = engine.submit(greedy("llama3", 4, outside));
    assert!(
        matches!(refused, Err(Error::Token { got: 100_000, .. })),
        "{refused:?}"
    );
    let refused = engine.submit(greedy("llama3", 4, penalties(3.0, 0.0, 1.0)));
    assert!(matches!(refused, Err(Error::Attention(_))), "{refused:?}");
    let many = Generation {
        log_probs: Some(21),
        ..greedy("llama3", 4, LogitRules::default())
    };
    assert!(engine.submit(many).is_err());
    assert!(engine.is_idle());
}
