//! Pictures as SVG. The layout computes text widths, so that nothing overlaps.

mod axis;
pub(crate) mod palette;
mod plan;
mod ranks;
mod roofline;
mod text;
#[cfg(feature = "emulator")]
mod timeline;

pub use plan::draw as plan;
pub(crate) use plan::processors;
pub use ranks::draw as ranks;
pub use roofline::{draw as roofline, points};
pub(crate) use text::{lines, text_width};
#[cfg(feature = "emulator")]
pub use timeline::draw as timeline;
#[cfg(feature = "emulator")]
pub(crate) use timeline::{barriers, state_name};

use std::fmt::{Display, Write as _};

use crate::table::visible;
use palette::{AXIS, INK};

/// Width of every picture in pixels.
pub(crate) const WIDTH: f64 = 1200.0;

/// Size of the smallest text.
pub(crate) const SMALL: u32 = 12;

/// A picture under construction. Coordinates are pixels; numbers are written with at most 2 decimals.
pub(crate) struct Svg {
    title: String,
    body: String,
}

/// Position of text relative to its point.
#[derive(Clone, Copy)]
pub(crate) enum Anchor {
    Start,
    Middle,
    End,
}

/// The shape of a point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mark {
    Circle,
    Square,
    Up,
    Diamond,
    Down,
    Plus,
    Cross,
}

impl Mark {
    pub(crate) const ALL: [Self; 7] = [
        Self::Circle,
        Self::Square,
        Self::Up,
        Self::Diamond,
        Self::Down,
        Self::Plus,
        Self::Cross,
    ];

    /// Corners around the origin, for a radius of 1.
    const fn corners(self) -> &'static [(f64, f64)] {
        const IN: f64 = 0.35;
        match self {
            Self::Circle => &[],
            Self::Square => &[(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
            Self::Up => &[(0.0, -1.1), (1.1, 0.9), (-1.1, 0.9)],
            Self::Down => &[(0.0, 1.1), (1.1, -0.9), (-1.1, -0.9)],
            Self::Diamond => &[(0.0, -1.2), (1.2, 0.0), (0.0, 1.2), (-1.2, 0.0)],
            Self::Plus => &[
                (-IN, -1.1),
                (IN, -1.1),
                (IN, -IN),
                (1.1, -IN),
                (1.1, IN),
                (IN, IN),
                (IN, 1.1),
                (-IN, 1.1),
                (-IN, IN),
                (-1.1, IN),
                (-1.1, -IN),
                (-IN, -IN),
            ],
            Self::Cross => &[
                (-1.0, -0.5),
                (-0.5, -1.0),
                (0.0, -0.5),
                (0.5, -1.0),
                (1.0, -0.5),
                (0.5, 0.0),
                (1.0, 0.5),
                (0.5, 1.0),
                (0.0, 0.5),
                (-0.5, 1.0),
                (-1.0, 0.5),
                (-0.5, 0.0),
            ],
        }
    }
}

impl Svg {
    /// A picture with a title for screen readers.
    pub(crate) fn new(title: &str) -> Self {
        Self {
            title: title.to_owned(),
            body: String::new(),
        }
    }

    /// Writes an element with an optional tooltip.
    fn element(&mut self, element: &str, tooltip: Option<&str>) {
        let name = element.split(' ').next().unwrap_or_default();
        let _ = match tooltip {
            None => writeln!(self.body, "<{element}/>"),
            Some(tooltip) => {
                let tooltip = escape(tooltip);
                writeln!(self.body, "<{element}><title>{tooltip}</title></{name}>")
            }
        };
    }

    pub(crate) fn rect(&mut self, [x, y, w, h]: [f64; 4], fill: &str, tooltip: Option<&str>) {
        let (x, y, w, h) = (num(x), num(y), num(w), num(h));
        self.element(
            &format!(r#"rect x="{x}" y="{y}" width="{w}" height="{h}" fill="{fill}""#),
            tooltip,
        );
    }

    pub(crate) fn line(&mut self, from: (f64, f64), to: (f64, f64), stroke: &str, width: f64) {
        let [x1, y1, x2, y2] = [from.0, from.1, to.0, to.1].map(num);
        self.element(
            &format!(
                r#"line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{stroke}" stroke-width="{width}""#
            ),
            None,
        );
    }

    /// A point of radius `r`.
    pub(crate) fn mark(
        &mut self,
        (x, y): (f64, f64),
        r: f64,
        mark: Mark,
        fill: &str,
        tooltip: Option<&str>,
    ) {
        let edge = "stroke=\"#fff\" stroke-width=\"0.8\"";
        if mark == Mark::Circle {
            let (x, y) = (num(x), num(y));
            let circle = format!(r#"circle cx="{x}" cy="{y}" r="{r}" fill="{fill}" {edge}"#);
            return self.element(&circle, tooltip);
        }
        let corners = mark.corners().iter();
        let corners = corners.map(|(dx, dy)| format!("{},{}", num(x + r * dx), num(y + r * dy)));
        let corners = corners.collect::<Vec<_>>().join(" ");
        self.element(
            &format!(r#"polygon points="{corners}" fill="{fill}" {edge}"#),
            tooltip,
        );
    }

    pub(crate) fn text(&mut self, (x, y): (f64, f64), anchor: Anchor, size: u32, text: &str) {
        self.turned_text((x, y), anchor, size, "", text);
    }

    /// The title of a vertical axis, rotated, with its middle at a point.
    pub(crate) fn axis_title(&mut self, (x, y): (f64, f64), text: &str) {
        let turn = format!(r#" transform="rotate(-90 {} {})""#, num(x), num(y));
        self.turned_text((x, y), Anchor::Middle, 13, &turn, text);
    }

    fn turned_text(
        &mut self,
        (x, y): (f64, f64),
        anchor: Anchor,
        size: u32,
        turn: &str,
        text: &str,
    ) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let (x, y, text) = (num(x), num(y), escape(text));
        let _ = writeln!(
            self.body,
            r#"<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}" fill="{INK}"{turn}>{text}</text>"#,
        );
    }

    /// Draws the title and the lines below it at the top left, without cutting them. Returns the bottom of the text.
    pub(crate) fn heading(&mut self, below: &[&str]) -> f64 {
        const MARGIN: f64 = 16.0;
        let mut y = 26.0;
        let title = self.title.clone();
        for line in lines(&title, 17, WIDTH - 2.0 * MARGIN) {
            self.text((MARGIN, y), Anchor::Start, 17, &line);
            y += 22.0;
        }
        for line in below
            .iter()
            .flat_map(|text| lines(text, 13, WIDTH - 2.0 * MARGIN))
        {
            self.text((MARGIN, y), Anchor::Start, 13, &line);
            y += 18.0;
        }
        y
    }

    /// A linear time axis below a chart. It starts at `left`; `end` is at a distance of `width`.
    pub(crate) fn time_axis(
        &mut self,
        [left, top, width, bottom]: [f64; 4],
        [begin_s, end_s]: [f64; 2],
        title: &str,
    ) {
        let span = end_s - begin_s;
        let (unit_s, unit) = match end_s {
            _ if end_s < 1e-3 => (1e-6, "µs"),
            _ if end_s < 1.0 => (1e-3, "ms"),
            _ => (1.0, "s"),
        };
        let first = (begin_s / unit_s).max(0.0);
        let step = step(span / unit_s, 10);
        let from = (first / step - 1e-6).ceil();
        for index in 0..12 {
            let tick = (from + f64::from(index)) * step;
            let x = left + (tick * unit_s - begin_s) / span * width;
            if x > left + width + 0.5 {
                break;
            }
            self.line((x, top), (x, bottom + 5.0), palette::GRID, 1.0);
            self.text((x, bottom + 20.0), Anchor::Middle, SMALL, &label(tick));
        }
        self.line((left, bottom), (left + width, bottom), AXIS, 1.0);
        self.text(
            (left + width / 2.0, bottom + 40.0),
            Anchor::Middle,
            13,
            &format!("{title}, {unit}"),
        );
    }

    /// The document with the given height. It has its own background and frame, so it stays legible on a dark page.
    pub(crate) fn finish(self, height: f64) -> String {
        let height = num(height);
        let title = escape(&self.title);
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
             viewBox=\"0 0 {WIDTH} {height}\" font-family=\"Helvetica, Arial, 'DejaVu Sans', sans-serif\">\n\
             <title>{title}</title>\n<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#ffffff\" stroke=\"{AXIS}\"/>\n\
             {}</svg>\n",
            self.body
        )
    }
}

/// A number as an axis label.
fn label(value: f64) -> String {
    // Remove rounding errors of inexact steps.
    let rounded = (value * 1e6).round() / 1e6;
    format!("{rounded}")
}

/// Escapes text for XML, which allows no control characters.
fn escape(text: &str) -> String {
    visible(text, false)
        .replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

fn num(x: f64) -> impl Display {
    (x * 100.0).round() / 100.0
}

/// The round step (1, 2 or 5 times a power of ten) that divides `0..=end` into at most `most` pieces.
fn step(end: f64, most: usize) -> f64 {
    let rough = end / most as f64;
    let power = 10f64.powf(rough.log10().floor());
    [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|factor| factor * power)
        .find(|&step| step >= rough * 0.999)
        .unwrap_or(10.0 * power)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_round_and_few() {
        assert_eq!(step(10.0, 5), 2.0);
        for end in [1e-9, 0.3, 17.0, 99.0, 1e7] {
            let pieces = end / step(end, 6);
            assert!((2.0..=6.01).contains(&pieces), "{end}: {pieces}");
        }
        assert_eq!(label(0.1 + 0.2), "0.3");
    }
}
