//! The file that `tandem bench --json` writes, and that `roofline`, `compare` and the scripts in `peers/` share.

use std::path::Path;

use serde::{Deserialize, Serialize};
use tandem_attn::plan::pod::PodMode;

use super::Stats;
use crate::{
    Failure,
    backend::{Ceilings, Machine},
    check::Errors,
    input,
    workload::json,
};

/// What stands in [`ResultFile::format`].
pub const FORMAT: &str = "tandem-results-1";

/// One run of the benchmark.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(
    deny_unknown_fields,
    expecting = "an object as `tandem bench --json` writes it"
)]
pub struct ResultFile {
    /// [`FORMAT`].
    pub format: String,
    /// Version of tandem-attn, or what the script says of itself.
    pub program: String,
    /// When it began, in UTC (RFC 3339).
    pub date: String,
    /// Where it ran.
    pub machine: Machine,
    /// The limits of the machine, measured in the same run.
    pub ceilings: Ceilings,
    /// Choices that differ from the default, as flags.
    pub options: Vec<String>,
    /// What was measured.
    pub results: Vec<CaseResult>,
}

/// One implementation on one case.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object with a case and its times")]
pub struct CaseResult {
    /// Name of the case.
    pub case: String,
    /// `tandem`, or a peer.
    pub implementation: String,
    /// The heads in words.
    pub heads: String,
    /// Tokens in a page.
    pub page_size: u32,
    /// Requests of the batch.
    pub requests: u32,
    /// Query tokens.
    pub query_tokens: u32,
    /// Bytes that must move: queries, outputs, and each key and value once.
    pub bytes: u64,
    /// Operations on pairs of a query and a key that it sees.
    pub flops: u64,
    /// How the prefills and the decodes of a hybrid batch ran; none elsewhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hybrid: Option<PodMode>,
    /// Planning, on one thread of the CPU; none where there is nothing to plan.
    pub plan: Option<Stats>,
    /// Running with caches that hold something else.
    pub flushed: Option<Stats>,
    /// Running again and again.
    pub warm: Option<Stats>,
    /// Reading as many bytes as fast as that can be done, with caches that hold something else; where it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read: Option<Stats>,
    /// Sampled errors against f64; none where they were not asked for.
    pub errors: Option<Errors>,
    /// Why there are no times.
    pub skipped: Option<String>,
}

impl CaseResult {
    /// The times that count first: flushed, else warm.
    #[must_use]
    pub fn times(&self) -> Option<&Stats> {
        self.flushed.as_ref().or(self.warm.as_ref())
    }
}

impl ResultFile {
    /// Reads a file.
    ///
    /// # Errors
    /// [`Failure::Read`], or [`Failure::Input`] that points at the place.
    pub fn load(path: &Path) -> Result<Self, Failure> {
        let name = path.display().to_string();
        let text = input::text(path, input::MOST_JSON)?;
        let file: Self = json::read(&name, &text)?;
        if file.format != FORMAT {
            return Err(Failure::Input(format!(
                "{name}: the format is {:?}, this program reads {FORMAT:?}",
                file.format
            )));
        }
        Ok(file)
    }

    /// The file as text.
    #[must_use]
    pub fn to_json(&self) -> String {
        let mut text = serde_json::to_string_pretty(self).expect("plain data");
        text.push('\n');
        text
    }
}
