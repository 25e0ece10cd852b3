//! The interface of policies: they inspect the requests and add tokens to the step.

use super::{Entry, Step, attention::StepShape, composer::Core};

/// Statistics of finished requests.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Workload {
    /// Number of finished requests.
    pub requests: u64,
    /// Total prompt tokens.
    pub prompt_tokens: u64,
    /// Total generated tokens.
    pub generated_tokens: u64,
}

impl Workload {
    pub(super) const fn finished(&mut self, prompt: u32, generated: u32) {
        self.requests += 1;
        self.prompt_tokens += prompt as u64;
        self.generated_tokens += generated as u64;
    }
}

/// A step being composed. It enforces all limits on the policy: the step never exceeds the budgets of tokens and
/// requests, and pages are allocated before tokens are added.
#[derive(Debug)]
pub struct Draft<'a> {
    core: &'a mut Core,
    step: &'a mut Step,
    /// Running requests before this rank are already in the step or cannot be prefilled.
    next_prefill: usize,
}

impl<'a> Draft<'a> {
    pub(super) fn new(core: &'a mut Core, step: &'a mut Step) -> Self {
        Self {
            core,
            step,
            next_prefill: 0,
        }
    }

    /// Number of tokens that still fit the step.
    #[must_use]
    pub fn tokens_left(&self) -> u32 {
        self.core.limits.step_tokens - self.step.tokens
    }

    /// Number of requests that still fit the step.
    #[must_use]
    pub fn requests_left(&self) -> u32 {
        self.core.limits.step_requests - self.step.entries.len() as u32
    }

    /// Number of tokens in the step.
    #[must_use]
    pub fn tokens(&self) -> u32 {
        self.step.tokens
    }

    /// Lengths of the step.
    #[must_use]
    pub fn shape(&self) -> &StepShape {
        &self.step.shape
    }

    /// Statistics of finished requests.
    #[must_use]
    pub fn workload(&self) -> &Workload {
        &self.core.workload
    }

    /// Number of requests that hold pages.
    #[must_use]
    pub fn running(&self) -> usize {
        self.core.running.len()
    }

    /// Number of requests that wait for admission.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.core.waiting.len()
    }

    /// Adds one token of each decoding request, at most `most` tokens. If not all fit, those served longest ago go
    /// first. Returns the number of tokens added.
    pub fn decode(&mut self, most: u32) -> u32 {
        let room = most.min(self.tokens_left()).min(self.requests_left()) as usize;
        let before = self.step.entries.len();
        let mut order = std::mem::take(&mut self.core.order);
        order.clear();
        order.extend_from_slice(&self.core.running);
        if order.len() > room {
            // Requests that cannot decode now may be among them, so count the others.
            let Core { slots, .. } = &*self.core;
            let ready = |slot: u32| {
                slots[slot as usize]
                    .as_ref()
                    .filter(|a| a.ready_to_decode())
            };
            order.retain(|&slot| ready(slot).is_some());
            if order.len() > room {
                order.sort_by_key(|&slot| ready(slot).map(|active| active.last_step));
            }
        }
        for &slot in &order {
            if self.step.entries.len() - before == room {
                break;
            }
            let active = self.core.at(slot);
            // Room for an earlier request may have preempted this one.
            if active.running && active.ready_to_decode() {
                self.put(slot, 1);
            }
        }
        self.core.order = order;
        (self.step.entries.len() - before) as u32
    }

    /// Number of decoding requests that are not in a step under way.
    #[must_use]
    pub fn decodes_ready(&self) -> usize {
        let ready = |&&slot: &&u32| self.core.at(slot).ready_to_decode();
        self.core.running.iter().filter(ready).count()
    }

    /// Number of decoding requests that are in a step under way.
    #[must_use]
    pub fn decodes_under_way(&self) -> usize {
        let under_way = |&&slot: &&u32| {
            let active = self.core.at(slot);
            active.in_flight && active.decodes()
        };
        self.core.running.iter().filter(under_way).count()
    }

    /// Maximum number of tokens that the next [`prefill`](Self::prefill) can add if pages and
    /// [`Limits::chunk_keys`](crate::Limits::chunk_keys) allow; `None` if there is nothing to prefill. A waiting request may need fewer if the prefix cache has some of them.
    #[must_use]
    pub fn next_prefill(&mut self) -> Option<u32> {
        if let Some(slot) = self.running_prefill() {
            return Some(self.core.at(slot).pending());
        }
        let full = self.core.running.len() >= self.core.limits.running as usize;
        let slot = self.core.waiting.front().filter(|_| !full)?;
        Some(self.core.at(*slot).known() - self.core.at(*slot).computed)
    }

    /// Position of the first token that the next [`prefill`](Self::prefill) adds: the tokens before it are computed, or the prefix
    /// cache has them. `None` if there is nothing to prefill.
    #[must_use]
    pub fn next_prefill_position(&mut self) -> Option<u32> {
        match self.running_prefill() {
            Some(slot) => Some(self.core.at(slot).computed),
            None => self.core.admission_position(),
        }
    }

    /// Adds up to `tokens` tokens of one prompt: that of the running request that arrived first, or else of a waiting
    /// request, which this admits. Returns the number added: 0 if there is nothing to prefill or no room, also for the
    /// keys of one more chunk ([`Limits::chunk_keys`](crate::Limits::chunk_keys)).
    pub fn prefill(&mut self, tokens: u32) -> u32 {
        let tokens = tokens.min(self.tokens_left());
        if tokens == 0 || self.requests_left() == 0 {
            return 0;
        }
        let running = self.running_prefill();
        let Some(slot) = running.or_else(|| self.core.admit(self.step)) else {
            return 0;
        };
        let active = self.core.at(slot);
        let tokens = tokens.min(active.pending());
        if !self.has_room_for_keys(active.computed + tokens) {
            return 0;
        }
        self.put(slot, tokens);
        tokens
    }

    /// Whether the prompt chunks of the step may have this many keys more.
    fn has_room_for_keys(&self, keys: u32) -> bool {
        let chunks = &self.step.shape.chunks;
        let sum: u64 = chunks.iter().map(|chunk| u64::from(chunk.keys)).sum();
        chunks.is_empty() || sum + u64::from(keys) <= u64::from(self.core.limits.chunk_keys)
    }

    fn running_prefill(&mut self) -> Option<u32> {
        while let Some(&slot) = self.core.running.get(self.next_prefill) {
            let active = self.core.at(slot);
            if !active.in_flight && !active.decodes() {
                return Some(slot);
            }
            self.next_prefill += 1;
        }
        None
    }

    fn put(&mut self, slot: u32, tokens: u32) {
        if !self.core.reserve(slot, tokens, self.step) {
            return;
        }
        let (request, steps) = (self.core.id(slot), self.core.steps);
        let active = self.core.at_mut(slot);
        self.step.push(Entry {
            request,
            first: active.computed,
            tokens,
            samples: tokens == active.pending(),
            decode: active.decodes(),
        });
        active.in_flight = true;
        active.last_step = steps;
    }
}
