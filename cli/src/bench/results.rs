//! The file that `tandem bench --json` writes, and that `roofline`, `compare` and the scripts in `peers/` share.

use std::path::Path;

use serde::{Deserialize, Serialize};
use tandem_attn::plan::pod::PodMode;

use super::{Energy, Stats};
use crate::{
    Failure,
    backend::{Ceilings, Machine},
    check::Errors,
    input,
    workload::json,
};

/// Value of [`ResultFile::format`].
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
    /// Version of tandem-attn, or what a script in `peers/` names itself.
    pub program: String,
    /// Start time in UTC (RFC 3339).
    pub date: String,
    /// The machine on which it ran.
    pub machine: Machine,
    /// The limits of the machine, measured in the same run.
    pub ceilings: Ceilings,
    /// Options that differ from the default, as flags.
    pub options: Vec<String>,
    /// The measurements.
    pub results: Vec<CaseResult>,
}

/// Measurements of one implementation on one case.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object with a case and its times")]
pub struct CaseResult {
    /// Name of the case.
    pub case: String,
    /// `tandem`, or the name of a peer.
    pub implementation: String,
    /// Description of the heads.
    pub heads: String,
    /// Number of tokens in a page.
    pub page_size: u32,
    /// Number of requests of the batch.
    pub requests: u32,
    /// Number of query tokens.
    pub query_tokens: u32,
    /// Minimum bytes to move: queries, outputs, and each key and value once.
    pub bytes: u64,
    /// Operations on pairs of a query and a visible key.
    pub flops: u64,
    /// How the prefills and the decodes of a hybrid batch ran; none for other batches.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hybrid: Option<PodMode>,
    /// Time of planning on one CPU thread; none if there is nothing to plan.
    pub plan: Option<Stats>,
    /// Time of a run with flushed caches.
    pub flushed: Option<Stats>,
    /// Time of repeated runs with warm caches.
    pub warm: Option<Stats>,
    /// Time to read the same number of bytes as fast as possible with flushed caches, if it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read: Option<Stats>,
    /// Energy of a run with warm caches, if it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub energy: Option<Energy>,
    /// Sampled errors against f64; none if they were not requested.
    pub errors: Option<Errors>,
    /// The reason why there are no times.
    pub skipped: Option<String>,
}

impl CaseResult {
    /// The times to report: with flushed caches if measured, else with warm ones.
    #[must_use]
    pub fn times(&self) -> Option<&Stats> {
        self.flushed.as_ref().or(self.warm.as_ref())
    }
}

impl ResultFile {
    /// Reads a file.
    ///
    /// # Errors
    /// [`Failure::Read`], or [`Failure::Input`] that shows the position.
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
