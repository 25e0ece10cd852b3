//! How long L2 keeps keys.

use cuda_std::ptr;

use crate::{
    abi::{LatentParams, WorkItem},
    common::tile_counter,
};

/// What all units of a launch have in common.
#[derive(Clone, Copy)]
pub(super) struct Policies {
    /// Each tile of an item reads its keys.
    has_tiles: bool,
    /// The launch reads several times what L2 holds.
    is_long: bool,
}

impl Policies {
    #[inline(always)]
    pub fn new(p: &LatentParams) -> Self {
        Self {
            has_tiles: p.tiles.get() > 1,
            // SAFETY: as the launch is.
            is_long: unsafe { tile_counter::is_long(p.long, p.attention.record) },
        }
    }

    /// Whether other CTAs read the keys of a unit, too, by its [flags](WorkItem::flags). They are kept for them.
    #[inline(always)]
    pub fn is_shared(self, flags: u32) -> bool {
        self.has_tiles || flags & WorkItem::SHARED_KEYS != 0
    }

    /// Of keys that no other CTA reads.
    #[inline(always)]
    pub fn own(self) -> u64 {
        match self.is_long {
            true => ptr::evict_unchanged_policy(),
            false => ptr::evict_first_policy(),
        }
    }

    /// Of a unit's keys, by its flags.
    #[inline(always)]
    pub fn of(self, flags: u32) -> u64 {
        match self.is_shared(flags) {
            true => ptr::evict_last_policy(),
            false => self.own(),
        }
    }
}
