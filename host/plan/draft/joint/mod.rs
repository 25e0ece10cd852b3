//! Joint tiles: rows that share some of their keys and see others alone, in one tile.
//!
//! Cutting a prefix off gives every row below it a partial state, for which memory is written and read. Where
//! tensor cores have products to spare, it is cheaper to let a tile read the keys of all its rows, each
//! hidden from the rows whose keys they are not: then nothing is left to merge. A prefix is read once for each
//! tile, as it would be in an item of its own.

mod choose;
mod costs;
mod draft;
mod layout;

pub use choose::{Choice, Joiner, JointForest};
pub use costs::WORTH_CUTTING;
