//! The contract between host and device: what a plan's device buffer holds and what a launch passes.
//!
//! Every struct is `repr(C)` plain data of 4-byte fields, so that a plan is copied to the device as
//! it lies in memory. Three coordinate systems appear:
//!
//! - **query token**: row of `q` and `out`, `0..total_q`;
//! - **key position**: index of a key in one page table, counted from that table's first page;
//! - **slot**: index of a partial state (one query token, all heads) in the workspace.

mod attention;
mod convert;
mod decode;
mod measure;
mod passes;
mod pod;
mod prefill;
mod rotary;
mod step;

pub use attention::*;
pub use convert::*;
pub use decode::*;
pub use measure::*;
pub use passes::*;
pub use pod::*;
pub use prefill::*;
pub use rotary::*;
pub use step::*;

use bytemuck::{Pod, Zeroable};

/// In [`QueryRow::slot`] and [`WorkItem::slot`]: the row's only item, the output is written directly.
pub const DIRECT: u32 = u32::MAX;

/// In [`QueryRow::merge`] and [`WorkItem::merge`]: no merge belongs to the row.
pub const NO_MERGE: u32 = u32::MAX;

/// A piece of attention: some query tokens against a run of keys of one page table.
///
/// An item is for all heads: its *units* are `item × kv_heads` where the query heads of a KV head are
/// packed into the rows of a tile, `item × q_heads` where they are not (see [`WorkItem::GATHERED`]).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct WorkItem {
    /// Gathered: index of the first [`QueryRow`]. Contiguous: the first query token.
    pub rows_begin: u32,
    /// Query tokens, at least one.
    pub rows: u32,
    /// Index into `page_ids` of the first page of the table (of key position 0, not of `kv_begin`).
    pub table: u32,
    /// First key position.
    pub kv_begin: u32,
    /// One past the last key position; equal to `kv_begin` where there is nothing to see.
    pub kv_end: u32,
    /// Contiguous: position of the first row, row `i` stands at `position + i` (as
    /// [`QueryRow::position`]). Gathered: the smallest position among the rows; an item whose
    /// `kv_end <= position + 1` needs no causal mask.
    pub position: i32,
    /// Contiguous: slot of the first row, row `i` owns `slot + i`; or [`DIRECT`]. Joint: how many items further
    /// on its first run stands. Gathered: unused.
    pub slot: u32,
    /// Contiguous: merge of the first row, row `i` belongs to `merge + i`; or [`NO_MERGE`]. Joint: how many
    /// runs it has. Gathered: unused.
    pub merge: u32,
    /// [`WorkItem::GATHERED`] and the like.
    pub flags: u32,
    /// The part of the batch (composable formats) whose page pool and page size the table speaks of.
    pub part: u32,
}

impl WorkItem {
    /// The rows are listed one by one in [`QueryRow`]s; without it they are consecutive tokens.
    pub const GATHERED: u32 = 1;
    /// The keys are read by other items too (a prefix that was cut): keep them in the L2 cache.
    pub const SHARED_KEYS: u32 = 2;
    /// A tile whose rows do not all see the same keys: some see this request's, others that one's, and a prefix
    /// all of them. The item's *runs* are gathered items that stand behind those of all launches, one after
    /// the other; each is a run of keys of one table for a part of the item's rows, and between them every row
    /// has one state. The item's own keys count those of all runs, from 0; its table is that of the first.
    pub const JOINT: u32 = 4;
    /// The most runs of an item.
    pub const MAX_RUNS: u32 = 128;

    /// Whether the rows are listed one by one.
    #[must_use]
    pub const fn is_gathered(&self) -> bool {
        self.flags & Self::GATHERED != 0
    }

    /// Whether the rows see different tables.
    #[must_use]
    pub const fn is_joint(&self) -> bool {
        self.flags & Self::JOINT != 0
    }

    /// Number of keys.
    #[must_use]
    pub const fn kv_len(&self) -> u32 {
        self.kv_end - self.kv_begin
    }

    /// Leaves at most `most` of the item's query tokens, those after its first `before`; perhaps none.
    pub const fn cut(&mut self, before: u32, most: u32) {
        let rows = self.rows.saturating_sub(before);
        self.rows = if rows < most { rows } else { most };
        self.rows_begin += before;
        if !self.is_gathered() {
            self.position += before as i32;
            if self.slot != DIRECT {
                self.slot += before;
            }
            if self.merge != NO_MERGE {
                self.merge += before;
            }
        }
    }
}

/// One query token of a gathered item.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct QueryRow {
    /// The query token.
    pub token: u32,
    /// Where the query stands among the keys of the item's table: under a causal mask it sees key
    /// positions `<= position`; a window of `w` keys to the left shows `>= position - w`.
    pub position: i32,
    /// The partial state this item writes for the token, or [`DIRECT`].
    pub slot: u32,
    /// The [`MergeRow`] that combines the token's partial states, or [`NO_MERGE`].
    pub merge: u32,
}

/// The states to be combined into one output row, for all heads.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct MergeRow {
    /// The query token to write.
    pub token: u32,
    /// First entry in the plan's `merge_slots`; the order of the entries is the order of merging.
    pub slots_begin: u32,
    /// Number of entries. Zero: the row sees no key, its output is 0 and its LSE −∞.
    pub slots: u32,
    /// Zero.
    pub reserved: u32,
}

/// How the rows of `k`, `v` (and of `q`, `out`) lie in memory; strides in elements.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct KvStrides {
    /// From one page to the next.
    pub page: u32,
    /// From one token of a page to the next.
    pub token: u32,
    /// From one head to the next.
    pub head: u32,
    /// Tokens in a page, 1 to 128.
    pub page_size: u32,
}

/// What the mask and the logits transform need, for all items of a launch.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub struct VariantParams {
    /// Softmax scale times log₂ e: logits are kept in base 2.
    pub scale_log2: f32,
    /// The softmax scale itself (a soft cap works on natural logits).
    pub scale: f32,
    /// Logits become `cap · tanh(logit / cap)`; 0 where there is no cap.
    pub soft_cap: f32,
    /// Keys a query sees to its left besides its own position; `i32::MAX` where there is no window.
    pub window_left: i32,
    /// 1: a query sees no key after its position.
    pub causal: u32,
    /// Zero.
    pub reserved: u32,
}

/// What a plan changes about a launch that stays as it was captured. It lies in the workspace, beside the
/// plan's arrays.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct LaunchRecord {
    /// The launch's first entry: of the plan's items, or of the merges that are left to a kernel.
    pub first: u32,
    /// How many of them.
    pub count: u32,
    /// As [`DecodeParams::long`].
    pub long: u32,
    /// Of prefills of 8-bit keys: the first of the plan's [`ConvertedPage`]s that are the launch's.
    pub first_page: u32,
    /// How many of these.
    pub pages: u32,
    /// As [`PrefillParams::kv_heads_together`].
    pub kv_heads_together: u32,
    /// Zero.
    pub reserved: [u32; 2],
}
