//! Choosing a chunk size, from the ratio of prompt to generated tokens and a cost model.
//!
//! With small chunks, more decodes run together with each prompt. Large chunks compute prompts more
//! efficiently. The best size is the one at which prompt chunks and decodes are used up at the same time, as far as the
//! hardware's efficiency at that size allows.

use super::{Workload, attention::StepShape, cost::CostModel};

/// Number of tokens of a step: chunk and decodes together.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum ChunkSize {
    /// Always this number.
    Fixed(u32),
    /// Adapts to the lengths of finished requests.
    Adaptive(Box<Adaptive>),
}

impl From<u32> for ChunkSize {
    fn from(tokens: u32) -> Self {
        Self::Fixed(tokens)
    }
}

impl ChunkSize {
    /// Chosen again after every 64 finished requests. Starts with the recommendation for `expected`.
    #[must_use]
    pub fn adaptive(cost: CostModel, expected: Expected) -> Self {
        let tokens = recommend(&cost, &expected).chunk;
        Self::Adaptive(Box::new(Adaptive {
            cost,
            expected,
            tokens,
            seen: Workload::default(),
        }))
    }

    pub(super) fn tokens(&mut self, workload: &Workload) -> u32 {
        match self {
            Self::Fixed(tokens) => *tokens,
            Self::Adaptive(adaptive) => adaptive.tokens(workload),
        }
    }
}

/// The state of [`ChunkSize::Adaptive`].
#[derive(Clone, Debug)]
pub struct Adaptive {
    cost: CostModel,
    expected: Expected,
    tokens: u32,
    /// The workload at the last choice.
    seen: Workload,
}

/// Finished requests between two choices.
const RECONSIDER: u64 = 64;

impl Adaptive {
    fn tokens(&mut self, now: &Workload) -> u32 {
        let requests = now.requests - self.seen.requests;
        if requests >= RECONSIDER {
            let mean = |now: u64, seen: u64| ((now - seen) / requests).max(1) as u32;
            self.expected.prompt = mean(now.prompt_tokens, self.seen.prompt_tokens);
            self.expected.generated = mean(now.generated_tokens, self.seen.generated_tokens);
            self.tokens = recommend(&self.cost, &self.expected).chunk;
            self.seen = *now;
        }
        self.tokens
    }
}

/// The requests to choose a chunk size for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Expected {
    /// Mean prompt length in tokens.
    pub prompt: u32,
    /// Mean number of generated tokens.
    pub generated: u32,
    /// Number of concurrent requests: SARATHI's B. In a pipeline, as many batches of them as stages are under way.
    pub requests: u32,
    /// Maximum time between tokens, if there is a target.
    pub target_ns: Option<f64>,
}

impl Expected {
    /// P:D, the number of prompt tokens per generated token.
    #[must_use]
    pub fn ratio(&self) -> f64 {
        f64::from(self.prompt) / f64::from(self.generated)
    }
}

/// Predictions for a chunk size in the steady state.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// Tokens of chunk and decodes together.
    pub chunk: u32,
    /// Prompt and generated tokens per second, of all batches under way.
    pub tokens_per_s: f64,
    /// Time between tokens of a decode: that of a hybrid step in all stages, each of which takes as long as the slowest.
    pub step_ns: f64,
    /// Fraction of all decodes that run in a step together with a chunk.
    pub piggybacked: f64,
    /// The P:D ratio at which prompts and decodes run out together: the prompt tokens of a step for each of its B − 1
    /// decodes.
    pub best_ratio: f64,
    /// Whether the step meets the target time between tokens.
    pub keeps_target: bool,
}

/// A recommendation and the candidates considered.
#[derive(Clone, Debug, PartialEq)]
pub struct Advice {
    /// The recommended chunk size.
    pub chunk: u32,
    /// Its speed-up over computing prompts and decodes in separate steps.
    pub gain: f64,
    /// Tokens per second with separate steps.
    pub separate_tokens_per_s: f64,
    /// All candidates, ascending.
    pub candidates: Vec<Candidate>,
    /// The reasons, as sentences.
    pub reasons: Vec<String>,
}

/// Prompt and generated tokens per second if prompts and decodes have separate steps, with `requests` concurrent
/// requests.
fn separate(cost: &CostModel, expected: &Expected) -> f64 {
    let &Expected {
        prompt,
        generated,
        requests,
        ..
    } = expected;
    let prefill = StepShape {
        sampled: 1,
        ..StepShape::default()
    }
    .with_chunk(prompt, prompt);
    let decode = StepShape::decodes(requests, prompt + generated / 2);
    let request_ns =
        cost.pace_ns(&prefill) + f64::from(generated) * cost.pace_ns(&decode) / f64::from(requests);
    f64::from(prompt + generated) / request_ns * 1e9
}

/// Predictions for a chunk size in the steady state.
fn candidate(cost: &CostModel, expected: &Expected, chunk: u32) -> Option<Candidate> {
    let &Expected {
        prompt,
        generated,
        requests,
        target_ns,
    } = expected;
    let companions = requests.saturating_sub(1);
    let tokens = chunk.checked_sub(companions).filter(|&n| n > 0)?;
    let chunks = prompt.div_ceil(tokens);
    // If a prompt has more chunks than its answer has tokens, fewer decodes run with each chunk.
    let generated_f = f64::from(generated);
    let per_chunk = f64::from(companions).min(generated_f / f64::from(chunks));
    let context = prompt + generated / 2;
    let mut hybrid = StepShape::default();
    hybrid.decodes = per_chunk.round() as u32;
    hybrid.decode_keys = (per_chunk * f64::from(context)) as u64;
    hybrid.sampled = hybrid.decodes + 1;
    let tokens = tokens.min(prompt);
    // On average, half of the prompt is before the chunk.
    let hybrid = hybrid.with_chunk(tokens, (prompt + tokens) / 2);
    let pace_ns = cost.pace_ns(&hybrid);
    let step_ns = pace_ns * f64::from(cost.parallel().pipeline);
    let piggybacked = per_chunk * f64::from(chunks);
    let left = (generated_f - piggybacked).max(0.0);
    let decode_ns = cost.pace_ns(&StepShape::decodes(requests, context));
    let request_ns = f64::from(chunks) * pace_ns + left / f64::from(requests) * decode_ns;
    Some(Candidate {
        chunk,
        tokens_per_s: f64::from(prompt + generated) / request_ns * 1e9,
        step_ns,
        piggybacked: (piggybacked / generated_f).min(1.0),
        best_ratio: f64::from(chunk - companions) / f64::from(companions.max(1)),
        keeps_target: target_ns.is_none_or(|target| step_ns <= target),
    })
}

/// The number of concurrent requests in words: in a pipeline, of each batch.
#[must_use]
pub fn together(requests: u32, stages: u32) -> String {
    let s = if requests == 1 { "" } else { "s" };
    match stages {
        1 => format!("{requests} request{s} at once"),
        _ => format!("{requests} request{s} in each of {stages} batches under way"),
    }
}

/// More tokens and requests than on any machine, yet sums of a few of them fit 32 bits.
const MOST: u32 = 1 << 24;

/// Recommends the chunk size with the highest throughput among those that meet the target time between tokens, or the
/// one with the fastest step if none does.
///
/// ```
/// use tandem_schedule::{
///     Hardware, ModelDescription,
///     chunk::{Expected, recommend},
///     cost::{CostModel, Parallel},
/// };
///
/// let model = ModelDescription::named("llama-3-8b")?;
/// let cost = CostModel::new(&model, &Hardware::named("h200")?, Parallel { tensor: 1, pipeline: 1 })?;
/// let expected = Expected { prompt: 4000, generated: 300, requests: 64, target_ns: Some(40e6) };
/// let advice = recommend(&cost, &expected);
/// assert!(advice.chunk.is_multiple_of(cost.tile()));
/// println!("{}", advice.reasons.join("\n"));
/// # Ok::<(), tandem_schedule::ScheduleError>(())
/// ```
#[must_use]
pub fn recommend(cost: &CostModel, expected: &Expected) -> Advice {
    let expected = Expected {
        prompt: expected.prompt.clamp(1, MOST),
        generated: expected.generated.clamp(1, MOST),
        requests: expected.requests.clamp(1, MOST),
        ..*expected
    };
    let tile = cost.tile();
    let first = expected.requests.next_multiple_of(tile);
    let last = (first + 32 * tile).max(4096);
    let candidates: Vec<Candidate> = (first..=last)
        .step_by(tile as usize)
        .filter_map(|chunk| candidate(cost, &expected, chunk))
        .collect();
    let fastest = |a: &&Candidate, b: &&Candidate| a.tokens_per_s.total_cmp(&b.tokens_per_s);
    let kept = candidates.iter().filter(|c| c.keeps_target).rev();
    let best = kept.max_by(fastest).or_else(|| {
        let shortest = |a: &&Candidate, b: &&Candidate| a.step_ns.total_cmp(&b.step_ns);
        candidates.iter().min_by(shortest)
    });
    let best = *best.expect("the last candidate has room for a token beside all decodes");
    let separate_tokens_per_s = separate(cost, &expected);
    let mut advice = Advice {
        chunk: best.chunk,
        gain: best.tokens_per_s / separate_tokens_per_s,
        separate_tokens_per_s,
        candidates,
        reasons: Vec::new(),
    };
    advice.explain(cost, &expected, &best);
    advice
}

impl Advice {
    fn explain(&mut self, cost: &CostModel, expected: &Expected, best: &Candidate) {
        let Expected {
            prompt,
            generated,
            requests,
            ..
        } = *expected;
        let decodes = requests - 1;
        // Ratios below 1 have too few digits otherwise.
        let ratio = match best.best_ratio < 1.0 {
            true => format!("{:.3}", best.best_ratio),
            false => format!("{:.1}", best.best_ratio),
        };
        let reasons = &mut self.reasons;
        reasons.push(format!(
            "A request has {prompt} prompt and {generated} generated tokens, P:D {:.1}; with {}, prompts and decodes in steps of \
             {} tokens run out together at P:D {}.",
            expected.ratio(),
            together(requests, cost.parallel().pipeline),
            best.chunk,
            ratio,
        ));
        reasons.push(format!(
            "{:.0} % of the decodes are piggybacked: they run in a step with a chunk, and need no reading of the weights of \
             their own.",
            100.0 * best.piggybacked
        ));
        reasons.push(format!(
            "{} is {} tiles of {} rows: beside {decodes} decodes, {} tokens of a prompt fit without a \
             tile that is partly empty.",
            best.chunk,
            best.chunk / cost.tile(),
            cost.tile(),
            best.chunk - decodes,
        ));
        let linear = |tokens| cost.linear_ns(tokens) / f64::from(tokens);
        let saturated = linear(64 * cost.tile());
        reasons.push(format!(
            "Linear layers reach {:.0} % of their best throughput at {} tokens.",
            100.0 * saturated / linear(best.chunk),
            best.chunk,
        ));
        if let Some(target) = expected.target_ns {
            let (step, target) = (best.step_ns / 1e6, target / 1e6);
            reasons.push(if best.keeps_target {
                format!("A step takes {step:.1} ms, within the {target:.1} ms wanted between tokens.")
            } else {
                format!(
                    "No chunk size keeps {target:.1} ms between tokens; this one comes closest, with \
                     {step:.1} ms."
                )
            });
        }
        reasons.push(format!(
            "{:.0} tokens/s, {:.2} times as many as with prompts and decodes in steps of their own.",
            best.tokens_per_s, self.gain
        ));
    }
}
