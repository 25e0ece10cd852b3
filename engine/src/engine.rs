//! Requests in, tokens out: the composer's steps on a backend.

use std::collections::HashMap;

use tandem_attn::{
    problem::{Batch, PageTable},
    step::{Draw, Sampling},
};
use tandem_schedule::{
    Composer, Limits, Request, RequestId, Sampled, ScheduleError, Step, StepInputs,
    policy::{Policy, SarathiServe},
};

use crate::{
    Architecture, Error,
    backend::{Backend, Work},
};

/// A prompt and what is to be made of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Generation {
    /// Token ids.
    pub prompt: Vec<u32>,
    /// The most tokens of the answer.
    pub max_new_tokens: u32,
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// Go on behind a token that ends a text: for measurements.
    pub ignore_ends: bool,
}

impl Generation {
    /// The likeliest token at each place.
    #[must_use]
    pub const fn greedy(prompt: Vec<u32>, max_new_tokens: u32) -> Self {
        Self {
            prompt,
            max_new_tokens,
            sampling: Sampling::GREEDY,
            ignore_ends: false,
        }
    }
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model ended it.
    End,
    /// It has as many tokens as were asked for.
    Length,
    /// It was cancelled.
    Cancelled,
}

/// What became of a request in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A token of the answer. The one that ends it is not among them.
    Token {
        /// Whose.
        request: RequestId,
        /// The token.
        token: u32,
    },
    /// The answer ended, and the request is forgotten.
    Finished {
        /// Whose.
        request: RequestId,
        /// Why.
        reason: Finish,
    },
}

/// Serves requests together: hybrid batches over paged caches, prompts in chunks, common beginnings computed once.
pub struct Engine {
    composer: Composer,
    backend: Box<dyn Backend>,
    requests: HashMap<RequestId, Answer>,
    step: Step,
    inputs: StepInputs,
    rows: Vec<u32>,
    draws: Vec<Draw>,
    sampled: Vec<u32>,
    /// Requests that were cancelled between steps, and whose end no event has said yet.
    cancelled: Vec<RequestId>,
    steps: u64,
}

#[derive(Debug)]
struct Answer {
    sampling: Sampling,
    ignore_ends: bool,
    drawn: u64,
    ended: bool,
}

/// How a step was made up, for measurements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepReport {
    /// Tokens that were computed.
    pub tokens: u32,
    /// Among them, those after a generated one.
    pub decodes: u32,
    /// Tokens that were drawn.
    pub drawn: u32,
}

impl Engine {
    /// An engine that composes its batches as SARATHI does: decodes first, chunks of prompts in what is left.
    ///
    /// # Errors
    /// [`Error::Schedule`] for limits that allow nothing.
    pub fn new(backend: Box<dyn Backend>, limits: Limits) -> Result<Self, Error> {
        Self::with_policy(backend, limits, Box::new(SarathiServe))
    }

    /// The same with another policy.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_policy(
        backend: Box<dyn Backend>,
        mut limits: Limits,
        policy: Box<dyn Policy>,
    ) -> Result<Self, Error> {
        limits.step_tokens = limits.step_tokens.min(backend.step_tokens());
        limits.step_requests = limits.step_requests.min(backend.step_requests());
        limits.running = limits.running.min(limits.step_requests);
        limits.request_tokens = limits.request_tokens.min(backend.architecture().positions);
        let composer = Composer::with_policy(limits, backend.pages(), backend.page_size(), policy)?;
        Ok(Self {
            composer,
            backend,
            requests: HashMap::new(),
            step: Step::default(),
            inputs: StepInputs::default(),
            rows: Vec::new(),
            draws: Vec::new(),
            sampled: Vec::new(),
            cancelled: Vec::new(),
            steps: 0,
        })
    }

    /// Takes a request.
    ///
    /// # Errors
    /// [`Error::Token`], [`Error::TooLong`], [`Error::Schedule`] where it breaks a limit or could never be served,
    /// [`Error::Attention`] for a sampling that means nothing.
    pub fn submit(&mut self, generation: Generation) -> Result<RequestId, Error> {
        self.check(&generation)?;
        let Generation {
            prompt,
            max_new_tokens,
            sampling,
            ignore_ends,
        } = generation;
        let request = self.composer.submit(Request::new(prompt, max_new_tokens))?;
        let answer = Answer {
            sampling,
            ignore_ends,
            drawn: 0,
            ended: false,
        };
        self.requests.insert(request, answer);
        Ok(request)
    }

    fn check(&self, generation: &Generation) -> Result<(), Error> {
        let architecture = self.backend.architecture();
        let vocabulary = architecture.vocabulary;
        if let Some(&got) = generation
            .prompt
            .iter()
            .find(|&&id| id as usize >= vocabulary)
        {
            return Err(Error::Token { got, vocabulary });
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
        Ok(())
    }

    /// Ends a request at any point; whether it was there. The next step says that it has ended.
    pub fn cancel(&mut self, request: RequestId) -> bool {
        let there = self.requests.remove(&request).is_some();
        if there {
            self.composer.cancel(request);
            self.cancelled.push(request);
        }
        there
    }

    /// Computes one step and tells what became of its requests; nothing to compute is an empty report.
    ///
    /// # Errors
    /// Where the backend fails. Its requests are lost then: the engine is not to be used any more.
    pub fn step(&mut self, tell: &mut dyn FnMut(Event)) -> Result<StepReport, Error> {
        for request in self.cancelled.drain(..) {
            let reason = Finish::Cancelled;
            tell(Event::Finished { request, reason });
        }
        if !self.composer.compose(&mut self.step) {
            return Ok(StepReport::default());
        }
        self.composer.inputs(&self.step, &mut self.inputs);
        self.rows.clear();
        self.draws.clear();
        let wanted = self.step.entries.iter().zip(&self.inputs.logits);
        for (entry, row) in wanted {
            let (Some(row), Some(answer)) = (row, self.requests.get(&entry.request)) else {
                continue;
            };
            self.rows.push(*row);
            let draw = answer.sampling.draw(answer.drawn);
            self.draws.push(draw.map_err(tandem_attn::Error::from)?);
        }
        let work = Work {
            inputs: &self.inputs,
            copies: &self.step.copies,
            rows: &self.rows,
            draws: &self.draws,
        };
        self.backend.compute(&work, &mut self.sampled)?;
        self.steps += 1;

        let ends = &self.backend.architecture().ends;
        let mut sampled = self.sampled.iter().copied();
        let requests = &mut self.requests;
        let finished = self.composer.complete(&self.step, |entry| {
            let request = entry.request;
            let answer = requests
                .get_mut(&request)
                .expect("nothing is cancelled within a step");
            let token = sampled.next().expect("one for each row");
            answer.drawn += 1;
            if !answer.ignore_ends && ends.contains(&token) {
                answer.ended = true;
                return Sampled::Last(token);
            }
            tell(Event::Token { request, token });
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
            tell(Event::Finished { request, reason });
        }
        let entries = &self.step.entries;
        Ok(StepReport {
            tokens: self.step.tokens(),
            decodes: entries.iter().filter(|entry| entry.decode).count() as u32,
            drawn: self.rows.len() as u32,
        })
    }

    /// Logits at every position of a text, `[tokens, vocabulary]`, computed in chunks of so many tokens.
    ///
    /// # Errors
    /// [`Error::Schedule`] where there is no room for it or requests are under way; as [`step`](Self::step).
    pub fn logits(&mut self, tokens: &[u32], chunk: usize) -> Result<Vec<f32>, Error> {
        let generation = Generation::greedy(tokens.to_vec(), 0);
        self.check(&generation)?;
        let (page_size, pages) = (self.backend.page_size(), self.backend.pages());
        let needed = (tokens.len() as u64).div_ceil(u64::from(page_size));
        self.composer.clear_cache();
        let free = self.composer.pool().free_pages();
        if !self.composer.is_idle() || needed > u64::from(free) {
            return Err(Error::Busy { needed, free });
        }
        let table: Vec<u32> = (0..needed as u32).collect();
        let mut logits = Vec::with_capacity(tokens.len() * self.backend.architecture().vocabulary);
        let chunk = chunk.clamp(1, self.backend.step_tokens() as usize);
        for (index, ids) in tokens.chunks(chunk).enumerate() {
            let first = (index * chunk) as u32;
            let end = first + ids.len() as u32;
            let mut keys = PageTable::new(page_size, pages);
            keys.push(&table[..end.div_ceil(page_size) as usize], end);
            let inputs = StepInputs {
                batch: Batch::new(vec![0, ids.len() as u32], keys),
                // The pages are in order.
                slots: (first..end).collect(),
                positions: (first..end).collect(),
                tokens: ids.to_vec(),
                logits: Vec::new(),
            };
            let most = self.backend.step_requests() as usize;
            let rows: Vec<u32> = (0..ids.len() as u32).collect();
            if rows.len() > most {
                return Err(ScheduleError::Limit {
                    name: "the requests of a step",
                    got: most as u64,
                    least: rows.len() as u64,
                }
                .into());
            }
            let draw = Sampling::GREEDY.draw(0).map_err(tandem_attn::Error::from)?;
            let work = Work {
                inputs: &inputs,
                copies: &[],
                rows: &rows,
                draws: &vec![draw; rows.len()],
            };
            self.backend.compute(&work, &mut self.sampled)?;
            logits.extend(self.backend.logits()?);
        }
        Ok(logits)
    }

    /// The model.
    #[must_use]
    pub fn architecture(&self) -> &Architecture {
        self.backend.architecture()
    }

    /// What it runs on, for people.
    #[must_use]
    pub fn device(&self) -> String {
        self.backend.name()
    }

    /// The requests and their pages.
    #[must_use]
    pub const fn composer(&self) -> &Composer {
        &self.composer
    }

    /// Gives back all pages that no request holds.
    pub fn clear_cache(&mut self) {
        self.composer.clear_cache();
    }

    /// Whether there is nothing to compute and nothing to tell.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.composer.is_idle() && self.cancelled.is_empty()
    }

    /// Steps that were computed.
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
