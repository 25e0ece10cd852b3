//! Launches of a plan that there is no kernel for.

use tandem_attn::plan::{DeviceDescription, Plan};

/// A line for each of them; nothing where all have one. (Heads and types that no kernel is for are not planned at all;
/// this is about devices that are described to take tiles of any size.)
pub(super) fn report(plan: &Plan, device: &DeviceDescription) -> String {
    // A CPU computes any tile, any heads and any type.
    if device.is_cpu() {
        return String::new();
    }
    let groups = plan.groups.iter().filter(|group| group.id.is_none());
    let line = |group: &tandem_attn::plan::TileGroup| {
        format!(
            "no kernel on {}: {:?} {}; the CPU runs it\n",
            device.name, group.kernel, group.tile
        )
    };
    groups.map(line).collect()
}
