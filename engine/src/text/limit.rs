//! Limits what is written of a conversation.

use std::{
    error::Error,
    fmt,
    io::{self, Write},
};

use serde::Serialize;

/// For each byte that is given, so many may be written.
const TIMES: usize = 2;
/// Bytes that may be written beside: a template's own words, and the indentation of a few tools.
const BESIDE: usize = 256 << 10;

/// Bytes that may be written of a value.
pub(super) fn most_of(value: &impl Serialize) -> usize {
    struct Count(usize);
    impl Write for Count {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 += bytes.len();
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let mut count = Count(0);
    // What is no JSON is refused where it is written.
    let _ = serde_json::to_writer(&mut count, value);
    count.0.saturating_mul(TIMES).saturating_add(BESIDE)
}

/// More is written than may be.
#[derive(Clone, Copy, Debug)]
pub(super) struct Beyond {
    pub limit: usize,
}

impl fmt::Display for Beyond {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "more than {} bytes are written", self.limit)
    }
}

impl Error for Beyond {}

/// The error of this type because of which a rendering ended.
pub(super) fn cause<T: Error + Copy + 'static>(error: &minijinja::Error) -> Option<T> {
    let mut cause: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if let Some(found) = error.downcast_ref::<T>() {
            return Some(*found);
        }
        cause = error.source();
    }
    None
}

/// Text up to a number of bytes.
pub(super) struct Limited {
    text: Vec<u8>,
    limit: usize,
    full: bool,
}

impl Limited {
    pub(super) const fn new(limit: usize) -> Self {
        Self {
            text: Vec::new(),
            limit,
            full: false,
        }
    }

    /// An error if more was written.
    pub(super) fn beyond(&self) -> Option<Beyond> {
        self.full.then_some(Beyond { limit: self.limit })
    }

    /// The text, which must be UTF-8.
    pub(super) fn into_string(self) -> String {
        String::from_utf8(self.text).expect("only whole texts are written")
    }
}

impl Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() > self.limit - self.text.len() {
            self.full = true;
            return Err(io::Error::other(Beyond { limit: self.limit }));
        }
        self.text.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
