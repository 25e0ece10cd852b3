//! Times steps of given lengths, part by part, to correct the cost model of simulations.

mod warm_up;

use serde::Serialize;
use tandem_attn::{
    plan::{PlanOptions, pod::PodMode},
    problem::{Batch, PageTable},
    step::{Draw, Sampling},
};
use tandem_schedule::{
    StepInputs,
    attention::{Overlap, StepShape},
    cost::{Correction, CostModel, DECODES, Measured},
};

use crate::{
    Error, LogitWork,
    backend::{Backend, Part, StepTime, Work},
};

pub use warm_up::warm_up;

/// A step, described by its lengths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct StepLengths {
    /// Requests with one query token.
    pub decodes: u32,
    /// Keys of each decode.
    pub keys: u32,
    /// Query tokens of the prompt chunk.
    pub chunk: u32,
    /// Keys of the prompt chunk, its own tokens included.
    pub chunk_keys: u32,
}

/// A step that was measured.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MeasuredStep {
    /// Lengths of the step.
    #[serde(flatten)]
    pub lengths: StepLengths,
    /// Whether prefill and decode attention may run concurrently on the GPU (POD).
    pub pod: bool,
    /// Time from the end of the previous step to the end of this one.
    pub seconds: f64,
    /// Time of each [`Part`], in order. Their sum differs from the step's time: timing adds to it, and time between
    /// parts is left out.
    pub parts_s: Vec<f64>,
}

impl MeasuredStep {
    /// Time of attention in all layers.
    #[must_use]
    pub fn attention_s(&self) -> f64 {
        self.parts_s[Part::Attention as usize]
    }

    /// Time of the matrix products within layers.
    #[must_use]
    pub fn linear_s(&self) -> f64 {
        let parts = Part::ALL.iter().zip(&self.parts_s);
        let linear = parts.filter(|(part, _)| part.is_linear());
        linear.map(|(_, seconds)| seconds).sum()
    }
}

/// Measured steps and the correction computed from them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Calibration {
    /// Argument of [`CostModel::with_correction`].
    pub correction: Correction,
    /// The steps.
    pub steps: Vec<MeasuredStep>,
}

/// Steps that run before any is timed: the second one of a bucket captures the graph, the third replays it.
const WARM: usize = 3;
const TIMED: usize = 5;

/// Decodes: number of requests, and keys of each.
const DECODE: [(u32, u32); 11] = [
    (1, 512),
    (1, 8192),
    (8, 1024),
    (8, 8192),
    (16, 10_240),
    (32, 4096),
    (32, 10_240),
    (64, 1024),
    (64, 4096),
    (64, 10_240),
    (128, 4096),
];
/// Prompt chunks: tokens and keys.
const PREFILL: [(u32, u32); 13] = [
    (64, 256),
    (128, 4096),
    (512, 512),
    (512, 4096),
    (512, 16_384),
    (1024, 1024),
    (1024, 4096),
    (1024, 10_240),
    (1024, 16_384),
    (2048, 2048),
    (2048, 10_240),
    (8192, 8192),
    (16_384, 16_384),
];
/// Hybrid steps: decodes and a prompt chunk.
const HYBRID: [StepLengths; 4] = [
    hybrid(16, 1008, 5120),
    hybrid(32, 992, 5120),
    hybrid(48, 976, 10_240),
    hybrid(64, 1984, 10_240),
];
/// Numbers of tokens of the steps that time everything but attention.
const TOKENS: [u32; 13] = [
    1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384,
];

const fn hybrid(decodes: u32, chunk: u32, chunk_keys: u32) -> StepLengths {
    StepLengths {
        decodes,
        keys: 10_240,
        chunk,
        chunk_keys,
    }
}

const fn decodes(decodes: u32, keys: u32) -> StepLengths {
    StepLengths {
        decodes,
        keys,
        chunk: 0,
        chunk_keys: 0,
    }
}

const fn chunk(chunk: u32, chunk_keys: u32) -> StepLengths {
    StepLengths {
        decodes: 0,
        keys: 0,
        chunk,
        chunk_keys,
    }
}

impl StepLengths {
    const fn tokens(self) -> u32 {
        self.decodes + self.chunk
    }

    fn shape(self) -> StepShape {
        let shape = StepShape::decodes(self.decodes, self.keys);
        match self.chunk {
            0 => shape,
            chunk => shape.with_chunk(chunk, self.chunk_keys),
        }
    }

    /// Whether the step fits a backend and has at most `most_tokens` tokens.
    fn fits(self, backend: &dyn Backend, most_tokens: u32) -> bool {
        let pages = |keys: u32| u64::from(keys.div_ceil(backend.page_size()));
        let wanted = u64::from(self.decodes) * pages(self.keys) + pages(self.chunk_keys);
        self.tokens() <= most_tokens.min(backend.step_tokens())
            && self.decodes + u32::from(self.chunk > 0) <= backend.step_requests()
            && self.keys.max(self.chunk_keys) <= backend.architecture().positions
            && wanted <= u64::from(backend.pages())
    }

    /// Inputs on the first pages of the pool, of which so many are common to all. Decodes are sampled; so is the last token of a chunk
    /// without decodes.
    fn inputs(self, backend: &dyn Backend, common: u32) -> StepInputs {
        let (page_size, pages) = (backend.page_size(), backend.pages());
        let vocabulary = backend.architecture().vocabulary as u32;
        let mut table = PageTable::new(page_size, pages);
        let mut inputs = StepInputs::default();
        let (mut indptr, mut page) = (vec![0], common);
        let chunk = (self.chunk, self.chunk_keys);
        let rows = (0..self.decodes).map(|_| (1, self.keys));
        for (tokens, keys) in rows.chain((self.chunk > 0).then_some(chunk)) {
            let first_page = page;
            page += keys.div_ceil(page_size) - common;
            let of_request: Vec<_> = (0..common).chain(first_page..page).collect();
            table.push(&of_request, keys);
            for position in keys - tokens..keys {
                let on = of_request[(position / page_size) as usize];
                inputs.slots.push(on * page_size + position % page_size);
                inputs.positions.push(position);
                let mixed = (first_page + position).wrapping_mul(0x9e37_79b9);
                inputs.tokens.push(mixed % vocabulary);
            }
            let end = inputs.tokens.len() as u32;
            indptr.push(end);
            let sampled = tokens == 1 || self.decodes == 0;
            inputs.logits.push(sampled.then_some(end - 1));
        }
        inputs.batch = Batch::new(indptr, table);
        inputs
    }
}

/// Runs a step several times. Returns all times but the first.
fn run(
    backend: &mut dyn Backend,
    lengths: StepLengths,
    steps: usize,
) -> Result<Vec<StepTime>, Error> {
    let inputs = lengths.inputs(backend, 0);
    repeat(
        backend,
        &inputs,
        Sampling::GREEDY,
        LogitWork::default(),
        steps,
    )
}

/// The same for given inputs. A step begins while the previous one is computed.
fn repeat(
    backend: &mut dyn Backend,
    inputs: &StepInputs,
    sampling: Sampling,
    logits: LogitWork<'_>,
    steps: usize,
) -> Result<Vec<StepTime>, Error> {
    let rows: Vec<u32> = inputs.logits.iter().copied().flatten().collect();
    let draw = sampling.draw(0).map_err(tandem_attn::Error::from)?;
    let draws: Vec<Draw> = vec![draw; rows.len()];
    let work = Work {
        inputs,
        copies: &[],
        rows: &rows,
        draws: &draws,
        drawn: &[],
        logits,
    };
    let (mut tokens, mut log_probs) = (Vec::new(), Vec::new());
    let mut times = Vec::new();
    backend.begin(&work)?;
    for _ in 1..steps {
        backend.begin(&work)?;
        times.push(backend.finish(&mut tokens, &mut log_probs)?);
    }
    times.push(backend.finish(&mut tokens, &mut log_probs)?);
    Ok(times.split_off(1))
}

/// Times a step as a whole, then its parts.
fn measure(
    backend: &mut dyn Backend,
    lengths: StepLengths,
    pod: bool,
) -> Result<MeasuredStep, Error> {
    run(backend, lengths, WARM)?;
    let times = run(backend, lengths, TIMED)?;
    backend.take_apart(true);
    let apart = run(backend, lengths, TIMED);
    backend.take_apart(false);
    let apart = apart?;
    let seconds = times
        .iter()
        .map(|time| time.seconds + time.gap_s.unwrap_or(0.0));
    let part = |part: &Part| median(apart.iter().map(|time| time.parts_s[*part as usize]));
    Ok(MeasuredStep {
        lengths,
        pod,
        seconds: median(seconds),
        parts_s: Part::ALL.iter().map(part).collect(),
    })
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<_> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

/// Times steps of at most `most_tokens` tokens on a backend and computes a correction of the cost model from them.
/// `progress` receives the number of steps timed so far and of all. Afterwards the backend plans with default options.
///
/// # Errors
/// If the backend fails; [`Error::Schedule`] if the cost model is for caches of another type.
pub fn calibrate(
    backend: &mut dyn Backend,
    cost: &CostModel,
    most_tokens: u32,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Calibration, Error> {
    let by_tokens = TOKENS.map(|tokens| match tokens > DECODES {
        true => chunk(tokens, tokens),
        false => decodes(tokens, 256),
    });
    let fits = |lengths: &StepLengths| lengths.fits(backend, most_tokens);
    let by_tokens: Vec<_> = by_tokens.into_iter().filter(fits).collect();
    let decode = DECODE.map(|(requests, keys)| decodes(requests, keys));
    let prefill = PREFILL.map(|(tokens, keys)| chunk(tokens, keys));
    let attention = decode.into_iter().chain(prefill).filter(fits);
    let attention: Vec<_> = attention.collect();
    let hybrids: Vec<_> = HYBRID.into_iter().filter(fits).collect();
    // Each hybrid is measured four times: its decodes, its chunk, both one after the other, and both concurrently.
    let all = by_tokens.len() + attention.len() + 4 * hybrids.len();
    let mut done = 0;
    let mut timed = |backend: &mut dyn Backend, lengths, pod| {
        progress(done, all);
        done += 1;
        measure(backend, lengths, pod)
    };

    let layers = cost.model().layers;
    let layer_ns = |seconds: f64| seconds * 1e9 / f64::from(layers);
    let (mut steps, mut correction) = (Vec::new(), Correction::default());
    correction.cache_type = backend.cache_type();
    correction.origin = Some(cost.origin());
    correction.check(cost)?;
    backend.plan_with(PlanOptions::default().with_pod(PodMode::Serial))?;
    for lengths in by_tokens {
        let step = timed(backend, lengths, false)?;
        // Timing the parts slows a small step down, so parts are scaled to the time of the whole step.
        let parts: f64 = step.parts_s.iter().sum();
        let scale = (step.seconds / parts).min(1.0);
        let linear = scale * step.linear_s();
        let rest = step.seconds - linear - scale * step.attention_s();
        let at = f64::from(lengths.tokens());
        let measured = |seconds: f64| Measured {
            at,
            measured_ns: (seconds * 1e9).max(1.0),
        };
        correction.linear.push(measured(linear));
        correction.rest.push(measured(rest));
        steps.push(step);
    }
    for lengths in attention {
        let step = timed(backend, lengths, false)?;
        let predicted = cost.attention().estimate(&lengths.shape());
        let (points, at) = match lengths.chunk {
            0 => (&mut correction.decode, predicted.decode_ns),
            _ => (&mut correction.prefill, predicted.prefill_ns),
        };
        points.push(Measured {
            at,
            measured_ns: layer_ns(step.attention_s()),
        });
        steps.push(step);
    }
    for points in [&mut correction.decode, &mut correction.prefill] {
        points.sort_by(|a, b| a.at.total_cmp(&b.at));
        points.dedup_by(|b, a| b.at < 1.001 * a.at);
    }
    let mut halves = Vec::new();
    for &lengths in &hybrids {
        for part in [
            decodes(lengths.decodes, lengths.keys),
            chunk(lengths.chunk, lengths.chunk_keys),
            lengths,
        ] {
            let step = timed(backend, part, false)?;
            halves.push(step.attention_s());
            steps.push(step);
        }
    }
    backend.plan_with(PlanOptions::default())?;
    let mut losses = Vec::new();
    for (lengths, halves) in hybrids.into_iter().zip(halves.chunks(3)) {
        let step = timed(backend, lengths, true)?;
        let (longer, shorter) = (halves[0].max(halves[1]), halves[0].min(halves[1]));
        losses.push((step.attention_s() - longer) / shorter);
        steps.push(step);
    }
    if !losses.is_empty() {
        let loss = losses.iter().sum::<f64>() / losses.len() as f64;
        correction.pod_loss = Some(loss.clamp(0.0, 1.0));
    }
    let mut calibration = Calibration { correction, steps };
    calibration.correction.hybrid = calibration.of_hybrids(cost);
    Ok(calibration)
}

impl Calibration {
    /// The means of measured over predicted times of hybrid steps, with attention one after the other and side by side.
    /// None if none were measured.
    fn of_hybrids(&self, cost: &CostModel) -> Option<[f64; 2]> {
        let mean = |pod: bool| {
            let hybrid = |step: &&MeasuredStep| {
                step.pod == pod && step.lengths.decodes > 0 && step.lengths.chunk > 0
            };
            let steps = self.steps.iter().filter(hybrid);
            let ratios: Vec<f64> = steps
                .map(|step| step.seconds / self.predicted_s(cost, step))
                .collect();
            let sum: f64 = ratios.iter().sum();
            let taken = Correction::HYBRID;
            (!ratios.is_empty())
                .then(|| (sum / ratios.len() as f64).clamp(*taken.start(), *taken.end()))
        };
        Some([mean(false)?, mean(true)?])
    }

    /// Time that a simulation predicts for a measured step, in seconds.
    #[must_use]
    pub fn predicted_s(&self, cost: &CostModel, step: &MeasuredStep) -> f64 {
        let overlap = match step.pod {
            true => Overlap::pod(cost.cache_type()),
            false => Overlap::Serial,
        };
        let cost = cost
            .clone()
            .with_overlap(overlap)
            .with_correction(&self.correction);
        let mut shape = step.lengths.shape();
        shape.sampled = match step.lengths.decodes {
            0 => 1,
            decodes => decodes,
        };
        cost.step(&shape).last_stage_ns() / 1e9
    }
}
