//! Pictures as SVG: text that is laid out by the numbers in it, so that nothing overlaps.

mod plan;
mod roofline;

pub use plan::draw as plan;
pub(crate) use plan::{processors, serially};
pub use roofline::{draw as roofline, points};

use std::fmt::{Display, Write as _};

/// A picture under construction. Coordinates are pixels; numbers are written with at most 2 decimals.
pub(crate) struct Svg {
    body: String,
    width: f64,
    height: f64,
}

/// Where text stands relative to its point.
#[derive(Clone, Copy)]
pub(crate) enum Anchor {
    Start,
    Middle,
    End,
}

impl Svg {
    /// White, with a title that screen readers find.
    pub(crate) fn new(width: f64, height: f64, title: &str) -> Self {
        Self {
            body: format!(
                "<title>{}</title>\n<rect width=\"{width}\" height=\"{height}\" fill=\"#fff\"/>\n",
                escape(title)
            ),
            width,
            height,
        }
    }

    pub(crate) fn rect(&mut self, [x, y, w, h]: [f64; 4], fill: &str, tooltip: Option<&str>) {
        let (x, y, w, h) = (num(x), num(y), num(w), num(h));
        let _ = match tooltip {
            None => writeln!(
                self.body,
                r#"<rect x="{x}" y="{y}" width="{w}" height="{h}" fill="{fill}"/>"#
            ),
            Some(tooltip) => writeln!(
                self.body,
                r#"<rect x="{x}" y="{y}" width="{w}" height="{h}" fill="{fill}"><title>{}</title></rect>"#,
                escape(tooltip)
            ),
        };
    }

    pub(crate) fn line(&mut self, from: (f64, f64), to: (f64, f64), stroke: &str, width: f64) {
        let _ = writeln!(
            self.body,
            r#"<line x1="{}" y1="{}" x2="{}" y2="{}" stroke="{stroke}" stroke-width="{width}"/>"#,
            num(from.0),
            num(from.1),
            num(to.0),
            num(to.1)
        );
    }

    pub(crate) fn circle(&mut self, (x, y): (f64, f64), r: f64, fill: &str, tooltip: &str) {
        let _ = writeln!(
            self.body,
            "<circle cx=\"{}\" cy=\"{}\" r=\"{r}\" fill=\"{fill}\" stroke=\"#fff\"><title>{}</title></circle>",
            num(x),
            num(y),
            escape(tooltip)
        );
    }

    pub(crate) fn text(&mut self, (x, y): (f64, f64), anchor: Anchor, size: u32, text: &str) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let _ = writeln!(
            self.body,
            r##"<text x="{}" y="{}" text-anchor="{anchor}" font-size="{size}" fill="#222">{}</text>"##,
            num(x),
            num(y),
            escape(text)
        );
    }

    pub(crate) fn finish(self) -> String {
        let Self {
            body,
            width,
            height,
        } = self;
        let (width, height) = (num(width), num(height));
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
             viewBox=\"0 0 {width} {height}\" font-family=\"Helvetica, Arial, sans-serif\">\n{body}</svg>\n"
        )
    }
}

/// The width that text takes at most: wide letters of common fonts are 0.62 of the size on average.
pub(crate) fn text_width(text: &str, size: u32) -> f64 {
    text.chars().count() as f64 * f64::from(size) * 0.62
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

fn num(x: f64) -> impl Display {
    (x * 100.0).round() / 100.0
}

/// Round steps (1, 2 or 5 times a power of ten) that divide `0..=end` into at most `most` pieces.
pub(crate) fn ticks(end: f64, most: usize) -> Vec<f64> {
    if !(end > 0.0 && end.is_finite()) {
        return vec![0.0];
    }
    let rough = end / most as f64;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|factor| factor * power)
        .find(|&step| step >= rough * 0.999)
        .unwrap_or(10.0 * power);
    (0..)
        .map(|index| f64::from(index) * step)
        .take_while(|&tick| tick <= end * 1.0001)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_few() {
        assert_eq!(ticks(10.0, 5), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        assert_eq!(ticks(0.7, 4), [0.0, 0.2, 0.4, 0.6000000000000001]);
        assert_eq!(ticks(0.0, 4), [0.0]);
        for end in [1e-9, 0.3, 17.0, 99.0, 1e7] {
            assert!((3..=7).contains(&ticks(end, 6).len()), "{end}");
        }
    }
}
