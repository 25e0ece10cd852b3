//! Plain-text tables.

use std::collections::HashSet;

/// Maximum width of a printed line.
pub const WIDTH: usize = 99;

/// A table whose columns are as wide as their content. The first column is left-aligned. The others are numbers,
/// right-aligned, except a last column without a heading, which has remarks.
#[derive(Clone, Debug, Default)]
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with headings.
    #[must_use]
    pub fn new<const N: usize>(headings: [&str; N]) -> Self {
        Self {
            rows: vec![headings.map(str::to_owned).to_vec()],
        }
    }

    /// Appends a row. Missing cells are empty.
    pub fn push(&mut self, row: impl IntoIterator<Item = String>) {
        let cells = row.into_iter().map(|cell| visible(&cell, false));
        self.rows.push(cells.collect());
    }

    /// The table as text. No line exceeds [`WIDTH`]; the first column is shortened if necessary. It has a few characters more where
    /// different names would look the same.
    #[must_use]
    pub fn render(&self) -> String {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let mut widths = vec![0; columns];
        for row in &self.rows {
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = cell.chars().count().max(*width);
            }
        }
        let others: usize = widths.iter().skip(1).map(|width| width + 2).sum();
        if let Some(first) = widths.first_mut() {
            const MORE: usize = 16;
            let narrow = (*first).min(WIDTH.saturating_sub(others).max(12));
            let mut widths = narrow..=(*first).min(narrow + MORE);
            let telling = widths.find(|&width| self.tells_names(width));
            *first = telling.unwrap_or(narrow);
        }
        let remarks = self.rows.first().and_then(|headings| headings.last());
        let remarks = remarks.filter(|heading| heading.is_empty() && columns > 1);
        let remarks = remarks.map(|_| columns - 1);
        let mut text = String::new();
        for row in &self.rows {
            let mut line = String::new();
            for (column, (cell, &width)) in row.iter().zip(&widths).enumerate() {
                if column == 0 {
                    line += &format!("{:<width$}", shorten(cell, width));
                } else if Some(column) == remarks {
                    line += &format!("  {cell}");
                } else {
                    line += &format!("  {cell:>width$}");
                }
            }
            text += line.trim_end();
            text.push('\n');
        }
        text
    }

    /// Whether different names in the first column are still different when they are shortened to a width.
    fn tells_names(&self, width: usize) -> bool {
        let names = self.rows.iter().filter_map(|row| row.first());
        let names: HashSet<_> = names.collect();
        let shortened: HashSet<_> = names.iter().map(|name| shorten(name, width)).collect();
        shortened.len() == names.len()
    }
}

/// Escapes control characters, so that names from files cannot control the terminal.
#[must_use]
pub fn visible(text: &str, keep_lines: bool) -> String {
    escaped(text, |c| {
        // Marks that change the direction of writing are not control characters, but can also hide text.
        let marks = matches!(c, '\u{200e}'..='\u{200f}');
        (c.is_control() && !(keep_lines && c == '\n')) || marks || overrides(c)
    })
}

/// Escapes control characters of a text for people, such as a model's. Lines, tabs and the direction marks of right-to-left
/// languages stay. What overrides the direction could hide a part of the text.
#[must_use]
#[cfg(feature = "engine")]
pub fn prose(text: &str) -> String {
    escaped(text, |c| {
        (c.is_control() && !matches!(c, '\n' | '\t')) || overrides(c)
    })
}

/// Whether a character embeds, overrides or isolates a direction of writing.
const fn overrides(c: char) -> bool {
    matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

fn escaped(text: &str, escapes: impl Fn(char) -> bool) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        match escapes(c) {
            true => shown.extend(c.escape_default()),
            false => shown.push(c),
        }
    }
    shown
}

/// Shortens a text to its beginning and its end with `…` in between.
pub(crate) fn shorten(text: &str, width: usize) -> String {
    let len = text.chars().count();
    if len <= width {
        return text.to_owned();
    }
    let head = (width - 1) * 2 / 3;
    let tail = width - 1 - head;
    let begin: String = text.chars().take(head).collect();
    let end: String = text.chars().skip(len - tail).collect();
    format!("{begin}…{end}")
}

/// Wraps text between words at `width`; continuation lines start with `indent`.
pub(crate) fn wrap(text: &str, width: usize, indent: &str) -> String {
    let mut wrapped = String::new();
    for line in text.split_inclusive('\n') {
        let (content, end) = match line.strip_suffix('\n') {
            Some(content) => (content, "\n"),
            None => (line, ""),
        };
        let mut len = 0;
        for (index, word) in content.split(' ').enumerate() {
            let more = word.chars().count();
            if index > 0 && len + 1 + more > width {
                wrapped.push('\n');
                wrapped.push_str(indent);
                len = indent.chars().count();
            } else if index > 0 {
                wrapped.push(' ');
                len += 1;
            }
            wrapped.push_str(word);
            len += more;
        }
        wrapped.push_str(end);
    }
    wrapped
}

/// A number of things: `1 item`, `2 items`.
#[must_use]
pub fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// A number with three significant digits and a scaled unit: `1.23 GB`, `45.6 MB`.
#[must_use]
pub fn scaled(value: f64, unit: &str) -> String {
    const PREFIXES: [(f64, &str); 5] =
        [(1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")];
    let prefix = PREFIXES.iter().find(|(scale, _)| value >= 0.9995 * scale);
    let (scale, prefix) = prefix.copied().unwrap_or((1.0, ""));
    format!("{} {prefix}{unit}", digits(value / scale))
}

/// A time with three significant digits: `12.3 µs`, `45.6 ms`.
#[must_use]
pub fn time(ns: f64) -> String {
    const UNITS: [(f64, &str); 3] = [(1e9, "s"), (1e6, "ms"), (1e3, "µs")];
    let unit = UNITS.iter().find(|(scale, _)| ns >= 0.9995 * scale);
    let (scale, unit) = unit.copied().unwrap_or(UNITS[2]);
    format!("{} {unit}", digits(ns / scale))
}

/// Three significant digits; fewer for whole numbers.
#[must_use]
pub fn digits(value: f64) -> String {
    match value.abs() {
        x if x == 0.0 || x >= 99.95 => format!("{value:.0}"),
        x if x >= 9.995 => format!("{value:.1}"),
        x if x >= 0.9995 => format!("{value:.2}"),
        x if x >= 0.09995 => format!("{value:.3}"),
        _ => format!("{value:.1e}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits() {
        let got = [0.0, 0.0012, 0.5, 1.0, 12.34, 99.96, 123.4, 1e4].map(digits);
        assert_eq!(
            got,
            [
                "0", "1.2e-3", "0.500", "1.00", "12.3", "100", "123", "10000"
            ]
        );
        assert_eq!(scaled(1.5e9, "B"), "1.50 GB");
        assert_eq!(scaled(999_900.0, "B"), "1.00 MB");
        assert_eq!(scaled(12.0, "B"), "12.0 B");
        let times = [0.0, 123.0, 12_340.0, 999_900.0, 2.5e9].map(time);
        assert_eq!(times, ["0 µs", "0.123 µs", "12.3 µs", "1.00 ms", "2.50 s"]);
    }

    #[test]
    fn control_characters_are_shown() {
        let name = "a\u{1b}[31m\nb\u{202e}";
        assert_eq!(visible(name, false), "a\\u{1b}[31m\\nb\\u{202e}");
        assert_eq!(visible("a\nµ", true), "a\nµ");
    }

    #[test]
    #[cfg(feature = "engine")]
    fn prose_keeps_what_a_terminal_shows() {
        let text = "if a:\n\tb\u{200f} é";
        assert_eq!(prose(text), text);
        assert_eq!(prose("\u{1b}[31m\r"), "\\u{1b}[31m\\r");
        assert_eq!(prose("\u{202e}\u{2066}\u{7f}"), "\\u{202e}\\u{2066}\\u{7f}");
    }

    #[test]
    fn words_move_to_the_next_line() {
        assert_eq!(wrap("one two three", 7, "  "), "one two\n  three");
        assert_eq!(wrap("one two\n  three\n", 9, "- "), "one two\n  three\n");
        assert_eq!(
            wrap("averylongword is kept", 5, ""),
            "averylongword\nis\nkept"
        );
    }

    /// Both were `sarathi-…cked`.
    #[test]
    fn different_names_stay_different() {
        let mut table = Table::new(["policy", "much"]);
        let names = ["sarathi-serve+unpacked", "sarathi-serve+pod+unpacked"];
        for name in names {
            table.push([name.to_owned(), "9".repeat(WIDTH)]);
        }
        let text = table.render();
        let rows = text.lines().skip(1);
        let rows: Vec<_> = rows.map(|line| line.split("  ").next()).collect();
        assert_ne!(rows[0], rows[1], "{text}");
    }

    #[test]
    fn long_names_give_way() {
        let mut table = Table::new(["case", "µs"]);
        table.push(["x".repeat(200), "12".to_owned()]);
        table.push(["short".to_owned(), "345".to_owned()]);
        let text = table.render();
        assert!(text.lines().all(|line| line.chars().count() <= WIDTH));
        let lines: Vec<_> = text.lines().collect();
        assert!(lines[1].contains('…') && lines[1].ends_with("   12"));
        assert!(lines[2].starts_with("short ") && lines[2].ends_with("  345"));
    }
}
