//! What happens to each request, as it happens.

use super::{Distribution, Report, STALLS_S};

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

/// Takes note of what becomes of requests, simulated or served, and makes a [`Report`] of it. Requests are counted from 0,
/// times are seconds from a common beginning.
#[derive(Debug, Default)]
pub struct Recorder {
    lives: Vec<Life>,
    gaps: Vec<f32>,
    refused: usize,
    finished: usize,
    last_s: f64,
}

impl Recorder {
    /// For so many requests.
    #[must_use]
    pub fn new(requests: usize) -> Self {
        Self {
            lives: vec![Life::default(); requests],
            ..Self::default()
        }
    }

    /// Requests that are done with, one way or the other.
    #[must_use]
    pub const fn left(&self) -> usize {
        self.finished + self.refused
    }

    /// A request came, with so many tokens.
    pub fn arrived(&mut self, request: usize, at_s: f64, prompt: u32) {
        self.lives[request].arrived_s = at_s;
        self.lives[request].prompt = prompt;
    }

    /// It was not taken.
    pub const fn refused(&mut self) {
        self.refused += 1;
    }

    /// Stages stood still before a step of it.
    pub fn waited(&mut self, request: usize, bubble_s: f64) {
        self.lives[request].bubble_s += bubble_s;
    }

    /// It has another token.
    pub fn token(&mut self, request: usize, now_s: f64) {
        let life = &mut self.lives[request];
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

    /// It has its last token.
    pub fn finished(&mut self, request: usize, now_s: f64) {
        self.lives[request].finished = true;
        self.finished += 1;
        self.last_s = now_s;
    }

    /// What that comes to. What is of steps and not of requests is for the caller to fill in.
    #[must_use]
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
            ..Report::default()
        }
    }
}
