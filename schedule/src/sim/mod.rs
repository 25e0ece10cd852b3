//! Discrete-event simulation of a serving system: arrivals, steps through pipeline stages, tokens.
//!
//! The composer and its policies are those of real serving. Only the time of a step comes from the cost model.
//!
//! ```
//! use tandem_schedule::{Hardware, Limits, ModelDescription, cost::{CostModel, Parallel}};
//! use tandem_schedule::{policy::{PrefillFirst, SarathiServe}, sim::{Simulation, simulate}, trace::Trace};
//!
//! let model = ModelDescription::named("llama-3-8b")?;
//! let cost = CostModel::new(&model, &Hardware::named("a100")?, Parallel::default())?;
//! let trace = Trace::uniform(40, 4000, 60).with_poisson_arrivals(2.0, 1);
//! let limits = Limits { step_tokens: 1024, ..Limits::default() };
//! let chunked = simulate(&trace, Simulation::new(&cost, limits, SarathiServe))?;
//! let limits = Limits { step_tokens: 16384, ..Limits::default() };
//! let prompts_first = simulate(&trace, Simulation::new(&cost, limits, PrefillFirst))?;
//! assert!(chunked.tbt.quantile(1.0) < prompts_first.tbt.quantile(1.0));
//! # Ok::<(), tandem_schedule::ScheduleError>(())
//! ```

use std::{collections::VecDeque, ops::Range};

use super::{
    Composer, Limits, Request, Sampled, ScheduleError, Step,
    cost::{CostModel, StepTime},
    metrics::{Report, StageSpan},
    policy::Policy,
    trace::{Arrival, Trace},
};
use tandem_attn::{plan::Planner, problem::Batch};

mod record;

use record::Record;

/// Source of attention times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AttentionSource {
    /// The closed form over lengths: fast, but ignores shared prefixes.
    #[default]
    Estimate,
    /// The planner's plan of every batch.
    Planner,
    /// The closed form for prefixes that are not packed: each request reads its prefix, mostly from L2.
    Unpacked,
}

/// Parameters of a simulation.
#[derive(Debug)]
pub struct Simulation<'a> {
    /// The cost model.
    pub cost: &'a CostModel,
    /// Limits of the composer.
    pub limits: Limits,
    /// The policy.
    pub policy: Box<dyn Policy>,
    /// Number of tokens in a page.
    pub page_size: u32,
    /// Number of pages of the pool; `None` for as many as fit the device.
    pub pages: Option<u32>,
    /// Source of attention times.
    pub attention: AttentionSource,
    /// Whether each step is composed when the previous one begins, as in an engine that does not wait for tokens.
    /// Requests that arrive in between wait one step longer. Only with one stage.
    pub ahead: bool,
    /// Time at which to stop; `None` stops when all requests have left.
    pub until_s: Option<f64>,
    /// The steps whose spans are recorded.
    pub timeline: Range<u64>,
}

impl<'a> Simulation<'a> {
    /// A simulation with pages of 64 tokens, as many as fit the device.
    #[must_use]
    pub fn new(cost: &'a CostModel, limits: Limits, policy: impl Policy + 'static) -> Self {
        Self::with_policy(cost, limits, Box::new(policy))
    }

    /// Like [`new`](Self::new), with a policy chosen at run time.
    #[must_use]
    pub fn with_policy(cost: &'a CostModel, limits: Limits, policy: Box<dyn Policy>) -> Self {
        Self {
            cost,
            limits,
            policy,
            page_size: 64,
            pages: None,
            attention: AttentionSource::Estimate,
            ahead: false,
            until_s: None,
            timeline: 0..0,
        }
    }
}

/// Simulates a trace.
///
/// # Errors
/// If the composer cannot be created, a batch cannot be planned, or a request arrives after more than 10^10 s. Requests that the composer
/// refuses are only counted.
pub fn simulate(trace: &Trace, simulation: Simulation<'_>) -> Result<Report, ScheduleError> {
    simulate_with(trace, simulation, |_| ())
}

/// Simulates a trace. Calls `progress` with the number of requests that have left when it changes.
///
/// # Errors
/// As [`simulate`].
pub fn simulate_with(
    trace: &Trace,
    simulation: Simulation<'_>,
    mut progress: impl FnMut(usize),
) -> Result<Report, ScheduleError> {
    let until_s = simulation.until_s;
    let mut engine = Engine::new(trace, simulation)?;
    let mut left = 0;
    let until_ns = until_s.map_or(f64::INFINITY, |s| s * 1e9);
    while engine.now_ns < until_ns && engine.advance(trace)? {
        if engine.record.left() != left {
            left = engine.record.left();
            progress(left);
        }
    }
    if let Some(until_s) = until_s {
        engine.record.stop(until_s);
    }
    let mut report = engine.report();
    if until_s.is_some() {
        // The last step may end after the end of the simulation.
        (report.stuck, report.busy) = (0, report.busy.min(1.0));
    }
    Ok(report)
}

/// Cuts a trace at a time. A simulation determines the requests that run or wait then: they continue from where they
/// stand, and have arrived before 0. All arrivals move earlier by `at_s`. Prompts of requests that had run are given as lengths,
/// so they share no prefixes any more.
///
/// # Errors
/// As [`simulate`].
pub fn standing_at(
    trace: &Trace,
    mut simulation: Simulation<'_>,
    at_s: f64,
) -> Result<Trace, ScheduleError> {
    simulation.until_s = Some(at_s);
    let mut engine = Engine::new(trace, simulation)?;
    while engine.now_ns < at_s * 1e9 && engine.advance(trace)? {}
    let mut arrivals = Vec::new();
    let mut last_s = f64::NEG_INFINITY;
    for (id, [known, computed, left]) in engine.composer.standing() {
        let arrival = &trace.arrivals[engine.record.index(id)];
        // In the order of the composer, which preempted requests may have left.
        last_s = last_s.max(arrival.at_s - at_s);
        let mut request = arrival.request.clone();
        if computed > 0 || request.max_new_tokens > left {
            request = Request::of_length(known, left);
        }
        request.computed = computed;
        // A request that only waits for the id of its last token has nothing left to compute.
        if left > 0 {
            arrivals.push(Arrival {
                at_s: last_s,
                request,
            });
        }
    }
    let later = &trace.arrivals[engine.next_arrival..];
    arrivals.extend(later.iter().map(|arrival| Arrival {
        at_s: arrival.at_s - at_s,
        request: arrival.request.clone(),
    }));
    Ok(Trace { arrivals })
}

/// A step under way in the stages.
#[derive(Debug)]
struct Flight {
    step: Step,
    done_ns: f64,
    bubble_ns: f64,
}

#[derive(Debug)]
struct Engine<'a> {
    cost: &'a CostModel,
    page_size: u32,
    attention: AttentionSource,
    wanted: Range<u64>,
    composer: Composer,
    ahead: bool,
    policy: &'static str,
    now_ns: f64,
    /// When each stage becomes free.
    free_ns: Vec<f64>,
    busy_ns: f64,
    /// In order of completion.
    flights: VecDeque<Flight>,
    /// Finished steps whose memory is reused.
    spare: Vec<Step>,
    planner: Planner,
    batch: Batch,
    next_arrival: usize,
    timeline: Vec<StageSpan>,
    steps: u64,
    record: Record,
}

impl<'a> Engine<'a> {
    fn new(trace: &Trace, simulation: Simulation<'a>) -> Result<Self, ScheduleError> {
        let Simulation {
            cost,
            limits,
            policy,
            page_size,
            pages,
            attention,
            ahead,
            until_s: _,
            timeline,
        } = simulation;
        if ahead && cost.parallel().pipeline > 1 {
            return Err(ScheduleError::Ahead {
                stages: cost.parallel().pipeline,
            });
        }
        // The simulation would end before them.
        trace.check_arrivals()?;
        let pages = pages.unwrap_or_else(|| cost.pages(page_size));
        let name = policy.name();
        Ok(Self {
            cost,
            page_size,
            attention,
            ahead,
            wanted: timeline,
            composer: Composer::with_policy(limits, pages, page_size, policy)?,
            policy: name,
            now_ns: 0.0,
            free_ns: vec![0.0; cost.parallel().pipeline as usize],
            busy_ns: 0.0,
            flights: VecDeque::new(),
            spare: Vec::new(),
            planner: Planner::new(),
            batch: Batch::default(),
            next_arrival: 0,
            timeline: Vec::new(),
            steps: 0,
            record: Record::new(trace.arrivals.len()),
        })
    }

    /// Handles all events at the current time, then moves to the next event. Returns false if there is none.
    fn advance(&mut self, trace: &Trace) -> Result<bool, ScheduleError> {
        let now_ns = self.now_ns;
        let landed = |flights: &VecDeque<Flight>| {
            flights
                .front()
                .is_some_and(|flight| flight.done_ns <= now_ns)
        };
        while landed(&self.flights)
            && let Some(flight) = self.flights.pop_front()
        {
            self.land(flight);
        }
        while let Some(arrival) = trace.arrivals.get(self.next_arrival)
            && arrival.at_s * 1e9 <= self.now_ns
        {
            if self.composer.is_idle() {
                // Idle time without any request is not a bubble.
                let idle_until = arrival.at_s * 1e9;
                for free_ns in &mut self.free_ns {
                    *free_ns = free_ns.max(idle_until);
                }
            }
            let submitted = self.composer.submit(arrival.request.clone());
            self.record
                .submitted(self.next_arrival, arrival, submitted.ok());
            self.next_arrival += 1;
        }
        let stages = self.free_ns.len();
        let mut next_ns = f64::INFINITY;
        if self.flights.len() < stages + usize::from(self.ahead) {
            if self.free_ns[0] > self.now_ns && !self.ahead {
                next_ns = self.free_ns[0];
            } else {
                let mut step = self.spare.pop().unwrap_or_default();
                if self.composer.compose(&mut step) {
                    self.launch(step)?;
                    return Ok(true);
                }
                self.record.preempted(&step);
                self.spare.push(step);
            }
        }
        if let Some(flight) = self.flights.front() {
            next_ns = next_ns.min(flight.done_ns);
        }
        if let Some(arrival) = trace.arrivals.get(self.next_arrival) {
            next_ns = next_ns.min(arrival.at_s * 1e9);
        }
        self.now_ns = next_ns.max(self.now_ns);
        Ok(next_ns.is_finite())
    }

    fn time(&mut self, step: &Step) -> Result<StepTime, ScheduleError> {
        match self.attention {
            AttentionSource::Estimate => Ok(self.cost.step(step.shape())),
            AttentionSource::Unpacked => {
                self.composer.batch(step, &mut self.batch);
                Ok(self.cost.unpacked_step(step.shape(), &self.batch))
            }
            AttentionSource::Planner => {
                self.composer.batch(step, &mut self.batch);
                self.cost
                    .planned_step(step.shape(), &self.batch, &mut self.planner)
                    .map_err(ScheduleError::Plan)
            }
        }
    }

    /// Sends a step through the stages. Each stage begins it when it has arrived and the previous step has left.
    fn launch(&mut self, step: Step) -> Result<(), ScheduleError> {
        let time = self.time(&step)?;
        let swap_ns = self.cost.swap_ns(step.swaps.len(), self.page_size);
        let stages = self.free_ns.len();
        let mut arrives_ns = self.now_ns;
        let mut bubble_ns = 0.0;
        for (stage, free_ns) in self.free_ns.iter_mut().enumerate() {
            let begin_ns = arrives_ns.max(*free_ns);
            bubble_ns += begin_ns - *free_ns;
            let stage_ns = if stage + 1 == stages {
                time.last_stage_ns()
            } else {
                time.stage_ns()
            };
            let end_ns = begin_ns + stage_ns + swap_ns;
            self.busy_ns += end_ns - begin_ns;
            *free_ns = end_ns;
            arrives_ns = end_ns + time.send_ns;
            if self.wanted.contains(&self.steps) {
                self.timeline.push(StageSpan {
                    stage: stage as u32,
                    step: self.steps,
                    prompt_tokens: step.tokens() - step.shape().decodes,
                    decodes: step.shape().decodes,
                    begin_s: begin_ns / 1e9,
                    end_s: end_ns / 1e9,
                });
            }
        }
        self.steps += 1;
        self.record.launched(&step);
        if self.ahead {
            self.composer.advance(&step);
        }
        self.flights.push_back(Flight {
            step,
            done_ns: self.free_ns[stages - 1],
            bubble_ns,
        });
        Ok(())
    }

    fn land(&mut self, flight: Flight) {
        let Flight {
            step,
            done_ns,
            bubble_ns,
        } = flight;
        let record = &mut self.record;
        for entry in &step.entries {
            record.computed(entry, done_ns / 1e9, bubble_ns / 1e9);
        }
        let finished = match self.ahead {
            true => self.composer.resolve(&step, |_| Sampled::Token(0)),
            false => self.composer.complete(&step, |_| Sampled::Token(0)),
        };
        for finished in finished {
            record.finished(finished.request, done_ns / 1e9);
        }
        self.spare.push(step);
    }

    fn report(self) -> Report {
        let stages = self.free_ns.len() as f64;
        let mut report = self.record.report();
        report.policy = self.policy.to_owned();
        report.stuck = self.composer.running() + self.composer.waiting();
        report.cached_tokens = self.composer.cached_tokens();
        report.recomputed_tokens = self.composer.lost_tokens();
        report.steps = self.steps;
        report.busy = self.busy_ns / 1e9 / stages / report.makespan_s.max(f64::MIN_POSITIVE);
        report.timeline = self.timeline;
        report
    }
}
