//! Items on their way to a plan: which rows against which keys, not yet cut along the keys.

use crate::plan::{
    data::{Kernel, Tile},
    model::CostModel,
};

/// The drafts of a plan, with their rows and runs. Buffers are reused.
#[derive(Debug, Default)]
pub struct Drafts {
    pub items: Vec<Draft>,
    /// Of gathered items.
    pub rows: Vec<DraftRow>,
    /// Of joint items.
    pub runs: Vec<DraftRun>,
}

impl Drafts {
    pub fn clear(&mut self) {
        self.items.clear();
        self.rows.clear();
        self.runs.clear();
    }

    /// What the items take if every resident CTA is busy all the time.
    pub fn mean_load_ps(&self, cost: &CostModel) -> u64 {
        self.items
            .iter()
            .map(|draft| draft.mean_load_ps(cost))
            .sum()
    }
}

/// A row of a gathered item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftRow {
    pub token: u32,
    pub position: i32,
}

/// An item before it is cut along the keys.
#[derive(Clone, Copy, Debug)]
pub struct Draft {
    pub kernel: Kernel,
    /// In decode, `n` is chosen with the splits.
    pub tile: Tile,
    /// Query heads in a tile.
    pub pack: u32,
    pub part: u32,
    /// The part's page size.
    pub page_size: u32,
    /// First page of the table in the plan's page ids.
    pub table: u32,
    /// Gathered: first [`DraftRow`]. Contiguous: first query token.
    pub rows_begin: u32,
    pub rows: u32,
    /// Contiguous: of the first row.
    pub position: i32,
    pub kv_begin: u32,
    pub kv_end: u32,
    pub flags: u32,
    /// Even if it is not cut along the keys.
    pub leaves_partial: bool,
    /// Every row sees a key of any run of the keys.
    pub all_see: bool,
    /// The row block that it is a tile of has tiles enough: under fixed splits its keys are seldom cut.
    pub many_rows: bool,
    /// The keys stay the same when queries move on.
    pub growable: bool,
    /// The row block whose last keys these are, among the plan's, if no other draft ends with them.
    pub tail_of: u32,
    /// Joint: where its [`DraftRun`]s begin, and how many there are. Its keys are theirs, counted through.
    pub runs_begin: u32,
    pub runs: u32,
}

/// Keys of one table that some rows of a joint draft see.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftRun {
    /// First page of the table in the plan's page ids.
    pub table: u32,
    pub kv_begin: u32,
    pub kv_end: u32,
    /// Where they stand among the keys of the draft; runs begin where drafts may be cut.
    pub start: u32,
    /// Its first [`DraftRow`].
    pub rows_begin: u32,
    pub rows: u32,
    /// Other drafts read them too.
    pub is_shared: bool,
    /// As [`Draft::tail_of`].
    pub tail_of: u32,
}

/// In [`Draft::tail_of`]: of none.
pub const NO_ROW_BLOCK: u32 = u32::MAX;

impl Draft {
    pub const fn kv_len(&self) -> u32 {
        self.kv_end - self.kv_begin
    }

    /// What it takes of every resident CTA.
    pub fn mean_load_ps(&self, cost: &CostModel) -> u64 {
        let partial_rows = if self.leaves_partial { self.rows } else { 0 };
        let unit = cost.fixed_ps(self.kernel, self.tile, self.pack, partial_rows)
            + cost.key_ps(self.kernel, self.tile, self.pack) * u64::from(self.kv_len());
        let units = u64::from(cost.units_per_item(self.pack));
        unit * units / u64::from(cost.resident_ctas(self.kernel))
    }

    /// It is cut at multiples of this.
    pub const fn split_alignment(&self) -> u32 {
        split_alignment(self.page_size)
    }

    pub fn is_gathered(&self) -> bool {
        self.kernel == Kernel::Decode
    }

    /// Whether its rows see different tables.
    pub const fn is_joint(&self) -> bool {
        self.runs > 0
    }
}

/// Cuts fall on multiples of this: whole pages, and no less than a matrix instruction's keys.
pub const fn split_alignment(page_size: u32) -> u32 {
    16u32.next_multiple_of(page_size)
}
