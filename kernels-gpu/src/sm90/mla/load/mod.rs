//! The warps that load: one claims units and brings their queries, two bring the halves of the keys.

mod pages;
mod rows;
mod scheduler;

pub(super) use pages::load;
pub(super) use rows::load_rows;
pub(super) use scheduler::{claim, claim_with_queries};
