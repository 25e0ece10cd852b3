//! Drafts: the rows and keys of items that are not yet cut along the keys.

use std::ops::Range;

use crate::plan::{
    data::{Kernel, Tile},
    model::CostModel,
};

/// The drafts of a plan, with their rows and runs. Buffers are reused.
#[derive(Debug, Default)]
pub struct Drafts {
    pub items: Vec<Draft>,
    /// Rows of gathered drafts.
    pub rows: Vec<DraftRow>,
    /// Runs of joint drafts.
    pub runs: Vec<DraftRun>,
}

impl Drafts {
    pub fn clear(&mut self) {
        self.items.clear();
        self.rows.clear();
        self.runs.clear();
    }

    /// Keys of all items: those of one row block, and those that several share.
    pub fn keys(&self) -> [u64; 2] {
        self.items.iter().fold([0; 2], |mut keys, draft| {
            let is_shared = draft.tail_of == NO_ROW_BLOCK;
            keys[usize::from(is_shared)] += u64::from(draft.kv_len());
            keys
        })
    }

    /// Time of the items in picoseconds, if every resident CTA is busy all the time.
    pub fn mean_load_ps(&self, cost: &CostModel) -> u64 {
        let mut loads = MeanLoads::new(cost);
        self.items.iter().map(|draft| loads.of(draft)).sum()
    }
}

/// The times of drafts on every resident CTA, if the units are spread evenly. Most drafts have as many rows as a recent one, so
/// that costs are computed once for all of them.
pub struct MeanLoads<'a> {
    cost: &'a CostModel,
    recent: [MeanLoad; 8],
}

/// The costs of drafts that differ in their keys only, in picoseconds: of a unit, of each of its keys, and the number of units.
#[derive(Clone, Copy, Default)]
struct MeanLoad {
    of: Option<(Kernel, Tile, u32, u32, u32)>,
    fixed: u64,
    key: u64,
    units: u64,
    ctas: u64,
}

impl<'a> MeanLoads<'a> {
    pub fn new(cost: &'a CostModel) -> Self {
        Self {
            cost,
            recent: [MeanLoad::default(); 8],
        }
    }

    /// The time of a draft in picoseconds.
    #[inline(always)]
    pub fn of(&mut self, draft: &Draft) -> u64 {
        let Draft {
            kernel,
            tile,
            pack,
            heads,
            ..
        } = *draft;
        let partial_rows = if draft.leaves_partial { draft.rows } else { 0 };
        let of = Some((kernel, tile, pack, heads, partial_rows));
        let recent = &mut self.recent[draft.rows.ilog2() as usize % 8];
        if recent.of != of {
            let cost = self.cost;
            *recent = MeanLoad {
                of,
                fixed: cost.fixed_ps(kernel, tile, pack, partial_rows),
                key: cost.key_ps(kernel, tile, pack),
                units: draft.units(cost).into(),
                ctas: cost.resident_ctas(kernel).into(),
            };
        }
        (recent.fixed + recent.key * u64::from(draft.kv_len())) * recent.units / recent.ctas
    }
}

/// Takes drafts.
pub trait DraftSink {
    fn add_decode(&mut self, draft: Draft);
    fn add_prefill(&mut self, draft: Draft);
}

impl DraftSink for Vec<Draft> {
    fn add_decode(&mut self, draft: Draft) {
        self.push(draft);
    }

    fn add_prefill(&mut self, draft: Draft) {
        self.push(draft);
    }
}

/// A row of a gathered draft.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftRow {
    pub token: u32,
    pub position: i32,
}

/// An item before it is cut along the keys.
#[derive(Clone, Copy, Debug)]
pub struct Draft {
    pub kernel: Kernel,
    /// For decodes, the splitter chooses `n`.
    pub tile: Tile,
    /// Query heads per tile.
    pub pack: u32,
    pub part: u32,
    /// As [`Part::heads`](crate::problem::Part::heads): the tokens of the draft are those of its part.
    pub heads: u32,
    /// The part's page size.
    pub page_size: u32,
    /// Index of the table's first page in the plan's page ids.
    pub table: u32,
    /// Gathered drafts: index of the first [`DraftRow`]. Contiguous drafts: the first query token.
    pub rows_begin: u32,
    pub rows: u32,
    /// Contiguous drafts: position of the first row.
    pub position: i32,
    pub kv_begin: u32,
    pub kv_end: u32,
    pub flags: u32,
    /// Rows leave partial states even if the draft is not cut along the keys.
    pub leaves_partial: bool,
    /// Every row belongs to every piece of the draft. Otherwise, rows that see no key of a piece are left out of it.
    pub all_see: bool,
    /// The row block has enough tiles to fill the device. Fixed splits then cut its keys at larger multiples.
    pub many_rows: bool,
    /// The keys stay the same when queries move to later positions.
    pub growable: bool,
    /// Index of the row block (in the plan) whose last keys only this draft ends with, or [`NO_ROW_BLOCK`].
    pub tail_of: u32,
    /// Joint drafts: index of the first [`DraftRun`], and the number of runs. The keys of all runs are numbered
    /// through: these numbers are the keys of the draft.
    pub runs_begin: u32,
    pub runs: u32,
}

/// Keys of one table that some rows of a joint draft see.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftRun {
    /// Index of the table's first page in the plan's page ids.
    pub table: u32,
    pub kv_begin: u32,
    pub kv_end: u32,
    /// Number of the first key among the keys of the draft: a multiple of the split alignment, so that cuts fall
    /// between pages.
    pub start: u32,
    /// Index of the first [`DraftRow`] that sees the keys.
    pub rows_begin: u32,
    pub rows: u32,
    /// Whether other drafts read these keys, too.
    pub is_shared: bool,
    /// As [`Draft::tail_of`].
    pub tail_of: u32,
}

/// Value of [`Draft::tail_of`] if there is no such row block.
pub const NO_ROW_BLOCK: u32 = u32::MAX;

impl Draft {
    pub const fn kv_len(&self) -> u32 {
        self.kv_end - self.kv_begin
    }

    /// Whether both are tiles of one prompt, and see some of the same keys.
    pub fn shares_prompt(&self, other: &Self) -> bool {
        let of = |draft: &Self| (draft.kernel, draft.part, draft.table);
        let overlap = self.kv_begin < other.kv_end && other.kv_begin < self.kv_end;
        self.kernel == Kernel::Prefill && of(self) == of(other) && overlap
    }

    /// Units of an item of the draft.
    pub const fn units(&self, cost: &CostModel) -> u32 {
        cost.units_per_item(self.pack) * self.heads
    }

    /// The query tokens of the batch for tokens of the draft, which are consecutive.
    pub const fn tokens(&self) -> Range<usize> {
        let heads = self.heads as usize;
        let first = self.rows_begin as usize;
        first * heads..(first + self.rows as usize) * heads
    }

    /// The draft is cut at multiples of this number of keys.
    pub const fn split_alignment(&self) -> u32 {
        // Latent kernels take blocks of 32 keys in pairs: pieces of 5 blocks take longer than pieces of 6.
        let pairs = !self.is_joint() && self.tile.m == 64 && self.tile.n == 32;
        let alignment = split_alignment(self.page_size);
        if pairs {
            alignment * (2 * self.tile.n).div_ceil(alignment)
        } else {
            alignment
        }
    }

    pub fn is_gathered(&self) -> bool {
        self.kernel == Kernel::Decode
    }

    /// Whether its rows see different tables.
    pub const fn is_joint(&self) -> bool {
        self.runs > 0
    }
}

/// Larger pages are cut inside: at multiples of this number of keys, which whole copies of a page's tokens fill.
pub const INSIDE_PAGES: u32 = 128;

/// Cuts fall on multiples of this number of keys: whole pages unless these are large, and at least the 16 keys of a
/// matrix instruction.
pub const fn split_alignment(page_size: u32) -> u32 {
    match page_size.is_power_of_two() {
        _ if page_size > INSIDE_PAGES => INSIDE_PAGES,
        true if page_size < 16 => 16,
        true => page_size, // the usual case, without a division
        false => 16u32.next_multiple_of(page_size),
    }
}

/// The least multiple of an alignment that is no less. If the alignment is a power of two, this takes no division.
pub const fn aligned(keys: u32, alignment: u32) -> u32 {
    match alignment.is_power_of_two() {
        true => (keys + (alignment - 1)) & !(alignment - 1),
        false => keys.next_multiple_of(alignment),
    }
}
