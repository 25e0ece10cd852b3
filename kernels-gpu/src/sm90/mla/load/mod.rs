//! The producer warps: the scheduler claims units and loads their queries; the others load keys.
//!
//! Loaders by TMA and bulk copies limit the bytes under way (`UNDER_WAY` of each kernel): before a part, they wait until
//! an earlier part has arrived, even if stages are free. With more bytes under way the first blocks of all SMs arrive
//! later, and large batches lose 2 to 3 % of bandwidth.

mod keys_656;
mod pages;
mod policy;
mod rows;
mod rows_656;
mod scheduler;

pub(super) use keys_656::{Places, load_656};
pub(super) use pages::load;
pub(super) use rows::{Share, load_rows, load_rows_of_two};
pub(super) use scheduler::{bring_queries, claim, claim_with_queries};
