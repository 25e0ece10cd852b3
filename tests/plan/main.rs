//! The planner: what plans compute, how they are balanced, shared among ranks, stored and checked.

#[path = "../common/damage.rs"]
mod damage;
#[path = "../common/numeric.rs"]
mod numeric;
#[path = "../common/problems/mod.rs"]
mod problems;
#[path = "../common/trees.rs"]
mod trees;

mod as_data;
mod balance;
mod decodes;
mod decodes_beside;
mod defects;
mod fixed_splits;
mod growing;
mod hybrid;
mod hybrid_forms;
mod large_groups;
mod merging;
mod options;
mod pat_trees;
mod pieces;
mod planner;
mod prompts;
mod shard;
mod wide_prefixes;
