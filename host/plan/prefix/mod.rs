//! Prefixes that requests share: which there are, and which rows read them together.

mod forest;
mod pack;

pub use forest::{Forest, NO_NODE};
pub use pack::{PackCosts, PackNode, Packer};
