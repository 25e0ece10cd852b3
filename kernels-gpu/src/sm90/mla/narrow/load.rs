//! The warps that bring keys, each every third block.

use cuda_std::{async_copy, mbarrier, misc, shared, warp};

use super::{
    config::{KEYS, KEYS_AN_ARRIVAL, LOADERS},
    shared::Shared,
};
use crate::{
    abi::LatentParams,
    sm90::{
        mla::{
            PREFETCH_DISTANCE,
            config::ROW_BYTES,
            convert::{look_up, policy},
            shared::{Unit, Units},
        },
        pipeline::Pipeline,
    },
};

/// Brings the blocks of all units whose number is `loader` modulo [`LOADERS`].
///
/// # Safety
/// A whole warp comes here; the barriers are initialised.
#[inline(always)]
pub(super) unsafe fn load<const STAGES: u32>(p: &LatentParams, s: Shared<STAGES>, loader: u32) {
    let mut slots = Pipeline::<2>::CONSUMER;
    // Blocks of all units before, and this warp's next one.
    let (mut before, mut number) = (0, loader);
    // SAFETY: a whole warp; the barriers say what belongs to whom.
    unsafe {
        loop {
            mbarrier::wait(s.unit_full(slots.stage), slots.parity);
            let Unit { tokens, blocks, .. } = Unit::load(s.unit(slots.stage));
            if tokens == 0 {
                break;
            }
            let mut page = look_up(p, s, slots.stage, number - before);
            while number < before + blocks {
                let lane = misc::opaque(warp::lane_id());
                let unit = Unit::load(s.unit(misc::opaque(slots.stage)));
                let block = number - before;
                if lane == 0 && block + PREFETCH_DISTANCE == unit.blocks {
                    mbarrier::arrive(s.near_end());
                }
                let at = unit.first + block * KEYS + lane;
                let exists = at < unit.kv_end && page < p.outside;
                let (_, in_page) = p.page_size.div_rem(at);
                let strides = &p.attention.k_strides;
                let row = p.attention.k
                    + u64::from(page) * u64::from(strides.page)
                    + u64::from(in_page) * u64::from(strides.token);
                let there = warp::warp_vote_ballot(warp::FULL_MASK, exists);
                let policy = policy(p, unit.flags);
                // Opaque: or it is counted in 16 bits.
                let of_all = misc::opaque(number);
                let (stage, parity) = (of_all % STAGES, of_all / STAGES & 1 ^ 1);
                // The page of the next block, which nothing waits for before these copies are under way.
                number += LOADERS;
                page = look_up(p, s, slots.stage, number - before);
                mbarrier::wait(s.free(stage), parity);
                // Opaque: or all keys are one piece of code, whose registers there are not.
                let mut first = misc::opaque(0);
                while first < KEYS {
                    copy_pair(s.key(stage, first), row, first, there, policy);
                    first += 2;
                    // racecheck follows a dozen copies of a lane to one arrival, and not four times as many.
                    if first % KEYS_AN_ARRIVAL == 0 {
                        async_copy::mbarrier_arrive(s.full(stage));
                    }
                }
                if lane == 0 {
                    shared::store_u32(s.there(stage), there);
                    mbarrier::arrive(s.full(stage));
                }
            }
            before += blocks;
            mbarrier::arrive(s.unit_free(slots.stage));
            slots.advance();
        }
        async_copy::wait_all();
    }
}

/// Copies two keys, 16 lanes each, of which `row` is that of each lane's key. Zeros stand for keys that are not there.
#[inline(always)]
unsafe fn copy_pair(target: u32, row: u64, first: u32, there: u32, policy: u64) {
    let lane = misc::opaque(warp::lane_id());
    let (half, column) = (lane / 16, lane % 16 * 16);
    let key = first + half;
    // SAFETY: a whole warp; rows are where the lanes found them, and their places are free.
    unsafe {
        let [low, high] = [row as u32, (row >> 32) as u32]
            .map(|word| warp::warp_shuffle_idx(warp::FULL_MASK, word, key, 32));
        let source = (u64::from(high) << 32 | u64::from(low)) + u64::from(column);
        let target = target + half * ROW_BYTES + column;
        let valid = (there >> key & 1) * 16;
        let mut piece = 0;
        while piece < ROW_BYTES {
            if column + piece < ROW_BYTES {
                let source = (source + u64::from(piece)) as *const u8;
                async_copy::copy_cg_hint_zfill(target + piece, source, valid, policy);
            }
            piece += 256;
        }
    }
}

const _: () = assert!(KEYS == 32 && ROW_BYTES % 16 == 0);
