//! Requests in, tokens out: the composer forms steps, and a backend computes them.

use std::{
    collections::{HashMap, VecDeque},
    sync::Weak,
};

use tandem_attn::{
    problem::{Batch, PageTable},
    step::{Draw, LOG_PROBS, LogProb, LogProbRow, Penalties, Sampling},
};
use tandem_schedule::{
    CacheType, Composer, Limits, Request, RequestId, Sampled, Step, StepInputs,
    policy::{Policy, SarathiServe},
};

use crate::{
    Architecture, Error, LogProbs, LogitRules, LogitWork,
    backend::{Backend, StepTime, Work},
    rules::{self, LogitRows, PromptTokens, Rules},
};

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

/// A step that is under way.
struct Flight {
    step: Step,
    rested: bool,
    /// Rows with log-probabilities.
    log_probs: Vec<LogProbRow>,
}

#[derive(Debug)]
struct Answer {
    sampling: Sampling,
    rules: Option<Box<Rules>>,
    log_probs: Option<u32>,
    ignore_ends: bool,
    /// Tokens that still must come before one may end it.
    before_end: u32,
    stop_tokens: Vec<u32>,
    started: bool,
    drawn: u64,
    ended: bool,
}

impl Answer {
    /// Whether a drawn token ends it. `ends` are those of the model.
    fn ends_with(&mut self, token: u32, ends: &[u32]) -> bool {
        if self.before_end > 0 {
            self.before_end -= 1;
            return false;
        }
        self.stop_tokens.contains(&token) || !self.ignore_ends && ends.contains(&token)
    }
}

/// What a step contained and how long it took, for measurements.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepReport {
    /// Number of computed tokens.
    pub tokens: u32,
    /// How many of them belong to decodes.
    pub decodes: u32,
    /// Number of requests.
    pub requests: u32,
    /// Number of drawn tokens.
    pub drawn: u32,
    /// Number of preempted requests.
    pub preempted: u32,
    /// How long it took. The gap before it is left out if there was nothing to compute.
    pub time: StepTime,
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

    /// Begins one step, finishes one, and reports what happened to the requests of the finished one. If the engine
    /// [runs ahead](Self::running_ahead), that is an earlier step. If no step finishes, the report is empty.
    ///
    /// # Errors
    /// If the backend fails. Its requests are lost, and the engine must not be used any more.
    pub fn step(&mut self, report: &mut dyn FnMut(Event)) -> Result<StepReport, Error> {
        for request in self.cancelled.drain(..) {
            let reason = Finish::Cancelled;
            report(Event::Finished { request, reason });
        }
        let begun = self.begin(report)?;
        if self.flights.len() > self.ahead || !begun {
            return self.finish(report);
        }
        Ok(StepReport::default())
    }

    /// Composes a step and begins it on the backend. Returns false if there is nothing to compute.
    fn begin(&mut self, report: &mut dyn FnMut(Event)) -> Result<bool, Error> {
        let mut step = self.spare.pop().unwrap_or_default();
        if !self.composer.compose(&mut step) {
            self.spare.push(step);
            return Ok(false);
        }
        self.composer.inputs(&step, &mut self.inputs);
        let inputs = &self.inputs;
        self.drawn.clear();
        for &entry in &inputs.awaited {
            let request = step.entries[entry as usize].request;
            let row = self.last_rows[&request];
            self.drawn
                .push((inputs.batch.qo_indptr[entry as usize], row));
        }
        self.rows.clear();
        self.draws.clear();
        self.logit_rows.clear();
        self.last_rows.clear();
        for (index, (entry, row)) in step.entries.iter().zip(&inputs.logits).enumerate() {
            let request = entry.request;
            let Some(answer) = self.requests.get_mut(&request) else {
                continue;
            };
            if !std::mem::replace(&mut answer.started, true) {
                let cached_tokens = self.composer.cached_tokens_of(request).unwrap_or(0);
                report(Event::Started {
                    request,
                    cached_tokens,
                });
            }
            let Some(row) = row else {
                continue;
            };
            let of_request = self.rows.len() as u32;
            self.last_rows.insert(request, of_request);
            self.rows.push(*row);
            if let Some(rules) = &answer.rules {
                // The only token of such an entry: the device knows it before the host does.
                let is_awaited = inputs.awaited.contains(&(index as u32));
                let newest = is_awaited.then_some(*row);
                rules.add_to(&mut self.logit_rows, of_request, answer.drawn, newest);
            }
            if let Some(top) = answer.log_probs {
                let row = of_request;
                self.logit_rows.log_probs.push(LogProbRow { row, top });
            }
            let draw = answer.sampling.draw(answer.drawn);
            self.draws.push(draw.map_err(tandem_attn::Error::from)?);
            answer.drawn += 1;
        }
        self.backend.begin(&Work {
            inputs,
            copies: &step.copies,
            rows: &self.rows,
            draws: &self.draws,
            drawn: &self.drawn,
            logits: self.logit_rows.work(),
        })?;
        self.composer.advance(&step);
        let rested = std::mem::take(&mut self.rested);
        self.flights.push_back(Flight {
            step,
            rested,
            log_probs: self.logit_rows.log_probs.clone(),
        });
        Ok(true)
    }

    /// Waits for the oldest step under way, if there is one, and reports its tokens.
    fn finish(&mut self, report: &mut dyn FnMut(Event)) -> Result<StepReport, Error> {
        let Some(Flight {
            step,
            rested,
            log_probs,
        }) = self.flights.pop_front()
        else {
            return Ok(StepReport::default());
        };
        let mut time = self
            .backend
            .finish(&mut self.sampled, &mut self.log_probs)?;
        time.gap_s = time.gap_s.filter(|_| !rested);
        self.steps += 1;

        let ends = &self.backend.architecture().ends;
        let mut sampled = (0..).zip(self.sampled.iter().copied());
        let results = self.log_probs.chunks_exact(LOG_PROBS as usize);
        let mut results = log_probs.iter().zip(results).peekable();
        let requests = &mut self.requests;
        let finished = self.composer.resolve(&step, |entry| {
            let request = entry.request;
            let (row, token) = sampled.next().expect("one for each row");
            let log_probs = results.next_if(|(asked, _)| asked.row == row);
            let log_probs = log_probs.map(|(asked, results)| LogProbs::of(*asked, results));
            // The request was cancelled meanwhile, or its answer had already ended.
            let Some(answer) = requests.get_mut(&request).filter(|answer| !answer.ended) else {
                return Sampled::Last(token);
            };
            if answer.ends_with(token, ends) {
                answer.ended = true;
                return Sampled::Last(token);
            }
            if let Some(rules) = &mut answer.rules {
                rules.count(token);
            }
            report(Event::Token {
                request,
                token,
                log_probs,
            });
            Sampled::Token(token)
        });
        for left in finished {
            let Some(answer) = self.requests.remove(&left.request) else {
                continue;
            };
            let reason = match answer.ended {
                true => Finish::End,
                false => Finish::Length,
            };
            let request = left.request;
            report(Event::Finished { request, reason });
        }
        let report = StepReport {
            tokens: step.tokens(),
            requests: step.entries.len() as u32,
            decodes: step.entries.iter().filter(|entry| entry.decode).count() as u32,
            drawn: self.sampled.len() as u32,
            preempted: step.preempted.len() as u32,
            time,
        };
        self.spare.push(step);
        Ok(report)
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
