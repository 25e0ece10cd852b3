//! The filter `tojson` as chat templates know it: Python's `json.dumps`, which has spaces behind commas and colons, and leaves
//! all characters as they are.

use std::io::{self, Write};

use super::limit::{Limited, most_of};

use minijinja::{Error, ErrorKind, Value, value::Kwargs};
use serde::Serialize;
use serde_json::{
    Serializer,
    ser::{Formatter, PrettyFormatter},
};

/// Everything in one line, with these separators.
struct OneLine {
    items: String,
    key: String,
}

impl Formatter for OneLine {
    fn begin_array_value<W: Write + ?Sized>(&mut self, to: &mut W, first: bool) -> io::Result<()> {
        to.write_all(if first { b"" } else { self.items.as_bytes() })
    }

    fn begin_object_key<W: Write + ?Sized>(&mut self, to: &mut W, first: bool) -> io::Result<()> {
        self.begin_array_value(to, first)
    }

    fn begin_object_value<W: Write + ?Sized>(&mut self, to: &mut W) -> io::Result<()> {
        to.write_all(self.key.as_bytes())
    }
}

pub(super) fn tojson(value: &Value, options: Kwargs) -> Result<String, Error> {
    let wrong = |reason: String| Error::new(ErrorKind::InvalidOperation, reason);
    let mut json = serde_json::to_value(value).map_err(|error| wrong(error.to_string()))?;
    if options.get::<Option<bool>>("sort_keys")? == Some(true) {
        json.sort_all_objects();
    }
    let indent: Option<usize> = options.get("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let ascii = options.get::<Option<bool>>("ensure_ascii")? == Some(true);
    options.assert_all_used()?;
    let [items, key] = match separators.map(<[String; 2]>::try_from) {
        None => [", ", ": "].map(str::to_owned),
        Some(Ok(given)) if indent.is_none() => given,
        Some(_) => {
            return Err(wrong(
                "tojson takes two separators, and no indent".to_owned(),
            ));
        }
    };
    if ascii {
        return Err(wrong("tojson knows no ensure_ascii=true".to_owned()));
    }
    // Lists within lists are indented by the square of their depth.
    let mut text = Limited::new(most_of(&json));
    let written = match indent {
        None => write(&json, &mut text, OneLine { items, key }),
        Some(spaces) => {
            let spaces = vec![b' '; spaces.min(64)];
            write(&json, &mut text, PrettyFormatter::with_indent(&spaces))
        }
    };
    match (text.beyond(), written) {
        (Some(beyond), _) => Err(wrong(beyond.to_string()).with_source(beyond)),
        (None, written) => {
            written.map_err(|error| wrong(error.to_string()))?;
            Ok(text.into_string())
        }
    }
}

fn write(
    json: &serde_json::Value,
    to: &mut Limited,
    layout: impl Formatter,
) -> serde_json::Result<()> {
    json.serialize(&mut Serializer::with_formatter(to, layout))
}
