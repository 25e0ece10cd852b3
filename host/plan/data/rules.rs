//! Rules that replace decisions of the planner.

use super::Tickets;

/// Functions that replace decisions of the planner, to compare it with other systems.
///
/// A rule applies if the [`PlanOptions`](super::PlanOptions) leave the decision to the planner: `join` if prefixes
/// are packed, `chunk` with [`SplitMode::Makespan`](super::SplitMode::Makespan). Prefixes are then not put into joint
/// tiles.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rules {
    /// Whether the rows of a child read the keys of its parent in the same item. Otherwise they leave a partial state
    /// for the parent's keys. Replaces the choice of the fewest bytes.
    pub join: Option<fn(&Join) -> bool>,
    /// Keys per piece. Replaces the balancing of CTAs.
    pub chunk: Option<fn(&Chunk) -> u32>,
    /// The mix for given numbers of prefill CTAs and decode CTAs of one kernel. Replaces a proportional mix.
    pub tickets: Option<fn(u32, u32) -> Tickets>,
}

/// An edge of the prefix forest, as a rule for packing sees it. Edges of a parent come in the order of its children.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Join {
    /// Keys of the parent.
    pub parent_keys: u32,
    /// Keys of the parent's item, including those of the ancestors that it was joined to.
    pub item_keys: u32,
    /// Query tokens below the child.
    pub rows: u32,
    /// Query tokens below the parent, without those of the children that were joined to it.
    pub rows_left: u32,
    /// Query tokens that a tile holds at most.
    pub tile_tokens: u32,
}

impl Join {
    /// The child has many rows for the keys of its parent: a row is worth four keys.
    #[must_use]
    pub const fn has_many_rows(&self) -> bool {
        4 * self.rows as u64 >= self.parent_keys as u64
    }

    /// The child has many rows for the keys of its parent's item, or needs no more tiles if its rows have their own.
    #[must_use]
    pub const fn has_many_rows_or_no_more_tiles(&self) -> bool {
        let rest = (self.rows_left - self.rows).div_ceil(self.tile_tokens);
        let apart = rest + self.rows.div_ceil(self.tile_tokens);
        4 * self.rows as u64 >= self.item_keys as u64
            || apart <= self.rows_left.div_ceil(self.tile_tokens)
    }
}

/// What a rule for cutting sees of the drafts that cost the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Keys of all drafts of the plan, each draft's counted once for each of its units.
    pub keys_of_units: u64,
    /// CTAs of the operation that run at the same time.
    pub ctas: u32,
    /// Pieces end at multiples of this number of keys.
    pub alignment: u32,
}
