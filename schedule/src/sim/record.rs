//! What happens to each request, as it happens.

use crate::{
    Entry, RequestId, Step,
    metrics::{Distribution, Report, STALLS_S},
    trace::Arrival,
};

#[derive(Clone, Copy, Debug, Default)]
struct Life {
    arrived_s: f64,
    prompt: u32,
    generated: u32,
    first_token_s: f64,
    last_token_s: f64,
    longest_gap_s: f64,
    bubble_s: f64,
    finished: bool,
}

#[derive(Debug, Default)]
pub(super) struct Record {
    lives: Vec<Life>,
    /// The request that holds each of the composer's slots.
    by_slot: Vec<u32>,
    gaps: Vec<f32>,
    refused: usize,
    finished: usize,
    preemptions: u64,
    computed_tokens: u64,
    last_s: f64,
}

impl Record {
    pub fn new(requests: usize) -> Self {
        Self {
            lives: vec![Life::default(); requests],
            ..Self::default()
        }
    }

    /// Requests that are done with, one way or the other.
    pub const fn left(&self) -> usize {
        self.finished + self.refused
    }

    pub fn submitted(&mut self, index: usize, arrival: &Arrival, id: Option<RequestId>) {
        self.lives[index].arrived_s = arrival.at_s;
        self.lives[index].prompt = arrival.request.prompt.len();
        let Some(RequestId { slot, .. }) = id else {
            self.refused += 1;
            return;
        };
        let slot = slot as usize;
        if self.by_slot.len() <= slot {
            self.by_slot.resize(slot + 1, 0);
        }
        self.by_slot[slot] = index as u32;
    }

    pub fn launched(&mut self, step: &Step) {
        self.preemptions += step.preempted.len() as u64;
        self.computed_tokens += u64::from(step.tokens());
    }

    fn life(&mut self, id: RequestId) -> &mut Life {
        &mut self.lives[self.by_slot[id.slot as usize] as usize]
    }

    pub fn computed(&mut self, entry: &Entry, now_s: f64, bubble_s: f64) {
        let life = self.life(entry.request);
        life.bubble_s += bubble_s;
        if !entry.samples {
            return;
        }
        let gap_s = now_s - life.last_token_s;
        life.last_token_s = now_s;
        life.generated += 1;
        if life.generated == 1 {
            life.first_token_s = now_s;
        } else {
            life.longest_gap_s = life.longest_gap_s.max(gap_s);
            self.gaps.push(gap_s as f32);
        }
    }

    pub fn finished(&mut self, id: RequestId, now_s: f64) {
        self.life(id).finished = true;
        self.finished += 1;
        self.last_s = now_s;
    }

    pub fn report(self) -> Report {
        let done: Vec<_> = self.lives.iter().filter(|life| life.finished).collect();
        let of = |value: fn(&Life) -> f64| {
            Distribution::new(done.iter().map(|life| value(life) as f32).collect())
        };
        let stalled = STALLS_S.map(|bound| {
            let stalled = done.iter().filter(|life| life.longest_gap_s > bound);
            stalled.count() as f64 / done.len().max(1) as f64
        });
        let sum = |value: fn(&Life) -> u32| done.iter().map(|life| u64::from(value(life))).sum();
        Report {
            finished: self.finished,
            refused: self.refused,
            makespan_s: self.last_s,
            ttft: of(|life| life.first_token_s - life.arrived_s),
            latency: of(|life| life.last_token_s - life.arrived_s),
            bubble: of(|life| life.bubble_s),
            tbt: Distribution::new(self.gaps),
            stalled,
            prompt_tokens: sum(|life| life.prompt),
            generated_tokens: sum(|life| life.generated),
            preemptions: self.preemptions,
            computed_tokens: self.computed_tokens,
            ..Report::default()
        }
    }
}
