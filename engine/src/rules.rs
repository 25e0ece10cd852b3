//! Biases, penalties and bans of an answer: what they make of the logits of its next token.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
};

use tandem_attn::step::{
    AdjustRow, AdjustToken, LogProb, LogProbRow, MOST_TOP, Penalties, StepError,
};

use crate::Error;

/// What changes the logits of an answer before its tokens are drawn.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LogitRules {
    /// Penalties of tokens that the text has.
    pub penalties: Penalties,
    /// Numbers from −100 to 100 that are added to the logits of tokens, before the penalties.
    pub bias: Vec<(u32, f32)>,
}

/// Log-probabilities of a token and of those that could have been drawn in its place, as the model gives them: without
/// temperature, biases or penalties.
#[derive(Clone, Debug, PartialEq)]
pub struct LogProbs {
    /// That of the token.
    pub token: f32,
    /// The most probable tokens, as many as the request asks for.
    pub top: Vec<LogProb>,
}

impl LogProbs {
    /// From the results of a row.
    pub(crate) fn of(row: LogProbRow, results: &[LogProb]) -> Self {
        Self {
            token: results[0].value,
            top: results[1..=row.top as usize].to_vec(),
        }
    }
}

/// What a step does with logits beside drawing tokens from them.
#[derive(Clone, Copy, Debug, Default)]
pub struct LogitWork<'a> {
    /// Rows whose logits are adjusted before their tokens are drawn, and as they were afterwards. Their newest tokens are indices into the
    /// tokens of the batch.
    pub adjusted: &'a [AdjustRow],
    /// Their tokens.
    pub tokens: &'a [AdjustToken],
    /// Rows whose log-probabilities are wanted, in order.
    pub log_probs: &'a [LogProbRow],
}

impl LogitWork<'_> {
    /// Whether tokens are only drawn.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.adjusted.is_empty() && self.log_probs.is_empty()
    }
}

/// The same, as a step is put together.
#[derive(Debug, Default)]
pub(crate) struct LogitRows {
    adjusted: Vec<AdjustRow>,
    tokens: Vec<AdjustToken>,
    pub log_probs: Vec<LogProbRow>,
}

impl LogitRows {
    pub(crate) fn clear(&mut self) {
        self.adjusted.clear();
        self.tokens.clear();
        self.log_probs.clear();
    }

    pub(crate) fn work(&self) -> LogitWork<'_> {
        LogitWork {
            adjusted: &self.adjusted,
            tokens: &self.tokens,
            log_probs: &self.log_probs,
        }
    }
}

/// Refuses numbers out of their ranges. Tokens are checked elsewhere.
pub(crate) fn check(rules: &LogitRules, log_probs: Option<u32>) -> Result<(), Error> {
    let refused = |what, got, rule| {
        let error = StepError::Sampling { what, got, rule };
        Err(tandem_attn::Error::from(error).into())
    };
    rules.penalties.check().map_err(tandem_attn::Error::from)?;
    let range = -100.0..=100.0;
    if let Some((_, got)) = rules.bias.iter().find(|(_, bias)| !range.contains(bias)) {
        return refused("logit_bias", f64::from(*got), "between -100 and 100");
    }
    match log_probs {
        Some(top) if top > MOST_TOP => refused("logprobs", top.into(), "at most 20"),
        _ => Ok(()),
    }
}

/// The tokens of a prompt, as repetition penalties see them. All choices of the prompt share them.
#[derive(Debug)]
pub(crate) struct PromptTokens {
    prompt: Vec<u32>,
    tokens: Vec<AdjustToken>,
    /// Where a token is among these.
    places: HashMap<u32, usize>,
}

impl PromptTokens {
    /// Those of the latest prompt if it is the same one.
    fn of(prompt: &[u32], latest: &mut Weak<Self>) -> Arc<Self> {
        if let Some(same) = latest.upgrade().filter(|latest| latest.prompt == prompt) {
            return same;
        }
        let (mut tokens, mut places) = (Vec::new(), HashMap::new());
        for &token in prompt {
            places.entry(token).or_insert_with(|| {
                tokens.push(AdjustToken {
                    seen: AdjustToken::IN_PROMPT,
                    ..unseen(token)
                });
                tokens.len() - 1
            });
        }
        let prompt = prompt.to_vec();
        let new = Arc::new(Self {
            prompt,
            tokens,
            places,
        });
        *latest = Arc::downgrade(&new);
        new
    }
}

const fn unseen(token: u32) -> AdjustToken {
    AdjustToken {
        token,
        bias: 0.0,
        seen: 0,
        logit: 0.0,
    }
}

/// A token with a bias, that ends the answer, or that the answer has.
#[derive(Debug)]
struct Changed {
    token: AdjustToken,
    /// Where it is among the tokens of the prompt.
    in_prompt: Option<usize>,
    /// Whether it may not be drawn yet.
    banned: bool,
}

/// The rules of an answer, with what they need to know of its text.
#[derive(Debug)]
pub(crate) struct Rules {
    penalties: Penalties,
    biased: bool,
    /// For repetition penalties.
    prompt: Option<Arc<PromptTokens>>,
    changed: Vec<Changed>,
    /// Where a token is among these.
    places: HashMap<u32, usize>,
    bans: bool,
    /// Number of tokens before which banned ones may not be drawn.
    banned_before: u64,
}

impl Rules {
    /// None if no logit is ever changed. `ends` may not be drawn before the answer has `min_tokens`. `latest` are the
    /// tokens of the prompt before, which may be the same.
    pub(crate) fn new(
        rules: &LogitRules,
        prompt: &[u32],
        ends: impl Iterator<Item = u32>,
        min_tokens: u32,
        latest: &mut Weak<PromptTokens>,
    ) -> Option<Box<Self>> {
        let penalties = rules.penalties;
        let repetition = penalties.repetition != 1.0;
        let mut new = Self {
            penalties,
            biased: !rules.bias.is_empty(),
            prompt: repetition.then(|| PromptTokens::of(prompt, latest)),
            changed: Vec::new(),
            places: HashMap::new(),
            bans: false,
            banned_before: min_tokens.into(),
        };
        for &(token, bias) in &rules.bias {
            new.change(token).token.bias += bias;
        }
        if min_tokens > 0 {
            for end in ends {
                new.change(end).banned = true;
                new.bans = true;
            }
        }
        let changes = new.biased || new.has_penalties() || new.bans;
        changes.then(|| Box::new(new))
    }

    fn has_penalties(&self) -> bool {
        self.penalties != Penalties::NONE
    }

    fn change(&mut self, token: u32) -> &mut Changed {
        let (changed, prompt) = (&mut self.changed, &self.prompt);
        let place = *self.places.entry(token).or_insert_with(|| {
            let prompt = prompt.as_ref();
            let found = prompt.and_then(|prompt| Some((prompt, *prompt.places.get(&token)?)));
            changed.push(Changed {
                token: found.map_or(unseen(token), |(prompt, place)| prompt.tokens[place]),
                in_prompt: found.map(|(_, place)| place),
                banned: false,
            });
            changed.len() - 1
        });
        &mut changed[place]
    }

    /// Counts a token of the answer.
    pub(crate) fn count(&mut self, token: u32) {
        if self.has_penalties() {
            self.change(token).token.seen += 1;
        }
    }

    /// Adds the row from which token number `drawn` is drawn. `newest` is the index of a token that was not counted yet.
    pub(crate) fn add_to(&self, rows: &mut LogitRows, row: u32, drawn: u64, newest: Option<u32>) {
        let bans = drawn < self.banned_before && self.bans;
        if !(bans || self.biased || self.has_penalties()) {
            return;
        }
        let first = rows.tokens.len();
        if let Some(prompt) = &self.prompt {
            rows.tokens.extend_from_slice(&prompt.tokens);
        }
        for changed in &self.changed {
            let mut token = changed.token;
            if bans && changed.banned {
                token.bias = f32::NEG_INFINITY;
            }
            match changed.in_prompt {
                Some(place) => rows.tokens[first + place] = token,
                None => rows.tokens.push(token),
            }
        }
        let end = rows.tokens.len();
        // Room for the newest token.
        rows.tokens.push(unseen(0));
        let newest = newest.filter(|_| self.has_penalties());
        let tokens = first as u32..end as u32;
        rows.adjusted.push(self.penalties.row(row, tokens, newest));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(penalties: Penalties, bias: &[(u32, f32)]) -> LogitRules {
        LogitRules {
            penalties,
            bias: bias.to_vec(),
        }
    }

    fn made(
        given: &LogitRules,
        prompt: &[u32],
        ends: &[u32],
        min_tokens: u32,
    ) -> Option<Box<Rules>> {
        let ends = ends.iter().copied();
        Rules::new(given, prompt, ends, min_tokens, &mut Weak::new())
    }

    fn row(rules: &Rules, drawn: u64) -> LogitRows {
        let mut rows = LogitRows::default();
        rules.add_to(&mut rows, 3, drawn, Some(7));
        rows
    }

    #[test]
    fn answers_without_rules_have_no_rows() {
        let none = made(&LogitRules::default(), &[1, 2], &[5], 0);
        assert!(none.is_none());
        let no_ends = made(&LogitRules::default(), &[1, 2], &[], 4);
        assert!(no_ends.is_none());
        // Bans end.
        let bans = made(&LogitRules::default(), &[1, 2], &[5, 6], 2).unwrap();
        let banned = row(&bans, 1);
        let biases: Vec<_> = banned.tokens.iter().map(|token| token.bias).collect();
        assert_eq!(biases, [f32::NEG_INFINITY, f32::NEG_INFINITY, 0.0]);
        assert_eq!((banned.adjusted[0].first, banned.adjusted[0].end), (0, 2));
        assert!(row(&bans, 2).work().is_empty());
    }

    #[test]
    fn only_repetition_penalties_see_the_prompt() {
        let subtracted = Penalties {
            presence: 1.0,
            ..Penalties::NONE
        };
        let repetition = Penalties {
            repetition: 1.5,
            ..subtracted
        };
        for (penalties, prompt_tokens) in [(subtracted, 0), (repetition, 2)] {
            let given = rules(penalties, &[(9, 1.0), (9, 0.5)]);
            let mut all = made(&given, &[4, 4, 8], &[], 0).unwrap();
            for token in [9, 11, 11] {
                all.count(token);
            }
            let tokens = row(&all, 3).tokens;
            let seen: Vec<_> = tokens.iter().map(|t| (t.token, t.seen)).collect();
            let (prompt, answer) = seen.split_at(prompt_tokens);
            assert!(
                prompt
                    .iter()
                    .all(|(_, seen)| *seen == AdjustToken::IN_PROMPT)
            );
            assert_eq!(answer, [(9, 1), (11, 2), (0, 0)]);
            assert_eq!(tokens[prompt_tokens].bias, 1.5);
            assert_eq!(row(&all, 3).adjusted[0].newest, 7);
        }
        // Biases count nothing.
        let biased = rules(Penalties::NONE, &[(9, 1.0)]);
        let mut all = made(&biased, &[4], &[], 0).unwrap();
        all.count(9);
        let rows = row(&all, 1);
        assert_eq!(rows.tokens[0].seen, 0);
        assert_eq!(rows.adjusted[0].newest, tandem_attn::step::NO_TOKEN);
    }

    /// Each choice of a long prompt made the list of its tokens, while all other answers waited.
    #[test]
    fn choices_share_the_tokens_of_their_prompt() {
        let repetition = Penalties {
            repetition: 1.5,
            ..Penalties::NONE
        };
        let given = rules(repetition, &[(4, 2.0)]);
        let mut latest = Weak::new();
        let mut new = |prompt: &[u32]| {
            Rules::new(&given, prompt, [8].into_iter(), 1, &mut latest).expect("has penalties")
        };
        let (mut first, second, other) = (new(&[4, 5, 8]), new(&[4, 5, 8]), new(&[4, 5, 9]));
        let of = |rules: &Rules| Arc::clone(rules.prompt.as_ref().expect("a penalty"));
        assert!(Arc::ptr_eq(&of(&first), &of(&second)));
        assert!(!Arc::ptr_eq(&of(&first), &of(&other)));
        // What an answer changes is its own, and each token is there once.
        first.count(5);
        let seen = |rules: &Rules, drawn: u64| {
            let tokens = row(rules, drawn).tokens;
            let tokens = tokens.iter().map(|t| (t.token, t.bias, t.seen));
            tokens.collect::<Vec<_>>()
        };
        let prompt = AdjustToken::IN_PROMPT;
        let least = f32::NEG_INFINITY;
        let right = [
            (4, 2.0, prompt),
            (5, 0.0, prompt + 1),
            (8, least, prompt),
            (0, 0.0, 0),
        ];
        assert_eq!(seen(&first, 0), right);
        let right = [
            (4, 2.0, prompt),
            (5, 0.0, prompt),
            (8, 0.0, prompt),
            (0, 0.0, 0),
        ];
        assert_eq!(seen(&second, 1), right);
    }

    #[test]
    fn numbers_out_of_their_ranges_are_refused() {
        let penalties = |presence, frequency, repetition| Penalties {
            presence,
            frequency,
            repetition,
        };
        for (rules, log_probs, field) in [
            (
                rules(penalties(2.1, 0.0, 1.0), &[]),
                None,
                "presence_penalty",
            ),
            (
                rules(penalties(0.0, -2.1, 1.0), &[]),
                None,
                "frequency_penalty",
            ),
            (
                rules(penalties(0.0, 0.0, 0.0), &[]),
                None,
                "repetition_penalty",
            ),
            (
                rules(penalties(0.0, 0.0, f32::NAN), &[]),
                None,
                "repetition_penalty",
            ),
            (rules(Penalties::NONE, &[(1, 101.0)]), None, "logit_bias"),
            (LogitRules::default(), Some(21), "logprobs"),
        ] {
            let refused = check(&rules, log_probs).unwrap_err().to_string();
            assert!(refused.starts_with(field), "{refused}");
        }
        let most = rules(penalties(-2.0, 2.0, 100.0), &[(1, -100.0)]);
        assert!(check(&most, Some(20)).is_ok());
    }
}
