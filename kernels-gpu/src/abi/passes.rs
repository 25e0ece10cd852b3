//! Parameters of the kernels around attention: merging states, appending keys and values, converting.

use bytemuck::{Pod, Zeroable};

use super::{ConvertParams, KvStrides, RotaryParams, ScaleParams};
use crate::common::divisor::Divisor;

/// Parameters of `merge_states`.
///
/// A *chunk* is 8 neighbouring elements of one output row and head, the work of one thread.
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
    /// `[tokens, q_heads]` f32, natural log; 0 if not wanted.
    pub lse: u64,
    /// The launch's [`LaunchRecord`](super::LaunchRecord), which gives the first row and the number of rows; or 0.
    pub record: u64,
    /// As [`AttentionParams::sinks`](super::AttentionParams::sinks).
    pub sinks: u64,
    /// Chunks of all rows, if there is no record; below [`Divisor::LIMIT`].
    pub chunks: u32,
    /// `q_heads × head_dim_v / 8`.
    pub chunks_per_row: Divisor,
    /// `head_dim_v / 8`.
    pub chunks_per_head: Divisor,
    /// Query heads.
    pub q_heads: u32,
    /// From one output token to the next, in elements (head stride is `head_dim_v`).
    pub out_token_stride: u32,
    /// 1: results of a variant [without a softmax](crate::variant::Variant::SOFTMAX), which are added.
    pub add_up: u32,
    /// Divides by the number of sinks: [`VariantParams::sink_tokens`](super::VariantParams::sink_tokens) × `q_heads`.
    pub sink_count: Divisor,
    /// Zero.
    pub reserved: u32,
}

/// The largest number of ranks whose results are merged directly: the GPUs of one host.
pub const MAX_GROUP: usize = 8;

/// The state that a rank of a group keeps in its own memory between merges.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct RankControl {
    /// Number of completed merges.
    pub round: u32,
    /// Completed blocks of the current merge.
    pub blocks: u32,
    /// The rank that timed out, plus 1; or [`STOPPED`](crate::passes::ranks::STOPPED); 0: none.
    pub missed: u32,
    /// Not 0: kernels must stop waiting, at the request of a rank's host; that rank, plus 1.
    pub stop: u32,
    /// Zero.
    pub reserved: [u32; 4],
    /// The last round that each rank reached: the first word of its sector, written by that rank.
    pub signals: [[u32; 8]; MAX_GROUP],
}

/// Parameters of `merge_ranks`. Tensors have the 16-bit float type in the kernel's name; LSEs are f32, natural log.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct RankMergeParams {
    /// `[tokens, q_heads, head_dim_v]` of each rank, in the order of merging; 0 beyond the last rank.
    pub out_of: [u64; MAX_GROUP],
    /// `[tokens, q_heads]` of each.
    pub lse_of: [u64; MAX_GROUP],
    /// This rank's word in the [`RankControl::signals`] of each; 0 for itself.
    pub signals: [u64; MAX_GROUP],
    /// This rank's [`RankControl`].
    pub control: u64,
    /// `[tokens, q_heads, head_dim_v]`.
    pub out: u64,
    /// `[tokens, q_heads]`; 0 if not wanted.
    pub lse: u64,
    /// Timeout of the wait for other ranks.
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
    /// The first token to merge.
    pub first_token: u32,
    /// Ranks of the group.
    pub ranks: u32,
    /// The index of this rank.
    pub rank: u32,
    /// Flags: constants of [`passes::ranks`](crate::passes::ranks).
    pub mode: u32,
    /// Zero.
    pub reserved: u32,
}

/// The largest number of results that are merged in one call.
pub const MAX_RESULTS: usize = 8;

/// Parameters of `merge_results`. Tensors have the type in the kernel's name; LSEs are f32, natural log.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct ResultMergeParams {
    /// `[tokens, q_heads, head_dim_v]` of each result, in the order of merging; 0 beyond the last.
    pub out_of: [u64; MAX_RESULTS],
    /// `[tokens, q_heads]` of each.
    pub lse_of: [u64; MAX_RESULTS],
    /// From one token of each `out_of` to the next, in elements.
    pub token_stride_of: [u32; MAX_RESULTS],
    /// `[tokens, q_heads, head_dim_v]`.
    pub out: u64,
    /// `[tokens, q_heads]`; 0 if not wanted.
    pub lse: u64,
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
    /// Number of results.
    pub results: u32,
}

/// In `append_paged_kv`'s slots: the token is not written (padding of a captured graph).
pub const NO_SLOT: u32 = u32::MAX;

/// Source and target of the new keys or values. Strides are in *vectors*: 16 bytes, or 8 if some stride or address is
/// not a multiple of 16.
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
    /// Vectors of a head, or of all heads if these are contiguous on both sides.
    pub vectors_per_head: Divisor,
}

/// Parameters of `append_paged_kv`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct AppendParams {
    /// `[tokens]` u32: `page × page_size + offset` of each new token. Tokens with slots outside the pool, such as
    /// [`NO_SLOT`], are skipped.
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

/// Source of new 16-bit keys or values, and their 8-bit target. Strides are in vectors of 8 numbers.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct QuantiseTensor {
    /// `[tokens, kv_heads, head_dim]`.
    pub source: u64,
    /// The page pool.
    pub pool: u64,
    /// f32; 0: all are 1.
    pub scales: u64,
    /// Strides of the scales: `page` is between pages, or between requests if scales are given per request.
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
    /// Log₂ of the threads per row, a part of a warp.
    pub lanes_log: u32,
    /// Zero.
    pub reserved: u32,
}

/// Parameters of `append_quantised`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct QuantiseParams {
    /// As [`AppendParams::slots`].
    pub slots: u64,
    /// `[tokens]` u32, the request of each new token; 0: there is only one request.
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
    /// The pool's 8-bit format: a constant of [`common::cache`](crate::common::cache).
    pub format: u32,
}

/// Parameters of `widen`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct WidenParams {
    /// Source and target. `done` and `control` are unused.
    pub convert: ConvertParams,
    /// Scales of each token and KV head, or none.
    pub scales: ScaleParams,
    /// Vectors of 16 numbers per row.
    pub vectors: u32,
    /// Zero.
    pub reserved: u32,
    /// The [`LaunchRecord`](super::LaunchRecord) of the prefill, which selects the pages to widen; or 0.
    pub record: u64,
    /// KV heads.
    pub kv_heads: Divisor,
    /// Log₂ of the next power of two of these vectors.
    pub vectors_log: u32,
}

/// Parameters of `turn_rows`, which applies rotary embeddings to keys. Strides are in vectors of 8 elements, 16 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct TurnParams {
    /// Source pools and target pages. `done` and `control` are unused.
    pub convert: ConvertParams,
    /// The rotary embedding.
    pub rotary: RotaryParams,
    /// The [`LaunchRecord`](super::LaunchRecord) of the prefill, which selects its entries; or 0.
    pub record: u64,
    /// KV heads.
    pub kv_heads: u32,
    /// Log₂ of the threads per head, with two vectors each.
    pub lanes_log: u32,
}

/// Parameters of `pad_heads`: copies a tensor to one with another head dimension. Heads are dense within a token.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct PadParams {
    /// The source tensor.
    pub from: u64,
    /// The target tensor.
    pub to: u64,
    /// Chunks of 8 elements to write; below [`Divisor::LIMIT`].
    pub chunks: u32,
    /// Divides by the chunks of a target head.
    pub chunks_per_head: Divisor,
    /// Divides by the heads of a token.
    pub heads: Divisor,
    /// Source stride between tokens, in elements.
    pub from_token: u32,
    /// Source stride between heads.
    pub from_head: u32,
    /// Target stride between tokens.
    pub to_token: u32,
    /// Target stride between heads.
    pub to_head: u32,
    /// Elements of an unpadded head.
    pub dim: u32,
    /// Elements between the starts of consecutive slabs in an unpadded head.
    pub step: u32,
    /// 1: copies padded heads to unpadded ones; 0: the reverse.
    pub back: u32,
}

/// Parameters of `narrow_rows`.
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
    /// Source stride between tokens, in elements.
    pub from_token: u32,
    /// Zero.
    pub reserved: u32,
}
