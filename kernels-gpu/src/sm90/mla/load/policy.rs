//! L2 cache policies of keys.

use crate::{
    abi::{LatentParams, WorkItem},
    common::policy,
};

/// The policies of a launch on latent keys.
#[derive(Clone, Copy)]
pub(super) struct Policies {
    /// Items have several tiles, and each reads the item's keys.
    has_tiles: bool,
    of_launch: policy::Policies,
}

impl Policies {
    #[inline(always)]
    pub fn new(p: &LatentParams) -> Self {
        Self {
            has_tiles: p.tiles.get() > 1,
            // SAFETY: the launch's parameters are valid.
            of_launch: unsafe { policy::Policies::new(p.long, p.attention.record) },
        }
    }

    /// Whether other CTAs also read the keys of a unit with these [flags](WorkItem::flags).
    #[inline(always)]
    pub fn is_shared(self, flags: u32) -> bool {
        self.has_tiles || flags & WorkItem::SHARED_KEYS != 0
    }

    /// The policy of keys that no other CTA reads.
    #[inline(always)]
    pub fn own(self) -> u64 {
        self.of_launch.own()
    }

    /// The policy of a unit's keys, by its flags.
    #[inline(always)]
    pub fn of(self, flags: u32) -> u64 {
        self.of_launch.of(self.is_shared(flags))
    }
}
