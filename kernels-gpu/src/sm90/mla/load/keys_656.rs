//! The loader warps for 656-byte keys: three warps take groups of 32 keys in turn, and copy them unconverted.

use cuda_std::{mbarrier, misc, warp};

use super::{
    super::{
        PREFETCH_DISTANCE,
        keys_656::{BLOCK, KEYS, LOADERS, PARTS, ROW_BYTES},
        shared::{Unit, Units},
    },
    policy::Policies,
    rows_656::{Entry, Rows},
};
use crate::{abi::LatentParams, sm90::pipeline::Pipeline};

/// Shared memory with a ring of places for 32 keys each.
pub(in crate::sm90::mla) trait Places: Units {
    const STAGES: u32;
    /// Places that are freed together: one, or those of a block.
    const FREED: u32;
    /// Places under way at most. See the module's documentation.
    const UNDER_WAY: u32;
    /// Offsets of the keys, and of the words that say which keys exist.
    const KEYS_AT: u32;
    const THERE_AT: u32;

    /// The first key of a place. Places are contiguous.
    #[inline(always)]
    fn place(self, stage: u32) -> u32 {
        self.base() + Self::KEYS_AT + stage * (KEYS * ROW_BYTES)
    }
    /// Which keys of a place exist, one bit per key.
    #[inline(always)]
    fn there(self, stage: u32) -> u32 {
        self.base() + Self::THERE_AT + stage * 4
    }
    /// The keys of a place have arrived.
    #[inline(always)]
    fn full(self, stage: u32) -> u32 {
        Self::RING.barrier(self.base(), Self::STAGE_BARRIERS + stage)
    }
    /// The consumers have read the keys of a place, or of its block.
    #[inline(always)]
    fn free(self, stage: u32) -> u32 {
        let index = Self::STAGE_BARRIERS + Self::STAGES + stage / Self::FREED;
        Self::RING.barrier(self.base(), index)
    }

    /// The first key of a block, by its number over all units.
    #[inline(always)]
    fn block(self, number: u32) -> u32 {
        let block = number % (Self::STAGES / PARTS);
        self.base() + Self::KEYS_AT + block * (BLOCK * ROW_BYTES)
    }
    /// The first place of a block, and the parity of its full barrier.
    #[inline(always)]
    fn first_place(self, number: u32) -> (u32, u32) {
        let blocks = Self::STAGES / PARTS;
        (number % blocks * PARTS, number / blocks & 1)
    }
}

/// Loads groups of 32 keys of all units: those whose number is `loader` modulo `LOADERS`. Every unit is rounded up to
/// whole blocks.
///
/// # Safety
/// A whole warp comes here; the barriers are initialised.
#[inline(always)]
pub(in crate::sm90::mla) unsafe fn load_656<S: Places>(p: &LatentParams, s: S, loader: u32) {
    const { assert!(S::KEYS == KEYS) };
    // This warp waits for the keys of other loaders. It must not miss the phase, so their place must not be filled
    // again meanwhile. The group that fills it waits for a group `UNDER_WAY` earlier, which waits in turn, and so on
    // down to this warp's group, which is not loaded yet.
    const { assert!(S::UNDER_WAY < S::STAGES && S::STAGES % S::UNDER_WAY == 0) };
    let mut slots = Pipeline::<2>::CONSUMER;
    // In groups of 32 keys: those of all previous units, and this warp's next one.
    let (mut before, mut number) = (0, loader);
    // SAFETY: a whole warp; the full and free barriers order every access to a place.
    unsafe {
        loop {
            mbarrier::wait(s.unit_full(slots.stage), slots.parity);
            let Unit { tokens, blocks, .. } = Unit::load(s.unit(slots.stage));
            if tokens == 0 {
                break;
            }
            let blocks = blocks.next_multiple_of(PARTS);
            let unit = Unit::load(s.unit(slots.stage));
            let mut entry = Entry::look_up(p, &unit, number - before);
            while number < before + blocks {
                let lane = misc::opaque(warp::lane_id());
                let unit = Unit::load(s.unit(misc::opaque(slots.stage)));
                let block = number - before;
                if lane == 0 && block + PREFETCH_DISTANCE == unit.blocks {
                    mbarrier::arrive(s.near_end());
                }
                let rows = Rows::find::<KEYS>(p, entry);
                let policy = Policies::new(p).of(unit.flags);
                // Opaque: otherwise the compiler narrows it to 16 bits.
                let of_all = misc::opaque(number);
                let (stage, parity) = (of_all % S::STAGES, of_all / S::STAGES & 1 ^ 1);
                // Load the next keys' pages now; they are first used after these copies were issued.
                number += LOADERS;
                entry = Entry::look_up(p, &unit, number - before);
                if of_all >= S::UNDER_WAY {
                    let earlier = of_all - S::UNDER_WAY;
                    mbarrier::wait(s.full(earlier % S::STAGES), earlier / S::STAGES & 1);
                }
                mbarrier::wait(s.free(stage), parity);
                let (full, there) = (s.full(stage), s.there(stage));
                rows.bring::<KEYS>(s.place(stage), 0, full, there, policy);
            }
            before += blocks;
            mbarrier::arrive(s.unit_free(slots.stage));
            slots.advance();
        }
    }
}
