//! Parameters of the kernels of the step around attention.
//!
//! A *vector* is 8 neighbouring elements of a row: 16 bytes, or 8 in pages of 8 bits. Strides are in vectors.

use bytemuck::{Pod, Zeroable};

use super::{KvStrides, ScaleParams};
use crate::common::divisor::Divisor;

/// Parameters of `qkv_step`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct QkvParams {
    /// `[tokens, q_heads + 2 · kv_heads, head_dim]`; the heads of a token are contiguous.
    pub source: u64,
    /// `[tokens, q_heads, head_dim]`; may be `source`.
    pub q: u64,
    /// The key pool.
    pub k: u64,
    /// The value pool.
    pub v: u64,
    /// As [`AppendParams::slots`](super::AppendParams::slots).
    pub slots: u64,
    /// The bias, in the layout of one source token, added to each token; 0: none.
    pub bias: u64,
    /// `[head_dim]`: weights of the RMS norm of queries; 0: no normalisation.
    pub q_weight: u64,
    /// The same for keys.
    pub k_weight: u64,
    /// `[rotated elements / 2]` u64: the angle per position of each pair, where 2⁶⁴ is a full turn; 0: no rotary
    /// embedding.
    pub turns: u64,
    /// `[tokens]` u32.
    pub positions: u64,
    /// Scales for 8-bit pages. Stride `page` is between pages if each token has scales of its own.
    pub scales: ScaleParams,
    /// Zero.
    pub reserved: [u32; 2],
    /// Strides of the key pool.
    pub k_strides: KvStrides,
    /// Strides of the value pool.
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
    /// Threads with vectors of a head, two each.
    pub lanes: u32,
    /// Log₂ of the threads per head, a part of a warp.
    pub lanes_log: u32,
    /// Threads whose vectors are rotated.
    pub turned: u32,
    /// 1: pairs are neighbouring elements.
    pub interleaved: u32,
    /// Factor of sine and cosine.
    pub magnitude: f32,
    /// Added to the mean square.
    pub eps: f32,
    /// Added to the weights of the normalisation.
    pub offset: f32,
    /// 1 / head dimension.
    pub inverse_dim: f32,
    /// Whether scales of 8-bit pages are given or computed: a constant of
    /// [`passes::quantise`](crate::passes::quantise).
    pub mode: u32,
    /// `pages × page_size` of the pool.
    pub pool_slots: u32,
    /// Tokens in a page.
    pub page_size: Divisor,
    /// Divides by the groups of heads of a token. A group is one head; or, for threads with two heads, two query heads
    /// or the key and the value of a KV head.
    pub groups: Divisor,
}

/// Parameters of `rms_norm`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct NormParams {
    /// `[tokens, width]`.
    pub x: u64,
    /// `[width]`.
    pub weight: u64,
    /// `[tokens, width]`, to which `x` is added; 0: none.
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

/// Parameters of `gate`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct GateParams {
    /// `[tokens, 2 · width]`: gates, then the numbers that they multiply.
    pub source: u64,
    /// `[tokens, width]`.
    pub out: u64,
    /// From one source token to the next.
    pub source_token: u32,
    /// From one token of `out` to the next.
    pub out_token: u32,
    /// Vectors to write.
    pub vectors: u32,
    /// 1: GELU; 0: SiLU.
    pub gelu: u32,
    /// Vectors of a token of `out`.
    pub per_token: Divisor,
    /// Zero.
    pub reserved: u32,
}

/// Parameters of `embed`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct EmbedParams {
    /// `[vocabulary, width]`.
    pub table: u64,
    /// `[tokens]` u32: rows of the table. Ids outside the table give zeros.
    pub ids: u64,
    /// `[tokens, width]`.
    pub out: u64,
    /// From one row of the table to the next.
    pub table_row: u32,
    /// From one token of `out` to the next.
    pub out_token: u32,
    /// Rows of the table.
    pub vocabulary: u32,
    /// Vectors to write.
    pub vectors: u32,
    /// Factor of the rows.
    pub scale: f32,
    /// Vectors of a token.
    pub per_token: Divisor,
}

/// The sampling rules of a row.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct DrawParams {
    /// Factor from differences of logits to exponents of 2 (log₂ e / temperature); 0: greedy, the largest logit is
    /// taken.
    pub scale: f32,
    /// Number of largest logits to keep; 0: all.
    pub top_k: u32,
    /// Share of the probability to keep, times 2³²; 0: all.
    pub top_p: u32,
    /// The smallest weight to keep, where the largest is [`ONE`](crate::step::sample::ONE).
    pub min_weight: u32,
    /// A random number.
    pub random: u64,
    /// 1 / `scale`; 0 if that is 0.
    pub inverse_scale: f32,
    /// Zero.
    pub reserved: u32,
}

/// Parameters of `sample`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct SampleParams {
    /// `[rows, vocabulary]`.
    pub logits: u64,
    /// `[rows]` [`DrawParams`].
    pub draws: u64,
    /// `[rows]` u32: the sampled tokens.
    pub ids: u64,
    /// From one row to the next, in elements.
    pub row: u64,
    /// Logits of a row.
    pub vocabulary: u32,
    /// The lowest bit of a logit, as an f32, that can be set in the logits' type.
    pub last_bit: u32,
}

/// In [`AdjustRow::newest`] and [`AdjustToken::token`]: there is no token.
pub const NO_TOKEN: u32 = u32::MAX;

/// A row of logits that is adjusted before a token is drawn from it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct AdjustRow {
    /// The row of logits; no other one has it.
    pub row: u32,
    /// Its first [`AdjustToken`].
    pub first: u32,
    /// One past its last. One more follows, which the kernel writes.
    pub end: u32,
    /// Index in `ids` of its newest token, which counts once more than `seen` says; or [`NO_TOKEN`].
    pub newest: u32,
    /// The presence penalty.
    pub presence: f32,
    /// The frequency penalty.
    pub frequency: f32,
    /// The repetition penalty, and 1 divided by it.
    pub repetition: [f32; 2],
}

/// A token whose logit is adjusted. A row has each token once.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct AdjustToken {
    /// The token.
    pub token: u32,
    /// Added to its logit.
    pub bias: f32,
    /// How often the text has it behind the prompt, and [`IN_PROMPT`](Self::IN_PROMPT).
    pub seen: u32,
    /// Its logit as it was.
    pub logit: f32,
}

impl AdjustToken {
    /// In [`seen`](Self::seen): the prompt has the token.
    pub const IN_PROMPT: u32 = 1 << 31;
}

/// Parameters of `adjust` and `restore`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct AdjustParams {
    /// `[…, vocabulary]`.
    pub logits: u64,
    /// [`AdjustRow`]s, one for each block.
    pub rows: u64,
    /// [`AdjustToken`]s.
    pub tokens: u64,
    /// u32: tokens, among them the newest of rows.
    pub ids: u64,
    /// From one row of logits to the next, in elements.
    pub row: u64,
    /// Logits of a row.
    pub vocabulary: u32,
    /// 1: writes the logits back that it adjusted before.
    pub restore: u32,
}

/// A row of logits whose log-probabilities are wanted.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct LogProbRow {
    /// The row of logits.
    pub row: u32,
    /// How many of the most probable tokens, at most [`MOST_TOP`](crate::step::sample::MOST_TOP).
    pub top: u32,
}

/// A token and the logarithm of its probability.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub struct LogProb {
    /// The token; [`NO_TOKEN`] if there are not so many.
    pub token: u32,
    /// The natural logarithm of its probability.
    pub value: f32,
}

/// Parameters of `log_probs`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct LogProbsParams {
    /// `[…, vocabulary]`.
    pub logits: u64,
    /// [`LogProbRow`]s, one for each block.
    pub rows: u64,
    /// u32: the token of each row of logits.
    pub ids: u64,
    /// `[rows, LOG_PROBS]` [`LogProb`].
    pub out: u64,
    /// From one row of logits to the next, in elements.
    pub row: u64,
    /// Logits of a row.
    pub vocabulary: u32,
    /// Zero.
    pub reserved: u32,
}
