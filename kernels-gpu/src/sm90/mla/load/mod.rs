//! The warps that load: one claims units and brings their queries, two bring the halves of the keys.

mod pages;
mod rows;
mod rows_656;
mod scheduler;

pub(super) use pages::load;
pub(super) use rows::load_rows;
pub(super) use rows_656::{Entry, Rows, policy};
pub(super) use scheduler::{claim, claim_with_queries};
