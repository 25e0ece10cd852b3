//! Draws simulations: distributions of times under each policy, and the steps of the stages in a time window that is
//! the same for all.

use tandem_schedule::metrics::{Distribution, Report, StageSpan};

use super::window;
use crate::{
    picture::{Anchor, Mark, SMALL, Svg, WIDTH, lines, palette},
    table::digits,
};

/// Spans recorded per policy: enough to find a window, few enough to keep.
pub(crate) const MOST_SPANS: u64 = 200_000;

const LEFT: f64 = 190.0;
const CHART_W: f64 = WIDTH - LEFT - 36.0;
const ROW: f64 = 26.0;

/// Draws all reports, below a title and further lines.
pub(crate) fn draw(title: &str, below: &str, reports: &[Report]) -> String {
    let mut svg = Svg::new(title);
    let mut y = svg.heading(&[below]) + 8.0;
    for (name, of) in [
        (
            "time to first token",
            (|report| &report.ttft) as fn(&Report) -> &Distribution,
        ),
        ("time between tokens", |report| &report.tbt),
    ] {
        y = quantiles(&mut svg, y, name, reports, of);
    }
    if let Some(window) = window::choose(reports) {
        y = steps(&mut svg, y + 4.0, window, reports);
    }
    svg.finish(y)
}

/// Draws a row for each policy over a logarithmic time axis. Returns the position of the next drawing.
fn quantiles(
    svg: &mut Svg,
    top: f64,
    name: &str,
    reports: &[Report],
    of: fn(&Report) -> &Distribution,
) -> f64 {
    const PLOT_W: f64 = CHART_W - 220.0;
    let samples = || {
        reports
            .iter()
            .map(of)
            .filter(|all| !all.samples().is_empty())
    };
    let least = samples()
        .map(|all| all.quantile(0.01))
        .fold(f64::INFINITY, f64::min);
    let most = samples().map(|all| all.quantile(1.0)).fold(0.0, f64::max);
    if least > most {
        return top;
    }
    // Whole decades, within a drawable range.
    let from = least.clamp(1e-6, 1e9).log10().floor();
    let to = most.clamp(1e-6, 1e9).log10().ceil().max(from + 1.0);
    let x = |seconds: f64| {
        let at = (seconds.max(1e-6).log10() - from) / (to - from);
        LEFT + PLOT_W * at.clamp(0.0, 1.0)
    };
    let title = format!(
        "{name}: line from the 1st to the 99th percentile, box the middle half, dot the median, diamond the longest"
    );
    svg.text((16.0, top + 12.0), Anchor::Start, 13, &title);
    let first = top + 26.0;
    let bottom = first + ROW * reports.len() as f64;
    let multiples: &[f64] = if to - from <= 2.0 {
        &[1.0, 2.0, 5.0]
    } else {
        &[1.0]
    };
    let decades = (from as i32..=to as i32).map(|decade| 10_f64.powi(decade));
    let ticks = decades.flat_map(|decade| multiples.iter().map(move |multiple| multiple * decade));
    for seconds in ticks.filter(|seconds| seconds.log10() < to + 1e-9) {
        svg.line(
            (x(seconds), first),
            (x(seconds), bottom + 5.0),
            palette::GRID,
            1.0,
        );
        svg.text(
            (x(seconds), bottom + 20.0),
            Anchor::Middle,
            SMALL,
            &short(seconds),
        );
    }
    svg.line((LEFT, bottom), (LEFT + PLOT_W, bottom), palette::AXIS, 1.0);
    for (index, report) in reports.iter().enumerate() {
        let middle = first + ROW * (index as f64 + 0.5);
        policy_name(svg, middle + 4.0, &report.policy);
        let all = of(report);
        if all.samples().is_empty() {
            svg.text((LEFT + 8.0, middle + 4.0), Anchor::Start, SMALL, "none");
            continue;
        }
        let at = |part: f64| x(all.quantile(part));
        svg.line(
            (at(0.01), middle),
            (at(0.99), middle),
            palette::NEUTRAL,
            2.0,
        );
        let half = [at(0.25), middle - 6.0, (at(0.75) - at(0.25)).max(1.0), 12.0];
        svg.rect(half, palette::NEUTRAL_LIGHT, None);
        svg.mark((at(1.0), middle), 5.0, Mark::Diamond, palette::ALARM, None);
        svg.mark((at(0.5), middle), 5.0, Mark::Circle, palette::NEUTRAL, None);
        let values = [("p50", 0.5), ("p99", 0.99)];
        for ((name, part), right) in values
            .into_iter()
            .zip([LEFT + CHART_W - 100.0, LEFT + CHART_W])
        {
            let value = format!("{name} {}", short(all.quantile(part)));
            svg.text((right, middle + 4.0), Anchor::End, SMALL, &value);
        }
    }
    svg.text(
        (LEFT + PLOT_W / 2.0, bottom + 40.0),
        Anchor::Middle,
        13,
        &format!("{name} (logarithmic)"),
    );
    bottom + 64.0
}

/// A time in few characters.
fn short(seconds: f64) -> String {
    let (value, unit) = match seconds {
        s if s < 0.9995e-3 => (s * 1e6, "µs"),
        s if s < 0.9995 => (s * 1e3, "ms"),
        s => (s, "s"),
    };
    let digits = digits(value);
    // Decades of an axis are whole numbers.
    let whole = digits.trim_end_matches('0').trim_end_matches('.');
    let value = if digits.contains('.') {
        whole
    } else {
        digits.as_str()
    };
    format!("{value} {unit}")
}

fn policy_name(svg: &mut Svg, y: f64, name: &str) {
    let name = lines(name, SMALL, LEFT - 30.0);
    svg.text((LEFT - 12.0, y), Anchor::End, SMALL, &name[0]);
}

/// Draws the stages under each policy in a window. Returns the position of the next drawing.
fn steps(svg: &mut Svg, top: f64, [begin_s, end_s]: [f64; 2], reports: &[Report]) -> f64 {
    const LANE: f64 = 15.0;
    const GAP: f64 = 16.0;
    const STALL: f64 = 4.0;
    let stages = |report: &Report| {
        let stages = report.timeline.iter().map(|span| span.stage + 1);
        stages.max().unwrap_or(0)
    };
    let most_stages = reports.iter().map(stages).max().unwrap_or(0);
    legend(svg, top, most_stages > 1);
    let first = top + 38.0;
    let lanes = reports
        .iter()
        .map(|report| LANE * f64::from(stages(report)) + GAP);
    let bottom = first + lanes.sum::<f64>();
    svg.time_axis(
        [LEFT, first, CHART_W, bottom],
        [begin_s, end_s],
        "time since the first request came",
    );
    let scale = CHART_W / (end_s - begin_s);
    let x = |seconds: f64| LEFT + (seconds.clamp(begin_s, end_s) - begin_s) * scale;
    let mut y = first;
    for report in reports {
        policy_name(svg, y + 11.0, &report.policy);
        for stage in 0..stages(report) {
            let lane = y + LANE * f64::from(stage);
            // The background, which stays visible where the stage is idle.
            svg.rect([LEFT, lane, CHART_W, LANE - 2.0], "#ededed", None);
            if stage > 0 && (stage + 1) % 4 == 0 {
                let name = format!("stage {}", stage + 1);
                svg.text((LEFT - 12.0, lane + 11.0), Anchor::End, SMALL, &name);
            }
            let spans = report
                .timeline
                .iter()
                .filter(|span| span.stage == stage && span.end_s > begin_s && span.begin_s < end_s);
            for span in spans {
                let width = x(span.end_s) - x(span.begin_s);
                // A gap between neighbours, if there is room for it.
                let drawn = if width > 3.0 { width - 0.7 } else { width };
                bar(svg, [x(span.begin_s), lane, drawn, LANE - 2.0], span);
            }
        }
        y += LANE * f64::from(stages(report));
        for [from, to] in window::stalls(&report.timeline) {
            if to > begin_s && from < end_s {
                svg.rect([x(from), y, x(to) - x(from), STALL], palette::ALARM, None);
            }
        }
        y += GAP;
    }
    bottom + 60.0
}

/// Draws a step: its chunk above its decodes, in their colours.
fn bar(svg: &mut Svg, [x, y, width, height]: [f64; 4], span: &StageSpan) {
    let tooltip = format!(
        "step {}: {} prompt tokens, {} decodes, {} ms",
        span.step,
        span.prompt_tokens,
        span.decodes,
        digits(1e3 * (span.end_s - span.begin_s))
    );
    let tooltip = (width > 2.0).then_some(tooltip.as_str());
    let half = height / 2.0;
    match (span.prompt_tokens > 0, span.decodes > 0) {
        (true, true) => {
            svg.rect([x, y, width, half], palette::PREFILL, tooltip);
            svg.rect([x, y + half, width, half], palette::DECODE, tooltip);
        }
        (true, false) => svg.rect([x, y, width, height], palette::PREFILL, tooltip),
        (false, _) => svg.rect([x, y, width, height], palette::DECODE, tooltip),
    }
}

fn legend(svg: &mut Svg, top: f64, pipeline: bool) {
    svg.text((16.0, top + 12.0), Anchor::Start, 13, "steps:");
    let still = if pipeline {
        "a bubble: the stage stands still"
    } else {
        "nothing to do"
    };
    let mut x = 80.0;
    for (colours, name) in [
        ([palette::PREFILL; 2], "prompt tokens"),
        ([palette::DECODE; 2], "decodes"),
        ([palette::PREFILL, palette::DECODE], "both"),
        (["#ededed"; 2], still),
        (
            [palette::ALARM; 2],
            "a stall: no token for more than 200 ms",
        ),
    ] {
        svg.rect([x, top + 1.0, 14.0, 7.0], colours[0], None);
        svg.rect([x, top + 8.0, 14.0, 7.0], colours[1], None);
        svg.text((x + 20.0, top + 12.0), Anchor::Start, SMALL, name);
        x += 44.0 + crate::picture::text_width(name, SMALL);
    }
}
