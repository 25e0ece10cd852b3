//! Steps: one begins on the backend while the tokens of the one before are reported.

use tandem_attn::step::{LOG_PROBS, LogProbRow};
use tandem_schedule::{Sampled, Step};

use super::{
    Engine,
    generation::{Event, Finish},
};
use crate::{
    Error, LogProbs,
    backend::{StepTime, Work},
};

/// What a step contained and how long it took, for measurements.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepReport {
    /// Number of computed tokens.
    pub tokens: u32,
    /// How many of them belong to decodes.
    pub decodes: u32,
    /// Number of requests.
    pub requests: u32,
    /// Number of drawn tokens.
    pub drawn: u32,
    /// Number of preempted requests.
    pub preempted: u32,
    /// How long it took. The gap before it is left out if there was nothing to compute.
    pub time: StepTime,
}

/// A step that is under way.
pub(super) struct Flight {
    pub(super) step: Step,
    pub(super) rested: bool,
    /// Rows with log-probabilities.
    pub(super) log_probs: Vec<LogProbRow>,
}

impl Engine {
    /// Begins one step, finishes one, and reports what happened to the requests of the finished one. If the engine
    /// [runs ahead](Self::running_ahead), that is an earlier step. If no step finishes, the report is empty.
    ///
    /// # Errors
    /// If the backend fails. Its requests are lost, and the engine must not be used any more.
    pub fn step(&mut self, report: &mut dyn FnMut(Event)) -> Result<StepReport, Error> {
        for request in self.cancelled.drain(..) {
            let reason = Finish::Cancelled;
            report(Event::Finished { request, reason });
        }
        let begun = self.begin(report)?;
        if self.flights.len() > self.ahead || !begun {
            return self.finish(report);
        }
        Ok(StepReport::default())
    }

    /// Composes a step and begins it on the backend. Returns false if there is nothing to compute.
    fn begin(&mut self, report: &mut dyn FnMut(Event)) -> Result<bool, Error> {
        let mut step = self.spare.pop().unwrap_or_default();
        if !self.composer.compose(&mut step) {
            self.spare.push(step);
            return Ok(false);
        }
        self.composer.inputs(&step, &mut self.inputs);
        let inputs = &self.inputs;
        self.drawn.clear();
        for &entry in &inputs.awaited {
            let request = step.entries[entry as usize].request;
            let row = self.last_rows[&request];
            self.drawn
                .push((inputs.batch.qo_indptr[entry as usize], row));
        }
        self.rows.clear();
        self.draws.clear();
        self.logit_rows.clear();
        self.last_rows.clear();
        for (index, (entry, row)) in step.entries.iter().zip(&inputs.logits).enumerate() {
            let request = entry.request;
            let Some(answer) = self.requests.get_mut(&request) else {
                continue;
            };
            if !std::mem::replace(&mut answer.started, true) {
                let cached_tokens = self.composer.cached_tokens_of(request).unwrap_or(0);
                report(Event::Started {
                    request,
                    cached_tokens,
                });
            }
            let Some(row) = row else {
                continue;
            };
            let of_request = self.rows.len() as u32;
            self.last_rows.insert(request, of_request);
            self.rows.push(*row);
            if let Some(rules) = &answer.rules {
                // The only token of such an entry: the device knows it before the host does.
                let is_awaited = inputs.awaited.contains(&(index as u32));
                let newest = is_awaited.then_some(*row);
                rules.add_to(&mut self.logit_rows, of_request, answer.drawn, newest);
            }
            if let Some(top) = answer.log_probs {
                let row = of_request;
                self.logit_rows.log_probs.push(LogProbRow { row, top });
            }
            let draw = answer.sampling.draw(answer.drawn);
            self.draws.push(draw.map_err(tandem_attn::Error::from)?);
            answer.drawn += 1;
        }
        self.backend.begin(&Work {
            inputs,
            copies: &step.copies,
            rows: &self.rows,
            draws: &self.draws,
            drawn: &self.drawn,
            logits: self.logit_rows.work(),
        })?;
        self.composer.advance(&step);
        let rested = std::mem::take(&mut self.rested);
        self.flights.push_back(Flight {
            step,
            rested,
            log_probs: self.logit_rows.log_probs.clone(),
        });
        Ok(true)
    }

    /// Waits for the oldest step under way, if there is one, and reports its tokens.
    pub(super) fn finish(&mut self, report: &mut dyn FnMut(Event)) -> Result<StepReport, Error> {
        let Some(Flight {
            step,
            rested,
            log_probs,
        }) = self.flights.pop_front()
        else {
            return Ok(StepReport::default());
        };
        let mut time = self
            .backend
            .finish(&mut self.sampled, &mut self.log_probs)?;
        time.gap_s = time.gap_s.filter(|_| !rested);
        self.steps += 1;

        let ends = &self.backend.architecture().ends;
        let mut sampled = (0..).zip(self.sampled.iter().copied());
        let results = self.log_probs.chunks_exact(LOG_PROBS as usize);
        let mut results = log_probs.iter().zip(results).peekable();
        let requests = &mut self.requests;
        let finished = self.composer.resolve(&step, |entry| {
            let request = entry.request;
            let (row, token) = sampled.next().expect("one for each row");
            let log_probs = results.next_if(|(asked, _)| asked.row == row);
            let log_probs = log_probs.map(|(asked, results)| LogProbs::of(*asked, results));
            // The request was cancelled meanwhile, or its answer had already ended.
            let Some(answer) = requests.get_mut(&request).filter(|answer| !answer.ended) else {
                return Sampled::Last(token);
            };
            if answer.ends_with(token, ends) {
                answer.ended = true;
                return Sampled::Last(token);
            }
            if let Some(rules) = &mut answer.rules {
                rules.count(token);
            }
            report(Event::Token {
                request,
                token,
                log_probs,
            });
            Sampled::Token(token)
        });
        for left in finished {
            let Some(answer) = self.requests.remove(&left.request) else {
                continue;
            };
            let reason = match answer.ended {
                true => Finish::End,
                false => Finish::Length,
            };
            let request = left.request;
            report(Event::Finished { request, reason });
        }
        let report = StepReport {
            tokens: step.tokens(),
            requests: step.entries.len() as u32,
            decodes: step.entries.iter().filter(|entry| entry.decode).count() as u32,
            drawn: self.sampled.len() as u32,
            preempted: step.preempted.len() as u32,
            time,
        };
        self.spare.push(step);
        Ok(report)
    }
}
