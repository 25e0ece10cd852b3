//! Simulations as a picture: how TTFT and TBT are distributed, and what pipeline stages do.

use std::{fmt::Write, ops::Range};

use tandem_schedule::metrics::{Distribution, Report};

/// The steps that are recorded.
pub const TIMELINE: Range<u64> = 0..264;

/// The steps that are drawn: the last ones up to a chunk, when the pipeline is full and still has something
/// to interleave.
const DRAWN: u64 = 64;

const COLOURS: [&str; 8] = [
    "#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#222222",
];

const WIDTH: f64 = 960.0;
const PANEL: f64 = 250.0;
const LANE: f64 = 16.0;

/// The picture of all reports.
pub fn draw(reports: &[Report]) -> String {
    let mut body = String::new();
    let distributions = |of: fn(&Report) -> &Distribution| reports.iter().map(of).collect();
    curves(
        &mut body,
        60.0,
        "time to first token",
        distributions(|r| &r.ttft),
    );
    curves(
        &mut body,
        530.0,
        "time between tokens",
        distributions(|r| &r.tbt),
    );
    const IN_A_ROW: usize = 6;
    let legend = PANEL + 90.0;
    for (index, report) in reports.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        let x = 60.0 + 150.0 * (index % IN_A_ROW) as f64;
        let y = legend + 16.0 * (index / IN_A_ROW) as f64;
        let _ = writeln!(
            body,
            "<rect x=\"{x}\" y=\"{y}\" width=\"10\" height=\"10\" fill=\"{colour}\"/>\
             <text x=\"{}\" y=\"{}\">{}</text>",
            x + 15.0,
            y + 9.0,
            report.policy
        );
    }
    let mut y = legend + 24.0 + 16.0 * reports.len().div_ceil(IN_A_ROW) as f64;
    for report in reports {
        y = pipeline(&mut body, y, report);
    }
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{y}\" viewBox=\"0 0 {WIDTH} {y}\" \
         font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         {body}</svg>\n"
    )
}

/// Cumulative distributions over a logarithmic axis of time.
fn curves(body: &mut String, left: f64, title: &str, distributions: Vec<&Distribution>) {
    const RIGHT: f64 = 380.0;
    let top = 40.0;
    let samples = || distributions.iter().filter(|d| !d.samples().is_empty());
    let least = samples()
        .map(|d| d.quantile(0.001))
        .fold(f64::INFINITY, f64::min);
    let most = samples().map(|d| d.quantile(1.0)).fold(0.0, f64::max);
    if least > most {
        return;
    }
    let (from, to) = (
        least.max(1e-4).log10().floor(),
        most.max(1e-3).log10().ceil(),
    );
    let x = |seconds: f64| left + RIGHT * (seconds.max(1e-4).log10() - from) / (to - from);
    let y = |part: f64| top + PANEL * (1.0 - part);
    let _ = writeln!(
        body,
        "<text x=\"{left}\" y=\"24\" font-size=\"13\">{title}: part of all below</text>"
    );
    for decade in from as i32..=to as i32 {
        let at = x(10_f64.powi(decade));
        let label = match decade {
            ..0 => format!("{} ms", 10_f64.powi(decade + 3)),
            0.. => format!("{} s", 10_f64.powi(decade)),
        };
        let _ = writeln!(
            body,
            "<path d=\"M{at:.1} {top}V{:.1}\" stroke=\"#ddd\"/><text x=\"{at:.1}\" y=\"{:.1}\" \
             text-anchor=\"middle\">{label}</text>",
            top + PANEL,
            top + PANEL + 16.0
        );
    }
    for part in [0.0, 0.5, 0.9, 1.0] {
        let at = y(part);
        let _ = writeln!(
            body,
            "<path d=\"M{left} {at:.1}h{RIGHT}\" stroke=\"#ddd\"/><text x=\"{}\" y=\"{:.1}\" \
             text-anchor=\"end\">{part}</text>",
            left - 5.0,
            at + 4.0
        );
    }
    for (index, distribution) in distributions.iter().enumerate() {
        if distribution.samples().is_empty() {
            continue;
        }
        let points: String = (1..=200)
            .map(|i| {
                let part = f64::from(i) / 200.0;
                let start = if i == 1 { 'M' } else { 'L' };
                format!(
                    "{start}{:.1} {:.1}",
                    x(distribution.quantile(part)),
                    y(part)
                )
            })
            .collect();
        let colour = COLOURS[index % COLOURS.len()];
        let _ = writeln!(
            body,
            "<path d=\"{points}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\"/>"
        );
    }
}

/// The stages of one report; returns where the next drawing may begin.
fn pipeline(body: &mut String, top: f64, report: &Report) -> f64 {
    let all = &report.timeline;
    let chunks = all.iter().filter(|span| span.prompt_tokens > 0);
    let last = chunks.map(|span| span.step).max().unwrap_or(DRAWN);
    let drawn = (last + 1).saturating_sub(DRAWN)..=last.max(DRAWN - 1);
    let spans: Vec<_> = all
        .iter()
        .filter(|span| drawn.contains(&span.step))
        .collect();
    let Some(first) = spans.first() else {
        return top;
    };
    let end = spans.iter().map(|span| span.end_s).fold(0.0, f64::max);
    let scale = (WIDTH - 120.0) / (end - first.begin_s);
    let stages = spans.iter().map(|span| span.stage).max().unwrap_or(0) + 1;
    let _ = writeln!(
        body,
        "<text x=\"60\" y=\"{:.1}\" font-size=\"13\">{}: {:.0} ms of steps with a chunk (dark) and of decodes \
         (light); white is a bubble</text>",
        top + 10.0,
        report.policy,
        1e3 * (end - first.begin_s)
    );
    let lanes = top + 18.0;
    for stage in 0..stages {
        let at = lanes + LANE * f64::from(stage);
        let _ = writeln!(
            body,
            "<text x=\"55\" y=\"{:.1}\" text-anchor=\"end\">stage {stage}</text>",
            at + 11.0
        );
    }
    for span in &spans {
        let fill = if span.prompt_tokens > 0 {
            "#4477aa"
        } else {
            "#a5c8e8"
        };
        let _ = writeln!(
            body,
            "<rect x=\"{:.2}\" y=\"{:.1}\" width=\"{:.2}\" height=\"{}\" fill=\"{fill}\" stroke=\"white\" \
             stroke-width=\"0.4\"><title>step {}: {} prompt tokens, {} decodes</title></rect>",
            60.0 + scale * (span.begin_s - first.begin_s),
            lanes + LANE * f64::from(span.stage),
            (scale * (span.end_s - span.begin_s)).max(0.3),
            LANE - 2.0,
            span.step,
            span.prompt_tokens,
            span.decodes,
        );
    }
    lanes + LANE * f64::from(stages) + 20.0
}
