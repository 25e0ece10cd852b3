//! Reads JSON with errors that show the position.

use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, Error as _},
};

use crate::{
    Failure,
    table::{WIDTH, shorten, visible, wrap},
};

/// Maximum length of the part of a line that is shown.
const SHOWN: usize = 80;

/// Maximum length of a path to a field that is shown whole.
const SHOWN_PATH: usize = 60;

/// Reads a value.
pub(crate) fn read<T: DeserializeOwned>(name: &str, text: &str) -> Result<T, Failure> {
    let deserializer = &mut serde_json::Deserializer::from_str(text);
    let value = serde_path_to_error::deserialize(&mut *deserializer).map_err(|error| {
        let path = error.path().to_string();
        show(name, text, &path, error.inner())
    })?;
    deserializer
        .end()
        .map_err(|error| show(name, text, ".", &error))?;
    Ok(value)
}

/// A measured number, which must be positive, so that nothing divides by zero.
pub(crate) fn positive<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    let value = f64::deserialize(deserializer)?;
    if value > 0.0 && value.is_finite() {
        Ok(value)
    } else {
        Err(D::Error::custom(format!(
            "{value} is not a positive number"
        )))
    }
}

/// The line of an object in a list that is a field of the outermost object of a JSON text.
pub(crate) fn line_of(text: &str, list: &str, index: usize) -> Option<usize> {
    let (mut line, mut depth, mut last, mut before) = (1, 0, Vec::new(), None);
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        match byte {
            b'\n' => line += 1,
            b'"' => {
                last.clear();
                while let Some(byte) = bytes.next().filter(|&byte| byte != b'"') {
                    last.push(byte);
                    if byte == b'\\' {
                        bytes.next();
                    }
                }
            }
            b'{' | b'[' => {
                match before {
                    None if depth == 1 && last == list.as_bytes() => before = Some(0),
                    Some(before) if depth == 2 && before == index => return Some(line),
                    Some(number) if depth == 2 => before = Some(number + 1),
                    _ => {}
                }
                depth += 1;
            }
            b'}' | b']' => depth -= 1,
            _ => {}
        }
    }
    None
}

/// An error `name:line:column: path: what`, and the line with a mark below it.
fn show(name: &str, text: &str, path: &str, error: &serde_json::Error) -> Failure {
    let (line, column) = (error.line(), error.column());
    let what = error.to_string();
    let what = what
        .rsplit_once(" at line ")
        .map_or(what.as_str(), |(what, _)| what);
    let (what, expected) = in_plain_words(what);
    let (name, what) = (visible(name, false), visible(&what, false));
    // `?` in the path marks an error in the JSON syntax itself.
    let field = match path.trim_end_matches('?').trim_end_matches('.') {
        "" => String::new(),
        path => format!("{}: ", shorten(path, SHOWN_PATH)),
    };
    let source: Vec<char> = text
        .lines()
        .nth(line.saturating_sub(1))
        .unwrap_or("")
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect();
    // Columns of serde_json count bytes, so the mark may be a few characters off after non-ASCII text.
    let mark = column.saturating_sub(1).min(source.len());
    let first = mark.saturating_sub(SHOWN * 3 / 4);
    let shown: String = source.iter().skip(first).take(SHOWN).collect();
    let gutter = line.to_string();
    let blank = " ".repeat(gutter.len());
    let mut message = format!(
        "{name}:{line}:{column}: {field}{what}\n {blank} |\n {gutter} | {shown}\n {blank} | {}^",
        " ".repeat(mark - first)
    );
    if let Some(expected) = expected {
        let note = wrap(
            &format!(" {blank} = {expected}"),
            WIDTH,
            &format!(" {blank}   "),
        );
        message = format!("{message}\n{note}");
    }
    Failure::Input(message)
}

/// A message of serde without type names, and the list of what it expected.
fn in_plain_words(what: &str) -> (String, Option<String>) {
    const TYPES: [(&str, &str); 5] = [
        ("u32", "a whole number of 32 bits"),
        ("u64", "a whole number"),
        ("usize", "a whole number"),
        ("f32", "a number"),
        ("f64", "a number"),
    ];
    if let Some((what, list)) = what.split_once(", expected one of ") {
        return (
            what.to_owned(),
            Some(format!("known are {}", list.replace('`', ""))),
        );
    }
    let known = TYPES.iter().find_map(|(type_name, plain)| {
        let (what, rest) = what.split_once(&format!("expected {type_name}"))?;
        rest.is_empty().then(|| format!("{what}expected {plain}"))
    });
    (known.unwrap_or_else(|| what.to_owned()), None)
}
