//! Hybrid batches: how the prefills and the decodes run, by the times that they are predicted to take.

mod choose;
mod forecast;
mod reread;
mod tiles;

pub use choose::{choose, prefixes_beside, tickets};
pub use reread::rereads;
