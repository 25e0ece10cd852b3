//! Parameters of prefill kernels: those with tensor maps, and those that gather row by row.

use bytemuck::{Pod, Zeroable};

use super::{AttentionParams, ConvertParams, KvStrides, QueryRotaryParams};
use crate::common::divisor::Divisor;

/// Coordinates of the page pool in its tensor map of five dimensions: 64 columns; 8 tokens; slabs of 64 columns (of all
/// heads, for NHD); groups of 8 tokens; pages (of all heads, for HND). For head dimensions that are no multiple of 64:
/// columns of a head; 8 tokens; heads; groups of 8 tokens; pages.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct PageCoordinates {
    /// Coordinate of dimension 2 per KV head, in heads: 1 for NHD, 0 for HND.
    pub step_in_token: u32,
    /// Coordinate of dimension 4 per page: 1 for NHD, `kv_heads` for HND.
    pub step_per_page: u32,
    /// Coordinate of dimension 4 per KV head: 0 for NHD, 1 for HND.
    pub step_per_head: u32,
    /// A coordinate of dimension 4 past the pool's end: TMA reads zeros there.
    pub outside: u32,
}

/// Parameters of the Hopper prefill kernels. The tensor maps come first, as they must be aligned to 64 bytes. The size
/// must not exceed 1,024 bytes: above that LLVM generates other code, which needs more registers than producer warps
/// have.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct PrefillParams {
    /// `q`: columns of a head, `pack` heads, tokens, 1, heads / `pack`. A box is 64 columns of
    /// [`query_box_rows`](Self::query_box_rows) rows of a tile; columns past the head dimension are zero.
    pub q_map: [u64; 16],
    /// The key pool, see [`PageCoordinates`]. A box is `box_tokens` of one head.
    pub k_map: [u64; 16],
    /// The value pool, likewise.
    pub v_map: [u64; 16],
    /// `out`: a box is 64 columns of a tile.
    pub out_map: [u64; 16],
    /// Parameters common to all attention kernels; `rows`, `merges` and `arrivals` are unused.
    pub attention: AttentionParams,
    /// Coordinates in `k_map` and `v_map`.
    pub pages: PageCoordinates,
    /// Items of the launch; units are items × query heads / `pack`.
    pub items: u32,
    /// Tokens in a box of `k_map`: a multiple of 8 that divides the page size and the keys of a block. 1: the pools
    /// have no tensor maps, rows are copied individually, and the pools' strides are in vectors of 16 bytes.
    pub box_tokens: u32,
    /// Divides by `pack`, the number of query heads of one KV head that share a tile: row `r` is token `r / pack`, head
    /// `r % pack`. `pack` divides the group.
    pub pack: Divisor,
    /// Divides by the tokens of a page.
    pub page_size: Divisor,
    /// Gap, in columns, after the 64th column of a head in outputs and partial states. It is not 0 if other launches of
    /// the run pad heads and this one does not.
    pub gap: u32,
    /// Tile order: the tiles of this many KV heads, for all items, come before those of the next KV heads; 0: all KV
    /// heads.
    pub kv_heads_together: u32,
    /// Conversion of pages before they are read; none if its `pages` are 0.
    pub convert: ConvertParams,
    /// Rotary embedding of queries; none if `turns` is 0. Only kernels that can apply it read this and the following
    /// fields.
    pub rotary: QueryRotaryParams,
    /// Coordinates in `v_map`, as `pages` are those in `k_map`.
    pub value_pages: PageCoordinates,
    /// Divides by the tokens of a page of values, as `page_size` does for keys.
    pub value_page_size: Divisor,
    /// 1: only keys are in converted pages; values are in the original pages, which `convert` names.
    pub values_apart: u32,
}

impl PrefillParams {
    /// Rows of a TMA box of queries: those of a tile; or those of one warpgroup (64), if warpgroups are loaded
    /// separately (`one_by_one`) and the rows of a token never span two warpgroups.
    #[must_use]
    pub const fn query_box_rows(one_by_one: bool, rows: u32, pack: u32) -> u32 {
        if one_by_one && pack <= 64 && pack.is_power_of_two() {
            64
        } else {
            rows
        }
    }
}

/// Parameters of prefill kernels that gather keys and values row by row.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct GatherPrefillParams {
    /// Parameters common to all attention kernels; `rows`, `merges`, `arrivals` and the strides of the pools are
    /// unused. Units are items × query heads / `pack` × `cuts`.
    pub attention: AttentionParams,
    /// Strides of the key pool in vectors of 16 bytes; the pool has fewer than 2³² of them.
    pub k_vectors: KvStrides,
    /// Strides of the value pool, likewise.
    pub v_vectors: KvStrides,
    /// Divides by the tokens of a page.
    pub page_size: Divisor,
    /// Divides by `pack`, the number of query heads of one KV head that share a tile: row `r` is token `r / pack`, head
    /// `r % pack`. `pack` divides the group.
    pub pack: Divisor,
    /// Divides by the number of tiles per item: as many as the largest item needs.
    pub cuts: Divisor,
    /// Divides by query heads / `pack`.
    pub heads: Divisor,
    /// Divides by query heads per KV head / `pack`.
    pub heads_per_kv_head: Divisor,
    /// Query tokens of a tile: its rows / `pack`.
    pub tile_tokens: u32,
    /// For general kernels: the bytes of a head's columns in the pools, the slabs of 64 columns that it has, and the bytes
    /// from one slab to the next. Slabs of padded heads may overlap; columns past the last are zero.
    pub columns: [u32; 3],
    /// Zero.
    pub reserved: u32,
}
