//! Measured and simulated results, as text and as data.

use serde::Serialize;
use tandem_engine::{
    Part,
    calibrate::{Calibration, MeasuredStep, StepLengths},
    replay::Replay,
};
use tandem_schedule::{
    CacheType,
    cost::{Correction, CostModel},
    metrics::Report,
    trace::Trace,
};

use crate::{
    backend::Ceilings,
    bench::serving::Args,
    serve_sim::table::{self, Line},
    table::{Table, WIDTH, digits, scaled, wrap},
};

/// All results.
pub(super) struct Results<'a> {
    pub device: &'a str,
    pub ceilings: Option<Ceilings>,
    pub cost: &'a CostModel,
    pub trace: &'a Trace,
    /// Requests per second.
    pub capacity: f64,
    pub rate: Option<f64>,
    /// Whether each step was composed before the tokens of the last one were known.
    pub ahead: bool,
    pub calibration: &'a Calibration,
    /// The replay and the simulation of each policy.
    pub served: &'a [(Replay, Report)],
}

/// The file that `--json` writes.
#[derive(Serialize)]
struct File<'a> {
    format: &'static str,
    program: String,
    date: String,
    device: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    ceilings: Option<Ceilings>,
    model: &'a str,
    /// The trace's path.
    trace: String,
    requests: usize,
    mean_prompt_tokens: f64,
    mean_generated_tokens: f64,
    capacity_per_s: f64,
    rate_per_s: Option<f64>,
    start_s: Option<f64>,
    window_s: Option<f64>,
    seed: Option<u64>,
    budget: u32,
    /// Tokens of a chunk of sarathi, if they were given; 0: adaptive.
    #[serde(skip_serializing_if = "Option::is_none")]
    chunk: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    target_ms: Option<f64>,
    prefix_cache: bool,
    batch: u32,
    page_size: u32,
    cache_type: CacheType,
    ahead: bool,
    policies: Vec<Served<'a>>,
    correction: &'a Correction,
    parts: Vec<&'static str>,
    steps: &'a [MeasuredStep],
}

#[derive(Serialize)]
struct Served<'a> {
    measured: Line<'a>,
    /// Fraction of time in which the device was idle although there was something to compute.
    idle: f64,
    simulated: Line<'a>,
}

/// How far a simulated mean is from the measured one; there is no time between tokens if all answers have one.
fn off_by(simulated: f64, measured: f64) -> String {
    // Without samples a mean is 0.
    match measured > 0.0 && simulated > 0.0 {
        true => format!("{:+.1} %", 100.0 * (simulated / measured - 1.0)),
        false => "-".to_owned(),
    }
}

impl Results<'_> {
    pub(super) fn reports(&self) -> Vec<Report> {
        let both = self.served.iter();
        both.flat_map(|(replay, simulated)| [replay.report.clone(), simulated.clone()])
            .collect()
    }

    pub(super) fn text(&self, args: &Args) -> String {
        let mut text = table::table(self.cost, self.trace, Some(self.device), &self.reports());
        let mut line = format!("measured on {}", self.device);
        if let Some(rate) = self.rate {
            line += &format!(
                ": {} requests/s, {:.0} % of the {} that sarathi-serve can serve of the trace",
                digits(rate),
                100.0 * rate / self.capacity,
                digits(self.capacity),
            );
        }
        if let Some(window_s) = args.window {
            line += &format!("; {window_s} s");
        }
        if let Some(start_s) = args.start {
            line += &format!(" from second {start_s} on");
        }
        text += &format!("\n{}\n", wrap(&line, WIDTH, "  ").trim_end());
        for (replay, simulated) in self.served {
            let idle = 100.0 * replay.idle();
            let mut line = format!("{}: idle {idle:.2} % of the time", replay.report.policy);
            if replay.report.finished > 0 && simulated.finished > 0 {
                let off = |of: fn(&Report) -> f64| off_by(of(simulated), of(&replay.report));
                line += &format!(
                    "; simulated: TTFT {}, TBT {}, tokens/s {}",
                    off(|report| report.ttft.mean()),
                    off(|report| report.tbt.mean()),
                    off(Report::tokens_per_s),
                );
            }
            text += &format!("{}\n", wrap(&line, WIDTH, "  "));
        }
        if !self.calibration.steps.is_empty() {
            text += "\n";
            text += &self.steps();
        }
        text
    }

    /// The steps of the calibration, as a table.
    fn steps(&self) -> String {
        let mut table = Table::new([
            "decodes × keys + chunk",
            "ms",
            "simulated",
            "products",
            "attention",
            "logits",
            "sampling",
            "other",
            "× bytes",
        ]);
        for (index, step) in self.calibration.steps.iter().enumerate() {
            let of = |part: Part| step.parts_s[part as usize];
            let (head, sample) = (of(Part::Head), of(Part::Sample));
            let other = step.parts_s.iter().sum::<f64>()
                - step.linear_s()
                - step.attention_s()
                - head
                - sample;
            let cells = [
                step.seconds,
                predicted_ms(self.calibration, self.cost, index) / 1e3,
                step.linear_s(),
                step.attention_s(),
                head,
                sample,
                other,
            ];
            let name = short(step);
            let cells = cells.map(|seconds| format!("{:.3}", 1e3 * seconds));
            let bytes = match (self.ceilings, step.lengths.chunk) {
                (Some(ceilings), 0) => {
                    let bytes = self.decode_bytes(step.lengths) / ceilings.read_bytes_per_s;
                    format!("{:.2}", step.seconds / bytes)
                }
                _ => String::new(),
            };
            table.push(std::iter::once(name).chain(cells).chain([bytes]));
        }
        let mut text = table.render();
        if let Some(ceilings) = self.ceilings {
            text += &format!(
                "\n× bytes: over the time to read weights and caches once at {}, as measured in this run.\n",
                scaled(ceilings.read_bytes_per_s, "B/s"),
            );
        }
        text
    }

    /// Bytes that a step of decodes must read.
    fn decode_bytes(&self, lengths: StepLengths) -> f64 {
        let model = self.cost.model();
        let weights = u64::from(model.layers) * model.layer_weights() + model.head_weights();
        let keys = u64::from(lengths.decodes) * u64::from(lengths.keys);
        (2 * weights + keys * self.cost.kv_bytes_per_token()) as f64
    }

    pub(super) fn json(&self, args: &Args) -> String {
        let (prompt, generated) = self.trace.mean_lengths();
        let name = |path: &std::path::PathBuf| {
            path.file_name()
                .map(|name| name.to_string_lossy().into_owned())
        };
        let trace = match (args.trace.as_ref().and_then(name), args.prefix) {
            (Some(name), _) => name,
            (None, None) => "requests alike".to_owned(),
            (None, Some(prefix)) => format!("requests alike, {prefix} tokens in common"),
        };
        let served = self.served.iter().map(|(replay, simulated)| Served {
            measured: Line::of(&replay.report),
            idle: replay.idle(),
            simulated: Line::of(simulated),
        });
        let file = File {
            format: "tandem-serve-1",
            program: format!("tandem {}", env!("CARGO_PKG_VERSION")),
            date: humantime::format_rfc3339_seconds(std::time::SystemTime::now()).to_string(),
            device: self.device,
            ceilings: self.ceilings,
            model: &self.cost.model().name,
            trace,
            requests: self.trace.arrivals.len(),
            mean_prompt_tokens: prompt,
            mean_generated_tokens: generated,
            capacity_per_s: self.capacity,
            rate_per_s: self.rate,
            start_s: args.start,
            window_s: args.window,
            seed: self.rate.map(|_| args.seed.unwrap_or(1)),
            budget: args.budget,
            chunk: args.chunk,
            target_ms: args.target_ms,
            prefix_cache: !args.no_prefix_cache,
            batch: args.batch,
            page_size: args.page_size,
            cache_type: self.cost.cache_type(),
            ahead: self.ahead,
            policies: served.collect(),
            correction: &self.calibration.correction,
            parts: Part::ALL.map(Part::name).to_vec(),
            steps: &self.calibration.steps,
        };
        serde_json::to_string_pretty(&file).expect("plain data") + "\n"
    }
}

/// A short name of a calibration step: decodes and their keys, and a chunk from its first token to the end of its keys.
pub(super) fn short(step: &MeasuredStep) -> String {
    let StepLengths {
        decodes,
        keys,
        chunk,
        chunk_keys,
    } = step.lengths;
    let mut parts = Vec::new();
    if decodes > 0 {
        parts.push(format!("{decodes} × {keys}"));
    }
    if chunk > 0 {
        parts.push(format!("{chunk} to {chunk_keys}"));
    }
    parts.join(" + ") + if step.pod { ", POD" } else { "" }
}

/// Predicted time for the rows of a step's table.
fn predicted_ms(calibration: &Calibration, cost: &CostModel, index: usize) -> f64 {
    1e3 * calibration.predicted_s(cost, &calibration.steps[index])
}
