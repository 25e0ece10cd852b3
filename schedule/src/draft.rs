//! The interface of policies: they look at the requests and put tokens into the step.

use super::{Entry, Step, attention::StepShape, composer::Core};

/// What requests were like, as seen by those that finished.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Workload {
    /// Requests that finished.
    pub requests: u64,
    /// Tokens of their prompts.
    pub prompt_tokens: u64,
    /// Tokens they generated.
    pub generated_tokens: u64,
}

impl Workload {
    pub(super) const fn finished(&mut self, prompt: u32, generated: u32) {
        self.requests += 1;
        self.prompt_tokens += prompt as u64;
        self.generated_tokens += generated as u64;
    }
}

/// A step in the making. Limits hold whatever a policy asks for: the budget of tokens and requests is never
/// exceeded, and pages are taken from the pool before a token is put in.
#[derive(Debug)]
pub struct Draft<'a> {
    core: &'a mut Core,
    step: &'a mut Step,
    /// Running requests before this rank are in the step, or cannot be prefilled.
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

    /// Tokens that still fit the step.
    #[must_use]
    pub fn tokens_left(&self) -> u32 {
        self.core.limits.step_tokens - self.step.tokens
    }

    /// Requests that still fit the step.
    #[must_use]
    pub fn requests_left(&self) -> u32 {
        self.core.limits.step_requests - self.step.entries.len() as u32
    }

    /// Tokens in the step.
    #[must_use]
    pub fn tokens(&self) -> u32 {
        self.step.tokens
    }

    /// Lengths in the step.
    #[must_use]
    pub fn shape(&self) -> &StepShape {
        &self.step.shape
    }

    /// What finished requests were like.
    #[must_use]
    pub fn workload(&self) -> &Workload {
        &self.core.workload
    }

    /// Requests that hold pages.
    #[must_use]
    pub fn running(&self) -> usize {
        self.core.running.len()
    }

    /// Requests that wait for admission.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.core.waiting.len()
    }

    /// Puts one token of each decoding request into the step, `most` at the most; those served longest ago
    /// go first where not all fit. Returns how many.
    pub fn decode(&mut self, most: u32) -> u32 {
        let room = most.min(self.tokens_left()).min(self.requests_left()) as usize;
        let before = self.step.entries.len();
        let mut order = std::mem::take(&mut self.core.order);
        order.clear();
        order.extend_from_slice(&self.core.running);
        if order.len() > room {
            // Perhaps not all fit.
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
            // An earlier one may have taken its pages: then it waits again.
            if active.running && active.ready_to_decode() {
                self.put(slot, 1);
            }
        }
        self.core.order = order;
        (self.step.entries.len() - before) as u32
    }

    /// Decoding requests that are not part of a step under way.
    #[must_use]
    pub fn decodes_ready(&self) -> usize {
        let ready = |&&slot: &&u32| self.core.at(slot).ready_to_decode();
        self.core.running.iter().filter(ready).count()
    }

    /// Tokens that the next [`prefill`](Self::prefill) could put in at most, if pages allow; none: there is
    /// nothing to prefill. A waiting request may turn out to have fewer, where the prefix cache has some.
    #[must_use]
    pub fn next_prefill(&mut self) -> Option<u32> {
        if let Some(slot) = self.running_prefill() {
            return Some(self.core.at(slot).pending());
        }
        let full = self.core.running.len() >= self.core.limits.running as usize;
        let slot = self.core.waiting.front().filter(|_| !full)?;
        Some(self.core.at(*slot).known() - self.core.at(*slot).computed)
    }

    /// Puts up to `tokens` tokens of one prompt into the step: of the running request that arrived first, or
    /// else of a waiting one, which is thereby admitted. Returns how many; 0 where there is nothing to
    /// prefill or no room.
    pub fn prefill(&mut self, tokens: u32) -> u32 {
        let tokens = tokens.min(self.tokens_left());
        if tokens == 0 || self.requests_left() == 0 {
            return 0;
        }
        let running = self.running_prefill();
        let Some(slot) = running.or_else(|| self.core.admit(self.step)) else {
            return 0;
        };
        let tokens = tokens.min(self.core.at(slot).pending());
        self.put(slot, tokens);
        tokens
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
