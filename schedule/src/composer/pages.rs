//! Page allocation: admission, room for the next step, and preemption if there is none.

use super::{
    super::{Preemption, Step, Swap},
    core::{Active, Core},
};
use tandem_attn::kv::{PagePool, PrefixCache, Sequence};

impl Core {
    /// Position at which the request that has waited longest would begin if it were admitted now.
    pub fn admission_position(&mut self) -> Option<u32> {
        let slot = *self.waiting.front()?;
        let Self { cache, slots, .. } = self;
        let active = slots[slot as usize].as_mut().expect("taken");
        if !active.swapped.is_empty() {
            return Some(active.computed);
        }
        let before_last = active.known() - 1;
        let cached = cache.as_ref().map_or(0, |cache| {
            active.prompt.expand_blocks(&mut active.tokens);
            let tokens = active.tokens.len().min(before_last as usize);
            cache.matches(&active.tokens[..tokens]) as u32
        });
        Some(cached.max(active.stands_at.min(before_last)))
    }

    /// Admits the request that has waited longest, if there are pages for its known tokens.
    pub fn admit(&mut self, step: &mut Step) -> Option<u32> {
        let slot = *self.waiting.front()?;
        let full = self.running.len() >= self.limits.running as usize;
        // Pages that a preemption freed are for the running request that needed them.
        if full || !step.preempted.is_empty() || self.blocked_at == Some(self.releases) {
            return None;
        }
        // The next step needs at most one more page for each of them.
        let spare = self.limits.spare_pages.min(self.running.len() as u32);
        let Self {
            pool, cache, slots, ..
        } = self;
        let active = slots[slot as usize].as_mut().expect("taken");
        if active.awaited > 0 {
            // Its last sampled token must be known before it can be computed again.
            return None;
        }
        let known = active.known();
        let mut sequence = Sequence::default();
        if let Some(cache) = cache
            && active.swapped.is_empty()
        {
            active.prompt.expand_blocks(&mut active.tokens);
            let before_last = active.tokens.len().min(known as usize - 1);
            sequence = cache.acquire(pool, &active.tokens[..before_last]);
        }
        let pages = sequence.pages_for(pool, known - sequence.len());
        let wanted = pages.saturating_add(spare);
        if !make_room(pool, cache.as_mut(), wanted) {
            sequence.release(pool);
            self.blocked_at = Some(self.releases);
            return None;
        }
        let cached = sequence.len();
        let copy = sequence
            .append(pool, known - cached)
            .expect("room was made");
        step.copies.extend(copy);
        if active.swapped.is_empty() {
            let stands_at = std::mem::take(&mut active.stands_at).min(known - 1);
            active.computed = cached.max(stands_at);
            active.unwritten = stands_at > cached;
            if !active.admitted {
                active.cached = cached;
                self.cached_tokens += u64::from(cached);
            }
            let lost = std::mem::take(&mut active.lost).saturating_sub(cached);
            self.lost_tokens += u64::from(lost);
        } else {
            for (host, &device) in active.swapped.drain(..).zip(sequence.pages()) {
                step.swaps.push(Swap::In { host, device });
                self.host.release(host);
            }
        }
        active.sequence = sequence;
        active.running = true;
        active.admitted = true;
        let arrival = active.arrival;
        self.waiting.pop_front();
        let rank = self
            .running
            .partition_point(|&other| self.at(other).arrival < arrival);
        self.running.insert(rank, slot);
        Some(slot)
    }

    /// Makes room for `tokens` more tokens of a running request; if necessary, by preempting later requests. Returns
    /// false if this request itself was preempted, or if it must wait: for pages of a request about to leave, or for a later one
    /// in a step under way.
    pub fn reserve(&mut self, slot: u32, tokens: u32, step: &mut Step) -> bool {
        loop {
            let Self {
                pool, cache, slots, ..
            } = self;
            let active = slots[slot as usize].as_mut().expect("taken");
            let keys = active.computed + tokens;
            if keys <= active.sequence.len() {
                return true;
            }
            // Extend to the end of the page, so that the next steps need not allocate.
            let more = keys.next_multiple_of(pool.page_size()) - active.sequence.len();
            let wanted = active.sequence.pages_for(pool, more);
            if make_room(pool, cache.as_mut(), wanted) {
                let copy = active.sequence.append(pool, more).expect("room was made");
                step.copies.extend(copy);
                return true;
            }
            let (arrival, this) = (active.arrival, self.steps);
            let is_later = |active: &Active| active.arrival > arrival && active.last_step != this;
            let victim = self.running.iter().rev().copied().find(|&other| {
                let active = self.at(other);
                is_later(active) && !active.in_flight && !active.is_done()
            });
            // A request that is done frees its pages soon, and a later one can be preempted when its step completes.
            let worth_waiting = |&slot: &u32| {
                let active = self.at(slot);
                active.is_done() || active.in_flight && is_later(active)
            };
            match victim {
                Some(victim) => self.preempt(victim, step),
                None if self.running.iter().any(worth_waiting) => return false,
                None => {
                    self.preempt(slot, step);
                    return false;
                }
            }
        }
    }

    /// Frees a request's pages and puts it back into the queue.
    fn preempt(&mut self, slot: u32, step: &mut Step) {
        let request = self.id(slot);
        let Self {
            pool, host, slots, ..
        } = self;
        let active = slots[slot as usize].as_mut().expect("taken");
        let used = active.computed.div_ceil(pool.page_size());
        let swapped = used > 0 && host.free_pages() >= used;
        if swapped {
            for &device in &active.sequence.pages()[..used as usize] {
                let host = host.alloc().expect("enough are free");
                step.swaps.push(Swap::Out { device, host });
                active.swapped.push(host);
            }
        } else {
            active.lost = std::mem::take(&mut active.computed);
        }
        std::mem::take(&mut active.sequence).release(pool);
        active.running = false;
        let arrival = active.arrival;
        self.releases += 1;
        self.running.retain(|&other| other != slot);
        let rank = self
            .waiting
            .partition_point(|&other| self.at(other).arrival < arrival);
        self.waiting.insert(rank, slot);
        step.preempted.push(Preemption { request, swapped });
    }
}

/// Whether `wanted` pages are free, after eviction from the prefix cache if necessary. Nothing is evicted if that is not enough.
fn make_room(pool: &mut PagePool, cache: Option<&mut PrefixCache>, wanted: u32) -> bool {
    let missing = wanted.saturating_sub(pool.free_pages());
    if missing == 0 {
        return true;
    }
    cache.is_some_and(|cache| {
        cache.unused(pool, missing) == missing && cache.evict(pool, missing) >= missing
    })
}
