//! Where partial states are merged.

use crate::plan::{
    data::{Kernel, MergeMode, Plan, PlanOptions, TileGroup},
    model::DeviceDescription,
};

/// Where the partial states of a plan are merged: as the options say, or in the faster way.
pub fn merge_mode(device: &DeviceDescription, options: &PlanOptions, plan: &Plan) -> MergeMode {
    match options.merge_mode {
        MergeMode::Auto if merges_in_passing(device, options, plan) => MergeMode::Fused,
        MergeMode::Auto if merges_pieces(options, plan) => MergeMode::Fused,
        MergeMode::Auto => MergeMode::Kernel,
        mode => mode,
    }
}

/// Whether kernels of latent attention merge rows of exactly two items; all other rows are left to the kernel. These kernels have more
/// code, which costs short steps 1 to 2 %, so at least half of the merges must be such. That is a choice: batches in between were not
/// measured. Not with fixed splits: that would let results depend on the other merges of the batch.
fn merges_pieces(options: &PlanOptions, plan: &Plan) -> bool {
    let can = |group: &TileGroup| group.id.is_some_and(|id| id.with_pieces().is_some());
    let pieces = || plan.merges.iter().filter(|merge| merge.slots == 2).count();
    plan.spec.latent
        && !options.split.is_fixed()
        && !plan.spec.has_f32_outputs()
        && !plan.merges.is_empty()
        && 2 * pieces() >= plan.merges.len()
        && plan.groups.iter().any(can)
}

/// Whether the CTAs of a plan merge faster than a separate kernel. In tiles of few rows, all warps merge at once; wider
/// tiles merge row by row. With more than a few merges per SM, or with more than a few rows in a merge, the many CTAs of the
/// kernel are faster: 1 × 1024 with 32/8 heads takes 7.5 µs either way in a graph, with 28/4 8.8 and 7.3, with 64/4 14.7 and
/// 8.5, and with 4 new tokens and 32/8 heads 20.0 and 14.2 after a flush.
fn merges_in_passing(device: &DeviceDescription, options: &PlanOptions, plan: &Plan) -> bool {
    const ROWS: u32 = 16;
    const MERGES_PER_SM: usize = 4;
    // Of the query heads of a KV head, for all tokens of the longest row block: one CTA arrives last for all of them.
    const ELEMENTS: u64 = 512;
    // With fixed splits, results must not depend on the rest of the batch, so the way of merging must not either.
    let fixed = options.split.is_fixed();
    // Kernels that share SMs do not merge.
    let merges_itself = |group: &TileGroup| group.id.is_none_or(|id| !id.info().co_resident);
    let few_rows = |group: &TileGroup| {
        group.kernel == Kernel::Decode && group.tile.m <= ROWS && merges_itself(group)
    };
    let merges = plan.merges.len() * plan.spec.kv_heads as usize;
    let tokens = plan.row_blocks.iter().map(|block| block.tokens).max();
    let of_token = plan.spec.group() * plan.spec.head_dim_v;
    let elements = u64::from(tokens.unwrap_or(0)) * u64::from(of_token);
    let all_have_states = plan.merges.iter().all(|merge| merge.slots > 0);
    !fixed
        && !plan.spec.latent
        && !plan.spec.has_f32_outputs()
        && elements <= ELEMENTS
        && (1..=MERGES_PER_SM * device.sms as usize).contains(&merges)
        && all_have_states
        && plan.groups.iter().all(few_rows)
}
