//! On threads of the CPU.

mod append;
mod merge;

pub use append::append_paged_kv;
pub use merge::{Partials, merge_states};
