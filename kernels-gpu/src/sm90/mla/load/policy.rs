//! L2 cache policies of keys.

use cuda_std::ptr;

use crate::{
    abi::{LatentParams, WorkItem},
    common::tile_counter,
};

/// The properties of a launch that determine its policies.
#[derive(Clone, Copy)]
pub(super) struct Policies {
    /// Items have several tiles, and each reads the item's keys.
    has_tiles: bool,
    /// The launch reads several times the capacity of L2.
    is_long: bool,
}

impl Policies {
    #[inline(always)]
    pub fn new(p: &LatentParams) -> Self {
        Self {
            has_tiles: p.tiles.get() > 1,
            // SAFETY: the launch's parameters are valid.
            is_long: unsafe { tile_counter::is_long(p.long, p.attention.record) },
        }
    }

    /// Whether other CTAs also read the keys of a unit with these [flags](WorkItem::flags). Then L2 should keep them.
    #[inline(always)]
    pub fn is_shared(self, flags: u32) -> bool {
        self.has_tiles || flags & WorkItem::SHARED_KEYS != 0
    }

    /// The policy of keys that no other CTA reads.
    #[inline(always)]
    pub fn own(self) -> u64 {
        match self.is_long {
            true => ptr::evict_unchanged_policy(),
            false => ptr::evict_first_policy(),
        }
    }

    /// The policy of a unit's keys, by its flags.
    #[inline(always)]
    pub fn of(self, flags: u32) -> u64 {
        match self.is_shared(flags) {
            true => ptr::evict_last_policy(),
            false => self.own(),
        }
    }
}
