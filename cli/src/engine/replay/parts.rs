//! Draws how the time of steps is divided among their parts.

use tandem_engine::{
    Part,
    calibrate::{Calibration, MeasuredStep, StepLengths},
};

use super::results::short;
use crate::{
    picture::{Anchor, SMALL, Svg, WIDTH, palette, text_width},
    table::digits,
};

const LEFT: f64 = 250.0;
const CHART_W: f64 = WIDTH - LEFT - 130.0;
const ROW: f64 = 34.0;

/// A colour for each part: matrix products, attention, and passes over the residual.
const COLOURS: [&str; 10] = [
    "#4a9a4a", "#175380", "#80be80", "#d1701f", "#2a7fba", "#5fa5d3", "#b5d9b5", "#a3cfea",
    "#6a4fc0", "#b8478f",
];
const BETWEEN: &str = "#d9d9d9";

/// Whether a measured step is drawn.
fn is_drawn(step: &MeasuredStep) -> bool {
    let StepLengths {
        decodes,
        keys,
        chunk,
        chunk_keys,
    } = step.lengths;
    match (decodes, chunk) {
        (0, _) => matches!((chunk, chunk_keys), (1024, 10_240) | (2048, 2048)),
        (_, 0) => matches!((decodes, keys), (1, 8192) | (64, 4096)),
        _ => true,
    }
}

pub(super) fn draw(title: &str, calibration: &Calibration) -> String {
    let mut svg = Svg::new(title);
    let mut top = svg.heading(&[
        "decodes × keys, and a chunk of a prompt with the keys up to its end; parts timed kernel by kernel, \
         and at the right the time of the step as a whole, from a graph where it is of decodes alone",
    ]) + 10.0;
    let mut seen = Vec::new();
    let steps = calibration.steps.iter();
    let mut steps: Vec<_> = steps
        .filter(|step| {
            let new = is_drawn(step) && !seen.contains(&(step.lengths, step.pod));
            seen.push((step.lengths, step.pod));
            new
        })
        .collect();
    if steps.is_empty() {
        steps = calibration.steps.iter().rev().take(6).collect();
    }
    steps.sort_by_key(|step| (step.lengths.chunk, step.lengths.decodes, step.pod));
    let mut x = LEFT;
    for (name, colour) in Part::ALL.map(Part::name).into_iter().zip(COLOURS) {
        let width = 20.0 + text_width(name, SMALL) + 18.0;
        if x + width > WIDTH - 16.0 {
            (x, top) = (LEFT, top + 20.0);
        }
        svg.rect([x, top, 14.0, 14.0], colour, None);
        svg.text((x + 20.0, top + 11.0), Anchor::Start, SMALL, name);
        x += width;
    }
    let first = top + 30.0;
    let bottom = first + ROW * steps.len() as f64;
    let length = |step: &MeasuredStep| step.seconds.max(step.parts_s.iter().sum());
    let longest = steps.iter().map(|step| length(step)).fold(0.0, f64::max);
    svg.time_axis(
        [LEFT, first, CHART_W, bottom],
        [0.0, longest],
        "time of a step",
    );
    for (row, step) in steps.into_iter().enumerate() {
        let y = first + ROW * row as f64 + 6.0;
        let name = short(step);
        svg.text((LEFT - 12.0, y + 15.0), Anchor::End, SMALL, &name);
        let width = |seconds: f64| seconds / longest * CHART_W;
        svg.rect([LEFT, y, width(step.seconds), ROW - 12.0], BETWEEN, None);
        let mut x = LEFT;
        for (part, &seconds) in Part::ALL.iter().zip(&step.parts_s) {
            let tooltip = format!("{}: {} ms", part.name(), digits(1e3 * seconds));
            let drawn = [x, y, width(seconds), ROW - 12.0];
            svg.rect(drawn, COLOURS[*part as usize], Some(&tooltip));
            x += width(seconds);
        }
        let time = format!("{} ms", digits(1e3 * step.seconds));
        let right = LEFT + width(length(step)) + 8.0;
        svg.text((right, y + 15.0), Anchor::Start, SMALL, &time);
    }
    svg.line((LEFT, first), (LEFT, bottom), palette::AXIS, 1.0);
    svg.finish(bottom + 60.0)
}
