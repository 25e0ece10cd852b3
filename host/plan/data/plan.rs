//! A plan: work items, the rows of each, the places of partial states, and how they are merged.

use std::{fmt, ops::Range};

use kernels_gpu::{
    abi::{MergeRow, QueryRow, WorkItem},
    registry::KernelId,
};
use serde::{Deserialize, Serialize};

use super::{Appended, PodPlan};
use crate::{
    plan::Origin,
    problem::{Masks, Spec},
};

/// Query rows × keys that one CTA works on at a time.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
pub struct Tile {
    /// Rows: query tokens × packed query heads.
    pub m: u32,
    /// Keys.
    pub n: u32,
}

impl fmt::Display for Tile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}×{}", self.m, self.n)
    }
}

/// Which kernel runs a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Kernel {
    /// Gathered rows, all query heads of a KV head in a tile.
    Decode,
    /// Contiguous rows.
    Prefill,
}

impl Kernel {
    /// Every kernel.
    pub const ALL: [Self; 2] = [Self::Decode, Self::Prefill];
}

/// Items that one kernel with one tile works through.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TileGroup {
    /// The operation.
    pub kernel: Kernel,
    /// The kernel that runs it. None: the executor takes tiles of any size.
    pub id: Option<KernelId>,
    /// Its tile.
    pub tile: Tile,
    /// Neighbouring query heads of one KV head that share a tile, each token taking as many rows: the whole
    /// group in decode (latent heads that are more than a tile's rows take several tiles), a divisor of it in prefill.
    pub pack: u32,
    /// The items, longest first.
    pub items: Range<u32>,
    /// If a GPU's L2 does not hold the keys of all KV heads: the number of KV heads whose tiles of all items come
    /// before those of the next heads, a divisor of the KV heads. 0: all heads of an item come before the next item.
    #[serde(default)]
    pub kv_heads_together: u32,
    /// As [`Part::heads`](crate::problem::Part::heads) of the parts of the items.
    #[serde(default = "one")]
    pub heads: u32,
}

/// The number of heads of plans that were stored without it.
const fn one() -> u32 {
    1
}

impl TileGroup {
    /// Units of an item: the number of tiles that have all query heads.
    #[must_use]
    pub const fn units_per_item(&self, spec: &Spec) -> u32 {
        spec.q_heads.div_ceil(self.pack) * self.heads
    }
}

/// What a plan knows of a part of its batch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedPart {
    /// Tokens in a page.
    pub page_size: u32,
    /// The part's page ids among the plan's.
    pub pages: Range<u32>,
    /// The part's row blocks among the plan's.
    pub row_blocks: Range<u32>,
    /// As [`Part::heads`](crate::problem::Part::heads). The part's items count query tokens and slots in so many of the plan's.
    #[serde(default = "one")]
    pub heads: u32,
}

/// What a plan knows of a row block of a part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedRowBlock {
    /// First query token.
    pub first_token: u32,
    /// Query tokens.
    pub tokens: u32,
    /// Position of the first query token.
    pub position: i32,
    /// Keys.
    pub kv_len: u32,
    /// Keys that its pages hold.
    pub capacity: u32,
    /// The item that ends with its last key, if that is one that can be made longer; else `u32::MAX`.
    pub tail: u32,
}

/// Where partial states are merged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum MergeMode {
    /// The faster one: fused where decodes of few rows have few merges of at most 512 elements for each KV head (new tokens of
    /// the longest row block × query heads × head dimension), and on Hopper where half or more of the merges of latent attention are of
    /// two states and splits are not fixed; otherwise the kernel. For options only: a plan has one of the other two.
    #[default]
    Auto,
    /// In a kernel after the others.
    Kernel,
    /// In the last CTA that arrives at a merge. A plan of latent attention may have it for rows of two states in tiles of 64 rows; a
    /// kernel merges all its other rows. As an option it is refused there.
    Fused,
}

/// Everything that a backend needs for a step: the work items, and how their partial states are merged. Plain data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Plan {
    /// The heads for which it was made.
    pub spec: Spec,
    /// Query tokens of the batch.
    pub total_q: u32,
    /// The parts of the batch.
    pub parts: Vec<PlannedPart>,
    /// The row blocks of all parts, one part after the other.
    pub row_blocks: Vec<PlannedRowBlock>,
    /// The tile groups; each is one launch.
    pub groups: Vec<TileGroup>,
    /// The items of all groups.
    pub items: Vec<WorkItem>,
    /// The rows of gathered items.
    pub rows: Vec<QueryRow>,
    /// The merges: one for every query token that does not have exactly one item, ascending by token.
    pub merges: Vec<MergeRow>,
    /// The slots of each merge, ascending by part and key position.
    pub merge_slots: Vec<u32>,
    /// The page ids of all parts, one after the other.
    pub page_ids: Vec<u32>,
    /// As [`Batch::ancestors`](crate::problem::Batch::ancestors).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ancestors: Vec<u64>,
    /// As [`Batch::masks`](crate::problem::Batch::masks).
    #[serde(default, skip_serializing_if = "Masks::is_empty")]
    pub masks: Masks,
    /// Number of partial states. Every slot is below it; each slot is written by one item and read by one merge.
    pub slots: u32,
    /// Whether [`grow`](Self::grow) can move the queries. This needs a plan of decodes only, in which no row sees some of its
    /// item's keys only from a later position on.
    pub growable: bool,
    /// The number of positions by which it can still grow, if there is a limit. A window must not leave the page in which an item
    /// begins: the page may then hold anything, also NaN. With fixed splits it must not leave a piece of keys either: a new plan would
    /// not have this piece, and both plans must give the same results.
    pub grows_by: Option<u32>,
    /// Whether splits do not depend on the batch ([`SplitMode::Fixed`](crate::plan::SplitMode::Fixed)). Then executors choose kernels that
    /// do not depend on it either.
    #[serde(default)]
    pub fixed_splits: bool,
    /// Where partial states are merged; never `MergeMode::Auto`.
    pub merge_mode: MergeMode,
    /// How prefills and decodes run, if the plan has both.
    pub pod: Option<PodPlan>,
    /// None for plans that were read from a file.
    #[serde(skip)]
    pub(in crate::plan) origin: Origin,
    /// None for plans that were read from a file.
    #[serde(skip)]
    pub(in crate::plan) appended: Appended,
}

impl Plan {
    /// An empty plan, to be filled by [`Planner::plan_into`](crate::plan::Planner::plan_into).
    #[must_use]
    pub const fn empty(spec: Spec) -> Self {
        Self {
            spec,
            total_q: 0,
            parts: Vec::new(),
            row_blocks: Vec::new(),
            groups: Vec::new(),
            items: Vec::new(),
            rows: Vec::new(),
            merges: Vec::new(),
            merge_slots: Vec::new(),
            page_ids: Vec::new(),
            ancestors: Vec::new(),
            masks: Masks::NONE,
            slots: 0,
            growable: false,
            grows_by: None,
            fixed_splits: false,
            merge_mode: MergeMode::Kernel,
            pod: None,
            origin: Origin(None),
            appended: Appended::NONE,
        }
    }

    /// The words of a query token's mask and where their bits begin ([`kernels_gpu::masks`]); no words if nothing is hidden.
    pub(crate) fn mask_of(&self, token: u32) -> (&[u64], u32) {
        match self.ancestors.get(token as usize) {
            Some(word) => (std::slice::from_ref(word), 0),
            None => self.masks.of_token(token),
        }
    }

    /// The position that a gathered item with these rows has: the smallest of them. A row whose mask has more than one word counts as
    /// further back by what its mask reaches beyond the first; kernels know from the item alone which keys all rows see.
    pub(in crate::plan) fn position_of(
        &self,
        rows: impl IntoIterator<Item = (u32, i32)>,
    ) -> Option<i32> {
        let positions = rows.into_iter().map(|(token, position)| {
            position.saturating_sub_unsigned(self.masks.beyond_a_word(token))
        });
        positions.min()
    }

    /// The items of a group.
    #[must_use]
    pub fn items_of(&self, group: &TileGroup) -> &[WorkItem] {
        &self.items[group.items.start as usize..group.items.end as usize]
    }

    /// Units of a group: items × query heads / `pack`, at most `u32::MAX`.
    #[must_use]
    pub fn units_of(&self, group: &TileGroup) -> u32 {
        let items = group.items.end - group.items.start;
        items.saturating_mul(group.units_per_item(&self.spec))
    }

    /// The rows of a gathered item.
    #[must_use]
    pub fn rows_of(&self, item: &WorkItem) -> &[QueryRow] {
        &self.rows[item.rows_begin as usize..(item.rows_begin + item.rows) as usize]
    }

    /// The runs of a joint item; none of others.
    #[must_use]
    pub fn runs_of(&self, index: usize) -> &[WorkItem] {
        let item = &self.items[index];
        if !item.is_joint() {
            return &[];
        }
        let first = index + item.slot as usize;
        &self.items[first..first + item.merge as usize]
    }

    /// Number of items that are launched. The items after them are runs.
    #[must_use]
    pub fn launched(&self) -> usize {
        self.groups
            .last()
            .map_or(0, |group| group.items.end as usize)
    }

    /// The pages of an item's table that the item reads. Empty for a joint item: its runs read.
    #[must_use]
    pub fn pages_of(&self, item: &WorkItem) -> &[u32] {
        let page_size = self.parts[item.part as usize].page_size;
        let pages = match item.is_joint() {
            true => 0,
            false => item.kv_end.div_ceil(page_size),
        };
        &self.page_ids[item.table as usize..(item.table + pages) as usize]
    }

    /// The number of pages that a pool must have for a part.
    pub(crate) fn pool_pages(&self, part: &PlannedPart) -> u32 {
        let Range { start, end } = part.pages;
        let ids = self.page_ids.get(start as usize..end as usize);
        let ends = ids.unwrap_or_default().iter();
        ends.fold(0, |most, id| most.max(id.saturating_add(1)))
    }

    /// The row block of an item of consecutive tokens.
    pub(crate) fn row_block_of(&self, item: &WorkItem) -> &PlannedRowBlock {
        let blocks = &self.parts[item.part as usize].row_blocks;
        let blocks = &self.row_blocks[blocks.start as usize..blocks.end as usize];
        // Empty row blocks come before the row block that begins at the same token.
        let behind = blocks.partition_point(|block| block.first_token <= item.rows_begin);
        &blocks[behind - 1]
    }

    /// The keys of a row block that any of its query tokens sees.
    pub(crate) fn keys_seen(&self, block: &PlannedRowBlock) -> Range<u32> {
        let last = block.position + block.tokens as i32 - 1;
        let variant = &self.spec.variant;
        variant.visible(block.position, block.kv_len).start..variant.visible(last, block.kv_len).end
    }

    /// The slots of a merge, in merging order.
    #[must_use]
    pub fn slots_of(&self, merge: &MergeRow) -> &[u32] {
        &self.merge_slots[merge.slots_begin as usize..(merge.slots_begin + merge.slots) as usize]
    }
}
