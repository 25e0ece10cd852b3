//! What attention kernels take.

use bytemuck::{Pod, Zeroable};

use super::{KvStrides, VariantParams};
use crate::common::divisor::Divisor;

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
    /// `[items]` [`WorkItem`](super::WorkItem), this launch's.
    pub items: u64,
    /// `[rows]` [`QueryRow`](super::QueryRow).
    pub rows: u64,
    /// `[...]` u32.
    pub page_ids: u64,
    /// `[merges]` [`MergeRow`](super::MergeRow).
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
    /// The launch's [`LaunchRecord`](super::LaunchRecord), which says which of `items` are its own;
    /// `units` are then those of one item. 0 where the launch is for one plan.
    pub record: u64,
    /// `[q_heads]` f32, natural logits: a [sink](crate::state::with_sink) for each query head; 0: there are none.
    /// They enter where a result is written, not into partial states.
    pub sinks: u64,
    /// `[total_q]` u64: the [ancestors](crate::common::tree) of each query token; 0: there are no trees.
    pub ancestors: u64,
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
    /// What 8-bit keys and values are multiplied by.
    pub scales: ScaleParams,
}

/// What 8-bit keys and values are multiplied by: f32 in device memory, so that a captured graph sees new ones.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct ScaleParams {
    /// Of keys; 0: all scales are 1.
    pub k: u64,
    /// Of values; 0 where `k` is.
    pub v: u64,
    /// `[total_q]` u32, the request of each query token; 0: there is one.
    pub of_token: u64,
    /// How `k` lies: `page` is from one request to the next, `head` from one KV head to the next.
    pub k_strides: KvStrides,
    /// How `v` lies.
    pub v_strides: KvStrides,
    /// Zero.
    pub reserved: [u32; 2],
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
    /// What turns queries and keys, in kernels that do.
    pub rotary: RotaryParams,
}

/// How queries and keys are turned by their positions.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub struct RotaryParams {
    /// `[pairs]` u64, and zeros up to a multiple of 8: by how much a pair is turned from a position to the next, of a turn of
    /// 2⁶⁴.
    pub turns: u64,
    /// Pairs of a head that are turned.
    pub pairs: u32,
    /// 1: pairs are neighbours. 0: of the turned part's first half and second half an element each.
    pub interleaved: u32,
    /// What turned elements of keys are multiplied by, for queries and keys together.
    pub gain: f32,
    /// Zero.
    pub reserved: [u32; 3],
}

impl RotaryParams {
    /// Of two words of two elements, those halves that are in a first word of pairs, and those in a second, as
    /// `permute_bytes` has them.
    #[must_use]
    pub const fn picks(&self) -> [u32; 2] {
        self.of_queries().picks()
    }

    /// What there is of queries.
    #[must_use]
    pub const fn of_queries(&self) -> QueryRotaryParams {
        QueryRotaryParams {
            turns: self.turns,
            pairs: self.pairs,
            interleaved: self.interleaved,
        }
    }
}

/// How queries alone are turned: as [`RotaryParams`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct QueryRotaryParams {
    /// See there.
    pub turns: u64,
    /// See there.
    pub pairs: u32,
    /// See there.
    pub interleaved: u32,
}

impl QueryRotaryParams {
    /// As [`RotaryParams::picks`].
    #[must_use]
    pub const fn picks(&self) -> [u32; 2] {
        if self.interleaved != 0 {
            [0x3210, 0x7654]
        } else {
            [0x5410, 0x7632]
        }
    }
}

/// What a kernel of latent attention takes. The maps come first: they must lie at a multiple of 64 bytes.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct LatentParams {
    /// `q`: 64 columns, heads, slabs of 64 columns, tokens. A box is one slab of `heads` heads.
    pub q_map: [u64; 16],
    /// The pool: 64 columns, 8 tokens, slabs, groups of 8 tokens, pages. A box is `piece_tokens` tokens of the first
    /// half of the values.
    pub left_map: [u64; 16],
    /// The same, with boxes of the other half and of what only keys have.
    pub right_map: [u64; 16],
    /// Everything else about the launch. Its units are items × `tiles`; `arrivals` is unused, and so are the strides
    /// where keys come by maps.
    pub attention: AttentionParams,
    /// By query heads in a tile: row `r` is token `r / heads`, head `r % heads` of those of the tile.
    pub heads: Divisor,
    /// By tiles that a token's heads take.
    pub tiles: Divisor,
    /// By tokens in a page.
    pub page_size: Divisor,
    /// Tokens of a box: a power of two that divides the page size and a block. Below 8 there are no boxes: keys come
    /// one by one, and the pool's maps are unused.
    pub piece_tokens: u32,
    /// A page behind the pool: what is read there is zero.
    pub outside: u32,
    /// As [`DecodeParams::long`].
    pub long: u32,
    /// Zero.
    pub reserved: [u32; 2],
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

/// How the page pool is seen through a tensor map of five dimensions: 64 columns, 8 tokens, slabs of 64
/// columns (of all heads where those are neighbours), groups of 8 tokens, pages (of all heads where
/// those are not). Of heads that have no whole slabs: the columns of a head, 8 tokens, heads, groups of 8 tokens, pages.
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

/// What a Hopper prefill kernel works on. The maps come first: they must lie at a multiple of 64 bytes. With more than 1,024
/// bytes LLVM has other code for those that feed, whose registers do not suffice then.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct PrefillParams {
    /// `q`: columns of a head, `pack` heads, tokens, 1, heads / `pack`. A box is 64 columns of
    /// [so many rows](Self::query_box_rows) of a tile; columns that the head lacks are zero.
    pub q_map: [u64; 16],
    /// The key pool, see [`PageCoordinates`]. A box is `box_tokens` of one head.
    pub k_map: [u64; 16],
    /// The value pool, likewise.
    pub v_map: [u64; 16],
    /// `out`: a box is 64 columns of a tile.
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
    /// Columns between the 64th of an output's head, or a partial state's, and the next: some where other launches of the
    /// run have padded heads, and this one's are not.
    pub gap: u32,
    /// KV heads whose units of all items come before those of the next ones; 0: all are together.
    pub kv_heads_together: u32,
    /// What becomes the pool before it is read; nothing where its `pages` are 0.
    pub convert: ConvertParams,
    /// How queries are turned; as they are where `turns` is 0. From here on only kernels read it that turn.
    pub rotary: QueryRotaryParams,
    /// Coordinates in `v_map`, as `pages` are those in `k_map`.
    pub value_pages: PageCoordinates,
    /// By tokens in a page of values, as `page_size` is of keys.
    pub value_page_size: Divisor,
    /// 1: only keys are in converted pages, values in those that they were made of: `convert` says which these are.
    pub values_apart: u32,
}

impl PrefillParams {
    /// Rows of a box of queries: of a tile, or of each of its warpgroups where those come one by one and no token has
    /// rows of two.
    #[must_use]
    pub const fn query_box_rows(one_by_one: bool, rows: u32, pack: u32) -> u32 {
        if one_by_one && pack <= 64 && pack.is_power_of_two() {
            64
        } else {
            rows
        }
    }
}

/// 64 keys of 8 bits of one table, with their values, and the page of 16-bit ones that they become.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct ConvertedPage {
    /// Index into the plan's page ids of the first page of the table.
    pub table: u32,
    /// The first key.
    pub key: u32,
    /// Keys that there are, at least one.
    pub keys: u32,
    /// The page that they become.
    pub page: u32,
}

impl ConvertedPage {
    /// Keys of a full page.
    pub const KEYS: u32 = 64;
}

/// What a prefill converts from 8 bits to 16, see `sm90::prefill::convert`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct ConvertParams {
    /// The 8-bit key pool.
    pub k: u64,
    /// The 8-bit value pool.
    pub v: u64,
    /// `[pages, kv_heads, 64, head_dim_qk]`: keys of 16 bits.
    pub to_k: u64,
    /// `[pages, kv_heads, 64, head_dim_v]`: their values; 0 where those are read where they are.
    pub to_v: u64,
    /// `[...]` [`ConvertedPage`]: those of the plan.
    pub list: u64,
    /// The plan's page ids.
    pub page_ids: u64,
    /// `[pages, kv_heads, 2]` u32: for the keys of a page and head and for its values, one more than the last epoch in
    /// which they were converted.
    pub done: u64,
    /// Three u32, 0 at first: pieces that are claimed; the epoch, which a launch ends; and CTAs that have found none left.
    /// Between launches the first and the last are 0.
    pub control: u64,
    /// Strides of the key pool, in vectors of 16 bytes.
    pub k_strides: KvStrides,
    /// Strides of the value pool, likewise.
    pub v_strides: KvStrides,
    /// By tokens in a page of 8-bit keys.
    pub page_size: Divisor,
    /// The launch's first entry of `list`, where no record says it.
    pub first_page: u32,
    /// How many entries are the launch's, or with a record any number but 0.
    pub pages: u32,
    /// What the pool holds: a constant of [`common::cache`](crate::common::cache).
    pub format: u32,
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

/// What the kernel takes that has prefill and decode in one.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct PodParams {
    /// The prefill; its ticket is unused.
    pub prefill: GatherPrefillParams,
    /// The decode, whose states somebody else merges; its ticket is unused.
    pub decode: GatherDecodeParams,
    /// `[`[`COUNTERS`](crate::sm80::pod::COUNTERS)`]` u32, zero before and after every launch.
    pub counters: u64,
    /// CTAs of prefill and of decode in a period of an SM's tickets; none of either: as many as there are.
    pub tickets: [u32; 2],
    /// Decodes that a CTA runs side by side, a warp each.
    pub virtual_decodes: u32,
    /// Zero.
    pub reserved: u32,
}
