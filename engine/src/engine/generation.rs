//! What is asked of the engine, and what it reports.

use tandem_attn::step::{Penalties, Sampling};
use tandem_schedule::RequestId;

use crate::{LogProbs, LogitRules, rules::Rules};

/// A prompt and how to generate its answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Generation {
    /// Token ids.
    pub prompt: Vec<u32>,
    /// Maximum number of tokens of the answer.
    pub max_new_tokens: u32,
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// What changes the logits before.
    pub rules: LogitRules,
    /// Number of most probable tokens whose log-probabilities come with each token's own, at most 20; if none, there are no
    /// log-probabilities.
    pub log_probs: Option<u32>,
    /// Continue after a token that ends an answer: for measurements. [`stop_tokens`](Self::stop_tokens) still end it.
    pub ignore_ends: bool,
    /// Number of tokens before which no token that would end the answer is drawn.
    pub min_new_tokens: u32,
    /// Tokens that end the answer, beside those of the model.
    pub stop_tokens: Vec<u32>,
    /// Prompt tokens that count as computed, whatever the cache holds: for measurements that begin in the middle of a
    /// prompt.
    pub computed: u32,
}

impl Generation {
    /// Greedy sampling: the most likely token at each position.
    #[must_use]
    pub const fn greedy(prompt: Vec<u32>, max_new_tokens: u32) -> Self {
        Self {
            prompt,
            max_new_tokens,
            sampling: Sampling::GREEDY,
            rules: LogitRules {
                penalties: Penalties::NONE,
                bias: Vec::new(),
            },
            log_probs: None,
            ignore_ends: false,
            min_new_tokens: 0,
            stop_tokens: Vec::new(),
            computed: 0,
        }
    }
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model drew a token that ends an answer, or one of [`Generation::stop_tokens`].
    End,
    /// It has the requested number of tokens.
    Length,
    /// It was cancelled.
    Cancelled,
}

/// What happened to a request in a step.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The first step with tokens of the request began. Reported once, before its tokens, also if it is preempted later.
    Started {
        /// The request.
        request: RequestId,
        /// Number of prompt tokens that were found in the prefix cache.
        cached_tokens: u32,
    },
    /// A token of the answer. The token that ends the answer is not reported.
    Token {
        /// The request.
        request: RequestId,
        /// The token.
        token: u32,
        /// Its log-probabilities, if the request asks for them.
        log_probs: Option<LogProbs>,
    },
    /// The answer ended, and the engine has dropped the request.
    Finished {
        /// The request.
        request: RequestId,
        /// The reason.
        reason: Finish,
    },
}

/// The state of a request between its submission and its end.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) sampling: Sampling,
    pub(super) rules: Option<Box<Rules>>,
    pub(super) log_probs: Option<u32>,
    pub(super) ignore_ends: bool,
    /// Tokens that still must come before one may end it.
    pub(super) before_end: u32,
    pub(super) stop_tokens: Vec<u32>,
    pub(super) started: bool,
    pub(super) drawn: u64,
    pub(super) ended: bool,
}

impl Answer {
    /// Whether a drawn token ends it. `ends` are those of the model.
    pub(super) fn ends_with(&mut self, token: u32, ends: &[u32]) -> bool {
        if self.before_end > 0 {
            self.before_end -= 1;
            return false;
        }
        self.stop_tokens.contains(&token) || !self.ignore_ends && ends.contains(&token)
    }
}
