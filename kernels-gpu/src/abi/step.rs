//! What the kernels of the step around attention take.
//!
//! A *vector* is 8 neighbouring elements of a row: 16 bytes, or 8 in pages of 8 bits. Strides are in vectors.

use bytemuck::{Pod, Zeroable};

use super::{KvStrides, ScaleParams};
use crate::common::divisor::Divisor;

/// What `qkv_step` works on.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct QkvParams {
    /// `[tokens, q_heads + 2 · kv_heads, head_dim]`, the heads of a token without gaps.
    pub source: u64,
    /// `[tokens, q_heads, head_dim]`; may be `source`.
    pub q: u64,
    /// The key pool.
    pub k: u64,
    /// The value pool.
    pub v: u64,
    /// As [`AppendParams::slots`](super::AppendParams::slots).
    pub slots: u64,
    /// A token of the source, added to each; 0: none.
    pub bias: u64,
    /// `[head_dim]`: weights of the normalisation of queries; 0: there is none.
    pub q_weight: u64,
    /// The same of keys.
    pub k_weight: u64,
    /// `[head_dim of the turned part / 2]` u64: by how much a pair is turned from a position to the next, of a turn of
    /// 2⁶⁴; 0: nothing is turned.
    pub turns: u64,
    /// `[tokens]` u32.
    pub positions: u64,
    /// Of pages of 8 bits: `page` of its strides is from page to page where scales are of each token.
    pub scales: ScaleParams,
    /// How keys lie in their pool.
    pub k_strides: KvStrides,
    /// How values lie in theirs.
    pub v_strides: KvStrides,
    /// From one source token to the next.
    pub source_token: u32,
    /// From one token of `q` to the next.
    pub q_token: u32,
    /// From one head of `q` to the next.
    pub q_head: u32,
    /// Tokens.
    pub tokens: u32,
    /// Query heads.
    pub q_heads: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Threads that have vectors of a head, two each.
    pub lanes: u32,
    /// Threads of a head, as a power of two: a part of a warp.
    pub lanes_log: u32,
    /// Threads whose vectors are turned.
    pub turned: u32,
    /// 1: pairs are neighbours.
    pub interleaved: u32,
    /// Sine and cosine are multiplied by it.
    pub magnitude: f32,
    /// Added to the mean square.
    pub eps: f32,
    /// Added to the weights of the normalisation.
    pub offset: f32,
    /// 1 / head dimension.
    pub inverse_dim: f32,
    /// Where scales of 8-bit pages come from: a constant of [`passes::quantise`](crate::passes::quantise).
    pub mode: u32,
    /// `pages × page_size` of the pool.
    pub pool_slots: u32,
    /// Tokens in a page.
    pub page_size: Divisor,
    /// By what a thread's heads are apart: heads of a token by heads of a thread.
    pub groups: Divisor,
}

/// What `rms_norm` works on.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct NormParams {
    /// `[tokens, width]`.
    pub x: u64,
    /// `[width]`.
    pub weight: u64,
    /// `[tokens, width]`, what `x` is added to; 0: none.
    pub residual: u64,
    /// `[tokens, width]`; may be `x`.
    pub out: u64,
    /// From one token of `x` to the next.
    pub x_token: u32,
    /// From one token of `residual` to the next.
    pub residual_token: u32,
    /// From one token of `out` to the next.
    pub out_token: u32,
    /// Vectors of a row.
    pub vectors: u32,
    /// Added to the mean square.
    pub eps: f32,
    /// Added to the weights.
    pub offset: f32,
    /// 1 / width.
    pub inverse_width: f32,
    /// Zero.
    pub reserved: u32,
}

/// What `gate` works on.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct GateParams {
    /// `[tokens, 2 · width]`: gates, then what they multiply.
    pub source: u64,
    /// `[tokens, width]`.
    pub out: u64,
    /// From one source token to the next.
    pub source_token: u32,
    /// From one token of `out` to the next.
    pub out_token: u32,
    /// Vectors that are written.
    pub vectors: u32,
    /// 1: GELU.
    pub gelu: u32,
    /// Vectors of a token of `out`.
    pub per_token: Divisor,
    /// Zero.
    pub reserved: u32,
}

/// What `embed` works on.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct EmbedParams {
    /// `[vocabulary, width]`.
    pub table: u64,
    /// `[tokens]` u32: rows of the table. One that is not there is zeros.
    pub ids: u64,
    /// `[tokens, width]`.
    pub out: u64,
    /// From one row of the table to the next.
    pub table_row: u32,
    /// From one token of `out` to the next.
    pub out_token: u32,
    /// Rows of the table.
    pub vocabulary: u32,
    /// Vectors that are written.
    pub vectors: u32,
    /// What rows are multiplied by.
    pub scale: f32,
    /// Vectors of a token.
    pub per_token: Divisor,
}

/// How the token of a row is drawn.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct DrawParams {
    /// What differences of logits are multiplied by to become exponents of 2; 0: the largest logit is taken.
    pub scale: f32,
    /// How many of the largest logits stay; 0: all.
    pub top_k: u32,
    /// The share that stays, of 2³²; 0: all.
    pub top_p: u32,
    /// The smallest weight that stays, where the largest is [`ONE`](crate::step::sample::ONE).
    pub min_weight: u32,
    /// A random number.
    pub random: u64,
    /// Zero.
    pub reserved: [u32; 2],
}

/// What `sample` works on.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct SampleParams {
    /// `[rows, vocabulary]`.
    pub logits: u64,
    /// `[rows]` [`DrawParams`].
    pub draws: u64,
    /// `[rows]` u32, written.
    pub ids: u64,
    /// From one row to the next, in elements.
    pub row: u64,
    /// Logits of a row.
    pub vocabulary: u32,
    /// The lowest bit of a logit in single precision that is not 0 in all.
    pub last_bit: u32,
}
