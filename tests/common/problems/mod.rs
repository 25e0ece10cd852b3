//! Attention problems for tests: random batches, and tensors to go with them.
// Each program uses its own part of this.
#![allow(dead_code, unused_imports)]

mod batches;
mod options;
mod random;
mod tensors;
mod variants;

pub use batches::*;
pub use options::*;
pub use random::*;
pub use tensors::*;
pub use variants::*;

use proptest::prelude::ProptestConfig;

/// Number of cases: `default`, or what `TANDEM_CASES` says.
pub fn cases(default: u32) -> ProptestConfig {
    let cases = std::env::var("TANDEM_CASES")
        .ok()
        .and_then(|cases| cases.parse().ok());
    ProptestConfig {
        cases: cases.unwrap_or(default),
        failure_persistence: None,
        max_shrink_iters: 2000,
        ..ProptestConfig::default()
    }
}
