//! Replays a trace on an engine in real time, to compare with what a simulation predicts.

use std::{
    collections::HashMap,
    thread,
    time::{Duration, Instant},
};

use tandem_schedule::{
    Prompt,
    metrics::{Recorder, Report, StageSpan},
    trace::Trace,
};

use crate::{Engine, Error, Event, Generation};

/// Measurements of a replay.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Replay {
    /// The same report as a simulation's. A token's time is when the host receives it.
    pub report: Report,
    /// Time from the first kernel of a step to its last, summed over all steps.
    pub computing_s: f64,
    /// Time from the last kernel of a step to the first of the next one, if there was something to compute.
    pub waiting_s: f64,
}

impl Replay {
    /// Fraction of time in which the backend was idle although there was something to compute.
    #[must_use]
    pub fn idle(&self) -> f64 {
        self.waiting_s / (self.computing_s + self.waiting_s).max(f64::MIN_POSITIVE)
    }
}

/// The thread wakes this long before an arrival and then polls the clock, because sleep is imprecise.
const SPIN: Duration = Duration::from_millis(2);

/// Replays a trace to its end or until a time, and records the spans of the first `spans` steps. Each request gets
/// token ids of its own, but equal blocks get equal ids. `progress` receives the number of requests that have left.
///
/// # Errors
/// As [`Engine::step`] and [`Trace::check_arrivals`]. Requests that the engine refuses are counted, not errors.
pub fn replay(
    engine: &mut Engine,
    trace: &Trace,
    until_s: Option<f64>,
    spans: u64,
    progress: &mut dyn FnMut(usize),
) -> Result<Replay, Error> {
    // The thread would sleep until they arrive.
    trace.check_arrivals()?;
    let vocabulary = engine.architecture().vocabulary as u32;
    let end_s = until_s.unwrap_or(f64::INFINITY);
    let arrivals = &trace.arrivals[..trace.arrivals.partition_point(|a| a.at_s < end_s)];
    let mut generations: Vec<_> = arrivals
        .iter()
        .zip(0..)
        .map(|(arrival, request)| Generation {
            ignore_ends: true,
            computed: arrival.request.computed,
            ..Generation::greedy(
                tokens(&arrival.request.prompt, request, vocabulary),
                arrival.request.max_new_tokens,
            )
        })
        .collect();
    let mut recorder = Recorder::new(generations.len());
    for (index, arrival) in arrivals.iter().enumerate() {
        recorder.arrived(index, arrival.at_s, &arrival.request);
    }
    let [cached, lost] = [
        engine.composer().cached_tokens(),
        engine.composer().lost_tokens(),
    ];
    let mut replay = Replay::default();
    let (mut timeline, mut steps, mut computed, mut preemptions) = (Vec::new(), 0_u64, 0, 0);
    let (mut indices, mut events) = (HashMap::new(), Vec::new());
    let (mut next, mut left, mut fruitless) = (0, 0, 0);
    let start = Instant::now();
    while recorder.left() < arrivals.len() && fruitless < 2 {
        while let Some(arrival) = arrivals.get(next)
            && arrival.at_s <= start.elapsed().as_secs_f64()
        {
            match engine.submit(std::mem::replace(
                &mut generations[next],
                Generation::greedy(Vec::new(), 0),
            )) {
                Ok(request) => {
                    indices.insert(request, next);
                }
                Err(Error::Schedule(_) | Error::TooLong { .. }) => recorder.refused(),
                Err(error) => return Err(error),
            }
            next += 1;
        }
        if engine.is_idle() {
            if let Some(arrival) = arrivals.get(next) {
                let at = Duration::try_from_secs_f64(arrival.at_s).unwrap_or(Duration::MAX);
                let until = at.saturating_sub(start.elapsed());
                thread::sleep(until.saturating_sub(SPIN));
            }
            continue;
        }
        let step = engine.step(&mut |event| events.push(event))?;
        let now_s = start.elapsed().as_secs_f64();
        if now_s > end_s {
            break;
        }
        for event in events.drain(..) {
            match event {
                Event::Started { .. } => {}
                Event::Token { request, .. } => recorder.token(indices[&request], now_s),
                Event::Finished { request, .. } => recorder.finished(indices[&request], now_s),
            }
        }
        if recorder.left() != left {
            left = recorder.left();
            progress(left);
        }
        // A step that only began is finished by the next call, so one fruitless call is normal.
        fruitless = if step.tokens > 0 { 0 } else { fruitless + 1 };
        if step.tokens == 0 {
            continue;
        }
        replay.computing_s += step.time.seconds;
        replay.waiting_s += step.time.gap_s.unwrap_or(0.0);
        computed += u64::from(step.tokens);
        preemptions += u64::from(step.preempted);
        if steps < spans {
            timeline.push(StageSpan {
                stage: 0,
                step: steps,
                prompt_tokens: step.tokens - step.decodes,
                decodes: step.decodes,
                begin_s: (now_s - step.time.seconds).max(0.0),
                end_s: now_s,
            });
        }
        steps += 1;
    }
    if until_s.is_some() {
        recorder.stop(end_s);
    }
    let mut report = recorder.report();
    report.stuck = match until_s {
        None => arrivals.len() - report.finished - report.refused,
        Some(_) => 0,
    };
    report.cached_tokens = engine.composer().cached_tokens() - cached;
    report.recomputed_tokens = engine.composer().lost_tokens() - lost;
    report.busy = replay.computing_s / report.makespan_s.max(f64::MIN_POSITIVE);
    (report.steps, report.computed_tokens, report.preemptions) = (steps, computed, preemptions);
    report.timeline = timeline;
    replay.report = report;
    Ok(replay)
}

/// Token ids of a prompt: its own tokens if it has any, equal ids for equal blocks, otherwise ids unique to the
/// request.
fn tokens(prompt: &Prompt, request: u64, vocabulary: u32) -> Vec<u32> {
    let id = |of: u64, token: u64| {
        let mixed = (of << 32 | token).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        // The upper half of a product is mixed better.
        ((mixed >> 32) % u64::from(vocabulary)) as u32
    };
    match prompt {
        Prompt::Tokens(tokens) => tokens.iter().map(|token| token % vocabulary).collect(),
        Prompt::Blocks { .. } => {
            let mut tokens = Vec::new();
            prompt.expand_blocks(&mut tokens);
            tokens.iter().map(|&token| id(0, token.into())).collect()
        }
        _ => (0..u64::from(prompt.len()))
            .map(|token| id(request + 1, token))
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_blocks_have_equal_tokens_and_others_their_own() {
        let blocks = |ids: &[u32]| Prompt::Blocks {
            ids: ids.into(),
            block: 16,
            len: 40,
        };
        let [a, b] =
            [blocks(&[3, 4, 5]), blocks(&[3, 4, 6])].map(|prompt| tokens(&prompt, 7, 1000));
        assert_eq!((a.len(), &a[..32]), (40, &b[..32]));
        assert_ne!(a[32..], b[32..]);
        assert_ne!(
            tokens(&Prompt::Length(40), 0, 1000),
            tokens(&Prompt::Length(40), 1, 1000)
        );
        assert!(a.iter().all(|&token| token < 1000));
    }
}
