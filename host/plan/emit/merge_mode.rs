//! Who merges partial states.

use crate::plan::{
    data::{Kernel, MergeMode, Plan, PlanOptions, TileGroup},
    model::DeviceDescription,
};

/// Who merges the partial states of a plan, as asked for or as is faster.
pub fn merge_mode(device: &DeviceDescription, options: &PlanOptions, plan: &Plan) -> MergeMode {
    match options.merge_mode {
        MergeMode::Auto if merges_in_passing(device, options, plan) => MergeMode::Fused,
        MergeMode::Auto => MergeMode::Kernel,
        mode => mode,
    }
}

/// Whether the CTAs of a plan merge in less time than a kernel behind them takes to start: tiles of few rows do,
/// all warps at once, wider ones row by row. A few merges each, or the kernel's many CTAs are faster.
fn merges_in_passing(device: &DeviceDescription, options: &PlanOptions, plan: &Plan) -> bool {
    const ROWS: u32 = 16;
    const MERGES_PER_SM: usize = 4;
    // What merges must not depend on the rest of the batch where results shall not.
    let fixed = options.split.is_fixed();
    let few_rows = |group: &TileGroup| group.kernel == Kernel::Decode && group.tile.m <= ROWS;
    let merges = plan.merges.len() * plan.spec.kv_heads as usize;
    let all_have_states = plan.merges.iter().all(|merge| merge.slots > 0);
    !fixed
        && !plan.spec.latent
        && !plan.spec.has_f32_outputs()
        && (1..=MERGES_PER_SM * device.sms as usize).contains(&merges)
        && all_have_states
        && plan.groups.iter().all(few_rows)
}
