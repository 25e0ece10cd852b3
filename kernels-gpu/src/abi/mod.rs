//! The contract between host and device: the content of a plan's device buffer, and the parameters of launches.
//!
//! Every struct is plain `repr(C)` data, so a plan is copied to the device byte for byte. There are three coordinates:
//!
//! - **query token**: row of `q` and `out`, `0..total_q`;
//! - **key position**: index of a key in one page table, counted from that table's first page;
//! - **slot**: index of a partial state (one query token, all heads) in the workspace.

mod attention;
mod convert;
mod decode;
mod measure;
mod passes;
mod pieces;
mod pod;
mod prefill;
mod rotary;
mod step;

pub use attention::*;
pub use convert::*;
pub use decode::*;
pub use measure::*;
pub use passes::*;
pub use pieces::*;
pub use pod::*;
pub use prefill::*;
pub use rotary::*;
pub use step::*;

use bytemuck::{Pod, Zeroable};

/// In [`QueryRow::slot`] and [`WorkItem::slot`]: this is the row's only item, and its output is written directly.
pub const DIRECT: u32 = u32::MAX;

/// In [`QueryRow::merge`] and [`WorkItem::merge`]: the row has no merge.
pub const NO_MERGE: u32 = u32::MAX;

/// A piece of attention: some query tokens against a range of keys of one page table.
///
/// An item covers all heads. Its *units* are `item × kv_heads` if the query heads of a KV head are packed into the rows
/// of a tile (pack_gqa), otherwise `item × q_heads` (see [`WorkItem::GATHERED`]).
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
    /// One past the last key position; equal to `kv_begin` if no key is visible.
    pub kv_end: u32,
    /// Contiguous: position of the first row; row `i` is at `position + i` (as [`QueryRow::position`]). Gathered: the
    /// smallest position among the rows; a row whose [mask](crate::common::masks) has several words counts as further back by the
    /// keys that these reach beyond 64. An item with `kv_end <= position + 1` needs no causal mask.
    pub position: i32,
    /// Contiguous: slot of the first row, row `i` owns `slot + i`; or [`DIRECT`]. Joint: offset, in items, from this
    /// item to its first run. Gathered: unused.
    pub slot: u32,
    /// Contiguous: merge of the first row, row `i` belongs to `merge + i`; or [`NO_MERGE`]. Joint: the number of runs.
    /// Gathered: unused.
    pub merge: u32,
    /// Flags: [`WorkItem::GATHERED`], [`WorkItem::SHARED_KEYS`], [`WorkItem::JOINT`].
    pub flags: u32,
    /// The part of the batch (composable formats) whose page pool and page size the table refers to.
    pub part: u32,
}

impl WorkItem {
    /// The rows are listed individually in [`QueryRow`]s; otherwise they are consecutive tokens.
    pub const GATHERED: u32 = 1;
    /// Other items also read the keys (a prefix that was cut): keep them in L2.
    pub const SHARED_KEYS: u32 = 2;
    /// A tile whose rows see different page tables: a common prefix for all rows, then each request's own keys for its
    /// rows. The item's *runs* are consecutive gathered items, stored after the items of all launches. Each run is a
    /// range of keys of one table for some of the item's rows; together they give each row one state. The item's own
    /// keys number those of all runs, from 0; its table is that of the first run.
    pub const JOINT: u32 = 4;
    /// The most runs of an item.
    pub const MAX_RUNS: u32 = 128;

    /// Whether the rows are listed individually.
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

    /// Reduces the item to at most `most` of its query tokens, after the first `before`; possibly none.
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
    /// The query's position among the keys of the item's table: with a causal mask it sees key positions `<= position`,
    /// with a window of `w` keys to the left those `>= position - w`.
    pub position: i32,
    /// The partial state this item writes for the token, or [`DIRECT`].
    pub slot: u32,
    /// The [`MergeRow`] that combines the token's partial states, or [`NO_MERGE`].
    pub merge: u32,
}

/// The partial states to be merged into one output row, for all heads.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct MergeRow {
    /// The query token to write.
    pub token: u32,
    /// First entry in the plan's `merge_slots`; the order of the entries is the order of merging.
    pub slots_begin: u32,
    /// Number of entries. 0: the row sees no key, its output is 0 and its LSE −∞.
    pub slots: u32,
    /// Zero.
    pub reserved: u32,
}

/// Strides of a page pool, in elements unless stated otherwise.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct KvStrides {
    /// From one page to the next.
    pub page: u32,
    /// From one token of a page to the next.
    pub token: u32,
    /// From one head to the next.
    pub head: u32,
    /// Tokens in a page, 1 to 4096.
    pub page_size: u32,
}

/// Parameters of the mask and of the logits transform, for all items of a launch.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub struct VariantParams {
    /// Softmax scale times log₂ e: logits are kept in base 2.
    pub scale_log2: f32,
    /// The softmax scale itself (a soft cap works on natural logits).
    pub scale: f32,
    /// Logits become `cap · tanh(logit / cap)`; 0: no cap.
    pub soft_cap: f32,
    /// The number of keys that a query sees to the left of its own position; `i32::MAX`: no window.
    pub window_left: i32,
    /// 1: a query sees no key after its position.
    pub causal: u32,
    /// Sinks are `[sink_tokens, q_heads]`, and token `t` has those of `t % sink_tokens`: in page lists by KV head, the tokens
    /// of the batch that are one token of the model. This is the [`sink_word`](crate::state::sink_word) of the number, or 0 where
    /// sinks are `[q_heads]`, for all tokens.
    pub sink_tokens: u32,
}

/// The parameters of a captured launch that differ between plans. It lies in the workspace, with the plan's arrays.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct LaunchRecord {
    /// The launch's first entry: among the plan's items or, for a merge kernel, among its merges.
    pub first: u32,
    /// The number of entries.
    pub count: u32,
    /// As [`DecodeParams::long`].
    pub long: u32,
    /// For prefills with converted pages: the launch's first [`ConvertedPage`].
    pub first_page: u32,
    /// The number of these.
    pub pages: u32,
    /// As [`PrefillParams::kv_heads_together`].
    pub kv_heads_together: u32,
    /// Zero.
    pub reserved: [u32; 2],
}
