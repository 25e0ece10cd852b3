//! Independent accounting that checks a composer.

use std::collections::{HashMap, HashSet, VecDeque};

use super::super::*;
use crate::policy::Policy;
use tandem_attn::problem::{Batch, Spec};

/// The test's own account of a request.
#[derive(Clone, Debug, Default)]
pub struct Known {
    pub prompt: u32,
    pub max_new: u32,
    pub computed: u32,
    pub generated: u32,
    pub cancelled: bool,
    pub in_flight: bool,
}

/// A composer and the accounts that check it.
pub struct Audit {
    pub composer: Composer,
    pub limits: Limits,
    pub known: HashMap<RequestId, Known>,
    pub under_way: VecDeque<Step>,
    /// Whether steps are advanced when composed, and resolved later.
    pub ahead: bool,
    /// Host pages that were copied to and not yet back.
    swapped: HashSet<u32>,
}

impl Audit {
    pub fn new(limits: Limits, pages: u32, page_size: u32, policy: Box<dyn Policy>) -> Self {
        Self {
            composer: Composer::with_policy(limits, pages, page_size, policy).unwrap(),
            limits,
            known: HashMap::new(),
            under_way: VecDeque::new(),
            ahead: false,
            swapped: HashSet::new(),
        }
    }

    pub fn submit(&mut self, request: Request) -> Option<RequestId> {
        let known = Known {
            prompt: request.prompt.len(),
            max_new: request.max_new_tokens,
            ..Known::default()
        };
        let id = self.composer.submit(request).ok()?;
        assert!(self.known.insert(id, known).is_none(), "an id given twice");
        Some(id)
    }

    /// Composes a step and checks it against the accounts.
    pub fn compose(&mut self) -> bool {
        let mut step = Step::default();
        let composed = self.composer.compose(&mut step);
        for preemption in &step.preempted {
            let known = self
                .known
                .get_mut(&preemption.request)
                .expect("preempted requests are alive");
            assert!(!known.in_flight, "preempted under way");
            if !preemption.swapped {
                known.computed = 0;
            }
        }
        assert!(step.tokens() <= self.limits.step_tokens, "token budget");
        assert!(step.entries.len() <= self.limits.step_requests as usize);
        let tokens: u32 = step.entries.iter().map(|entry| entry.tokens).sum();
        assert_eq!((tokens, step.shape().tokens()), (step.tokens(), tokens));
        for entry in &step.entries {
            let known = self.known.get_mut(&entry.request).expect("alive");
            assert!(!known.in_flight, "twice under way");
            assert!(entry.tokens > 0);
            // Only a cached prompt may start later than its first token.
            let all = known.prompt + known.generated;
            if known.computed == 0 {
                assert!(entry.first < all);
                known.computed = entry.first;
            }
            assert_eq!(entry.first, known.computed, "computed twice, or skipped");
            assert!(entry.first + entry.tokens <= all);
            assert_eq!(entry.samples, entry.first + entry.tokens == all);
            assert_eq!(entry.decode, known.generated > 0 && entry.first + 1 == all);
            known.in_flight = true;
        }
        let mut batch = Batch::default();
        self.composer.batch(&step, &mut batch);
        batch.check(&Spec::new(8, 2, 64)).unwrap();
        batch.check_append().unwrap();
        let mut inputs = StepInputs::default();
        self.composer.inputs(&step, &mut inputs);
        assert_eq!(inputs.batch, batch);
        assert_eq!(inputs.slots.len(), tokens as usize);
        self.check_pages();
        if composed {
            let awaited = |index: u32| step.entries[index as usize];
            assert!(inputs.awaited.iter().all(|&index| awaited(index).decode));
            for swap in &step.swaps {
                match *swap {
                    Swap::Out { host, .. } => drop(self.swapped.insert(host)),
                    Swap::In { host, .. } => {
                        assert!(
                            self.swapped.remove(&host),
                            "page {host} was never copied out"
                        );
                    }
                }
            }
            if self.ahead {
                self.advance(&step);
            }
            self.under_way.push_back(step);
        } else {
            assert!(step.entries.is_empty() && step.swaps.is_empty());
        }
        composed
    }

    fn advance(&mut self, step: &Step) {
        for entry in &step.entries {
            let known = self.known.get_mut(&entry.request).expect("alive");
            known.computed += entry.tokens;
            known.generated += u32::from(entry.samples && !known.cancelled);
            known.in_flight = false;
        }
        for finished in self.composer.advance(step) {
            let known = self.known.remove(&finished.request).expect("leaves once");
            assert!(finished.cancelled && known.cancelled);
            assert_eq!(finished.generated, known.generated);
        }
    }

    /// Completes the oldest step. Some answers end before their maximum length.
    pub fn complete(&mut self) {
        let Some(step) = self.under_way.pop_front() else {
            return;
        };
        if !self.ahead {
            self.advance(&step);
        }
        let sample = |entry: &Entry| match entry.first % 23 {
            22 => Sampled::Last(entry.first),
            _ => Sampled::Token(entry.first),
        };
        for finished in self.composer.resolve(&step, sample) {
            let known = self.known.remove(&finished.request).expect("finishes once");
            assert!(!finished.cancelled);
            let mut entries = step.entries.iter();
            let entry = entries.find(|entry| entry.request == finished.request);
            let entry = entry.expect("finishes by what the step sampled");
            let generated = entry.first + entry.tokens + 1 - known.prompt;
            assert_eq!(finished.generated, generated);
            let ended = matches!(sample(entry), Sampled::Last(_));
            assert!(ended || generated == known.max_new);
        }
        for (id, known) in &self.known {
            let mut later = self.under_way.iter().flat_map(|step| &step.entries);
            let awaited = self.ahead && later.any(|entry| entry.request == *id && entry.samples);
            assert!(
                awaited || known.generated < known.max_new,
                "should have finished"
            );
        }
        self.check_pages();
    }

    pub fn cancel(&mut self, id: RequestId) {
        let known = self.known.get_mut(&id).unwrap();
        known.cancelled = true;
        if !known.in_flight {
            self.known.remove(&id);
        }
        assert!(self.composer.cancel(id));
        self.check_pages();
    }

    /// Checks that each page reference belongs to a request or to the cache.
    pub fn check_pages(&self) {
        let pool = self.composer.pool();
        let mut refs = vec![0_u32; pool.pages() as usize];
        for &id in self.known.keys() {
            for &page in self.composer.pages_of(id).unwrap_or_default() {
                refs[page as usize] += 1;
            }
        }
        let mut cached = 0;
        for (page, &held) in refs.iter().enumerate() {
            let extra = pool.refs(page as u32) - held;
            assert!(extra <= 1, "page {page}");
            cached += extra;
        }
        assert_eq!(
            cached,
            self.composer
                .prefix_cache()
                .map_or(0, |cache| cache.pages())
        );
        let used = (0..pool.pages())
            .filter(|&page| pool.refs(page) > 0)
            .count() as u32;
        assert_eq!(used + pool.free_pages(), pool.pages());
    }

    /// Runs until all requests have left. Returns the number of steps.
    pub fn drain(&mut self, most: usize) -> usize {
        for steps in 0..most {
            let composed = self.compose();
            self.complete();
            if !composed && self.under_way.is_empty() {
                assert!(self.composer.is_idle(), "nothing to do, but not idle");
                return steps;
            }
        }
        panic!("not done after {most} steps");
    }

    pub fn check_empty(&mut self) {
        assert!(self.known.is_empty() && self.composer.is_idle());
        self.composer.clear_cache();
        let pool = self.composer.pool();
        assert_eq!(pool.free_pages(), pool.pages());
        let host = self.composer.host_pool();
        assert_eq!(host.free_pages(), host.pages());
    }
}
