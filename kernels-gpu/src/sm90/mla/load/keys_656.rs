//! The warps that bring keys of 656 bytes as they are, each every third 32 of them.

use cuda_std::{mbarrier, misc, warp};

use super::{
    super::{
        PREFETCH_DISTANCE,
        shared::{Unit, Units},
    },
    policy::Policies,
    rows_656::{Entry, Rows},
};
use crate::{abi::LatentParams, sm90::pipeline::Pipeline};

/// Keys of a place.
const KEYS: u32 = 32;

/// Where keys go, 32 to a place.
pub(in crate::sm90::mla) trait Places: Units {
    const STAGES: u32;
    /// Places of a block.
    const PARTS: u32;
    /// The first key of a place; behind its last is the next place's first.
    fn place(self, stage: u32) -> u32;
    /// Which keys of a place are there, a bit each.
    fn there(self, stage: u32) -> u32;
    /// They have come.
    fn full(self, stage: u32) -> u32;
    /// Who computes has read the keys of a place, or those of its block.
    fn free(self, stage: u32) -> u32;
}

/// Brings 32 keys after another of all units, those whose number is `loader` modulo `LOADERS`; of each unit whole blocks.
///
/// # Safety
/// A whole warp comes here; the barriers are initialised.
#[inline(always)]
pub(in crate::sm90::mla) unsafe fn load_656<const LOADERS: u32, S: Places>(
    p: &LatentParams,
    s: S,
    loader: u32,
) {
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
            let blocks = blocks.next_multiple_of(S::PARTS);
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
