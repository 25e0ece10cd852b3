//! The warps that bring keys of 656 bytes and convert them to bf16.
//!
//! Groups of 8 keys go to the warps in turn. A warp has the rows of two groups in shared memory: while it converts one,
//! the other is on its way, and the pages of the one after that are looked up. Each lane has 16 columns of a key for each
//! slab of 64: what 8 lanes read or write at a time lies in different banks, for 656 is 41 times 16, and the slabs are
//! swizzled.

use cuda_std::{convert, fence, mbarrier, misc, ptr, shared, tma, warp};

use super::{
    PREFETCH_DISTANCE,
    config::{CONVERTERS, GROUP, RAW_SLOTS, ROW_BYTES, ROW_ROPE, ROW_SCALES, SLABS},
    shared::{Shared, Unit},
};
use crate::{
    abi::{LatentParams, WorkItem},
    common::tile_counter,
};

const WARP: u32 = warp::FULL_MASK;

/// A warp's way through the groups of all units. What a unit is, it looks up each time: registers are few.
#[derive(Clone, Copy)]
struct Walk {
    /// Units before the one that it is in.
    unit: u32,
    /// The next group there.
    group: u32,
}

/// What is known of the next group.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Next {
    Group,
    NotYet,
    End,
}

impl Walk {
    #[inline(always)]
    fn slot(&self) -> u32 {
        self.unit % 2
    }

    /// Goes to the unit that has the next group.
    #[inline(always)]
    unsafe fn find<const KEYS: u32, const STAGES: u32, const CONVERTED: bool>(
        &mut self,
        s: Shared<KEYS, STAGES, CONVERTED>,
        waits: bool,
    ) -> Next {
        // SAFETY: the barriers say what is there; a whole warp.
        unsafe {
            loop {
                let (full, parity) = (s.unit_full(self.slot()), self.unit / 2 % 2);
                if waits {
                    mbarrier::wait(full, parity);
                } else if !warp::warp_vote_all(WARP, mbarrier::test_wait(full, parity)) {
                    return Next::NotYet;
                }
                let unit = Unit::load(s.unit(self.slot()));
                if unit.tokens == 0 {
                    return Next::End;
                }
                let groups = unit.blocks * (KEYS / GROUP);
                if self.group < groups {
                    return Next::Group;
                }
                self.group -= groups;
                self.unit += 1;
            }
        }
    }
}

/// Brings and converts this warp's groups of all units.
///
/// # Safety
/// A whole warp comes here, as one of [`CONVERTERS`]; the barriers are initialised.
#[inline(always)]
pub(super) unsafe fn convert<const KEYS: u32, const STAGES: u32, const CONVERTED: bool>(
    p: &LatentParams,
    s: Shared<KEYS, STAGES, CONVERTED>,
    converter: u32,
) {
    let start = Walk {
        unit: 0,
        group: converter,
    };
    let (mut ask, mut take) = (start, start);
    // Groups under way, and those that were converted.
    let (mut pending, mut taken) = (0, 0);
    // The next group to ask for: whether it is known, and where the lane's key is.
    let (mut known, mut row) = (false, 0);
    // Keys that are there, 8 bits for each group that was asked for, the last one lowest.
    let mut there = 0;
    // SAFETY: a whole warp; the barriers say what belongs to whom.
    unsafe {
        loop {
            if known && pending < RAW_SLOTS {
                let (lane, converter) = (misc::opaque(warp::lane_id()), misc::opaque(converter));
                let unit = Unit::load(s.unit(ask.slot()));
                let slot = (taken + pending) % RAW_SLOTS;
                let exists = lane < GROUP && row != 0;
                let mask = warp::warp_vote_ballot(WARP, exists);
                there = there << GROUP | mask;
                let full = s.raw_full(converter, slot);
                if lane == 0 {
                    mbarrier::arrive_expect_tx(full, mask.count_ones() * ROW_BYTES);
                    if ask.group / (KEYS / GROUP) + PREFETCH_DISTANCE == unit.blocks
                        && ask.group % (KEYS / GROUP) == 0
                    {
                        mbarrier::arrive(s.near_end());
                    }
                }
                // What the lanes read of the slot comes before what is written to it.
                warp::sync_warp(WARP);
                if exists {
                    let target = s.raw(converter, slot) + lane * ROW_BYTES;
                    let policy = policy(p, unit.flags);
                    tma::load_bulk_hint(target, row as *const u8, ROW_BYTES, full, policy);
                }
                pending += 1;
                ask.group += CONVERTERS;
                known = false;
            }
            if !known {
                match ask.find(s, pending == 0) {
                    Next::End if pending == 0 => return,
                    Next::Group => {
                        row = look_up(p, s, &ask);
                        known = true;
                        if pending < RAW_SLOTS {
                            continue;
                        }
                    }
                    _ => {}
                }
            }
            pending -= 1;
            // Opaque: or the addresses of the warp's slots are kept in registers.
            let converter = misc::opaque(converter);
            let mask = there >> (GROUP * pending) & 0xff;
            let slot = taken % RAW_SLOTS;
            mbarrier::wait(s.raw_full(converter, slot), taken / RAW_SLOTS & 1);
            let raw = s.raw(converter, slot);
            if mask != 0xff {
                clear(raw, mask);
            }
            // Counted over all units.
            let nth = converter + CONVERTERS * taken;
            widen_group(s, raw, nth / (KEYS / GROUP), nth % (KEYS / GROUP), mask);
            taken += 1;
            take.group += CONVERTERS;
            let blocks = Unit::load(s.unit(take.slot())).blocks;
            if take.group >= blocks * (KEYS / GROUP) {
                // All lanes have read it.
                warp::sync_warp(WARP);
                if warp::lane_id() == 0 {
                    mbarrier::arrive(s.unit_free(take.slot()));
                }
                take.group -= blocks * (KEYS / GROUP);
                take.unit += 1;
            }
        }
    }
}

/// How long L2 keeps the keys of a unit.
#[inline(always)]
fn policy(p: &LatentParams, flags: u32) -> u64 {
    // SAFETY: as the launch is.
    let long = unsafe { tile_counter::is_long(p.long, p.attention.record) };
    match p.tiles.get() > 1 || flags & WorkItem::SHARED_KEYS != 0 {
        true => ptr::evict_last_policy(),
        false if long => ptr::evict_unchanged_policy(),
        false => ptr::evict_first_policy(),
    }
}

/// Where the key of a lane is, of the next group; 0 where there is none.
#[inline(always)]
unsafe fn look_up<const KEYS: u32, const STAGES: u32, const CONVERTED: bool>(
    p: &LatentParams,
    s: Shared<KEYS, STAGES, CONVERTED>,
    ask: &Walk,
) -> u64 {
    let (lane, strides) = (misc::opaque(warp::lane_id()), &p.attention.k_strides);
    // SAFETY: the unit was published, and is until this warp has converted its groups.
    let unit = unsafe { Unit::load(s.unit(ask.slot())) };
    let at = unit.first + ask.group * GROUP + lane % GROUP;
    if lane >= GROUP || at >= unit.kv_end {
        return 0;
    }
    let (page, in_page) = p.page_size.div_rem(at);
    let entry = p.attention.page_ids + u64::from(unit.table + page) * 4;
    // SAFETY: the table has an entry for each key of the item.
    let page = unsafe { ptr::load_nc_u32(entry as *const u32) };
    if page >= p.outside {
        return 0;
    }
    let bytes =
        u64::from(page) * u64::from(strides.page) + u64::from(in_page) * u64::from(strides.token);
    p.attention.k + bytes
}

/// Sets rows to zero that are not there.
#[inline(always)]
unsafe fn clear(raw: u32, mask: u32) {
    let lane = misc::opaque(warp::lane_id());
    let (row, mut at) = (raw + lane % GROUP * ROW_BYTES, lane / GROUP * 16);
    while mask >> (lane % GROUP) & 1 == 0 && at < ROW_BYTES {
        // SAFETY: the rows are this warp's.
        unsafe { shared::store_u32x4(row + at, [0; 4]) };
        at += 32 / GROUP * 16;
    }
    // SAFETY: a whole warp.
    unsafe { warp::sync_warp(WARP) };
}

/// Converts the rows of a group to its place in a block.
#[inline(always)]
unsafe fn widen_group<const KEYS: u32, const STAGES: u32, const CONVERTED: bool>(
    s: Shared<KEYS, STAGES, CONVERTED>,
    raw: u32,
    block: u32,
    group: u32,
    mask: u32,
) {
    // Opaque: or what follows from it is kept in registers from group to group.
    let lane = misc::opaque(warp::lane_id());
    let (key, part) = (lane % GROUP, lane / GROUP);
    let (stage, parity) = (block % STAGES, block / STAGES & 1 ^ 1);
    let row = raw + key * ROW_BYTES;
    let chunks = [(2 * part ^ key) * 16, ((2 * part + 1) ^ key) * 16];
    // SAFETY: a whole warp; the rows are there, and the halves are free when their barriers say so.
    unsafe {
        let mut half = 0;
        while half < 2 {
            let slabs = SLABS[half as usize];
            mbarrier::wait(s.free(stage, half), parity);
            if half == 0 && lane == 0 {
                shared::store_u32(s.there(stage, group), mask);
            }
            let target = s.half(stage, half) + group * slabs * 1024 + key * 128;
            // Opaque: or all slabs are one piece of code, whose registers there are not.
            let mut slab = misc::opaque(0);
            while slab < SLABS[0] {
                let column = (half * SLABS[0] + slab) * 64;
                let scale = shared::load_f32(row + ROW_SCALES + column / 128 * 4);
                let numbers = shared::load_u32x4(row + column + part * 16);
                let target = target + slab * 1024;
                shared::store_u32x4(target + chunks[0], widen([numbers[0], numbers[1]], scale));
                shared::store_u32x4(target + chunks[1], widen([numbers[2], numbers[3]], scale));
                slab += 1;
            }
            if half == 1 {
                // What only keys have.
                let target = target + SLABS[0] * 1024;
                let elements = shared::load_u32x4(row + ROW_ROPE + part * 32);
                shared::store_u32x4(target + chunks[0], elements);
                let elements = shared::load_u32x4(row + ROW_ROPE + part * 32 + 16);
                shared::store_u32x4(target + chunks[1], elements);
            }
            // The tensor cores read it.
            fence::proxy_async_shared();
            warp::sync_warp(WARP);
            if lane == 0 {
                mbarrier::arrive(s.full(stage, half));
            }
            half += 1;
        }
    }
}

/// Eight numbers of 8 bits, times their scale, in bf16.
#[inline(always)]
fn widen(numbers: [u32; 2], scale: f32) -> [u32; 4] {
    let pair = |pair: u16| {
        let [first, second] = convert::f16x2_to_f32(convert::e4m3x2_to_f16x2(pair));
        convert::f32x2_to_bf16x2(first * scale, second * scale)
    };
    [
        pair(numbers[0] as u16),
        pair((numbers[0] >> 16) as u16),
        pair(numbers[1] as u16),
        pair((numbers[1] >> 16) as u16),
    ]
}
