//! Records what happens to each request.

use super::{Distribution, Report, STALLS_S};
use crate::Request;

#[derive(Clone, Copy, Debug, Default)]
struct Life {
    arrived_s: f64,
    prompt: u32,
    generated: u32,
    first_token_s: f64,
    last_token_s: f64,
    longest_gap_s: f64,
    bubble_s: f64,
    /// It had already been running or waiting, so it continues from where it was.
    standing: bool,
    finished: bool,
}

/// Records the events of requests, simulated or served, and makes a [`Report`] of them. Requests are numbered from 0;
/// times are seconds from a common start.
#[derive(Debug, Default)]
pub struct Recorder {
    lives: Vec<Life>,
    gaps: Vec<f32>,
    refused: usize,
    finished: usize,
    last_s: f64,
    stopped: bool,
}

impl Recorder {
    /// A recorder for `requests` requests.
    #[must_use]
    pub fn new(requests: usize) -> Self {
        Self {
            lives: vec![Life::default(); requests],
            ..Self::default()
        }
    }

    /// Number of requests that have finished or were refused.
    #[must_use]
    pub const fn left(&self) -> usize {
        self.finished + self.refused
    }

    /// A request arrived. Times of one that had arrived before 0 do not count from its arrival: only the times between its
    /// tokens do.
    pub fn arrived(&mut self, index: usize, at_s: f64, request: &Request) {
        let life = &mut self.lives[index];
        life.arrived_s = at_s;
        life.standing = request.computed > 0 || at_s < 0.0;
        life.prompt = request.prompt.len().saturating_sub(request.computed);
    }

    /// Later events do not count. Requests that have a token by then count as they are.
    pub const fn stop(&mut self, at_s: f64) {
        self.stopped = true;
        self.last_s = at_s;
    }

    /// A request was refused.
    pub const fn refused(&mut self) {
        self.refused += 1;
    }

    /// Stages were idle before a step of the request.
    pub fn waited(&mut self, request: usize, bubble_s: f64) {
        self.lives[request].bubble_s += bubble_s;
    }

    /// The request has another token.
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

    /// The request has its last token.
    pub fn finished(&mut self, request: usize, now_s: f64) {
        self.lives[request].finished = true;
        self.finished += 1;
        self.last_s = now_s;
    }

    /// The report. The caller fills in the fields that concern steps, not requests.
    #[must_use]
    pub fn report(self) -> Report {
        let lives = self.lives.iter();
        let counted = |life: &&Life| life.finished || (self.stopped && life.generated > 0);
        let counted: Vec<_> = lives.filter(counted).collect();
        let of = |which: fn(&Life) -> bool, value: fn(&Life) -> f64| {
            let lives = counted.iter().filter(|life| which(life));
            Distribution::new(lives.map(|life| value(life) as f32).collect())
        };
        let stalled = STALLS_S.map(|bound| {
            let stalled = counted.iter().filter(|life| life.longest_gap_s > bound);
            stalled.count() as f64 / counted.len().max(1) as f64
        });
        let sum = |value: fn(&Life) -> u32| counted.iter().map(|life| u64::from(value(life))).sum();
        let came = |life: &Life| !life.standing;
        Report {
            finished: self.finished,
            refused: self.refused,
            makespan_s: self.last_s,
            ttft: of(came, |life| life.first_token_s - life.arrived_s),
            latency: of(
                |life| life.finished && !life.standing,
                |life| life.last_token_s - life.arrived_s,
            ),
            bubble: of(|_| true, |life| life.bubble_s),
            tbt: Distribution::new(self.gaps),
            stalled,
            prompt_tokens: sum(|life| life.prompt),
            generated_tokens: sum(|life| life.generated),
            ..Report::default()
        }
    }
}
