//! What a graph keeps of the plan that it was captured with, if its workspace has no launch set.

use std::hash::{DefaultHasher, Hash, Hasher};

use super::LaunchPlan;

impl LaunchPlan {
    /// Equal for plans that the same captured launches compute. Left out is what the lengths of decodes may change from
    /// step to step and what only affects speed, such as how units are claimed, and what a graph compares on its own.
    pub(in crate::exec::gpu) fn fingerprint(&self) -> u64 {
        let mut hash = DefaultHasher::new();
        self.launches.len().hash(&mut hash);
        for launch in &self.launches {
            let items = (launch.first, launch.items, launch.joint, launch.pieces);
            (launch.key, items, &launch.converted, launch.few_rows).hash(&mut hash);
        }
        let merges = (
            self.merging.fused,
            self.merging.prefill_merges,
            self.merging.left,
            self.merging.most_slots,
        );
        let rest = (self.trees, self.masks, self.indices, &self.padded);
        (merges, rest, self.tickets.is_some()).hash(&mut hash);
        hash.finish()
    }
}
