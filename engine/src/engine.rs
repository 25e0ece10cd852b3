//! Requests in, tokens out: the composer forms steps, and a backend computes them.

mod generation;
mod step;

use std::{
    collections::{HashMap, VecDeque},
    sync::Weak,
};

use tandem_attn::{
    problem::{Batch, PageTable},
    step::{Draw, LogProb, Sampling},
};
use tandem_schedule::{
    CacheType, Composer, Limits, Request, RequestId, Step, StepInputs,
    policy::{Policy, SarathiServe},
};

use self::{generation::Answer, step::Flight};
pub use self::{
    generation::{Event, Finish, Generation},
    step::StepReport,
};
use crate::{
    Architecture, Error, LogitWork,
    backend::{Backend, Work},
    rules::{self, LogitRows, PromptTokens, Rules},
};

/// Serves requests together: hybrid batches over paged caches, prompts in chunks, common beginnings computed once.
///
/// An asynchronous backend gets the next step before the tokens of the last one are known: it takes them from its own
/// memory. Meanwhile the host composes and plans.
pub struct Engine {
    composer: Composer,
    backend: Box<dyn Backend>,
    requests: HashMap<RequestId, Answer>,
    /// Steps that the backend has begun and not finished, the oldest first.
    flights: VecDeque<Flight>,
    /// Number of steps that may wait behind the one that is being computed.
    ahead: usize,
    /// Maximum number of tokens of a request, regardless of the cache size.
    request_tokens: u32,
    /// Whether there was nothing to compute before the next step, so that its gap does not count.
    rested: bool,
    spare: Vec<Step>,
    inputs: StepInputs,
    rows: Vec<u32>,
    draws: Vec<Draw>,
    logit_rows: LogitRows,
    /// The latest prompt with a repetition penalty.
    latest_prompt: Weak<PromptTokens>,
    drawn: Vec<(u32, u32)>,
    /// For each request that draws a token in the last step that began: its row.
    last_rows: HashMap<RequestId, u32>,
    sampled: Vec<u32>,
    log_probs: Vec<LogProb>,
    /// Requests cancelled between steps whose end has not been reported yet.
    cancelled: Vec<RequestId>,
    steps: u64,
}

impl Engine {
    /// An engine that composes batches as SARATHI does: decodes first, prompt chunks in the rest of a step. Preempted
    /// requests are computed again.
    ///
    /// # Errors
    /// [`Error::Schedule`] for limits that no request can meet, [`Error::HostPages`] if [`Limits::host_pages`] is not
    /// 0.
    pub fn new(backend: Box<dyn Backend>, limits: Limits) -> Result<Self, Error> {
        Self::with_policy(backend, limits, Box::new(SarathiServe))
    }

    /// Like [`new`](Self::new), with another policy.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_policy(
        backend: Box<dyn Backend>,
        mut limits: Limits,
        policy: Box<dyn Policy>,
    ) -> Result<Self, Error> {
        // No backend copies pages to the host, so preempted requests are computed again.
        if limits.host_pages > 0 {
            let got = limits.host_pages;
            return Err(Error::HostPages { got });
        }
        limits.step_tokens = limits.step_tokens.min(backend.step_tokens());
        limits.step_requests = limits.step_requests.min(backend.step_requests());
        limits.chunk_keys = limits.chunk_keys.min(backend.chunk_keys());
        limits.running = limits.running.min(limits.step_requests);
        limits.request_tokens = limits.request_tokens.min(backend.architecture().positions);
        let request_tokens = limits.request_tokens;
        let composer = Composer::with_policy(limits, backend.pages(), backend.page_size(), policy)?;
        let ahead = usize::from(backend.is_asynchronous());
        Ok(Self {
            composer,
            backend,
            requests: HashMap::new(),
            flights: VecDeque::new(),
            ahead,
            request_tokens,
            rested: true,
            spare: Vec::new(),
            inputs: StepInputs::default(),
            rows: Vec::new(),
            draws: Vec::new(),
            logit_rows: LogitRows::default(),
            latest_prompt: Weak::new(),
            drawn: Vec::new(),
            last_rows: HashMap::new(),
            sampled: Vec::new(),
            log_probs: Vec::new(),
            cancelled: Vec::new(),
            steps: 0,
        })
    }

    /// Whether the next step is composed before the tokens of the last one are known. Overrides the default, which
    /// depends on the backend. Answers do not depend on it.
    #[must_use]
    pub fn running_ahead(mut self, ahead: bool) -> Self {
        self.ahead = usize::from(ahead);
        self
    }

    /// Queues a request.
    ///
    /// # Errors
    /// [`Error::Token`], [`Error::TooLong`], [`Error::Schedule`] if the request breaks a limit or can never be served,
    /// [`Error::Attention`] for invalid sampling parameters, [`Error::MinTokens`].
    pub fn submit(&mut self, generation: Generation) -> Result<RequestId, Error> {
        self.check(&generation)?;
        self.rested |= self.is_idle();
        let Generation {
            prompt,
            max_new_tokens,
            sampling,
            rules,
            log_probs,
            ignore_ends,
            min_new_tokens,
            stop_tokens,
            computed,
        } = generation;
        let architecture = self.backend.architecture();
        let ends = architecture.ends.iter().filter(|_| !ignore_ends);
        let ends = ends.chain(&stop_tokens).copied();
        // A configuration may name an end that the model does not have.
        let ends = ends.filter(|&end| (end as usize) < architecture.vocabulary);
        let rules = Rules::new(
            &rules,
            &prompt,
            ends,
            min_new_tokens,
            &mut self.latest_prompt,
        );
        let most = u32::try_from(architecture.vocabulary).unwrap_or(u32::MAX);
        let request = self.composer.submit(Request {
            computed,
            ..Request::new(prompt, max_new_tokens)
        })?;
        let answer = Answer {
            sampling,
            rules,
            log_probs: log_probs.map(|top| top.min(most)),
            ignore_ends,
            before_end: min_new_tokens,
            stop_tokens,
            started: false,
            drawn: 0,
            ended: false,
        };
        self.requests.insert(request, answer);
        Ok(request)
    }

    fn check(&self, generation: &Generation) -> Result<(), Error> {
        let architecture = self.backend.architecture();
        let vocabulary = architecture.vocabulary;
        let biased = generation.rules.bias.iter().map(|(token, _)| token);
        let ids = generation.prompt.iter().chain(&generation.stop_tokens);
        let mut ids = ids.chain(biased);
        if let Some(&got) = ids.find(|&&id| id as usize >= vocabulary) {
            return Err(Error::Token { got, vocabulary });
        }
        let (min, max) = (generation.min_new_tokens, generation.max_new_tokens);
        if min > max {
            return Err(Error::MinTokens { min, max });
        }
        let got = generation.prompt.len() as u64 + u64::from(generation.max_new_tokens);
        let limit = architecture.positions;
        if got > u64::from(limit) {
            return Err(Error::TooLong { got, limit });
        }
        generation
            .sampling
            .draw(0)
            .map_err(tandem_attn::Error::from)?;
        rules::check(&generation.rules, generation.log_probs)
    }

    /// Cancels a request at any point. Returns whether it existed. The next step reports its end.
    pub fn cancel(&mut self, request: RequestId) -> bool {
        let there = self.requests.remove(&request).is_some();
        if there {
            self.composer.cancel(request);
            self.cancelled.push(request);
        }
        there
    }

    /// Logits at every position of a text, `[tokens, vocabulary]`, computed in chunks of `chunk` tokens: of fewer if a step of
    /// the backend has less room for tokens, or for rows of logits.
    ///
    /// # Errors
    /// [`Error::Busy`] if there are too few free pages or requests are under way; [`Error::Token`], [`Error::TooLong`];
    /// those of [`step`](Self::step).
    pub fn logits(&mut self, tokens: &[u32], chunk: usize) -> Result<Vec<f32>, Error> {
        let generation = Generation::greedy(tokens.to_vec(), 0);
        self.check(&generation)?;
        let (page_size, pages) = (self.backend.page_size(), self.backend.pages());
        let needed = (tokens.len() as u64).div_ceil(u64::from(page_size));
        self.composer.clear_cache();
        let free = self.composer.pool().free_pages();
        if !self.is_idle() || needed > u64::from(free) {
            return Err(Error::Busy { needed, free });
        }
        let table: Vec<u32> = (0..needed as u32).collect();
        let mut logits = Vec::with_capacity(tokens.len() * self.backend.architecture().vocabulary);
        // Each token has a row of logits.
        let most = self.backend.step_tokens().min(self.backend.step_requests());
        let chunk = chunk.clamp(1, most as usize);
        for (index, ids) in tokens.chunks(chunk).enumerate() {
            let first = (index * chunk) as u32;
            let end = first + ids.len() as u32;
            let mut keys = PageTable::new(page_size, pages);
            keys.push(&table[..end.div_ceil(page_size) as usize], end);
            let inputs = StepInputs {
                batch: Batch::new(vec![0, ids.len() as u32], keys),
                // The text uses the pages in order, so slots equal positions.
                slots: (first..end).collect(),
                positions: (first..end).collect(),
                tokens: ids.to_vec(),
                logits: Vec::new(),
                awaited: Vec::new(),
            };
            let rows: Vec<u32> = (0..ids.len() as u32).collect();
            let draw = Sampling::GREEDY.draw(0).map_err(tandem_attn::Error::from)?;
            let work = Work {
                inputs: &inputs,
                copies: &[],
                rows: &rows,
                draws: &vec![draw; rows.len()],
                drawn: &[],
                logits: LogitWork::default(),
            };
            self.backend.begin(&work)?;
            self.backend
                .finish(&mut self.sampled, &mut self.log_probs)?;
            logits.extend(self.backend.logits()?);
        }
        Ok(logits)
    }

    /// The model.
    #[must_use]
    pub fn architecture(&self) -> &Architecture {
        self.backend.architecture()
    }

    /// Maximum number of tokens of a request, prompt and answer: the least of the model's positions,
    /// [`Limits::request_tokens`] and what the cache can hold. A request for more is refused.
    #[must_use]
    pub fn request_tokens(&self) -> u32 {
        let cached = u64::from(self.backend.pages()) * u64::from(self.backend.page_size());
        // The last token is never computed, so it needs no place in the cache.
        let most = u32::try_from(cached + 1).unwrap_or(u32::MAX);
        self.request_tokens.min(most)
    }

    /// Name of the backend's device, for display.
    #[must_use]
    pub fn device(&self) -> String {
        self.backend.name()
    }

    /// How the caches store keys and values.
    #[must_use]
    pub fn cache_type(&self) -> CacheType {
        self.backend.cache_type()
    }

    /// The composer, with the requests and their pages.
    #[must_use]
    pub const fn composer(&self) -> &Composer {
        &self.composer
    }

    /// What made steps slower and did not end them, since this was last called: lines for a user.
    pub fn warnings(&mut self) -> Vec<String> {
        self.backend.warnings()
    }

    /// Frees all pages that no request holds.
    pub fn clear_cache(&mut self) {
        self.composer.clear_cache();
    }

    /// Whether there is nothing to compute and nothing to report.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.composer.is_idle() && self.cancelled.is_empty() && self.flights.is_empty()
    }

    /// Returns the backend, for use in another engine.
    ///
    /// # Errors
    /// If a step under way cannot be finished. All requests are dropped.
    pub fn into_backend(mut self) -> Result<Box<dyn Backend>, Error> {
        while !self.flights.is_empty() {
            self.finish(&mut |_| ())?;
        }
        Ok(self.backend)
    }

    /// Number of finished steps.
    #[must_use]
    pub const fn steps(&self) -> u64 {
        self.steps
    }
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("device", &self.backend.name())
            .field("requests", &self.requests)
            .field("steps", &self.steps)
            .finish_non_exhaustive()
    }
}
