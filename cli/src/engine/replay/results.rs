//! Measured beside simulated, in text and as data.

use serde::Serialize;
use tandem_engine::{
    Part,
    calibrate::{Calibration, MeasuredStep},
    replay::Replay,
};
use tandem_schedule::{
    cost::{Correction, CostModel},
    metrics::Report,
    trace::Trace,
};

use super::{predicted_ms, words};
use crate::{
    bench::serving::Args,
    serve_sim::table::{self, Line},
    table::{Table, digits},
};

/// All that was measured.
pub(super) struct Results<'a> {
    pub device: &'a str,
    pub cost: &'a CostModel,
    pub trace: &'a Trace,
    /// Requests in a second.
    pub capacity: f64,
    pub rate: Option<f64>,
    pub calibration: &'a Calibration,
    /// Each policy, and its simulation.
    pub served: &'a [(Replay, Report)],
}

/// What `--json` writes.
#[derive(Serialize)]
struct File<'a> {
    format: &'static str,
    program: String,
    date: String,
    device: &'a str,
    model: &'a str,
    /// As they were given.
    trace: String,
    requests: usize,
    mean_prompt_tokens: f64,
    mean_generated_tokens: f64,
    capacity_per_s: f64,
    rate_per_s: Option<f64>,
    seed: u64,
    budget: u32,
    batch: u32,
    page_size: u32,
    ahead: bool,
    policies: Vec<Served<'a>>,
    correction: &'a Correction,
    parts: Vec<&'static str>,
    steps: &'a [MeasuredStep],
}

#[derive(Serialize)]
struct Served<'a> {
    measured: Line<'a>,
    /// The part of the time with something to compute in which the device did not.
    idle: f64,
    simulated: Line<'a>,
}

impl Results<'_> {
    pub(super) fn text(&self, args: &Args) -> String {
        let mut text = table::table(self.cost, self.trace, &self.reports());
        text += &format!("\nmeasured on {}", self.device);
        if let Some(rate) = self.rate {
            text += &format!(
                "; {} requests/s, {:.0} % of the {} that sarathi-serve can serve of the trace",
                digits(rate),
                100.0 * rate / self.capacity,
                digits(self.capacity),
            );
        }
        text += "\n";
        for (replay, simulated) in self.served {
            let off = |of: fn(&Report) -> f64| {
                100.0 * (of(simulated) / of(&replay.report).max(f64::MIN_POSITIVE) - 1.0)
            };
            text += &format!(
                "{}: idle between steps {:.2} %; simulated beside measured: TTFT {:+.1} %, TBT {:+.1} %, tokens/s {:+.1} %\n",
                replay.report.policy,
                100.0 * replay.idle(),
                off(|report| report.ttft.mean()),
                off(|report| report.tbt.mean()),
                off(Report::tokens_per_s),
            );
        }
        if args.parts.is_some() {
            text += "\n";
            text += &self.steps();
        }
        text
    }

    /// The steps of the calibration.
    fn steps(&self) -> String {
        let mut table = Table::new([
            "step",
            "ms",
            "simulated",
            "products",
            "attention",
            "logits",
            "sampling",
            "other",
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
            let name = words(step.lengths, step.pod);
            let cells = cells.map(|seconds| format!("{:.3}", 1e3 * seconds));
            table.push(std::iter::once(name).chain(cells));
        }
        table.render()
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
            model: &self.cost.model().name,
            trace,
            requests: self.trace.arrivals.len(),
            mean_prompt_tokens: prompt,
            mean_generated_tokens: generated,
            capacity_per_s: self.capacity,
            rate_per_s: self.rate,
            seed: args.seed,
            budget: args.budget,
            batch: args.batch,
            page_size: args.page_size,
            ahead: !args.wait,
            policies: served.collect(),
            correction: &self.calibration.correction,
            parts: Part::ALL.map(Part::name).to_vec(),
            steps: &self.calibration.steps,
        };
        serde_json::to_string_pretty(&file).expect("plain data") + "\n"
    }
}
