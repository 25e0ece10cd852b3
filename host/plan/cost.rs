//! What a unit of work costs on a device: the model that splits, orders and predictions share.
//!
//! Times are integer picoseconds, so that sums do not depend on their order and plans repeat bit for bit.

use super::{DeviceDescription, Kernel, Tile, draft::Draft};
use crate::problem::Spec;

/// The cost of units, for one specification on one device.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CostModel {
    decode: KernelCost,
    prefill: KernelCost,
    prefill_packed: KernelCost,
    merge_ps: u64,
}

/// The cost of one kernel's units, from its share of the device: an SM's bandwidth and FLOPs over the CTAs
/// that are resident there.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct KernelCost {
    resident_ctas: u32,
    units_per_item: u32,
    /// Claiming a unit, filling and draining its pipeline.
    unit_ps: u64,
    /// Reading one key and its value.
    read_ps_per_key: f64,
    /// One row of the tile against one key.
    compute_ps_per_pair: f64,
    /// Writing and reading back one query token's partial state, the share of one unit.
    partial_ps_per_token: f64,
}

impl CostModel {
    /// The model for a specification on a device.
    #[must_use]
    pub fn new(device: &DeviceDescription, spec: &Spec) -> Self {
        let kernel = |kernel: Kernel| {
            let resident_ctas = device.resident_ctas(kernel);
            let units_per_item = kernel.units_per_item(spec);
            let bytes_per_ps = device.read_bytes_per_ns / 1e3 / f64::from(resident_ctas);
            let flops_per_ps = device.flops_per_ns / 1e3 / f64::from(resident_ctas);
            let kv_heads = f64::from(spec.kv_heads);
            let q_heads = f64::from(spec.q_heads);
            // A KV head that several units read comes from the L2 cache after the first.
            let readers = f64::from(units_per_item) / kv_heads;
            KernelCost {
                resident_ctas,
                units_per_item,
                unit_ps: (device.kernel(kernel).unit_ns * 1e3) as u64,
                read_ps_per_key: spec.kv_bytes_per_token() as f64
                    / kv_heads
                    / readers
                    / bytes_per_ps,
                compute_ps_per_pair: spec.flops_per_pair() as f64 / q_heads / flops_per_ps,
                partial_ps_per_token: 2.0 * spec.partial_bytes_per_token() as f64
                    / f64::from(units_per_item)
                    / bytes_per_ps,
            }
        };
        Self {
            decode: kernel(Kernel::Decode),
            prefill: kernel(Kernel::Prefill),
            prefill_packed: kernel(Kernel::PrefillPacked),
            merge_ps: (device.merge_ns * 1e3) as u64,
        }
    }

    const fn kernel(&self, kernel: Kernel) -> &KernelCost {
        match kernel {
            Kernel::Decode => &self.decode,
            Kernel::Prefill => &self.prefill,
            Kernel::PrefillPacked => &self.prefill_packed,
        }
    }

    /// CTAs of a kernel that run at the same time.
    #[must_use]
    pub const fn resident_ctas(&self, kernel: Kernel) -> u32 {
        self.kernel(kernel).resident_ctas
    }

    /// Units of an item of a kernel.
    #[must_use]
    pub const fn units_per_item(&self, kernel: Kernel) -> u32 {
        self.kernel(kernel).units_per_item
    }

    /// What a unit costs whatever its keys, in picoseconds; `partial_tokens` of its query tokens leave a
    /// partial state.
    #[must_use]
    pub fn fixed_ps(&self, kernel: Kernel, partial_tokens: u32) -> u64 {
        let cost = self.kernel(kernel);
        cost.unit_ps + (f64::from(partial_tokens) * cost.partial_ps_per_token) as u64
    }

    /// What drafts take if every resident CTA is busy all the time.
    pub(super) fn mean_load_ps(&self, drafts: &[Draft]) -> u64 {
        let load = |draft: &Draft| {
            let partial_rows = if draft.leaves_partial { draft.rows } else { 0 };
            let unit = self.fixed_ps(draft.kernel, partial_rows)
                + self.key_ps(draft.kernel, draft.tile) * u64::from(draft.kv_len());
            let KernelCost {
                units_per_item,
                resident_ctas,
                ..
            } = *self.kernel(draft.kernel);
            unit * u64::from(units_per_item) / u64::from(resident_ctas)
        };
        drafts.iter().map(load).sum()
    }

    /// What merging costs a step at least.
    #[must_use]
    pub const fn merge_ps(&self) -> u64 {
        self.merge_ps
    }

    /// What each key adds to a unit, in picoseconds: the larger of reading it and computing with it.
    #[must_use]
    pub fn key_ps(&self, kernel: Kernel, tile: Tile) -> u64 {
        let cost = self.kernel(kernel);
        let compute = f64::from(tile.m) * cost.compute_ps_per_pair;
        compute.max(cost.read_ps_per_key).ceil() as u64
    }
}
