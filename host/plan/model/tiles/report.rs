//! What was compiled against what the planner may choose.

use serde::{Deserialize, Serialize};

use super::{super::DeviceDescription, TileTable};
use crate::{
    plan::data::{Kernel, PlanError, Tile},
    problem::Spec,
};

/// What the compiler made of one kernel: a line of the static report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelReport {
    /// Name of the entry.
    pub entry: String,
    /// The kernel.
    pub kernel: Kernel,
    /// Its tile.
    pub tile: Tile,
    /// Threads of a CTA.
    pub threads: u32,
    /// Registers per thread.
    pub registers: u32,
    /// Shared memory, static and dynamic, in bytes.
    pub shared_bytes: u32,
    /// Bytes spilled to local memory.
    pub spill_bytes: u32,
}

/// A kernel whose compiled form does not keep what the device description promises.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disagreement {
    /// Name of the entry, or of the tile where no entry was compiled for it.
    pub entry: String,
    /// What is wrong.
    pub reason: String,
}

/// Compares what the compiler used with what the device has and what the planner may choose.
///
/// Found are: a CTA count that registers or shared memory do not allow, spills, and tiles that the planner
/// may choose for `spec` but that were not compiled.
///
/// # Errors
/// [`PlanError::NoTile`] where the heads have no tile at all.
pub fn check_report(
    device: &DeviceDescription,
    spec: &Spec,
    report: &[KernelReport],
) -> Result<Vec<Disagreement>, PlanError> {
    let table = TileTable::new(device, spec, None, None)?;
    let mut found = Vec::new();
    for line in report {
        let mut wrong = |reason: String| {
            found.push(Disagreement {
                entry: line.entry.clone(),
                reason,
            });
        };
        let ctas = device.ctas_per_sm(line.kernel);
        let registers = ctas * line.threads * line.registers.next_multiple_of(8);
        if registers > device.registers_per_sm {
            let available = device.registers_per_sm;
            wrong(format!(
                "{ctas} CTAs take {registers} registers of an SM's {available}"
            ));
        }
        // The driver keeps 1 KB of an SM's shared memory per CTA for itself.
        let shared = ctas * (line.shared_bytes + 1024);
        if line.shared_bytes > device.shared_bytes_per_cta || shared > device.shared_bytes_per_sm {
            let (cta, sm) = (device.shared_bytes_per_cta, device.shared_bytes_per_sm);
            wrong(format!(
                "{ctas} CTAs of {} bytes of shared memory; a CTA may have {cta}, an SM has {sm}",
                line.shared_bytes
            ));
        }
        if line.spill_bytes > 0 {
            wrong(format!("{} bytes spilled", line.spill_bytes));
        }
    }
    for kernel in Kernel::ALL {
        for tile in table.all(kernel) {
            if !report
                .iter()
                .any(|line| line.kernel == kernel && line.tile == tile)
            {
                let reason = "the planner may choose this tile, but it was not compiled".to_owned();
                found.push(Disagreement {
                    entry: format!("{kernel:?} {tile}"),
                    reason,
                });
            }
        }
    }
    Ok(found)
}
