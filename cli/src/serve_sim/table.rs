//! Compares policies in a table.

use serde::Serialize;
use tandem_schedule::{
    CacheType,
    cost::{CostModel, Parallel},
    metrics::{Distribution, Report, Summary},
    trace::Trace,
};

use crate::{
    cache_type::mention,
    table::{Table, WIDTH, counted, digits, wrap},
};

/// The model on its machine, and the requests: the heading of every output. With measured times, the machine is the one
/// that they are from, and the simulated one is named after it.
pub(crate) fn heading(cost: &CostModel, trace: &Trace, measured: Option<&str>) -> [String; 2] {
    let (prompt, generated) = trace.mean_lengths();
    let Parallel { tensor, pipeline } = cost.parallel();
    let measured = measured.map_or(String::new(), |device| format!("{device}, simulated as "));
    [
        format!(
            "{} on {measured}{} × {} (tensor {tensor}, pipeline {pipeline}){}",
            cost.model().name,
            u64::from(tensor) * u64::from(pipeline),
            cost.hardware().name,
            mention(cost.cache_type()),
        ),
        format!(
            "{}, {prompt:.0} prompt and {generated:.0} generated tokens in the mean",
            counted(trace.arrivals.len(), "request"),
        ),
    ]
}

/// The table of policies.
pub(crate) fn table(
    cost: &CostModel,
    trace: &Trace,
    measured: Option<&str>,
    reports: &[Report],
) -> String {
    let [machine, requests] = heading(cost, trace, measured);
    let machine = wrap(&machine, WIDTH, "  ");
    let machine = machine.trim_end();
    let mut table = Table::new([
        "",
        "TTFT s",
        "",
        "TBT ms",
        "",
        "",
        "latency s",
        "",
        "stalls %",
        "",
        "tokens",
        "busy",
    ]);
    table.push(
        [
            "policy", "p50", "p99", "p50", "p99", "max", "p50", "p99", "200 ms", "500 ms", "per s",
            "%",
        ]
        .map(str::to_owned),
    );
    for report in reports {
        let times = [&report.ttft, &report.tbt, &report.latency];
        let [ttft, tbt, latency] = times.map(Distribution::summary);
        // A window may have none of them.
        let [of_ttft, of_tbt, of_latency] = times.map(|of| !of.samples().is_empty());
        // If no request finished, these numbers are meaningless.
        let ran = |(there, cell): (bool, String)| match report.finished > 0 && there {
            true => cell,
            false => "-".to_owned(),
        };
        let cells = [
            (of_ttft, seconds(ttft.p50)),
            (of_ttft, seconds(ttft.p99)),
            (of_tbt, digits(1e3 * tbt.p50)),
            (of_tbt, digits(1e3 * tbt.p99)),
            (of_tbt, digits(1e3 * tbt.max)),
            (of_latency, seconds(latency.p50)),
            (of_latency, seconds(latency.p99)),
            (true, format!("{:.1}", 100.0 * report.stalled[0])),
            (true, format!("{:.1}", 100.0 * report.stalled[1])),
            (true, digits(report.tokens_per_s())),
            (true, format!("{:.0}", 100.0 * report.busy)),
        ];
        table.push(std::iter::once(report.policy.clone()).chain(cells.map(ran)));
    }
    let mut text = format!("{machine}\n{requests}\n\n{}", table.render());
    for report in reports {
        let notes = notes(cost, report);
        if !notes.is_empty() {
            let note = format!("{}: {}", report.policy, notes.join("; "));
            text += &format!("\n{}", wrap(&note, WIDTH, "  "));
        }
    }
    if !text.ends_with('\n') {
        text.push('\n');
    }
    text
}

/// Seconds, with a resolution of a millisecond.
fn seconds(value: f64) -> String {
    match value {
        ..0.0995 => format!("{value:.3}"),
        _ => digits(value),
    }
}

/// Remarks that have no column.
fn notes(cost: &CostModel, report: &Report) -> Vec<String> {
    let mut notes = Vec::new();
    if report.cached_tokens > 0 {
        let cached = 100.0 * report.cached_tokens as f64 / report.prompt_tokens.max(1) as f64;
        notes.push(format!("{cached:.0} % of the prompt tokens were cached"));
    }
    if cost.parallel().pipeline > 1 && report.finished > 0 {
        let bubble = report.bubble.quantile(0.5);
        notes.push(format!("{bubble:.2} s of bubbles in a request's median"));
    }
    for (count, what) in [
        (report.preemptions as usize, "preemption"),
        (
            report.stuck,
            "request was left over|requests were left over",
        ),
        (
            report.refused,
            "request too large for the pool|requests too large for the pool",
        ),
    ] {
        match (count, what.split_once('|')) {
            (0, _) => {}
            (1, Some((one, _))) => notes.push(format!("1 {one}")),
            (_, Some((_, many))) => notes.push(format!("{count} {many}")),
            (_, None) => notes.push(counted(count, what)),
        }
    }
    notes
}

/// The file that `--json` writes.
#[derive(Debug, Serialize)]
pub(super) struct File<'a> {
    format: &'static str,
    program: String,
    model: &'a str,
    hardware: &'a str,
    tensor: u32,
    pipeline: u32,
    cache_type: CacheType,
    requests: usize,
    mean_prompt_tokens: f64,
    mean_generated_tokens: f64,
    policies: Vec<Line<'a>>,
}

/// Results of a policy: times in seconds, fractions from 0 to 1.
#[derive(Debug, Serialize)]
pub(crate) struct Line<'a> {
    policy: &'a str,
    finished: usize,
    refused: usize,
    stuck: usize,
    preemptions: u64,
    makespan_s: f64,
    ttft_s: Summary,
    tbt_s: Summary,
    latency_s: Summary,
    bubble_s: Summary,
    stalled_200_ms: f64,
    stalled_500_ms: f64,
    prompt_tokens: u64,
    generated_tokens: u64,
    cached_tokens: u64,
    recomputed_tokens: u64,
    steps: u64,
    busy: f64,
}

impl<'a> Line<'a> {
    pub(crate) fn of(report: &'a Report) -> Self {
        Self {
            policy: &report.policy,
            finished: report.finished,
            refused: report.refused,
            stuck: report.stuck,
            preemptions: report.preemptions,
            makespan_s: report.makespan_s,
            ttft_s: report.ttft.summary(),
            tbt_s: report.tbt.summary(),
            latency_s: report.latency.summary(),
            bubble_s: report.bubble.summary(),
            stalled_200_ms: report.stalled[0],
            stalled_500_ms: report.stalled[1],
            prompt_tokens: report.prompt_tokens,
            generated_tokens: report.generated_tokens,
            cached_tokens: report.cached_tokens,
            recomputed_tokens: report.recomputed_tokens,
            steps: report.steps,
            busy: report.busy,
        }
    }
}

/// The numbers of the table as data.
pub(super) fn file<'a>(cost: &'a CostModel, trace: &Trace, reports: &'a [Report]) -> File<'a> {
    let (prompt, generated) = trace.mean_lengths();
    let Parallel { tensor, pipeline } = cost.parallel();
    File {
        format: "tandem-serve-sim-1",
        program: format!("tandem {}", env!("CARGO_PKG_VERSION")),
        model: &cost.model().name,
        hardware: &cost.hardware().name,
        tensor,
        pipeline,
        cache_type: cost.cache_type(),
        requests: trace.arrivals.len(),
        mean_prompt_tokens: prompt,
        mean_generated_tokens: generated,
        policies: reports.iter().map(Line::of).collect(),
    }
}

#[cfg(test)]
mod tests {
    use tandem_schedule::{Hardware, ModelDescription};

    use super::*;

    /// A short window may have tokens of requests that came before it only.
    #[test]
    fn times_that_were_not_measured_are_no_zeros() {
        let model = ModelDescription::named("llama-3-8b").unwrap();
        let hardware = Hardware::named("h200").unwrap();
        let cost = CostModel::new(&model, &hardware, Parallel::default()).unwrap();
        let report = Report {
            policy: "orca".to_owned(),
            finished: 2,
            makespan_s: 1.0,
            tbt: Distribution::new(vec![0.02]),
            ..Report::default()
        };
        let text = table(&cost, &Trace::uniform(2, 90, 9), None, &[report]);
        let row = text.lines().find(|line| line.starts_with("orca")).unwrap();
        let cells: Vec<_> = row.split_whitespace().collect();
        assert_eq!(
            cells[..8],
            ["orca", "-", "-", "20.0", "20.0", "20.0", "-", "-"]
        );
    }
}
