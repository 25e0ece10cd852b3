//! What every attention kernel takes.

use bytemuck::{Pod, Zeroable};

use super::{KvStrides, VariantParams};

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
