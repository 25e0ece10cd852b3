//! L2 cache policies of keys and values.

use cuda_std::ptr;

use super::tile_counter;

/// The policies of a launch. Keys that other CTAs also read leave L2 last, keys that are read once leave it first. But
/// evict-first lines find little room among lines that were in L2 before, so a long launch uses `evict_unchanged` to drive
/// those out.
#[derive(Clone, Copy)]
pub struct Policies {
    /// Whether the launch reads several times what L2 holds.
    pub is_long: bool,
}

impl Policies {
    /// Those of a launch with this parameter and this record.
    ///
    /// # Safety
    /// The record, if there is one, is readable.
    #[inline(always)]
    #[must_use]
    pub unsafe fn new(long: u32, record: u64) -> Self {
        Self {
            // SAFETY: the caller's promise.
            is_long: unsafe { tile_counter::is_long(long, record) },
        }
    }

    /// The policy of keys that no other CTA reads.
    #[inline(always)]
    #[must_use]
    pub fn own(self) -> u64 {
        match self.is_long {
            true => ptr::evict_unchanged_policy(),
            false => ptr::evict_first_policy(),
        }
    }

    /// The policy of keys, by whether other CTAs also read them.
    #[inline(always)]
    #[must_use]
    pub fn of(self, shared: bool) -> u64 {
        match shared {
            true => ptr::evict_last_policy(),
            false => self.own(),
        }
    }
}
