//! Joint tiles: one tile with rows that share only some of their keys.
//!
//! If a prefix is an item of its own, every row below it gets a partial state, which is written to memory and read
//! again. Where tensor cores have time to spare, it is cheaper if a tile reads the keys of all its rows and masks each
//! key for the rows that do not have it: then there is nothing to merge. Each joint tile reads the prefix once, as a
//! separate item of the prefix would.

mod choose;
mod costs;
mod draft;
mod layout;

pub use choose::{Choice, Joiner, JointForest};
pub use costs::WORTH_CUTTING;
