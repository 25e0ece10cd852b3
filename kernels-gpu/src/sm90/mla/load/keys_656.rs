//! The warps that bring keys of 656 bytes as they are, each every third 32 of them.

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
    /// Places that are given back together: one, or those of a block.
    const FREED: u32;
    /// Where the keys begin, and the words that say which are there.
    const KEYS_AT: u32;
    const THERE_AT: u32;

    /// The first key of a place; behind its last is the next place's first.
    #[inline(always)]
    fn place(self, stage: u32) -> u32 {
        self.base() + Self::KEYS_AT + stage * (KEYS * ROW_BYTES)
    }
    /// Which keys of a place are there, a bit each.
    #[inline(always)]
    fn there(self, stage: u32) -> u32 {
        self.base() + Self::THERE_AT + stage * 4
    }
    /// They have come.
    #[inline(always)]
    fn full(self, stage: u32) -> u32 {
        Self::RING.barrier(self.base(), Self::STAGE_BARRIERS + stage)
    }
    /// Who computes has read the keys of a place, or those of its block.
    #[inline(always)]
    fn free(self, stage: u32) -> u32 {
        let index = Self::STAGE_BARRIERS + Self::STAGES + stage / Self::FREED;
        Self::RING.barrier(self.base(), index)
    }

    /// The first key of a block, by its number among all.
    #[inline(always)]
    fn block(self, number: u32) -> u32 {
        let block = number % (Self::STAGES / PARTS);
        self.base() + Self::KEYS_AT + block * (BLOCK * ROW_BYTES)
    }
    /// Its first place, and the parity of that one's phase.
    #[inline(always)]
    fn first_place(self, number: u32) -> (u32, u32) {
        let blocks = Self::STAGES / PARTS;
        (number % blocks * PARTS, number / blocks & 1)
    }
}

/// Brings 32 keys after another of all units, those whose number is `loader` modulo `LOADERS`; of each unit whole blocks.
///
/// # Safety
/// A whole warp comes here; the barriers are initialised.
#[inline(always)]
pub(in crate::sm90::mla) unsafe fn load_656<S: Places>(p: &LatentParams, s: S, loader: u32) {
    const { assert!(S::KEYS == KEYS) };
    let mut slots = Pipeline::<2>::CONSUMER;
    // Keys of all units before, and this warp's next ones, in 32s.
    let (mut before, mut number) = (0, loader);
    // SAFETY: a whole warp; the barriers say what belongs to whom.
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
                // Opaque: or it is counted in 16 bits.
                let of_all = misc::opaque(number);
                let (stage, parity) = (of_all % S::STAGES, of_all / S::STAGES & 1 ^ 1);
                // The page of the next key, which nothing waits for before these copies are under way.
                number += LOADERS;
                entry = Entry::look_up(p, &unit, number - before);
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
