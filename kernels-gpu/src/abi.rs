//! The contract between host and device: what a plan's device buffer holds and what a launch passes.
//!
//! Every struct is `repr(C)` plain data of 4-byte fields, so that a plan is copied to the device as
//! it lies in memory. Three coordinate systems appear:
//!
//! - **query token**: row of `q` and `out`, `0..total_q`;
//! - **key position**: index of a key in one page table, counted from that table's first page;
//! - **slot**: index of a partial state (one query token, all heads) in the workspace.

use bytemuck::{Pod, Zeroable};

use crate::divisor::Divisor;

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
    /// Zero.
    pub reserved: u32,
}

/// Where a plan's arrays lie and where results go: the parameters every attention kernel takes.
///
/// Addresses are device addresses. The scratch arrays lie in the workspace at offsets that a plan of
/// the same bound never moves, so that a captured graph stays valid.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub struct AttentionParams {
    /// `[total_q, q_heads, head_dim_qk]`.
    pub q: u64,
    /// Key pool; see `kv`.
    pub k: u64,
    /// Value pool; see `kv`.
    pub v: u64,
    /// `[total_q, q_heads, head_dim_v]`.
    pub out: u64,
    /// `[total_q, q_heads]` f32, natural log; 0 where it is not wanted.
    pub lse: u64,
    /// `[items]` [`WorkItem`], this launch's.
    pub items: u64,
    /// `[rows]` [`QueryRow`].
    pub rows: u64,
    /// `[...]` u32.
    pub page_ids: u64,
    /// `[merges]` [`MergeRow`].
    pub merges: u64,
    /// `[...]` u32.
    pub merge_slots: u64,
    /// `[slots, q_heads, head_dim_v]` f32, normalised.
    pub partial_out: u64,
    /// `[slots, q_heads]` f32, base 2.
    pub partial_lse: u64,
    /// `[merges, kv_heads]` u32, zero before and after every run: arrivals at a merge.
    pub arrivals: u64,
    /// One u32 per launch of a run, zero before and after: the next unit to claim.
    pub ticket: u64,
    /// The launch's [`LaunchRecord`], which says which of `items` are its own; `units` are then those of one
    /// item. 0 where the launch is for one plan.
    pub record: u64,
    /// Units of this launch: items × query heads / heads in a tile.
    pub units: u32,
    /// Query heads.
    pub q_heads: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Query heads per KV head.
    pub group: u32,
    /// Strides of the key pool.
    pub k_strides: KvStrides,
    /// Strides of the value pool.
    pub v_strides: KvStrides,
    /// From one query token to the next, in elements (head stride is `head_dim_qk`).
    pub q_token_stride: u32,
    /// From one output token to the next, in elements (head stride is `head_dim_v`).
    pub out_token_stride: u32,
    /// Mask and logits transform.
    pub variant: VariantParams,
}

impl AttentionParams {
    /// Makes the units of so many items those of one, where a record says how many items there are.
    pub const fn leave_to_record(&mut self, items: usize) {
        if self.record != 0 && items > 0 {
            self.units /= items as u32;
        }
    }
}

/// What a decode kernel takes: where a page's keys and values are found by the tensor memory accelerator,
/// and the rest.
///
/// The maps (128 bytes each) have the dimensions: 64 elements of a row, 8 tokens, half rows (64 elements, of
/// one head or of all), groups of 8 tokens, pages (or pages × heads). Their box is `piece_tokens` tokens of
/// one head.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct DecodeParams {
    /// Tensor map of the key pool.
    pub k_map: [u64; 16],
    /// Tensor map of the value pool.
    pub v_map: [u64; 16],
    /// Everything else about the launch. `k` and `v` are not looked at.
    pub attention: AttentionParams,
    /// By query heads per KV head.
    pub group: Divisor,
    /// By KV heads.
    pub kv_heads: Divisor,
    /// By tokens in a page.
    pub page_size: Divisor,
    /// Tokens of a box: a divisor of the page size and of 32, a multiple of 8.
    pub piece_tokens: u32,
    /// Coordinate in the third dimension per head.
    pub half_per_head: u32,
    /// Coordinate in the fifth dimension per page.
    pub page_per_page: u32,
    /// Coordinate in the fifth dimension per head.
    pub page_per_head: u32,
    /// Stages of the ring in shared memory.
    pub stages: u32,
    /// Units that a CTA claims at a time, below the number of slots for them.
    pub run: u32,
    /// A coordinate in the fifth dimension behind the pool: what is read there is zero.
    pub outside: u32,
    /// 1: the launch reads several times what L2 holds. Where there is a record, that says it.
    pub long: u32,
    /// Zero.
    pub reserved: u32,
}

/// What a decode kernel takes that gathers keys and values row by row.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct GatherDecodeParams {
    /// Everything that is not particular to this kernel; the strides of the pools are unused. Its units are
    /// items × `cuts` × KV heads.
    pub attention: AttentionParams,
    /// Strides of the key pool in vectors of 16 bytes; the pool has fewer than 2³² of them.
    pub k_vectors: KvStrides,
    /// Strides of the value pool, likewise.
    pub v_vectors: KvStrides,
    /// By tokens in a page.
    pub page_size: Divisor,
    /// By query heads per KV head.
    pub group: Divisor,
    /// By KV heads.
    pub kv_heads: Divisor,
    /// By pieces that an item is cut into: as many as the largest needs.
    pub cuts: Divisor,
    /// Query tokens of a piece.
    pub tile_tokens: u32,
    /// 1: the warps of a CTA share each unit. 0: each has its own.
    pub team: u32,
    /// As [`DecodeParams::long`].
    pub long: u32,
    /// Zero.
    pub reserved: u32,
}

/// What the kernels that measure the hardware's limits take.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct CeilingParams {
    /// What is read.
    pub source: u64,
    /// Four bytes that may be written.
    pub sink: u64,
    /// Tiles to read, or rounds of products.
    pub count: u32,
    /// Zero.
    pub reserved: u32,
}

/// What [`loops`](crate::loops) work on.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct LoopsParams {
    /// `[elements]` f32 each: the memory-bound loop adds the first two to the third.
    pub memory: [u64; 3],
    /// `[products]` f32: the compute-bound loop multiplies each again and again.
    pub compute: u64,
    /// `[2 + SMs]` u32, zero before a launch: blocks begun of each loop, and on each SM.
    pub counters: u64,
    /// Elements of the memory-bound loop.
    pub elements: u32,
    /// Elements of the compute-bound loop.
    pub products: u32,
    /// What each is multiplied by.
    pub factor: f32,
    /// How often.
    pub rounds: u32,
    /// Blocks of each loop.
    pub blocks: u32,
    /// Who does what: see [`Binding`](crate::loops::Binding).
    pub binding: u32,
}

/// What `merge_states` works on.
///
/// A *chunk* is 8 neighbouring elements of one output row and head: what one thread computes.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct MergeParams {
    /// `[slots, q_heads, head_dim_v]` f32, normalised.
    pub partial_out: u64,
    /// `[slots, q_heads]` f32, base 2.
    pub partial_lse: u64,
    /// `[rows]` [`MergeRow`].
    pub rows: u64,
    /// `[...]` u32: the slots of all rows.
    pub merge_slots: u64,
    /// `[tokens, q_heads, head_dim_v]`.
    pub out: u64,
    /// `[tokens, q_heads]` f32, natural log; 0 where it is not wanted.
    pub lse: u64,
    /// The launch's [`LaunchRecord`], which says how many rows there are and which is the first; or 0.
    pub record: u64,
    /// Chunks of all rows, where no record says it; below [`Divisor::LIMIT`].
    pub chunks: u32,
    /// `q_heads × head_dim_v / 8`.
    pub chunks_per_row: Divisor,
    /// `head_dim_v / 8`.
    pub chunks_per_head: Divisor,
    /// Query heads.
    pub q_heads: u32,
    /// From one output token to the next, in elements (head stride is `head_dim_v`).
    pub out_token_stride: u32,
    /// Zero.
    pub reserved: u32,
}

/// An entry of `append_paged_kv`'s slots: the token is not written (padding of a captured graph).
pub const NO_SLOT: u32 = u32::MAX;

/// Where the new keys (or values) are and where they go. Strides are in *vectors*: 16 bytes, or 8
/// where something is not a multiple of 16.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct AppendTensor {
    /// `[tokens, kv_heads, head_dim]`.
    pub source: u64,
    /// The page pool.
    pub pool: u64,
    /// From one source token to the next.
    pub source_token: u32,
    /// From one source head to the next.
    pub source_head: u32,
    /// From one page to the next.
    pub page: u32,
    /// From one token of a page to the next.
    pub token: u32,
    /// From one head of a token to the next.
    pub head: u32,
    /// Vectors to copy; below [`Divisor::LIMIT`].
    pub vectors: u32,
    /// Vectors of a token, all heads.
    pub vectors_per_token: Divisor,
    /// Vectors of a head, or of all heads where they lie one after the other on both sides.
    pub vectors_per_head: Divisor,
}

/// What `append_paged_kv` works on.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct AppendParams {
    /// `[tokens]` u32: `page × page_size + offset` of each new token. Slots that are not in the pool
    /// ([`NO_SLOT`] among them) are left out.
    pub slots: u64,
    /// `pages × page_size` of the pool; below [`Divisor::LIMIT`].
    pub pool_slots: u32,
    /// Tokens in a page.
    pub page_size: Divisor,
    /// Keys.
    pub k: AppendTensor,
    /// Values.
    pub v: AppendTensor,
}

/// How the page pool is seen through a tensor map of five dimensions: 64 columns, 8 tokens, slabs of 64
/// columns (of all heads where those are neighbours), groups of 8 tokens, pages (of all heads where
/// those are not).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct PageCoordinates {
    /// Coordinate of dimension 2 per KV head, in heads: 1 for NHD, 0 for HND.
    pub step_in_token: u32,
    /// Coordinate of dimension 4 per page: 1 for NHD, `kv_heads` for HND.
    pub step_per_page: u32,
    /// Coordinate of dimension 4 per KV head: 0 for NHD, 1 for HND.
    pub step_per_head: u32,
    /// A coordinate of dimension 4 behind the pool: what is read there is zero.
    pub outside: u32,
}

/// What a Hopper prefill kernel works on. The maps come first: they must lie at a multiple of 64 bytes.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct PrefillParams {
    /// `q`: 64 columns, `pack` heads, tokens, slabs of 64 columns, heads / `pack`. A box is one slab of a
    /// tile.
    pub q_map: [u64; 16],
    /// The key pool, see [`PageCoordinates`]. A box is `box_tokens` of one head.
    pub k_map: [u64; 16],
    /// The value pool, likewise.
    pub v_map: [u64; 16],
    /// `out`, cut like `q`.
    pub out_map: [u64; 16],
    /// Everything that is not particular to this kernel; `rows`, `merges` and `arrivals` are unused.
    pub attention: AttentionParams,
    /// Coordinates in `k_map` and `v_map`.
    pub pages: PageCoordinates,
    /// Items of the launch; units are items × query heads / `pack`.
    pub items: u32,
    /// Tokens in a box of `k_map`: divides the page and the tile's keys, a multiple of 8. 1: there are no
    /// maps of the pools, rows are copied one by one, and the pools' strides are in vectors of 16 bytes.
    pub box_tokens: u32,
    /// By neighbouring query heads of one KV head that share a tile: row `r` is token `r / pack`, head
    /// `r % pack`. Divides the group.
    pub pack: Divisor,
    /// By tokens in a page.
    pub page_size: Divisor,
    /// Zero.
    pub reserved: [u32; 2],
}

/// What a prefill kernel works on that gathers keys and values row by row.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct GatherPrefillParams {
    /// Everything that is not particular to this kernel; `rows`, `merges`, `arrivals` and the strides of
    /// the pools are unused. Its units are items × query heads / `pack` × `cuts`.
    pub attention: AttentionParams,
    /// Strides of the key pool in vectors of 16 bytes; the pool has fewer than 2³² of them.
    pub k_vectors: KvStrides,
    /// Strides of the value pool, likewise.
    pub v_vectors: KvStrides,
    /// By tokens in a page.
    pub page_size: Divisor,
    /// By neighbouring query heads of one KV head that share a tile: row `r` is token `r / pack`, head
    /// `r % pack`. It divides the group.
    pub pack: Divisor,
    /// By tiles that an item is cut into: as many as the largest item needs.
    pub cuts: Divisor,
    /// By query heads / `pack`.
    pub heads: Divisor,
    /// By query heads of a KV head / `pack`.
    pub heads_per_kv_head: Divisor,
    /// Query tokens of a tile: its rows / `pack`.
    pub tile_tokens: u32,
}
