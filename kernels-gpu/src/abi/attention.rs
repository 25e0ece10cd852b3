//! Parameters of every attention kernel.

use bytemuck::{Pod, Zeroable};

use super::{KvStrides, VariantParams};

/// Addresses of a plan's arrays and of the results: the parameters of every attention kernel.
///
/// Addresses are device addresses. Scratch arrays lie in the workspace, at offsets that are the same for all plans of a
/// bound, so a captured graph stays valid.
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
    /// `[total_q, q_heads]` f32, natural log; 0 if not wanted.
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
    /// `[merges, kv_heads]` u32, zero before and after every run: arrivals at a merge. Of latent heads `[merges, tiles, 8]`, where
    /// kernels merge [pieces](super::PieceOf).
    pub arrivals: u64,
    /// One u32 per launch of a run, zero before and after: the next unit to claim.
    pub ticket: u64,
    /// The launch's [`LaunchRecord`](super::LaunchRecord), which selects its part of `items`; `units` are then those of
    /// one item. 0 if the launch is for a single plan.
    pub record: u64,
    /// `[sink_tokens, q_heads]` f32, natural logits: a [sink](crate::state::with_sink) for each query head; 0: none. Sinks are
    /// applied when a final result is written, never to partial states. See [`VariantParams::sink_tokens`].
    pub sinks: u64,
    /// `[total_q]` u64: the [ancestors](crate::common::masks) of each query token; 0: no trees, or they are among `masks`.
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
    /// Scales of 8-bit keys and values.
    pub scales: ScaleParams,
    /// `[total_q]` [`TokenMask`], followed by the words that these refer to; 0: no masks of any length.
    pub masks: u64,
}

/// Where the [mask](crate::common::masks) of a query token is.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct TokenMask {
    /// Its words; 0: it hides nothing.
    pub words: u32,
    /// Bit `b` is the key `b - after` positions before the token's own.
    pub after: u32,
    /// Index of its first word, in u64 from the beginning of the array.
    pub first: u32,
    /// Zero.
    pub reserved: u32,
}

/// Scales of 8-bit keys and values: f32 in device memory, so that a captured graph sees new ones.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct ScaleParams {
    /// Scales of keys; 0: all are 1.
    pub k: u64,
    /// Scales of values; 0 if `k` is 0.
    pub v: u64,
    /// `[total_q]` u32, the request of each query token; 0: there is only one request.
    pub of_token: u64,
    /// Strides of `k`: `page` between requests, `head` between KV heads.
    pub k_strides: KvStrides,
    /// Strides of `v`, likewise.
    pub v_strides: KvStrides,
}

impl AttentionParams {
    /// If there is a record, which gives the number of items, divides `units` by `items`: they are then those of one
    /// item.
    pub const fn leave_to_record(&mut self, items: usize) {
        if self.record != 0 && items > 0 {
            self.units /= items as u32;
        }
    }
}
