//! What a GPU launches for a plan, as far as the plan decides it: the executor follows this, and views show it.

pub(crate) mod converted;
pub(crate) mod merging;
pub(crate) mod pairs;
pub(crate) mod pieces;
