//! Reads files up to a size limit, which the error names.

use std::{
    collections::HashMap,
    fmt::Display,
    fs::File,
    io::{self, Read},
    path::Path,
};

use serde::Deserialize;

use crate::{Failure, memory, table::scaled};

/// Maximum bytes of a description, a workload or a result file: far more than any real one.
pub const MOST_JSON: u64 = 64 << 20;

/// Maximum bytes of a trace: about ten million requests.
pub const MOST_TRACE: u64 = 512 << 20;

/// Reads a text file, without the byte order mark that some editors add.
///
/// # Errors
/// [`Failure::Read`] if it cannot be read, is not UTF-8 or is longer than `most`.
pub fn text(path: &Path, most: u64) -> Result<String, Failure> {
    let mut text = utf8(path, bytes(path, most)?)?;
    if text.starts_with('\u{feff}') {
        text.drain(..'\u{feff}'.len_utf8());
    }
    Ok(text)
}

fn utf8(path: &Path, bytes: Vec<u8>) -> Result<String, Failure> {
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        failure(
            path,
            io::Error::other(format!("byte {at} is not UTF-8: save it as UTF-8")),
        )
    })
}

/// Reads text from standard input to its end.
///
/// # Errors
/// As [`text`].
#[cfg(feature = "engine")]
pub fn standard_input(most: u64) -> Result<String, Failure> {
    let path = Path::new("standard input");
    utf8(path, whole(path, io::stdin().lock(), most)?)
}

/// Reads a whole file of at most `most` bytes.
///
/// # Errors
/// [`Failure::Read`]
pub fn bytes(path: &Path, most: u64) -> Result<Vec<u8>, Failure> {
    let file = File::open(path).map_err(|error| failure(path, error))?;
    whole(path, file, most)
}

fn whole(path: &Path, from: impl Read, most: u64) -> Result<Vec<u8>, Failure> {
    let mut bytes = Vec::new();
    read_more(path, &mut from.take(most.saturating_add(1)), &mut bytes)?;
    if bytes.len() as u64 > most {
        let most = scaled(most as f64, "B");
        let reason = format!("it has more than {most}, the most that is read of such a file");
        return Err(failure(path, io::Error::other(reason)));
    }
    Ok(bytes)
}

/// Reads to the end. Running out of memory is an error, too.
fn read_more(path: &Path, from: &mut impl Read, to: &mut Vec<u8>) -> Result<(), Failure> {
    from.read_to_end(to)
        .map(drop)
        .map_err(|error| failure(path, error))
}

/// Maximum bytes of the header of a safetensors file.
const MOST_HEADER: u64 = 16 << 20;

/// What the header of a safetensors file says about a tensor. Metadata has no such fields.
#[derive(Deserialize)]
struct Place {
    #[serde(default)]
    data_offsets: [u64; 2],
}

/// Reads a safetensors file. Its header determines its length, and no more than that is read.
///
/// # Errors
/// [`Failure::Read`], and [`Failure::Input`] if it is no such file or is too large for this machine: the tensors are
/// copied, and the results need memory, too.
pub fn tensors(path: &Path) -> Result<Vec<u8>, Failure> {
    let wrong = |reason: &dyn Display| {
        let name = path.display();
        Failure::Input(format!("{name}: not a whole safetensors file ({reason})"))
    };
    let mut file = File::open(path).map_err(|error| failure(path, error))?;
    let mut bytes = Vec::new();
    read_more(path, &mut file.by_ref().take(8), &mut bytes)?;
    let length = bytes.first_chunk().copied().map(u64::from_le_bytes);
    let header = length.filter(|length| (2..=MOST_HEADER).contains(length));
    let header = header.ok_or_else(|| wrong(&"no length of a header at its begin"))?;
    read_more(path, &mut file.by_ref().take(header), &mut bytes)?;
    let places: HashMap<String, Place> =
        serde_json::from_slice(&bytes[8..]).map_err(|error| wrong(&error))?;
    let data = places.values().map(|place| place.data_offsets[1]);
    let data = data.max().unwrap_or(0);
    memory::check(
        &path.display().to_string(),
        data.saturating_mul(3),
        "split the batch, or run it where there is more memory",
    )?;
    // Reading one byte more detects a file that is longer than its header says.
    read_more(path, &mut file.take(data.saturating_add(1)), &mut bytes)?;
    Ok(bytes)
}

fn failure(path: &Path, error: io::Error) -> Failure {
    Failure::Read {
        path: path.to_owned(),
        error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_read_up_to_a_limit() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("w.json");
        std::fs::write(&path, "\u{feff}{}").unwrap();
        assert_eq!(text(&path, 5).unwrap(), "{}");
        let error = text(&path, 4).unwrap_err().to_string();
        assert!(error.contains("more than 4.00 B"), "{error}");
        std::fs::write(&path, b"ab\xff").unwrap();
        let error = text(&path, 5).unwrap_err().to_string();
        assert!(error.contains("byte 2 is not UTF-8"), "{error}");
    }

    #[cfg(unix)]
    #[test]
    fn devices_without_end_are_not_read_to_their_end() {
        let zero = Path::new("/dev/zero");
        assert!(text(zero, 1 << 16).is_err());
        let error = tensors(zero).unwrap_err().to_string();
        assert!(error.contains("not a whole safetensors file"), "{error}");
    }
}
