//! Policies, which choose the requests of a step, and their trait.

use std::fmt::Debug;

use super::{Draft, ScheduleError, chunk::ChunkSize, cost::CostModel};

mod decode_priority;
mod orca;
mod prefill_first;
mod sarathi;
mod sarathi_serve;

pub use decode_priority::DecodePriority;
pub use orca::Orca;
pub use prefill_first::PrefillFirst;
pub use sarathi::Sarathi;
pub use sarathi_serve::SarathiServe;

/// Decides what goes into each step. It must be deterministic: equal requests must give equal steps.
pub trait Policy: Debug + Send {
    /// A short name.
    fn name(&self) -> &'static str;

    /// Fills a step through the draft, which enforces the limits.
    fn compose(&mut self, draft: &mut Draft<'_>);
}

/// Names of all policies, for [`by_name`].
pub const NAMES: [&str; 5] = [
    "sarathi",
    "sarathi-serve",
    "prefill-first",
    "orca",
    "decode-priority",
];

/// Options of the policies, for [`by_name`].
#[derive(Clone, Debug)]
pub struct PolicyOptions {
    /// SARATHI's chunk size.
    pub chunk: ChunkSize,
    /// Target time between tokens of the decode-priority policy.
    pub target_ns: f64,
    /// Predicts step times for decode priority.
    pub cost: CostModel,
}

/// A policy by its name.
///
/// # Errors
/// [`ScheduleError::Unknown`].
pub fn by_name(name: &str, options: &PolicyOptions) -> Result<Box<dyn Policy>, ScheduleError> {
    Ok(match name {
        "sarathi" => Box::new(Sarathi::new(options.chunk.clone(), options.cost.tile())),
        "sarathi-serve" => Box::new(SarathiServe),
        "prefill-first" => Box::new(PrefillFirst),
        "orca" => Box::new(Orca::default()),
        "decode-priority" => Box::new(DecodePriority::new(options.cost.clone(), options.target_ns)),
        _ => return Err(unknown(name)),
    })
}

/// Checks that there is a policy of this name.
///
/// # Errors
/// [`ScheduleError::Unknown`].
pub fn check_name(name: &str) -> Result<(), ScheduleError> {
    match NAMES.contains(&name) {
        true => Ok(()),
        false => Err(unknown(name)),
    }
}

fn unknown(name: &str) -> ScheduleError {
    ScheduleError::Unknown {
        kind: "policy",
        got: name.to_owned(),
        known: NAMES.join(", "),
    }
}
