//! Maps each slot of the composer to its request in the trace.

use crate::{
    Entry, RequestId, Step,
    metrics::{Recorder, Report},
    trace::Arrival,
};

#[derive(Debug, Default)]
pub(super) struct Record {
    recorder: Recorder,
    by_slot: Vec<u32>,
    preemptions: u64,
    computed_tokens: u64,
}

impl Record {
    pub fn new(requests: usize) -> Self {
        Self {
            recorder: Recorder::new(requests),
            ..Self::default()
        }
    }

    pub const fn left(&self) -> usize {
        self.recorder.left()
    }

    pub fn submitted(&mut self, index: usize, arrival: &Arrival, id: Option<RequestId>) {
        self.recorder.arrived(index, arrival.at_s, &arrival.request);
        let Some(RequestId { slot, .. }) = id else {
            self.recorder.refused();
            return;
        };
        let slot = slot as usize;
        if self.by_slot.len() <= slot {
            self.by_slot.resize(slot + 1, 0);
        }
        self.by_slot[slot] = index as u32;
    }

    pub const fn preempted(&mut self, step: &Step) {
        self.preemptions += step.preempted.len() as u64;
    }

    pub fn launched(&mut self, step: &Step) {
        self.preempted(step);
        self.computed_tokens += u64::from(step.tokens());
    }

    pub const fn stop(&mut self, at_s: f64) {
        self.recorder.stop(at_s);
    }

    pub fn index(&self, id: RequestId) -> usize {
        self.by_slot[id.slot as usize] as usize
    }

    pub fn computed(&mut self, entry: &Entry, now_s: f64, bubble_s: f64) {
        let index = self.index(entry.request);
        self.recorder.waited(index, bubble_s);
        if entry.samples {
            self.recorder.token(index, now_s);
        }
    }

    pub fn finished(&mut self, id: RequestId, now_s: f64) {
        self.recorder.finished(self.index(id), now_s);
    }

    pub fn report(self) -> Report {
        Report {
            preemptions: self.preemptions,
            computed_tokens: self.computed_tokens,
            ..self.recorder.report()
        }
    }
}
