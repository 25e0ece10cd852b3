//! What a plan moves and computes.

use std::ops::AddAssign;

use kernels_gpu::abi::WorkItem;
use serde::{Deserialize, Serialize};

use crate::plan::data::{Kernel, Plan};

/// Bytes and FLOPs of a plan or of a piece of it, over all heads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    /// Keys and values read: each item reads its own once.
    pub kv_bytes: u64,
    /// Partial states, written once and read once.
    pub partial_bytes: u64,
    /// Floating-point operations on all pairs of a row and a key of an item, masked pairs included.
    pub flops: u64,
}

impl Traffic {
    /// Keys, values and partial states.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.kv_bytes + self.partial_bytes
    }
}

impl AddAssign for Traffic {
    fn add_assign(&mut self, other: Self) {
        self.kv_bytes += other.kv_bytes;
        self.partial_bytes += other.partial_bytes;
        self.flops += other.flops;
    }
}

impl Plan {
    /// What the whole plan moves and computes.
    #[must_use]
    pub fn traffic(&self) -> Traffic {
        let mut total = Traffic::default();
        for group in &self.groups {
            for item in self.items_of(group) {
                total += self.traffic_of(group.kernel, item);
            }
        }
        total
    }

    /// What an item moves and computes.
    #[must_use]
    pub fn traffic_of(&self, kernel: Kernel, item: &WorkItem) -> Traffic {
        let part = self.parts.get(item.part as usize);
        let heads = part.map_or(1, |part| u64::from(part.heads));
        let keys = u64::from(item.kv_len()) * heads;
        let partial_rows = u64::from(self.partial_rows(kernel, item)) * heads;
        Traffic {
            kv_bytes: keys * self.spec.kv_bytes_per_token(),
            partial_bytes: 2 * partial_rows * self.spec.partial_bytes_per_token(),
            flops: keys * u64::from(item.rows) * self.spec.flops_per_pair(),
        }
    }
}
