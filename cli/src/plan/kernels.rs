//! Which kernels a plan runs with, and which of them there are not.
//!
//! What was compiled is in the device's description, as tiles and heads. Kernels have no names there yet: a registry
//! that has them is what [`report`] prints them from.

use tandem_attn::{
    plan::{DeviceDescription, Plan, TileGroup},
    problem::{Dtype, Spec},
};

use crate::workload::dtype_name;

/// A line for each launch that the device has no kernel for; nothing where it has all.
pub(super) fn report(plan: &Plan, device: &DeviceDescription) -> String {
    // A CPU computes any tile, any heads and any type.
    if device.is_cpu() {
        return String::new();
    }
    let groups = plan.groups.iter();
    let lines = groups.filter_map(|group| {
        let missing = missing(&plan.spec, group, device)?;
        Some(format!(
            "no kernel on {}: {:?} {} for {missing}; the CPU runs it\n",
            device.name, group.kernel, group.tile
        ))
    });
    lines.collect()
}

/// What a launch is for that no kernel is for.
fn missing(spec: &Spec, group: &TileGroup, device: &DeviceDescription) -> Option<String> {
    let types = [spec.q_dtype, spec.kv_dtype, spec.out_dtype];
    if let Some(&dtype) = types
        .iter()
        .find(|dtype| !matches!(dtype, Dtype::F16 | Dtype::BF16))
    {
        return Some(format!("{}: GPUs have 16-bit kernels", dtype_name(dtype)));
    }
    let compiled = device.compiled(group.kernel);
    let serves = compiled.iter().any(|instance| {
        (instance.m, instance.n) == (group.tile.m, group.tile.n) && instance.serves(spec)
    });
    // Where nothing is known of what was compiled, nothing is said.
    (!compiled.is_empty() && !serves).then(|| {
        let heads = match (spec.head_dim_qk, spec.head_dim_v) {
            (qk, v) if qk == v => format!("heads of {qk}"),
            (qk, v) => format!("heads of {qk}/{v}"),
        };
        match spec.variant.soft_cap {
            Some(_) => format!("{heads} with a soft cap"),
            None => heads,
        }
    })
}
