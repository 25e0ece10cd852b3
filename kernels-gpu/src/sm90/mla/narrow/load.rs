//! The warps that bring keys, each every third 32 of them.

use cuda_std::{mbarrier, misc, warp};

use super::{
    config::{KEYS, LOADERS, PARTS},
    shared::Shared,
};
use crate::{
    abi::LatentParams,
    sm90::{
        mla::{
            PREFETCH_DISTANCE,
            load::{Entry, Rows, policy},
            shared::{Unit, Units},
        },
        pipeline::Pipeline,
    },
};

/// Brings 32 keys after another of all units, those whose number is `loader` modulo [`LOADERS`]; of each unit whole blocks.
///
/// # Safety
/// A whole warp comes here; the barriers are initialised.
#[inline(always)]
pub(super) unsafe fn load<const STAGES: u32>(p: &LatentParams, s: Shared<STAGES>, loader: u32) {
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
                let policy = policy(p, unit.flags);
                // Opaque: or it is counted in 16 bits.
                let of_all = misc::opaque(number);
                let (stage, parity) = (of_all % STAGES, of_all / STAGES & 1 ^ 1);
                // The page of the next key, which nothing waits for before these copies are under way.
                number += LOADERS;
                entry = Entry::look_up(p, &unit, number - before);
                mbarrier::wait(s.free(stage / PARTS), parity);
                let (full, there) = (s.full(stage), s.there(stage));
                rows.bring::<KEYS>(s.key(stage, 0), 0, full, there, policy);
            }
            before += blocks;
            mbarrier::arrive(s.unit_free(slots.stage));
            slots.advance();
        }
    }
}
