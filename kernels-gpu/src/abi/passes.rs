//! What the kernels around attention take: merging states, appending keys and values.

use bytemuck::{Pod, Zeroable};

use super::{ConvertParams, KvStrides, RotaryParams, ScaleParams};
use crate::common::divisor::Divisor;

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
    /// `[rows]` [`MergeRow`](super::MergeRow).
    pub rows: u64,
    /// `[...]` u32: the slots of all rows.
    pub merge_slots: u64,
    /// `[tokens, q_heads, head_dim_v]`.
    pub out: u64,
    /// `[tokens, q_heads]` f32, natural log; 0 where it is not wanted.
    pub lse: u64,
    /// The launch's [`LaunchRecord`](super::LaunchRecord), which says how many rows there are
    /// and which is the first; or 0.
    pub record: u64,
    /// As [`AttentionParams::sinks`](super::AttentionParams::sinks).
    pub sinks: u64,
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
    /// 1: results of a variant [without a softmax](crate::variant::Variant::SOFTMAX), which add up.
    pub add_up: u32,
}

/// The most ranks whose results are merged directly: the GPUs of one host.
pub const MAX_GROUP: usize = 8;

/// What a rank of a group keeps in its own memory, from merge to merge.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct RankControl {
    /// Merges that are done.
    pub round: u32,
    /// Blocks of the present one that are done.
    pub blocks: u32,
    /// One more than the rank that did not come in time, or [`STOPPED`](crate::passes::ranks::STOPPED); 0: none was missed.
    pub missed: u32,
    /// Not 0: kernels must not wait any more, as the host of a rank asked. One more than that rank.
    pub stop: u32,
    /// Zero.
    pub reserved: [u32; 4],
    /// The last round that each rank came to: the first word of its sector, which that rank writes.
    pub signals: [[u32; 8]; MAX_GROUP],
}

/// What `merge_ranks` works on. All tensors are of the 16-bit float in the kernel's name, LSEs f32 in natural log.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct RankMergeParams {
    /// `[tokens, q_heads, head_dim_v]` of each rank, in merging order; 0 beyond the last.
    pub out_of: [u64; MAX_GROUP],
    /// `[tokens, q_heads]` of each.
    pub lse_of: [u64; MAX_GROUP],
    /// This rank's word in the [`RankControl::signals`] of each; 0 for itself.
    pub signals: [u64; MAX_GROUP],
    /// This rank's [`RankControl`].
    pub control: u64,
    /// `[tokens, q_heads, head_dim_v]`.
    pub out: u64,
    /// `[tokens, q_heads]`; 0 where it is not wanted.
    pub lse: u64,
    /// How long to wait for others.
    pub timeout_ns: u64,
    /// Chunks to merge; below [`Divisor::LIMIT`].
    pub chunks: u32,
    /// `q_heads × head_dim_v / 8`.
    pub chunks_per_row: Divisor,
    /// `head_dim_v / 8`.
    pub chunks_per_head: Divisor,
    /// Query heads.
    pub q_heads: u32,
    /// From one output token to the next, in elements.
    pub out_token_stride: u32,
    /// The first token that is merged.
    pub first_token: u32,
    /// Ranks of the group.
    pub ranks: u32,
    /// This one among them.
    pub rank: u32,
    /// Constants of [`passes::ranks`](crate::passes::ranks).
    pub mode: u32,
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

/// Where new keys (or values) of 16 bits are, and where they go with 8. Strides are in vectors of 8 numbers.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct QuantiseTensor {
    /// `[tokens, kv_heads, head_dim]`.
    pub source: u64,
    /// The page pool.
    pub pool: u64,
    /// f32; 0: all are 1.
    pub scales: u64,
    /// How scales lie: `page` is from page to page, or from request to request where they are given so.
    pub scale_strides: KvStrides,
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
    /// Vectors of a row.
    pub vectors: u32,
    /// Threads of a row, as a power of two: a part of a warp.
    pub lanes_log: u32,
    /// Zero.
    pub reserved: u32,
}

/// What `append_quantised` works on.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct QuantiseParams {
    /// As [`AppendParams::slots`].
    pub slots: u64,
    /// `[tokens]` u32, the request of each new token; 0: there is one.
    pub of_token: u64,
    /// Keys.
    pub k: QuantiseTensor,
    /// Values.
    pub v: QuantiseTensor,
    /// As [`AppendParams::pool_slots`].
    pub pool_slots: u32,
    /// Tokens × KV heads.
    pub rows: u32,
    /// Whether scales are given or computed: a constant of [`passes::quantise`](crate::passes::quantise).
    pub mode: u32,
    /// Tokens in a page.
    pub page_size: Divisor,
    /// KV heads.
    pub kv_heads: Divisor,
    /// What the pool holds: a constant of [`common::cache`](crate::common::cache).
    pub format: u32,
}

/// What `widen_by_token` works on.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct WidenParams {
    /// From where, and to where. `done` and `control` are unused.
    pub convert: ConvertParams,
    /// Of each token and KV head.
    pub scales: ScaleParams,
    /// The [`LaunchRecord`](super::LaunchRecord) of the prefill, which says which pages are widened; or 0.
    pub record: u64,
    /// KV heads.
    pub kv_heads: Divisor,
    /// Vectors of 16 numbers in a row, as a power of two.
    pub vectors_log: u32,
}

/// What `turn_rows` works on. Strides are in vectors of 8 elements, 16 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct TurnParams {
    /// From which pools to which pages. `done` and `control` are unused.
    pub convert: ConvertParams,
    /// How they are turned.
    pub rotary: RotaryParams,
    /// The [`LaunchRecord`](super::LaunchRecord) of the prefill, which says which entries are its own; or 0.
    pub record: u64,
    /// KV heads.
    pub kv_heads: u32,
    /// Threads of a head, two vectors each, as a power of two.
    pub lanes_log: u32,
}

/// What `pad_heads` works on: a tensor of heads, dense in each token, and the same with heads of another dimension.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct PadParams {
    /// The tensor that is read.
    pub from: u64,
    /// The tensor that is written.
    pub to: u64,
    /// Chunks of 8 elements that are written; below [`Divisor::LIMIT`].
    pub chunks: u32,
    /// Of a head that is written.
    pub chunks_per_head: Divisor,
    /// By heads of a token.
    pub heads: Divisor,
    /// From one token to the next that is read, in elements.
    pub from_token: u32,
    /// From one head to the next that is read.
    pub from_head: u32,
    /// From one token to the next that is written.
    pub to_token: u32,
    /// From one head to the next that is written.
    pub to_head: u32,
    /// Elements of a head that is not padded.
    pub dim: u32,
    /// Elements from one slab of it to the next.
    pub step: u32,
    /// 1: from padded heads to those that are not.
    pub back: u32,
}

/// What `narrow_rows` works on.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct NarrowParams {
    /// `[tokens, heads, head_dim]` f32, heads dense in each token.
    pub from: u64,
    /// The same in 16 bits, dense.
    pub to: u64,
    /// Chunks of 8 elements; below [`Divisor::LIMIT`].
    pub chunks: u32,
    /// `heads × head_dim / 8`.
    pub chunks_per_token: Divisor,
    /// From one token to the next that is read, in elements.
    pub from_token: u32,
    /// Zero.
    pub reserved: u32,
}
