//! Some of the launches of a launch set.

use kernels_gpu::abi::LaunchRecord;

/// Some of the launches of a workspace's [launch set](super::LaunchSet), with or without the merging kernel:
/// those that [a plan needs](super::super::Workspace::needed_launches).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::exec::gpu) struct LaunchSubset {
    /// A bit for each key of the set, and behind them one for the merging kernel.
    bits: u128,
}

impl LaunchSubset {
    pub(in crate::exec::gpu) const ALL: Self = Self { bits: u128::MAX };
    pub(in crate::exec::gpu) const NONE: Self = Self { bits: 0 };

    pub(in crate::exec::gpu) const fn bits(self) -> u128 {
        self.bits
    }

    /// The launches that have work.
    pub(super) fn of(records: &[LaunchRecord]) -> Self {
        let mut subset = Self::NONE;
        for (place, record) in records.iter().enumerate() {
            if record.count > 0 {
                subset.add(place);
            }
        }
        subset
    }

    pub(in crate::exec::gpu) fn add(&mut self, place: usize) {
        self.bits |= 1 << place;
    }

    /// Whether it has the launch at this place of the set. The merging kernel is behind the last key.
    pub(in crate::exec::gpu) fn has(self, place: usize) -> bool {
        self.bits >> place & 1 > 0
    }

    /// The place of a launch that it has and the other has not.
    pub(in crate::exec::gpu) fn beyond(self, other: Self) -> Option<usize> {
        let beyond = self.bits & !other.bits;
        (beyond > 0).then(|| beyond.trailing_zeros() as usize)
    }
}
