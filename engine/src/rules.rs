//! Biases, penalties and bans of an answer: what they make of the logits of its next token.

use std::collections::HashMap;

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

/// The rules of an answer, with what they need to know of its text.
#[derive(Debug)]
pub(crate) struct Rules {
    penalties: Penalties,
    biased: bool,
    /// Tokens with a bias, that end the answer, or that the text has.
    tokens: Vec<AdjustToken>,
    /// Where a token is among these.
    places: HashMap<u32, usize>,
    /// Places of tokens that may not be drawn yet.
    banned: Vec<usize>,
    /// Number of tokens before which they may not.
    banned_before: u64,
}

impl Rules {
    /// None if no logit is ever changed. `ends` may not be drawn before the answer has `min_tokens`.
    pub(crate) fn new(
        rules: &LogitRules,
        prompt: &[u32],
        ends: impl Iterator<Item = u32>,
        min_tokens: u32,
    ) -> Option<Box<Self>> {
        let penalties = rules.penalties;
        let mut new = Self {
            penalties,
            biased: !rules.bias.is_empty(),
            tokens: Vec::new(),
            places: HashMap::new(),
            banned: Vec::new(),
            banned_before: min_tokens.into(),
        };
        if penalties.repetition != 1.0 {
            for &token in prompt {
                new.token(token).seen = AdjustToken::IN_PROMPT;
            }
        }
        for &(token, bias) in &rules.bias {
            new.token(token).bias += bias;
        }
        if min_tokens > 0 {
            for end in ends {
                new.token(end);
                new.banned.push(new.places[&end]);
            }
        }
        let changes = new.biased || new.has_penalties() || !new.banned.is_empty();
        changes.then(|| Box::new(new))
    }

    fn has_penalties(&self) -> bool {
        self.penalties != Penalties::NONE
    }

    fn token(&mut self, token: u32) -> &mut AdjustToken {
        let tokens = &mut self.tokens;
        let place = *self.places.entry(token).or_insert_with(|| {
            tokens.push(AdjustToken {
                token,
                bias: 0.0,
                seen: 0,
                logit: 0.0,
            });
            tokens.len() - 1
        });
        &mut tokens[place]
    }

    /// Counts a token of the answer.
    pub(crate) fn count(&mut self, token: u32) {
        if self.has_penalties() {
            self.token(token).seen += 1;
        }
    }

    /// Adds the row from which token number `drawn` is drawn. `newest` is the index of a token that was not counted yet.
    pub(crate) fn add_to(&self, rows: &mut LogitRows, row: u32, drawn: u64, newest: Option<u32>) {
        let bans = drawn < self.banned_before && !self.banned.is_empty();
        if !(bans || self.biased || self.has_penalties()) {
            return;
        }
        let first = rows.tokens.len();
        rows.tokens.extend_from_slice(&self.tokens);
        if bans {
            for place in &self.banned {
                rows.tokens[first + place].bias = f32::NEG_INFINITY;
            }
        }
        let end = rows.tokens.len();
        // Room for the newest token.
        rows.tokens.push(AdjustToken {
            token: 0,
            bias: 0.0,
            seen: 0,
            logit: 0.0,
        });
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

    fn row(rules: &Rules, drawn: u64) -> LogitRows {
        let mut rows = LogitRows::default();
        rules.add_to(&mut rows, 3, drawn, Some(7));
        rows
    }

    #[test]
    fn answers_without_rules_have_no_rows() {
        let none = Rules::new(&LogitRules::default(), &[1, 2], [5].into_iter(), 0);
        assert!(none.is_none());
        let no_ends = Rules::new(&LogitRules::default(), &[1, 2], std::iter::empty(), 4);
        assert!(no_ends.is_none());
        // Bans end.
        let bans = Rules::new(&LogitRules::default(), &[1, 2], [5, 6].into_iter(), 2).unwrap();
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
            let mut all = Rules::new(&given, &[4, 4, 8], std::iter::empty(), 0).unwrap();
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
        let mut all = Rules::new(&biased, &[4], std::iter::empty(), 0).unwrap();
        all.count(9);
        let rows = row(&all, 1);
        assert_eq!(rows.tokens[0].seen, 0);
        assert_eq!(rows.adjusted[0].newest, tandem_attn::step::NO_TOKEN);
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
