//! Policies beside one another, in numbers.

use std::fmt::Write;

use tandem_schedule::{
    cost::{CostModel, Parallel},
    metrics::Report,
    trace::Trace,
};

/// The policies beside one another.
pub(super) fn table(cost: &CostModel, trace: &Trace, reports: &[Report]) -> String {
    let (prompt, generated) = trace.mean_lengths();
    let Parallel { tensor, pipeline } = cost.parallel();
    let mut text = format!(
        "{} on {} × {} (tensor {tensor}, pipeline {pipeline})\n{} requests, {prompt:.0} prompt and {generated:.0} \
         generated tokens in the mean\n\n",
        cost.model().name,
        tensor * pipeline,
        cost.hardware().name,
        trace.arrivals.len(),
    );
    let mut line = |cells: [&str; 12]| {
        let _ = write!(text, "{:<19}", cells[0]);
        for cell in &cells[1..] {
            let _ = write!(text, "{cell:>7}");
        }
        text.push('\n');
    };
    line([
        "", "TTFT", "s", "TBT", "ms", "", "latency", "s", "stalls", "%", "tokens", "busy",
    ]);
    line([
        "policy", "p50", "p99", "p50", "p99", "max", "p50", "p99", "200 ms", "500 ms", "per s", "%",
    ]);
    for report in reports {
        let [ttft, tbt, latency] =
            [&report.ttft, &report.tbt, &report.latency].map(|of| of.summary());
        let cells = [
            format!("{:.2}", ttft.p50),
            format!("{:.2}", ttft.p99),
            format!("{:.1}", 1e3 * tbt.p50),
            format!("{:.1}", 1e3 * tbt.p99),
            format!("{:.0}", 1e3 * tbt.max),
            format!("{:.1}", latency.p50),
            format!("{:.1}", latency.p99),
            format!("{:.1}", 100.0 * report.stalled[0]),
            format!("{:.1}", 100.0 * report.stalled[1]),
            // Nothing ran where every request was refused.
            match report.tokens_per_s() {
                rate if rate.is_finite() => format!("{rate:.0}"),
                _ => "-".to_owned(),
            },
            format!("{:.0}", 100.0 * report.busy),
        ];
        let mut all = [""; 12];
        all[0] = &report.policy;
        for (place, cell) in all[1..].iter_mut().zip(&cells) {
            *place = cell;
        }
        line(all);
    }
    for report in reports {
        let cached = 100.0 * report.cached_tokens as f64 / report.prompt_tokens.max(1) as f64;
        let mut notes = Vec::new();
        if report.cached_tokens > 0 {
            notes.push(format!("{cached:.0} % of the prompt tokens were cached"));
        }
        if pipeline > 1 {
            let bubble = report.bubble.quantile(0.5);
            notes.push(format!("{bubble:.2} s of bubbles in a request's median"));
        }
        if report.preemptions > 0 {
            notes.push(format!("{} preemptions", report.preemptions));
        }
        if report.refused > 0 {
            notes.push(format!(
                "{} requests too large for the pool",
                report.refused
            ));
        }
        if !notes.is_empty() {
            let _ = write!(text, "\n{:<19} {}", report.policy, notes.join("; "));
        }
    }
    if !text.ends_with('\n') {
        text.push('\n');
    }
    text
}
