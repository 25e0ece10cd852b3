//! The producer warps: the scheduler claims units and loads their queries; the others load keys.

mod keys_656;
mod pages;
mod policy;
mod rows;
mod rows_656;
mod scheduler;

pub(super) use keys_656::{Places, load_656};
pub(super) use pages::load;
pub(super) use policy::Policies;
pub(super) use rows::load_rows;
pub(super) use scheduler::{QueryPlace, bring_queries, claim, claim_with_queries};
