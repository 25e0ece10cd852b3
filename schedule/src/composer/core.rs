//! The composer's state of requests and its transitions: everything except pages and policy.

use std::collections::VecDeque;

use super::{
    super::{Entry, Prompt, Request, RequestId, ScheduleError, Swap, Workload},
    Finished, Limits, Sampled,
};
use tandem_attn::kv::{PagePool, PrefixCache, Sequence};

/// A request that the composer holds.
#[derive(Debug)]
pub(crate) struct Active {
    /// Rank by arrival; lower is earlier.
    pub arrival: u64,
    /// Number of earlier requests in this slot.
    pub generation: u32,
    pub prompt: Prompt,
    pub prompt_len: u32,
    pub max_new: u32,
    pub generated: u32,
    /// Sampled tokens whose ids are not known yet: at most one, the last token.
    pub awaited: u32,
    /// Tokens that count as computed on admission.
    pub stands_at: u32,
    /// Tokens whose keys are in pages.
    pub computed: u32,
    /// Whether some of these pages were never written, because their tokens only counted as computed.
    pub unwritten: bool,
    /// Whether it has been admitted before.
    pub admitted: bool,
    /// Tokens of the prompt found in the prefix cache on the first admission.
    pub cached: u32,
    /// Tokens whose keys it lost to preemption; reset on admission.
    pub lost: u32,
    /// Its pages: on admission for all known tokens, later extended to the end of a page at a time.
    pub sequence: Sequence,
    /// Ids of the known tokens. For prompts given as blocks, present only while the prompt is computed.
    pub tokens: Vec<u32>,
    /// Host pages of a request that was swapped out.
    pub swapped: Vec<u32>,
    /// The last step that contained its tokens.
    pub last_step: u64,
    /// Whether it is in a step under way.
    pub in_flight: bool,
    pub running: bool,
    pub cancelled: bool,
}

impl Active {
    pub const fn known(&self) -> u32 {
        self.prompt_len + self.generated
    }

    pub const fn pending(&self) -> u32 {
        self.known() - self.computed
    }

    pub const fn decodes(&self) -> bool {
        self.generated > 0 && self.pending() == 1
    }

    pub const fn ready_to_decode(&self) -> bool {
        self.decodes() && !self.in_flight && !self.is_done()
    }

    /// Whether all its tokens are sampled. It leaves when the id of the last one is known.
    pub const fn is_done(&self) -> bool {
        self.generated == self.max_new
    }

    /// Number of keys at its end. The last token is never computed, so it has no key.
    const fn most_keys(&self) -> u32 {
        self.prompt_len + self.max_new - 1
    }
}

/// Everything but the policy.
#[derive(Debug)]
pub(crate) struct Core {
    pub limits: Limits,
    pub pool: PagePool,
    pub cache: Option<PrefixCache>,
    pub host: PagePool,
    generations: Vec<u32>,
    pub slots: Vec<Option<Active>>,
    vacant: Vec<u32>,
    /// By arrival.
    pub running: Vec<u32>,
    /// By arrival.
    pub waiting: VecDeque<u32>,
    /// The running requests in decode order; kept to reuse its memory.
    pub order: Vec<u32>,
    /// Copies of preemptions since the last step that had entries.
    pub swaps: Vec<Swap>,
    arrivals: u64,
    pub steps: u64,
    /// Increases when pages become free or enter the prefix cache. A failed admission is tried again only then.
    pub releases: u64,
    pub blocked_at: Option<u64>,
    pub workload: Workload,
    /// Prompt tokens found in the prefix cache on first admissions.
    pub cached_tokens: u64,
    /// Tokens whose keys were lost to preemption and that the prefix cache did not have on the next admission.
    pub lost_tokens: u64,
}

impl Core {
    pub fn new(limits: Limits, pages: u32, page_size: u32) -> Self {
        Self {
            limits,
            pool: PagePool::new(pages, page_size),
            cache: limits.prefix_cache.then(|| PrefixCache::new(page_size)),
            host: PagePool::new(limits.host_pages, page_size),
            generations: Vec::new(),
            slots: Vec::new(),
            vacant: Vec::new(),
            running: Vec::new(),
            waiting: VecDeque::new(),
            order: Vec::new(),
            swaps: Vec::new(),
            arrivals: 0,
            steps: 0,
            releases: 0,
            blocked_at: None,
            workload: Workload::default(),
            cached_tokens: 0,
            lost_tokens: 0,
        }
    }

    pub fn submit(&mut self, request: Request) -> Result<RequestId, ScheduleError> {
        let Request {
            prompt,
            max_new_tokens,
            computed: stands_at,
        } = request;
        let prompt_len = prompt.len();
        if prompt_len == 0 {
            return Err(ScheduleError::EmptyPrompt);
        }
        prompt.check_blocks()?;
        if max_new_tokens == 0 {
            return Err(ScheduleError::NoNewTokens);
        }
        let total = u64::from(prompt_len) + u64::from(max_new_tokens);
        if total > u64::from(self.limits.request_tokens.min(i32::MAX as u32)) {
            return Err(ScheduleError::RequestTooLong {
                prompt: prompt_len,
                new: max_new_tokens,
                limit: self.limits.request_tokens.min(i32::MAX as u32),
            });
        }
        // Requests are admitted when a step is composed. Those for which there is room wait only for that.
        let room = (self.limits.running as usize).saturating_sub(self.running.len());
        if self.waiting.len() >= self.limits.waiting.saturating_add(room) {
            return Err(ScheduleError::QueueFull {
                waiting: self.waiting.len(),
            });
        }
        self.arrivals += 1;
        let (prompt, tokens) = match prompt {
            Prompt::Tokens(tokens) => (Prompt::Tokens(Vec::new()), tokens),
            prompt => (prompt, Vec::new()),
        };
        let mut active = Active {
            arrival: self.arrivals,
            generation: 0,
            prompt,
            prompt_len,
            max_new: max_new_tokens,
            generated: 0,
            awaited: 0,
            stands_at,
            computed: 0,
            unwritten: false,
            admitted: false,
            cached: 0,
            lost: 0,
            sequence: Sequence::default(),
            tokens,
            swapped: Vec::new(),
            last_step: 0,
            in_flight: false,
            running: false,
            cancelled: false,
        };
        let wanted = active.most_keys().div_ceil(self.pool.page_size());
        if wanted > self.pool.pages() {
            return Err(ScheduleError::PoolTooSmall {
                wanted,
                total: self.pool.pages(),
            });
        }
        let slot = self.vacant.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.generations.push(0);
            self.slots.len() as u32 - 1
        });
        active.generation = self.generations[slot as usize];
        self.slots[slot as usize] = Some(active);
        self.waiting.push_back(slot);
        Ok(self.id(slot))
    }

    pub fn id(&self, slot: u32) -> RequestId {
        RequestId {
            slot,
            generation: self.at(slot).generation,
        }
    }

    pub fn at(&self, slot: u32) -> &Active {
        self.slots[slot as usize]
            .as_ref()
            .expect("a slot that is listed is taken")
    }

    pub fn at_mut(&mut self, slot: u32) -> &mut Active {
        self.slots[slot as usize]
            .as_mut()
            .expect("a slot that is listed is taken")
    }

    pub fn get(&self, request: RequestId) -> Option<&Active> {
        let RequestId { slot, generation } = request;
        let active = self.slots.get(slot as usize)?.as_ref();
        active.filter(|active| active.generation == generation)
    }

    pub fn get_mut(&mut self, request: RequestId) -> Option<&mut Active> {
        let RequestId { slot, generation } = request;
        let active = self.slots.get_mut(slot as usize)?.as_mut();
        active.filter(|active| active.generation == generation)
    }

    /// The entry's step is on its way, so its tokens count as computed, and the token that it samples as generated.
    pub fn advance(&mut self, entry: &Entry) -> Option<Finished> {
        let slot = entry.request.slot;
        let active = self
            .get_mut(entry.request)
            .filter(|active| active.in_flight)
            .expect("the step is under way");
        active.in_flight = false;
        active.computed += entry.tokens;
        if active.cancelled {
            let generated = active.generated;
            return Some(self.leave(slot, generated));
        }
        if entry.samples {
            if !entry.decode {
                self.cache_computed(slot);
            }
            let active = self.at_mut(slot);
            active.generated += 1;
            active.awaited += 1;
            if matches!(active.prompt, Prompt::Tokens(_)) {
                // A placeholder until the id is known.
                active.tokens.push(0);
            }
        }
        None
    }

    /// Sets the token that an entry sampled. Does nothing if its request has left meanwhile.
    pub fn resolve(&mut self, entry: &Entry, sampled: Sampled) -> Option<Finished> {
        let slot = entry.request.slot;
        let active = self.get_mut(entry.request)?;
        assert!(!active.in_flight, "advance the later step first");
        active.awaited -= 1;
        let (token, last) = match sampled {
            Sampled::Token(token) => (token, false),
            Sampled::Last(token) => (token, true),
        };
        let position = entry.first + entry.tokens;
        if let Some(id) = active.tokens.get_mut(position as usize) {
            *id = token;
        }
        let (prompt, generated) = (active.prompt_len, position + 1 - active.prompt_len);
        if !last && generated < active.max_new {
            return None;
        }
        self.workload.finished(prompt, generated);
        if self.at(slot).running {
            self.cache_computed(slot);
        }
        Some(self.leave(slot, generated))
    }

    /// Frees a request. The caller removes it from the running requests.
    fn leave(&mut self, slot: u32, generated: u32) -> Finished {
        let active = self.at(slot);
        let finished = Finished {
            request: self.id(slot),
            generated,
            cancelled: active.cancelled,
        };
        if !active.running {
            self.stop_waiting(slot);
        }
        self.free(slot);
        finished
    }

    /// Adds the full pages of a request's known tokens to the prefix cache.
    fn cache_computed(&mut self, slot: u32) {
        let Self {
            cache,
            pool,
            slots,
            releases,
            ..
        } = self;
        let active = slots[slot as usize].as_mut().expect("taken");
        let free = pool.free_pages();
        active.sequence.truncate(pool, active.computed);
        let mut added = 0;
        if let Some(cache) = cache
            && !active.unwritten
            && active.tokens.len() >= active.computed as usize
        {
            added = cache.insert(pool, &active.tokens, &mut active.sequence);
        }
        if added > 0 || pool.free_pages() > free {
            *releases += 1;
        }
        if matches!(active.prompt, Prompt::Blocks { .. }) {
            active.tokens = Vec::new();
        }
    }

    /// Removes a request from its queue and frees it.
    pub fn remove(&mut self, slot: u32) {
        if self.at(slot).running {
            self.running.retain(|&other| other != slot);
        } else {
            self.stop_waiting(slot);
        }
        self.free(slot);
    }

    /// Takes a request out of the queue. There may be many in it, so this searches by arrival.
    fn stop_waiting(&mut self, slot: u32) {
        let arrival = self.at(slot).arrival;
        let rank = self
            .waiting
            .partition_point(|&other| self.at(other).arrival < arrival);
        self.waiting.remove(rank);
        self.blocked_at = None;
    }

    fn free(&mut self, slot: u32) {
        let active = self.slots[slot as usize].take().expect("freed once");
        active.sequence.release(&mut self.pool);
        for page in active.swapped {
            self.host.release(page);
        }
        self.releases += 1;
        self.generations[slot as usize] = self.generations[slot as usize].wrapping_add(1);
        self.vacant.push(slot);
    }
}
