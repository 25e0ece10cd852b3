//! Draws measured points below the ceilings, with logarithmic axes.

use super::{Anchor, Mark, SMALL, Svg, WIDTH, axis::Log, label, lines, palette, text_width};
use crate::{
    bench::{CaseResult, ResultFile},
    table::{digits, scaled},
};

const LEFT: f64 = 104.0;
const CHART_W: f64 = WIDTH - LEFT - 32.0;
const CHART_H: f64 = 460.0;
const MARGIN: f64 = 16.0;
const LINE: f64 = 18.0;
const RADIUS: f64 = 5.0;

/// Number of results with a place in the chart: those with a time, bytes and operations.
#[must_use]
pub fn points(file: &ResultFile) -> usize {
    file.results.iter().filter_map(Point::of).count()
}

/// Draws the results of a file below its ceilings. Each implementation has a colour and a shape, each case a number.
/// The list below the chart explains the numbers.
#[must_use]
pub fn draw(file: &ResultFile) -> String {
    let points: Vec<Point<'_>> = file.results.iter().filter_map(Point::of).collect();
    let ceilings = &file.ceilings;
    let roof = |intensity: f64| (intensity * ceilings.read_bytes_per_s).min(ceilings.flops_per_s);
    let mut svg = Svg::new(&format!(
        "{} on {} ({})",
        file.program, file.machine.name, file.machine.details
    ));
    let top = svg.heading(&[&format!(
        "{}; the line is the roof, measured in the same run: read {}, multiply-add {}",
        file.date,
        scaled(ceilings.read_bytes_per_s, "B/s"),
        ceilings.multiply_add()
    )]);
    let series = Series::of(&points);
    let top = series.legend(&mut svg, top) + 8.0;

    let x = Log::over(points.iter().map(|point| point.intensity), LEFT, CHART_W);
    let rates = points.iter().map(|point| point.flops_per_s);
    let roofs = points.iter().map(|point| roof(point.intensity));
    let y = Log::over(rates.chain(roofs), top + CHART_H, -CHART_H);
    axes(&mut svg, &x, &y, top);
    // The roof across the chart: bandwidth up to the ridge, throughput beyond it.
    let ridge = ceilings.flops_per_s / ceilings.read_bytes_per_s;
    let place = |intensity: f64| (x.at(intensity), y.at(roof(intensity)));
    let begin = x.low.max(y.low / ceilings.read_bytes_per_s);
    let above = y.high / ceilings.read_bytes_per_s;
    let end = if ceilings.flops_per_s > y.high {
        x.high.min(above)
    } else {
        x.high
    };
    let corner = ridge.clamp(begin.min(end), end);
    svg.line(place(begin), place(corner), palette::INK, 2.0);
    svg.line(place(corner), place(end), palette::INK, 2.0);

    let cases = cases(&points);
    for point in &points {
        let (mark, colour) = series.look(point);
        let tooltip = format!(
            "{} [{}]: {} FLOP/B, {}, {:.0} % of the roof",
            point.result.case,
            point.result.implementation,
            digits(point.intensity),
            scaled(point.flops_per_s, "FLOP/s"),
            100.0 * point.flops_per_s / roof(point.intensity)
        );
        let centre = (x.at(point.intensity), y.at(point.flops_per_s));
        svg.mark(centre, RADIUS, mark, colour, Some(&tooltip));
    }
    numbers(&mut svg, &points, &cases, [&x, &y], top);
    let mut list = top + CHART_H + 76.0;
    svg.text(
        (MARGIN, list),
        Anchor::Start,
        13,
        "number and case; on the right, what each reaches of the roof",
    );
    list += 24.0;
    for (index, case) in cases.iter().enumerate() {
        let of_case = points.iter().filter(|point| point.result.case == *case);
        list = row(&mut svg, list, index + 1, case, of_case, &series, &roof);
    }
    svg.finish(list + 8.0)
}

/// Draws a case of the list. Returns the position of the next one.
fn row<'a>(
    svg: &mut Svg,
    top: f64,
    number: usize,
    case: &str,
    points: impl Iterator<Item = &'a Point<'a>>,
    series: &Series<'_>,
    roof: &impl Fn(f64) -> f64,
) -> f64 {
    const NAME: f64 = MARGIN + 44.0;
    const SLOT: f64 = 72.0;
    // One column per implementation, up to eight; the name gets the rest.
    let columns = series.names.len().clamp(1, 8);
    let shares = WIDTH - MARGIN - SLOT * columns as f64;
    svg.text((NAME - 10.0, top), Anchor::End, SMALL, &number.to_string());
    let name = lines(case, SMALL, shares - NAME - 12.0);
    for (index, line) in name.iter().enumerate() {
        svg.text(
            (NAME, top + LINE * index as f64),
            Anchor::Start,
            SMALL,
            line,
        );
    }
    let mut used = name.len();
    // A case that was measured several times needs more lines.
    let mut taken = vec![0; series.names.len()];
    for point in points {
        let index = series.index(point);
        let (mark, colour) = series.look(point);
        let lines_of_all = series.names.len().div_ceil(columns);
        let line = index / columns + taken[index] * lines_of_all;
        taken[index] += 1;
        used = used.max(line + 1);
        let x = shares + SLOT * (index % columns) as f64;
        let y = top + LINE * line as f64;
        svg.mark((x + 6.0, y - 4.0), 4.5, mark, colour, None);
        let share = 100.0 * point.flops_per_s / roof(point.intensity);
        svg.text(
            (x + 16.0, y),
            Anchor::Start,
            SMALL,
            &format!("{share:.0} %"),
        );
    }
    top + LINE * used as f64
}

/// A result with a place in the chart.
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
}

/// The implementations, in the order in which they appear.
struct Series<'a> {
    names: Vec<&'a str>,
}

impl<'a> Series<'a> {
    fn of(points: &[Point<'a>]) -> Self {
        let mut names: Vec<&str> = Vec::new();
        for point in points {
            if !names.contains(&point.result.implementation.as_str()) {
                names.push(&point.result.implementation);
            }
        }
        Self { names }
    }

    fn index(&self, point: &Point<'_>) -> usize {
        let mut names = self.names.iter();
        names
            .position(|name| *name == point.result.implementation)
            .unwrap_or(0)
    }

    fn look(&self, point: &Point<'_>) -> (Mark, &'static str) {
        Self::look_of(self.index(point))
    }

    fn look_of(index: usize) -> (Mark, &'static str) {
        let (marks, colours) = (Mark::ALL, palette::SERIES);
        (marks[index % marks.len()], colours[index % colours.len()])
    }

    /// Draws marks with their names in lines. Returns the bottom.
    fn legend(&self, svg: &mut Svg, top: f64) -> f64 {
        let (mut x, mut y) = (MARGIN, top + 2.0);
        for (index, name) in self.names.iter().enumerate() {
            let name = lines(name, 13, WIDTH - 2.0 * MARGIN - 24.0).join(" ");
            let width = 20.0 + text_width(&name, 13) + 20.0;
            if x > MARGIN && x + width > WIDTH - MARGIN {
                (x, y) = (MARGIN, y + 20.0);
            }
            let (mark, colour) = Self::look_of(index);
            svg.mark((x + 6.0, y - 4.0), RADIUS, mark, colour, None);
            svg.text((x + 18.0, y), Anchor::Start, 13, &name);
            x += width;
        }
        y + 14.0
    }
}

fn cases<'a>(points: &[Point<'a>]) -> Vec<&'a str> {
    let mut names: Vec<&str> = Vec::new();
    for point in points {
        if !names.contains(&point.result.case.as_str()) {
            names.push(&point.result.case);
        }
    }
    names
}

/// Writes the number of each case next to its fastest point if there is room, never over another number or point.
fn numbers(svg: &mut Svg, points: &[Point<'_>], cases: &[&str], [x, y]: [&Log; 2], top: f64) {
    let around = |x: f64, y: f64| [x - 6.0, y - 6.0, x + 6.0, y + 6.0];
    let centres = points.iter();
    let mut taken: Vec<[f64; 4]> = centres
        .map(|point| around(x.at(point.intensity), y.at(point.flops_per_s)))
        .collect();
    for (index, case) in cases.iter().enumerate() {
        let of_case = points.iter().filter(|point| point.result.case == *case);
        let fastest = of_case.max_by(|a, b| a.flops_per_s.total_cmp(&b.flops_per_s));
        let Some(point) = fastest else { continue };
        let (cx, cy) = (x.at(point.intensity), y.at(point.flops_per_s));
        let number = (index + 1).to_string();
        let width = text_width(&number, SMALL);
        let sides = [
            (cx + 8.0, cy + 4.0),
            (cx - 8.0 - width, cy + 4.0),
            (cx - width / 2.0, cy - 9.0),
            (cx - width / 2.0, cy + 18.0),
        ];
        let free = sides.into_iter().find_map(|(left, base)| {
            let area = [left, base - 11.0, left + width, base + 3.0];
            let inside = area[0] > LEFT
                && area[2] < LEFT + CHART_W
                && area[1] > top
                && area[3] < top + CHART_H;
            let overlaps = |other: &[f64; 4]| {
                area[0] < other[2] && other[0] < area[2] && area[1] < other[3] && other[1] < area[3]
            };
            (inside && !taken.iter().any(overlaps)).then_some((left, base, area))
        });
        if let Some((left, base, area)) = free {
            svg.text((left, base), Anchor::Start, SMALL, &number);
            taken.push(area);
        }
    }
}

fn axes(svg: &mut Svg, x: &Log, y: &Log, top: f64) {
    let bottom = top + CHART_H;
    for value in x.ticks() {
        svg.line(
            (x.at(value), top),
            (x.at(value), bottom + 5.0),
            palette::GRID,
            1.0,
        );
        svg.text(
            (x.at(value), bottom + 20.0),
            Anchor::Middle,
            SMALL,
            &label(value),
        );
    }
    let unit = if y.high < 1e13 {
        (1e9, "GFLOP/s")
    } else {
        (1e12, "TFLOP/s")
    };
    for value in y.ticks() {
        let at = y.at(value);
        svg.line((LEFT - 5.0, at), (LEFT + CHART_W, at), palette::GRID, 1.0);
        svg.text(
            (LEFT - 10.0, at + 4.0),
            Anchor::End,
            SMALL,
            &label(value / unit.0),
        );
    }
    svg.line((LEFT, top), (LEFT, bottom), palette::AXIS, 1.0);
    svg.line((LEFT, bottom), (LEFT + CHART_W, bottom), palette::AXIS, 1.0);
    svg.text(
        (LEFT + CHART_W / 2.0, bottom + 42.0),
        Anchor::Middle,
        13,
        "operations per byte that must move, FLOP/B (logarithmic)",
    );
    svg.axis_title(
        (26.0, top + CHART_H / 2.0),
        &format!("reached, {} (logarithmic)", unit.1),
    );
}
