//! The filter `tojson` as chat templates know it: Python's `json.dumps`, which has spaces behind commas and colons, and leaves
//! all characters as they are.

use std::io::{self, Write};

use super::{
    float::float,
    limit::{Limited, most_of},
};

use minijinja::{Error, ErrorKind, Value, value::Kwargs};
use serde::Serialize;
use serde_json::{Serializer, ser::Formatter};

/// How lists and objects are written.
struct Layout {
    /// Between two values; not used with an indent.
    items: String,
    /// Behind a key.
    key: String,
    /// Spaces before a value for each list and object around it; none for everything in one line.
    indent: Option<usize>,
    /// Number of lists and objects around.
    depth: usize,
    /// Whether the innermost one has no value yet.
    empty: bool,
}

impl Layout {
    fn open<W: Write + ?Sized>(&mut self, to: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth += 1;
        self.empty = true;
        to.write_all(bracket)
    }

    fn close<W: Write + ?Sized>(&mut self, to: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth -= 1;
        if !std::mem::take(&mut self.empty) {
            self.line(to)?;
        }
        to.write_all(bracket)
    }

    fn next<W: Write + ?Sized>(&mut self, to: &mut W, first: bool) -> io::Result<()> {
        self.empty = false;
        match (first, self.indent) {
            (true, _) => {}
            (false, None) => to.write_all(self.items.as_bytes())?,
            (false, Some(_)) => to.write_all(b",")?,
        }
        self.line(to)
    }

    /// Begins a line if there is an indent.
    fn line<W: Write + ?Sized>(&self, to: &mut W) -> io::Result<()> {
        let Some(indent) = self.indent else {
            return Ok(());
        };
        to.write_all(b"\n")?;
        (0..self.depth).try_for_each(|_| write!(to, "{:indent$}", ""))
    }
}

impl Formatter for Layout {
    fn write_f64<W: Write + ?Sized>(&mut self, to: &mut W, number: f64) -> io::Result<()> {
        to.write_all(float(number).as_bytes())
    }

    fn begin_array<W: Write + ?Sized>(&mut self, to: &mut W) -> io::Result<()> {
        self.open(to, b"[")
    }

    fn end_array<W: Write + ?Sized>(&mut self, to: &mut W) -> io::Result<()> {
        self.close(to, b"]")
    }

    fn begin_array_value<W: Write + ?Sized>(&mut self, to: &mut W, first: bool) -> io::Result<()> {
        self.next(to, first)
    }

    fn begin_object<W: Write + ?Sized>(&mut self, to: &mut W) -> io::Result<()> {
        self.open(to, b"{")
    }

    fn end_object<W: Write + ?Sized>(&mut self, to: &mut W) -> io::Result<()> {
        self.close(to, b"}")
    }

    fn begin_object_key<W: Write + ?Sized>(&mut self, to: &mut W, first: bool) -> io::Result<()> {
        self.next(to, first)
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
    let layout = Layout {
        items,
        key,
        indent: indent.map(|spaces| spaces.min(64)),
        depth: 0,
        empty: false,
    };
    // Lists within lists are indented by the square of their depth.
    let mut text = Limited::new(most_of(&json));
    let written = json.serialize(&mut Serializer::with_formatter(&mut text, layout));
    match (text.beyond(), written) {
        (Some(beyond), _) => Err(wrong(beyond.to_string()).with_source(beyond)),
        (None, written) => {
            written.map_err(|error| wrong(error.to_string()))?;
            Ok(text.into_string())
        }
    }
}
