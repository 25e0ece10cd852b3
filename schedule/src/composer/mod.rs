//! The composer: holds the requests and their pages, and composes steps.

mod core;
mod pages;

pub(super) use core::Core;

use super::{
    Draft, Entry, Request, RequestId, ScheduleError, Step, StepInputs, policy::Policy, step,
};
use tandem_attn::{
    kv::{PagePool, PrefixCache},
    problem::{Batch, PageTable},
};

/// Limits of a composer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of query tokens in a step.
    pub step_tokens: u32,
    /// Maximum number of requests in a step.
    pub step_requests: u32,
    /// Maximum number of keys of all prompt chunks of a step together. The first chunk of a step may have more. It limits
    /// the memory of attention kernels that convert the keys of chunks.
    pub chunk_keys: u32,
    /// Maximum number of requests that hold pages.
    pub running: u32,
    /// Maximum number of waiting requests (back-pressure). Those that [`running`](Self::running) has room for do not count.
    pub waiting: usize,
    /// Maximum number of tokens of one request, prompt and generated.
    pub request_tokens: u32,
    /// Pages that admission keeps free for the growth of running requests: at most one for each of them.
    pub spare_pages: u32,
    /// Pages on the host to swap to when the pool is full. If 0, preempted requests are computed again.
    pub host_pages: u32,
    /// Whether prompts with token ids use a prefix cache.
    pub prefix_cache: bool,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            step_tokens: 2048,
            step_requests: 256,
            chunk_keys: u32::MAX,
            running: 256,
            waiting: usize::MAX,
            request_tokens: u32::MAX,
            spare_pages: 0,
            host_pages: 0,
            prefix_cache: true,
        }
    }
}

/// The sampled token of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sampled {
    /// The next token. The request continues unless this is its last token.
    Token(u32),
    /// The last token: it ends the sequence or completes a stop text.
    Last(u32),
}

/// A request that left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Finished {
    /// The request.
    pub request: RequestId,
    /// Number of tokens it generated.
    pub generated: u32,
    /// Whether it was cancelled.
    pub cancelled: bool,
}

/// Requests in, hybrid batches out; deterministic.
///
/// A step is made by [`compose`](Self::compose), computed by the caller, and given back to
/// [`complete`](Self::complete) with the sampled tokens. Several steps may be under way at once (pipeline
/// parallelism): a request is in at most one of them. A machine that computes steps in their order can be given the
/// next one before the tokens of the last are known: [`advance`](Self::advance) and [`resolve`](Self::resolve).
#[derive(Debug)]
pub struct Composer {
    core: Core,
    policy: Box<dyn Policy>,
}

impl Composer {
    /// A composer over a pool of `pages` pages of `page_size` tokens.
    ///
    /// # Errors
    /// [`ScheduleError::Limit`], [`ScheduleError::Problem`] for pages of more than 4096 tokens.
    pub fn new(
        limits: Limits,
        pages: u32,
        page_size: u32,
        policy: impl Policy + 'static,
    ) -> Result<Self, ScheduleError> {
        Self::with_policy(limits, pages, page_size, Box::new(policy))
    }

    /// Like [`new`](Self::new), with a policy chosen at run time.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_policy(
        limits: Limits,
        pages: u32,
        page_size: u32,
        policy: Box<dyn Policy>,
    ) -> Result<Self, ScheduleError> {
        for (name, got) in [
            ("Limits::step_tokens", limits.step_tokens),
            ("Limits::step_requests", limits.step_requests),
            ("Limits::running", limits.running),
            ("the number of pages", pages),
            ("the page size", page_size),
        ] {
            if got == 0 {
                return Err(ScheduleError::Limit {
                    name,
                    got: 0,
                    least: 1,
                });
            }
        }
        PageTable::try_new(page_size, pages)?;
        let core = Core::new(limits, pages, page_size);
        Ok(Self { core, policy })
    }

    /// Queues a request. It waits until the policy admits it.
    ///
    /// # Errors
    /// If it asks for no tokens, breaks a limit, or would not fit the pool even alone.
    pub fn submit(&mut self, request: Request) -> Result<RequestId, ScheduleError> {
        self.core.submit(request)
    }

    /// Cancels a request at any point. Returns whether it existed. A request in a step under way keeps its pages until
    /// that step completes, because the step writes to them.
    pub fn cancel(&mut self, request: RequestId) -> bool {
        let Some(active) = self.core.get_mut(request) else {
            return false;
        };
        active.cancelled = true;
        if !active.in_flight {
            self.core.remove(request.slot);
        }
        true
    }

    /// Composes the next step. Returns false if there is nothing to compute now. Requests may have been preempted
    /// nevertheless; the next step that has something to compute begins with the copies of their pages.
    pub fn compose(&mut self, step: &mut Step) -> bool {
        step.clear();
        self.core.steps += 1;
        let mut draft = Draft::new(&mut self.core, step);
        self.policy.compose(&mut draft);
        if step.is_empty() {
            self.core.swaps.append(&mut step.swaps);
            return false;
        }
        step.swaps.splice(..0, self.core.swaps.drain(..));
        true
    }

    /// Records that a step was computed. Calls `sample` for each entry that samples, in order. Returns the requests
    /// that left.
    ///
    /// # Panics
    /// If the step is not under way.
    pub fn complete(
        &mut self,
        step: &Step,
        sample: impl FnMut(&Entry) -> Sampled,
    ) -> Vec<Finished> {
        let mut finished = self.advance(step);
        finished.extend(self.resolve(step, sample));
        finished
    }

    /// Records that a step is on its way to a device that computes steps in order. The next step can then be composed
    /// before the tokens of this one are known; [`resolve`](Self::resolve) supplies them. Returns the requests that
    /// were cancelled since the step was composed.
    ///
    /// A request whose last token the step samples stays until `resolve`. If the sampled token ends a request early, a
    /// later step may already contain the request; the token that this step samples for it is dropped.
    ///
    /// # Panics
    /// If the step is not under way.
    pub fn advance(&mut self, step: &Step) -> Vec<Finished> {
        let finished = step.entries.iter();
        let finished = finished.filter_map(|entry| self.core.advance(entry));
        let finished: Vec<_> = finished.collect();
        self.take_off(&finished);
        finished
    }

    /// Takes the sampled tokens of a step. This step and all steps composed so far must have been
    /// [advanced](Self::advance); steps are resolved in order. Calls `sample` for each entry that samples, in order.
    /// Returns the requests that left.
    ///
    /// # Panics
    /// If a request of the step is in another step that was composed and not advanced.
    pub fn resolve(
        &mut self,
        step: &Step,
        mut sample: impl FnMut(&Entry) -> Sampled,
    ) -> Vec<Finished> {
        let mut finished = Vec::new();
        for entry in step.entries.iter().filter(|entry| entry.samples) {
            let sampled = sample(entry);
            finished.extend(self.core.resolve(entry, sampled));
        }
        self.take_off(&finished);
        finished
    }

    fn take_off(&mut self, finished: &[Finished]) {
        if finished.is_empty() {
            return;
        }
        let left = |slot| {
            let mut finished = finished.iter();
            finished.any(|finished| finished.request.slot == slot)
        };
        self.core.running.retain(|&slot| !left(slot));
    }

    /// Writes the batch of a step for the planner. The step must be under way.
    pub fn batch(&self, step: &Step, batch: &mut Batch) {
        let page_size = self.core.pool.page_size();
        step::clear_batch(batch, page_size, self.core.pool.pages());
        for entry in &step.entries {
            let pages = self.core.at(entry.request.slot).sequence.pages();
            step::push_row(batch, entry, pages, page_size);
        }
    }

    /// Writes all inputs that a backend needs for a step. The step must be under way.
    pub fn inputs(&self, step: &Step, inputs: &mut StepInputs) {
        let page_size = self.core.pool.page_size();
        inputs.clear(page_size, self.core.pool.pages());
        for entry in &step.entries {
            let active = self.core.at(entry.request.slot);
            if active.awaited > 0 {
                inputs.awaited.push(inputs.logits.len() as u32);
            }
            inputs.push(entry, active.sequence.pages(), page_size, &active.tokens);
        }
    }

    /// Its limits.
    #[must_use]
    pub const fn limits(&self) -> &Limits {
        &self.core.limits
    }

    /// The page pool.
    #[must_use]
    pub const fn pool(&self) -> &PagePool {
        &self.core.pool
    }

    /// The host pages for requests that are swapped out.
    #[must_use]
    pub const fn host_pool(&self) -> &PagePool {
        &self.core.host
    }

    /// The prefix cache, if there is one.
    #[must_use]
    pub const fn prefix_cache(&self) -> Option<&PrefixCache> {
        self.core.cache.as_ref()
    }

    /// Frees all pages of the prefix cache that no request holds.
    pub fn clear_cache(&mut self) {
        let Core { cache, pool, .. } = &mut self.core;
        if let Some(cache) = cache {
            cache.evict(pool, u32::MAX);
        }
        self.core.releases += 1;
    }

    /// Number of requests that hold pages.
    #[must_use]
    pub fn running(&self) -> usize {
        self.core.running.len()
    }

    /// Number of waiting requests.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.core.waiting.len()
    }

    /// Whether there are no requests.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.core.running.is_empty() && self.core.waiting.is_empty()
    }

    /// For each request, running ones first and each group by arrival: the numbers of known tokens, of computed tokens,
    /// and of tokens still to generate.
    pub(crate) fn standing(&self) -> impl Iterator<Item = (RequestId, [u32; 3])> {
        let slots = self.core.running.iter().chain(&self.core.waiting);
        slots.map(|&slot| {
            let active = self.core.at(slot);
            let left = active.max_new - active.generated;
            (self.core.id(slot), [active.known(), active.computed, left])
        })
    }

    /// Number of prompt tokens found in the prefix cache so far. Tokens found again after preemption are not counted.
    #[must_use]
    pub const fn cached_tokens(&self) -> u64 {
        self.core.cached_tokens
    }

    /// Number of a request's prompt tokens that were found in the prefix cache when it was first admitted; 0 before that.
    #[must_use]
    pub fn cached_tokens_of(&self, request: RequestId) -> Option<u32> {
        self.core.get(request).map(|active| active.cached)
    }

    /// Number of tokens computed again so far: preemption lost their keys, and the prefix cache did not have them at
    /// the next admission.
    #[must_use]
    pub const fn lost_tokens(&self) -> u64 {
        self.core.lost_tokens
    }

    /// The pages that a running request holds.
    #[must_use]
    pub fn pages_of(&self, request: RequestId) -> Option<&[u32]> {
        self.core.get(request).map(|active| active.sequence.pages())
    }
}
