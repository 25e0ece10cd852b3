//! Parameters of the decode kernels: with tensor maps, of latent attention, and with gathered rows.

use bytemuck::{Pod, Zeroable};

use super::{AttentionParams, KvStrides, RotaryParams};
use crate::common::divisor::Divisor;

/// Parameters of a decode kernel that loads pages with TMA.
///
/// The tensor maps (128 bytes each) have these dimensions: 64 elements of a row, 8 tokens, half rows (64 elements, of
/// one head or of all), groups of 8 tokens, pages (or pages × heads). A box has `piece_tokens` tokens of one head.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct DecodeParams {
    /// Tensor map of the key pool.
    pub k_map: [u64; 16],
    /// Tensor map of the value pool.
    pub v_map: [u64; 16],
    /// Everything else about the launch. If maps are used, `k` and `v` are not.
    pub attention: AttentionParams,
    /// Divides by the query heads per KV head.
    pub group: Divisor,
    /// Divides by the KV heads.
    pub kv_heads: Divisor,
    /// Divides by the tokens in a page.
    pub page_size: Divisor,
    /// Tokens of a box: a divisor of the page size and of 32, a multiple of 8. 1: keys and values are loaded one by one,
    /// by the following fields instead of the maps.
    pub piece_tokens: u32,
    /// Strides of the key pool in vectors of 16 bytes; the pool has fewer than 2³² of them.
    pub k_vectors: KvStrides,
    /// Strides of the value pool, likewise.
    pub v_vectors: KvStrides,
    /// Vectors from one slab of a key to the next. A slab has 64 elements, or all of a smaller head.
    pub slab_step: u32,
    /// Vectors of a key. What a kernel has room for behind them gets zeros.
    pub vectors: u32,
    /// Step of the coordinate in the third dimension per head.
    pub half_per_head: u32,
    /// Step of the coordinate in the fifth dimension per page.
    pub page_per_page: u32,
    /// Step of the coordinate in the fifth dimension per head.
    pub page_per_head: u32,
    /// Stages of the ring in shared memory.
    pub stages: u32,
    /// Units that a CTA claims at a time: fewer than it has slots.
    pub run: u32,
    /// A coordinate in the fifth dimension past the pool, where reads give zeros.
    pub outside: u32,
    /// 1: the launch reads several times the capacity of L2. If there is a launch record, its value counts.
    pub long: u32,
    /// Columns of a head in the outputs, for head dimensions 80 and 96: the head dimension, or 128 as in [partial
    /// states](crate::common::decode::output_columns).
    pub out_columns: u32,
    /// 1: the launch may begin while the one before it still runs, and waits for its end before it reads queries, keys and
    /// counters. 0: it reads nothing that the launch before it writes, and ends after it.
    pub early: u32,
    /// Zero.
    pub reserved: u32,
    /// The rotary embedding, in kernels that apply it.
    pub rotary: RotaryParams,
}

impl DecodeParams {
    /// Whether keys and values are loaded one by one.
    #[cfg(target_arch = "nvptx64")]
    #[inline(always)]
    pub(crate) const fn loads_rows(&self) -> bool {
        self.piece_tokens == 1
    }
}

/// Parameters of a kernel of latent attention. The maps come first because they must be aligned to 64 bytes.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct LatentParams {
    /// `q`: 64 columns, heads, slabs of 64 columns, tokens. A box has one slab of `heads` heads.
    pub q_map: [u64; 16],
    /// The pool: 64 columns, 8 tokens, slabs, groups of 8 tokens, pages. A box has the first half of the values of
    /// `piece_tokens` tokens; for tiles of few rows, one of three equal parts of their columns.
    pub left_map: [u64; 16],
    /// The same, with boxes of the other half of the values and of the part that only keys have. If that part is
    /// `apart`, a box has 8 tokens, and of the right half (or last third) only the columns of the values.
    pub right_map: [u64; 16],
    /// The pool of the part that only keys have, if it is `apart`: as above, one slab. A box has 8 tokens.
    pub rope_map: [u64; 16],
    /// Everything else about the launch. Its units are items × `tiles`. Only kernels that merge pieces use `arrivals`; the
    /// strides are unused if keys are loaded with TMA.
    pub attention: AttentionParams,
    /// The part that only keys have, if it is `apart`: the address of the first key's. Kernels that load with TMA use
    /// neither this nor the strides.
    pub rope: u64,
    /// From one page of that part to the next, in elements.
    pub rope_page: u32,
    /// From one token of that part to the next, in elements.
    pub rope_token: u32,
    /// Divides by the query heads in a tile: row `r` is token `r / heads`, and head `r % heads` of the tile.
    pub heads: Divisor,
    /// Divides by the tiles that a token's heads take.
    pub tiles: Divisor,
    /// Divides by the tokens in a page.
    pub page_size: Divisor,
    /// Tokens of a box: a power of two that divides the page size and a block. Below 8, keys are loaded one by one
    /// instead, and the pool's maps are unused.
    pub piece_tokens: u32,
    /// A page past the pool, where reads give zeros.
    pub outside: u32,
    /// As [`DecodeParams::long`].
    pub long: u32,
    /// 1: the part of 64 columns that only keys have is in a pool of its own, with pages of as many tokens. 0: it follows
    /// the values.
    pub apart: u32,
    /// As [`DecodeParams::early`].
    pub early: u32,
}

/// Parameters of a decode kernel that gathers keys and values row by row.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct GatherDecodeParams {
    /// Everything else about the launch; the strides of the pools are unused. Its units are items × `cuts` × KV heads.
    pub attention: AttentionParams,
    /// Strides of the key pool in vectors of 16 bytes; the pool has fewer than 2³² of them.
    pub k_vectors: KvStrides,
    /// Strides of the value pool, likewise.
    pub v_vectors: KvStrides,
    /// Divides by the tokens in a page.
    pub page_size: Divisor,
    /// Divides by the query heads per KV head.
    pub group: Divisor,
    /// Divides by the KV heads.
    pub kv_heads: Divisor,
    /// Divides by the pieces that an item is cut into: as many as the largest item needs.
    pub cuts: Divisor,
    /// Query tokens of a piece.
    pub tile_tokens: u32,
    /// 1: the warps of a CTA share each unit. 0: each warp has its own units.
    pub team: u32,
    /// As [`DecodeParams::long`].
    pub long: u32,
    /// Vectors of a key. What a kernel has room for behind them gets zeros.
    pub vectors: u16,
    /// Vectors from one slab of a key to the next. A slab has 128 bytes, or all of a smaller key of the kernel.
    pub slab_step: u16,
}
