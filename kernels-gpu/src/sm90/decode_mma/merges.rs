//! Merges of split rows: which of them the end of a unit completes, which warps do them, and when.

use cuda_std::{atomic, shared, warp};

use super::{super::meet, layout::MERGES, mainloop::Consumer};
use crate::{
    abi::NO_MERGE,
    common::{
        cache,
        decode::results::{Merge, SLICE},
        half::Half,
        variant::Variant,
    },
};

const ALL: u32 = warp::FULL_MASK;

impl<const DIM: u32, const ROWS: u32, const WARPS: u32, const CACHE: u32>
    Consumer<'_, DIM, ROWS, WARPS, CACHE>
{
    /// The merge of the unit's token with the lane's index, or `NO_MERGE`.
    ///
    /// # Safety
    /// `slot` is filled, and its unit has `tokens` tokens.
    #[inline(always)]
    pub(super) unsafe fn merge_of_lane(&self, slot: u32, tokens: u32) -> u32 {
        if self.lane < tokens {
            // SAFETY: the caller's promise.
            unsafe { self.row(slot, self.lane).merge }
        } else {
            NO_MERGE
        }
    }

    /// Counts the unit's partial states as arrived at their merges; each lane has at most one merge. If a state is the
    /// last of its merge, the merge is deferred to the end of the CTA, where all its warps share it. If the list of
    /// deferred merges is full, this warp does it now.
    ///
    /// # Safety
    /// The lanes come together, after the partial states were written.
    #[inline(always)]
    pub(super) unsafe fn merge<T: Half, V: Variant>(&self, index: u32, merge: Merge, head: u32) {
        let mut second = 0;
        while second < cache::kv_heads(CACHE) {
            // SAFETY: the caller's promise.
            unsafe {
                self.merge_head::<T, V>(index, merge, head * cache::kv_heads(CACHE) + second)
            };
            second += 1;
        }
    }

    /// [`merge`](Self::merge) for one KV head. Heads of a pair are counted separately because other launches of the
    /// step may have units of single heads.
    ///
    /// # Safety
    /// As [`merge`](Self::merge).
    #[inline(always)]
    unsafe fn merge_head<T: Half, V: Variant>(&self, index: u32, merge: Merge, head: u32) {
        let (results, group) = (self.results(), self.group.get());
        // SAFETY: merges and slots are the plan's; `sync_warp` orders the arrival after the writes of all lanes.
        unsafe {
            warp::sync_warp(ALL);
            let mut last = results.arrive(index, merge, head);
            if last {
                let index = atomic::shared::fetch_add_u32(self.layout.merges(), 1);
                if index < MERGES {
                    shared::store_u32x4(
                        self.layout.merge(index),
                        [merge.token, merge.slots_begin, merge.slots, head],
                    );
                    last = false;
                }
            }
            let mut waiting = warp::warp_vote_ballot(ALL, last);
            if waiting != 0 {
                // One lane has acquired the others' states, and all lanes will read them; the vote does not order
                // memory.
                warp::sync_warp(ALL);
            }
            while waiting != 0 {
                let merge = merge.broadcast(waiting.trailing_zeros());
                waiting &= waiting - 1;
                let mut in_group = 0;
                while in_group < group {
                    results.merge::<T, V>(merge, head * group + in_group);
                    in_group += 1;
                }
            }
        }
    }

    /// Does the deferred merges; all warps share them by slices of rows.
    ///
    /// # Safety
    /// The warps come together, after their last units.
    #[inline(always)]
    pub(super) unsafe fn late_merges<T: Half, V: Variant>(&self) {
        // SAFETY: every consumer warp calls this once; the barrier publishes the list; the acquiring atomic of the warp
        // that listed a merge made its states visible.
        unsafe {
            meet(0, WARPS);
            let merges = shared::load_u32(self.layout.merges()).min(MERGES);
            let slices = DIM.div_ceil(SLICE);
            let mut task = self.warp;
            let group = self.group.get();
            while task < merges * group * slices {
                let (row, slice) = (task / slices, task % slices);
                let (index, in_group) = self.group.div_rem(row);
                let [token, slots_begin, slots, kv_head] =
                    shared::load_u32x4(self.layout.merge(index));
                let merge = Merge {
                    token,
                    slots_begin,
                    slots,
                };
                self.results()
                    .merge_slice::<T, V>(merge, kv_head * group + in_group, slice);
                task += WARPS;
            }
        }
    }
}
