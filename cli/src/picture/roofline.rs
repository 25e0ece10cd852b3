//! Measured points under the ceilings, in logarithmic axes.

use super::{Anchor, Svg, text_width};
use crate::{
    bench::{CaseResult, ResultFile},
    table::{digits, scaled},
};

const WIDTH: f64 = 1200.0;
const LEFT: f64 = 92.0;
const TOP: f64 = 64.0;
const CHART_W: f64 = 660.0;
const CHART_H: f64 = 520.0;
const LIST_X: f64 = LEFT + CHART_W + 32.0;
const LIST_LINE: f64 = 17.0;
const COLOURS: [&str; 6] = [
    "#2a7fba", "#d1701f", "#4a9a4a", "#a23b72", "#7a5cc0", "#666666",
];

/// Results that have a place in the chart: a time, and both bytes and operations.
#[must_use]
pub fn points(file: &ResultFile) -> usize {
    file.results.iter().filter_map(Point::of).count()
}

/// Draws results under the ceilings of their file. Points carry numbers, and the list beside the chart says
/// what they are; a list longer than the chart makes the picture longer.
#[must_use]
pub fn draw(file: &ResultFile) -> String {
    let points: Vec<Point<'_>> = file.results.iter().filter_map(Point::of).collect();
    let ceilings = &file.ceilings;
    let ridge = ceilings.flops_per_s / ceilings.read_bytes_per_s;
    let intensities = points.iter().map(|point| point.intensity);
    let x = Log::over(intensities.chain([ridge]), LEFT, CHART_W);
    let rates = points.iter().map(|point| point.flops_per_s);
    let y = Log::over(rates.chain([ceilings.flops_per_s]), TOP + CHART_H, -CHART_H);

    let list_height = 40.0 + LIST_LINE * points.len() as f64;
    let height = TOP + CHART_H.max(list_height) + 64.0;
    let title = format!(
        "{} on {} ({})",
        file.program, file.machine.name, file.machine.details
    );
    let mut svg = Svg::new(WIDTH, height, &title);
    svg.text((16.0, 26.0), Anchor::Start, 17, &title);
    svg.text(
        (16.0, 46.0),
        Anchor::Start,
        13,
        &format!(
            "{}; limits measured in the same run: read {}, multiply-add {}",
            file.date,
            scaled(ceilings.read_bytes_per_s, "B/s"),
            scaled(ceilings.flops_per_s, "FLOP/s")
        ),
    );
    axes(&mut svg, &x, &y);
    // The roof: bandwidth up to the ridge, throughput beyond it.
    let roof = |intensity: f64| (intensity * ceilings.read_bytes_per_s).min(ceilings.flops_per_s);
    let corner = ridge.clamp(x.low, x.high);
    let place = |intensity: f64| (x.at(intensity), y.at(roof(intensity).max(y.low)));
    let start = x.low.max(y.low / ceilings.read_bytes_per_s);
    svg.line(place(start), place(corner), "#222222", 2.0);
    svg.line(place(corner), place(x.high), "#222222", 2.0);

    let names = implementations(&points);
    let colour = |point: &Point<'_>| {
        let index = names
            .iter()
            .position(|name| *name == point.result.implementation);
        COLOURS[index.unwrap_or(0) % COLOURS.len()]
    };
    svg.text(
        (LIST_X, TOP + 4.0),
        Anchor::Start,
        13,
        "number, share of the roof, case",
    );
    for (index, point) in points.iter().enumerate() {
        let centre = (x.at(point.intensity), y.at(point.flops_per_s));
        let share = 100.0 * point.flops_per_s / roof(point.intensity);
        let name = point.name(names.len() > 1);
        let tooltip = format!(
            "{name}: {} FLOP/B, {}, {share:.0} % of the roof",
            digits(point.intensity),
            scaled(point.flops_per_s, "FLOP/s")
        );
        svg.circle(centre, 5.0, colour(point), &tooltip);
        let line = TOP + 26.0 + LIST_LINE * index as f64;
        svg.circle((LIST_X + 5.0, line - 4.0), 4.0, colour(point), &name);
        let label = format!("{} · {share:.0} % · {name}", index + 1);
        svg.text(
            (LIST_X + 16.0, line),
            Anchor::Start,
            11,
            &fit(&label, 11, WIDTH - LIST_X - 24.0),
        );
    }
    numbers(&mut svg, &points, &x, &y);
    svg.finish()
}

/// A result that has a place in the chart.
struct Point<'a> {
    result: &'a CaseResult,
    /// FLOP per byte.
    intensity: f64,
    flops_per_s: f64,
}

impl<'a> Point<'a> {
    fn of(result: &'a CaseResult) -> Option<Self> {
        let seconds = result.times()?.median_us / 1e6;
        let intensity = result.flops as f64 / result.bytes as f64;
        let flops_per_s = result.flops as f64 / seconds;
        let drawable = |value: f64| value > 0.0 && value.is_finite();
        (drawable(intensity) && drawable(flops_per_s)).then_some(Self {
            result,
            intensity,
            flops_per_s,
        })
    }

    fn name(&self, with_implementation: bool) -> String {
        if with_implementation {
            format!("{} [{}]", self.result.case, self.result.implementation)
        } else {
            self.result.case.clone()
        }
    }
}

fn implementations<'a>(points: &[Point<'a>]) -> Vec<&'a str> {
    let mut names: Vec<&str> = Vec::new();
    for point in points {
        if !names.contains(&point.result.implementation.as_str()) {
            names.push(&point.result.implementation);
        }
    }
    names
}

/// Numbers beside the points, where there is room: never on another number or point.
fn numbers(svg: &mut Svg, points: &[Point<'_>], x: &Log, y: &Log) {
    const SIZE: u32 = 11;
    let centres: Vec<_> = points
        .iter()
        .map(|point| (x.at(point.intensity), y.at(point.flops_per_s)))
        .collect();
    let mut taken: Vec<[f64; 4]> = centres
        .iter()
        .map(|&(x, y)| [x - 5.0, y - 5.0, x + 5.0, y + 5.0])
        .collect();
    for (index, &(cx, cy)) in centres.iter().enumerate() {
        let label = (index + 1).to_string();
        let width = text_width(&label, SIZE);
        let sides = [
            (cx + 7.0, cy + 4.0),
            (cx - 7.0 - width, cy + 4.0),
            (cx - width / 2.0, cy - 8.0),
            (cx - width / 2.0, cy + 17.0),
        ];
        let free = sides.into_iter().find_map(|(left, base)| {
            let area = [left, base - 10.0, left + width, base + 2.0];
            let overlaps = |other: &[f64; 4]| {
                area[0] < other[2] && other[0] < area[2] && area[1] < other[3] && other[1] < area[3]
            };
            (!taken.iter().any(overlaps)).then_some((left, base, area))
        });
        if let Some((left, base, area)) = free {
            svg.text((left, base), Anchor::Start, SIZE, &label);
            taken.push(area);
        }
    }
}

/// A logarithmic axis over whole decades.
struct Log {
    low: f64,
    high: f64,
    start: f64,
    len: f64,
}

impl Log {
    fn over(values: impl Iterator<Item = f64>, start: f64, len: f64) -> Self {
        let (mut low, mut high) = (f64::INFINITY, 0.0f64);
        for value in values {
            (low, high) = (low.min(value), high.max(value));
        }
        Self {
            low: round(low, false),
            high: round(high * 1.05, true),
            start,
            len,
        }
    }

    fn at(&self, value: f64) -> f64 {
        self.start + self.len * (value / self.low).log10() / (self.high / self.low).log10()
    }

    /// Round numbers within; powers of ten where there are many.
    fn ticks(&self) -> Vec<f64> {
        let powers = self.low.log10().floor() as i32..=self.high.log10().ceil() as i32;
        let multiples = |of: &'static [f64]| {
            let all = powers.clone().map(|power| 10f64.powi(power));
            let all = all.flat_map(|power| of.iter().map(move |multiple| multiple * power));
            let within = |x: &f64| *x > 0.999 * self.low && *x < 1.001 * self.high;
            all.filter(within).collect::<Vec<_>>()
        };
        let ticks = multiples(&STEPS);
        if ticks.len() <= 8 {
            ticks
        } else {
            multiples(&[1.0])
        }
    }
}

/// Round numbers in a power of ten.
const STEPS: [f64; 3] = [1.0, 2.0, 5.0];

/// The next round number below or above.
fn round(value: f64, up: bool) -> f64 {
    let power = 10f64.powf(value.log10().floor());
    let parts = value / power;
    let step = if up {
        STEPS.into_iter().find(|step| *step >= parts)
    } else {
        STEPS.into_iter().rfind(|step| *step <= parts)
    };
    power * step.unwrap_or(if up { 10.0 } else { 1.0 })
}

fn axes(svg: &mut Svg, x: &Log, y: &Log) {
    let bottom = TOP + CHART_H;
    for value in x.ticks() {
        svg.line((x.at(value), TOP), (x.at(value), bottom), "#e4e4e4", 1.0);
        svg.text(
            (x.at(value), bottom + 18.0),
            Anchor::Middle,
            12,
            &super::num(value).to_string(),
        );
    }
    for value in y.ticks() {
        svg.line(
            (LEFT, y.at(value)),
            (LEFT + CHART_W, y.at(value)),
            "#e4e4e4",
            1.0,
        );
        let label = scaled(value, "FLOP/s").replace(".00", "").replace(".0", "");
        svg.text((LEFT - 6.0, y.at(value) + 4.0), Anchor::End, 11, &label);
    }
    svg.text(
        (LEFT + CHART_W / 2.0, bottom + 40.0),
        Anchor::Middle,
        13,
        "operations per byte that must move",
    );
}

/// The text as far as it fits.
fn fit(text: &str, size: u32, width: f64) -> String {
    if text_width(text, size) <= width {
        return text.to_owned();
    }
    let letters = (width / text_width("x", size)) as usize;
    let kept: String = text.chars().take(letters.saturating_sub(1)).collect();
    format!("{kept}…")
}
