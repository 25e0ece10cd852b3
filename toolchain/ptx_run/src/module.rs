//! A module of PTX.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use crate::{
    ParseError,
    decode::{Code, decode},
    parse::{Declarations, EntryText, declarations},
};

/// The declaration of an entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EntryInfo {
    /// Its name.
    pub name: String,
    /// Total bytes of the parameters.
    pub parameter_bytes: usize,
    /// Offset and size of each parameter among them.
    pub parameters: Vec<(usize, usize)>,
    /// Maximum number of threads of a block, if declared.
    pub max_threads: Option<u32>,
    /// Number of blocks that must fit on a multiprocessor, if declared.
    pub min_blocks: Option<u32>,
    /// Number of blocks of a cluster, along x, if declared.
    pub cluster: Option<u32>,
}

/// A module of PTX. Entries are decoded on first use.
#[derive(Debug)]
pub struct Module {
    text: String,
    /// Start of each line.
    lines: Vec<usize>,
    declarations: Declarations,
    decoded: Mutex<HashMap<String, Arc<Code>>>,
}

impl Module {
    /// Parses a module's declarations.
    ///
    /// # Errors
    /// [`ParseError`] for invalid or unsupported declarations.
    pub fn parse(text: &str) -> Result<Self, ParseError> {
        let starts = std::iter::once(0).chain(
            text.bytes()
                .enumerate()
                .filter(|&(_, b)| b == b'\n')
                .map(|(at, _)| at + 1),
        );
        Ok(Self {
            lines: starts.collect(),
            declarations: declarations(text)?,
            text: text.to_owned(),
            decoded: Mutex::default(),
        })
    }

    /// The entries, in the order of the text.
    pub fn entries(&self) -> impl Iterator<Item = EntryInfo> {
        self.declarations
            .order
            .iter()
            .filter_map(|name| self.entry(name))
    }

    /// The declaration of an entry.
    #[must_use]
    pub fn entry(&self, name: &str) -> Option<EntryInfo> {
        let entry = self.declarations.entries.get(name)?;
        let last = entry.parameters.last();
        Some(EntryInfo {
            name: entry.name.clone(),
            parameter_bytes: last.map_or(0, |last| last.offset + last.size),
            parameters: entry
                .parameters
                .iter()
                .map(|one| (one.offset, one.size))
                .collect(),
            max_threads: entry.max_threads,
            min_blocks: entry.min_blocks,
            cluster: entry.cluster,
        })
    }

    /// Decodes an entry, as its first launch would. Returns the number of its instructions.
    ///
    /// # Errors
    /// [`ParseError`] for the first unsupported instruction.
    pub fn check(&self, name: &str) -> Result<usize, ParseError> {
        self.code(name).map(|code| code.instructions.len())
    }

    /// Bytes of static shared memory that a block of an entry has.
    ///
    /// # Errors
    /// [`ParseError`] for the first unsupported instruction of an entry that declares some.
    pub fn static_shared(&self, name: &str) -> Result<usize, ParseError> {
        let body = |entry: &EntryText| self.text[entry.body.clone()].contains(".shared .");
        let declares = self.declarations.entries.get(name).is_some_and(body);
        match declares || !self.declarations.shared.is_empty() {
            true => self.code(name).map(|code| code.shared),
            // Most entries have none, and take long to decode.
            false => Ok(0),
        }
    }

    /// The newest compute capability that the code needs, from `.target`: 90 for `sm_90a`.
    #[must_use]
    pub fn target(&self) -> Option<u32> {
        let mut lines = self.text.lines().map(str::trim_start);
        let target = lines.find_map(|line| line.strip_prefix(".target sm_"))?;
        let end = target.find(|c: char| !c.is_ascii_digit());
        target[..end.unwrap_or(target.len())].parse().ok()
    }

    pub(crate) fn code(&self, name: &str) -> Result<Arc<Code>, ParseError> {
        let mut decoded = self
            .decoded
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(code) = decoded.get(name) {
            return Ok(code.clone());
        }
        let Some(entry) = self.declarations.entries.get(name) else {
            return Err(ParseError::new(0, "no such entry", name));
        };
        let code = Arc::new(decode(&self.text, &self.declarations, entry)?);
        decoded.insert(name.to_owned(), code.clone());
        Ok(code)
    }

    pub(crate) fn constants(&self) -> &[u8] {
        &self.declarations.constants
    }

    /// A line of the text, numbered from 1.
    pub(crate) fn line(&self, line: u32) -> &str {
        let Some(&start) = self.lines.get((line as usize).wrapping_sub(1)) else {
            return "";
        };
        let end = self
            .lines
            .get(line as usize)
            .map_or(self.text.len(), |next| next - 1);
        &self.text[start..end]
    }

    pub(crate) fn file(&self, number: u32) -> Option<&str> {
        self.declarations.files.get(&number).map(String::as_str)
    }
}
