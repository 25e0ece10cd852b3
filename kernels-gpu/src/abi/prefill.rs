//! What prefill kernels take: by tensor maps, and row by row.

use bytemuck::{Pod, Zeroable};

use super::{AttentionParams, ConvertParams, KvStrides, QueryRotaryParams};
use crate::common::divisor::Divisor;

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

/// What a Hopper prefill kernel works on. The maps come first: they must lie at a multiple of 64 bytes. It must not
/// exceed 1,024 bytes: above, LLVM makes other code for the producer warps, which takes more registers than they have.
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
