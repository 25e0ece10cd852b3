//! What decode kernels take: by tensor maps, of latent heads, and row by row.

use bytemuck::{Pod, Zeroable};

use super::{AttentionParams, KvStrides, RotaryParams};
use crate::common::divisor::Divisor;

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
    /// Columns of a head in the outputs, for heads of 80 and 96: as many, or 128, as
    /// [partial states](crate::common::decode::output_columns) have.
    pub out_columns: u32,
    /// What turns queries and keys, in kernels that do.
    pub rotary: RotaryParams,
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
