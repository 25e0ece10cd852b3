//! Methods of Python's texts that chat templates call, and the library for such methods lacks.

use minijinja::{Error, ErrorKind, State, Value, value::from_args};
use minijinja_contrib::pycompat::unknown_method_callback;

/// Calls a method of a value.
pub(super) fn method(
    state: &mut State,
    value: &Value,
    name: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    let Some(text) = value.as_str() else {
        return unknown_method_callback(state, value, name, arguments);
    };
    match name {
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(arguments)?;
            Ok(text.strip_prefix(prefix).unwrap_or(text).into())
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(arguments)?;
            Ok(text.strip_suffix(suffix).unwrap_or(text).into())
        }
        "rsplit" => {
            let (separator, most): (Option<&str>, Option<i64>) = from_args(arguments)?;
            if separator == Some("") {
                let reason = "rsplit takes no empty separator";
                return Err(Error::new(ErrorKind::InvalidOperation, reason));
            }
            // A negative number is no limit.
            let most = most.and_then(|most| usize::try_from(most).ok());
            let parts = rsplit(text, separator, most.unwrap_or(usize::MAX));
            Ok(parts.into_iter().rev().map(Value::from).collect())
        }
        _ => unknown_method_callback(state, value, name, arguments),
    }
}

/// The parts of a text, from the last one on, after at most so many cuts. Without a separator white space separates.
fn rsplit<'a>(text: &'a str, separator: Option<&str>, most: usize) -> Vec<&'a str> {
    if let Some(separator) = separator {
        return text.rsplitn(most.saturating_add(1), separator).collect();
    }
    let mut parts = Vec::new();
    let mut rest = text.trim_end();
    while !rest.is_empty() {
        let last = match parts.len() < most {
            true => rest.rsplit(char::is_whitespace).next().unwrap_or(rest),
            false => rest,
        };
        parts.push(last);
        rest = rest[..rest.len() - last.len()].trim_end();
    }
    parts
}
