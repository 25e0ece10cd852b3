//! JSON with errors that show the place.

use serde::de::DeserializeOwned;

use crate::Failure;

/// The longest piece of a line that is shown.
const SHOWN: usize = 80;

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

/// `name:line:column: path: what`, and the line with a mark below it.
fn show(name: &str, text: &str, path: &str, error: &serde_json::Error) -> Failure {
    let (line, column) = (error.line(), error.column());
    let what = error.to_string();
    let what = what
        .rsplit_once(" at line ")
        .map_or(what.as_str(), |(what, _)| what);
    // `?` is where the error is in the JSON itself.
    let field = match path.trim_end_matches('?').trim_end_matches('.') {
        "" => String::new(),
        path => format!("{path}: "),
    };
    let source: Vec<char> = text
        .lines()
        .nth(line.saturating_sub(1))
        .unwrap_or("")
        .chars()
        .map(|c| if c == '\t' { ' ' } else { c })
        .collect();
    // Columns of serde_json count bytes; a mark that is off by an umlaut still shows the place.
    let mark = column.saturating_sub(1).min(source.len());
    let first = mark.saturating_sub(SHOWN * 3 / 4);
    let shown: String = source.iter().skip(first).take(SHOWN).collect();
    let gutter = line.to_string();
    let blank = " ".repeat(gutter.len());
    Failure::Input(format!(
        "{name}:{line}:{column}: {field}{what}\n {blank} |\n {gutter} | {shown}\n {blank} | {}^",
        " ".repeat(mark - first)
    ))
}
