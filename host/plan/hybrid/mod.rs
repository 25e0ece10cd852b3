//! Hybrid batches: how the prefills and the decodes run, by the times that they are predicted to take.

mod choose;
mod forecast;
mod tiles;

pub use choose::{choose, prefixes_beside, tickets};
