//! The warps that bring keys of 656 bytes and convert them to bf16.
//!
//! One warp brings rows, as many groups of 8 keys ahead as there are places. Groups go to the converting warps in turn.
//! Each lane has 16 columns of a key for each slab of 64: what 8 lanes read or write at a time lies in different banks,
//! for 656 is 41 times 16, and the slabs are swizzled.

use cuda_std::{async_copy, convert, fence, mbarrier, misc, ptr, shared, warp};

use super::{
    super::pipeline::Pipeline,
    PREFETCH_DISTANCE,
    config::{
        CONVERTERS, GROUP, RAW_BARRIERS, RAW_SLOTS, ROW_BYTES, ROW_ROPE, ROW_SCALES, SLABS,
        VALUE_DIM,
    },
    shared::{Shared, Unit, Units},
};
use crate::{
    abi::{LatentParams, WorkItem},
    common::tile_counter,
};

const WARP: u32 = warp::FULL_MASK;

/// Lanes that copy a row together, 16 bytes each: what lies side by side is asked for at once, for rows begin in the
/// middle of sectors.
const LANES: u32 = 16;

/// What is said of a group in place of the keys that are there: there are no more.
const END: u32 = u32::MAX;

/// Brings the rows of all units.
///
/// # Safety
/// A whole warp comes here; the barriers are initialised.
#[inline(always)]
pub(super) unsafe fn bring<const KEYS: u32, const STAGES: u32, const CONVERTED: bool>(
    p: &LatentParams,
    s: Shared<KEYS, STAGES, CONVERTED>,
) {
    const { assert!(!CONVERTED || KEYS == 32) };
    let mut slots = Pipeline::<2>::CONSUMER;
    // Groups of all units so far.
    let mut group = 0;
    // SAFETY: a whole warp; the barriers say what belongs to whom.
    unsafe {
        loop {
            mbarrier::wait(s.unit_full(slots.stage), slots.parity);
            let Unit { tokens, blocks, .. } = Unit::load(s.unit(slots.stage));
            if tokens == 0 {
                break;
            }
            let mut page = look_up(p, s, slots.stage, 0);
            let mut block = 0;
            while block < blocks {
                // What a unit is, is looked up for each block: registers are few.
                let lane = misc::opaque(warp::lane_id());
                let unit = Unit::load(s.unit(misc::opaque(slots.stage)));
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
                let mut there = warp::warp_vote_ballot(WARP, exists);
                let policy = policy(p, unit.flags);
                block += 1;
                page = look_up(p, s, slots.stage, block);
                // Opaque: or all groups are one piece of code, whose registers there are not.
                let mut first = misc::opaque(0);
                while first < KEYS {
                    mbarrier::wait(s.raw_free(group), group / RAW_SLOTS & 1 ^ 1);
                    copy_group(s.raw(group), row, first, there, policy);
                    announce(s, group, there & 0xff);
                    group += 1;
                    there >>= GROUP;
                    first += GROUP;
                }
            }
            mbarrier::arrive(s.unit_free(slots.stage));
            slots.advance();
        }
        let mut converter = misc::opaque(0);
        while converter < CONVERTERS {
            mbarrier::wait(s.raw_free(group), group / RAW_SLOTS & 1 ^ 1);
            announce(s, group, END);
            group += 1;
            converter += 1;
        }
        async_copy::wait_all();
    }
}

/// The page of a lane's key of a block; what is no page behind the unit's last key.
#[inline(always)]
pub(super) unsafe fn look_up<U: Units>(p: &LatentParams, s: U, slot: u32, block: u32) -> u32 {
    let lane = misc::opaque(warp::lane_id());
    // SAFETY: the unit was published, and is until this warp says that it is done with it.
    let unit = unsafe { Unit::load(s.unit(slot)) };
    let at = unit.first + block * U::KEYS + lane;
    if at >= unit.kv_end {
        return u32::MAX;
    }
    let (page, _) = p.page_size.div_rem(at);
    let entry = p.attention.page_ids + u64::from(unit.table + page) * 4;
    // SAFETY: the table has an entry for each key of the item.
    unsafe { ptr::load_nc_u32(entry as *const u32) }
}

/// Says which keys of a group are there, or that there are no more groups, once all lanes' copies have arrived.
#[inline(always)]
unsafe fn announce<const KEYS: u32, const STAGES: u32, const CONVERTED: bool>(
    s: Shared<KEYS, STAGES, CONVERTED>,
    group: u32,
    there: u32,
) {
    // SAFETY: a whole warp; the barrier counts its lanes, and one of them for what it has written.
    unsafe {
        async_copy::mbarrier_arrive(s.raw_full(group));
        if warp::lane_id() == 0 {
            shared::store_u32(s.raw_there(group), there);
            mbarrier::arrive(s.raw_full(group));
        }
    }
}

/// Copies the rows of a group, of which `row` is that of each lane's key from the group's `first` lane on. Zeros stand for
/// keys that are not there.
#[inline(always)]
unsafe fn copy_group(raw: u32, row: u64, first: u32, mask: u32, policy: u64) {
    const ROUNDS: usize = (GROUP * LANES / 32) as usize;
    let lane = misc::opaque(warp::lane_id());
    let (half, column) = (lane / LANES, lane % LANES * 16);
    // All shuffles before the first copy: none waits for the one before.
    let sources: [u64; ROUNDS] = [0, 1, 2, 3].map(|i| {
        let key = first + i * (32 / LANES) + half;
        // SAFETY: a whole warp.
        let [low, high] = [row as u32, (row >> 32) as u32]
            .map(|word| unsafe { warp::warp_shuffle_idx(WARP, word, key, 32) });
        (u64::from(high) << 32 | u64::from(low)) + u64::from(column)
    });
    let (mask, target) = (mask >> half, raw + half * ROW_BYTES + column);
    let mut i = 0;
    while i < ROUNDS {
        let key = i as u32 * (32 / LANES);
        let valid = (mask >> key & 1) * 16;
        let mut piece = 0;
        while piece < ROW_BYTES {
            if column + piece < ROW_BYTES {
                let source = (sources[i] + u64::from(piece)) as *const u8;
                // SAFETY: rows are where the lanes found them, and their places are free.
                unsafe {
                    let target = target + key * ROW_BYTES + piece;
                    async_copy::copy_cg_hint_zfill(target, source, valid, policy);
                }
            }
            piece += LANES * 16;
        }
        i += 1;
    }
}

/// How long L2 keeps the keys of a unit.
#[inline(always)]
pub(super) fn policy(p: &LatentParams, flags: u32) -> u64 {
    // SAFETY: as the launch is.
    let long = unsafe { tile_counter::is_long(p.long, p.attention.record) };
    match p.tiles.get() > 1 || flags & WorkItem::SHARED_KEYS != 0 {
        true => ptr::evict_last_policy(),
        false if long => ptr::evict_unchanged_policy(),
        false => ptr::evict_first_policy(),
    }
}

/// Converts a warp's groups of all units.
///
/// # Safety
/// A whole warp comes here, as one of [`CONVERTERS`]; the barriers are initialised.
#[inline(always)]
pub(super) unsafe fn convert<const KEYS: u32, const STAGES: u32, const CONVERTED: bool>(
    s: Shared<KEYS, STAGES, CONVERTED>,
    converter: u32,
) {
    // Counted over all units.
    let mut group = converter;
    // SAFETY: a whole warp; the barriers say what belongs to whom.
    unsafe {
        loop {
            mbarrier::wait(s.raw_full(group), group / RAW_BARRIERS & 1);
            if shared::load_u32(s.raw_there(group)) == END {
                return;
            }
            widen_half(s, group, 0);
            widen_half(s, group, 1);
            // Each lane has read of the rows, and arrives for itself.
            mbarrier::arrive(s.raw_free(misc::opaque(group)));
            group += CONVERTERS;
        }
    }
}

/// Converts a half of a group's rows to its place in a block.
#[inline(always)]
unsafe fn widen_half<const KEYS: u32, const STAGES: u32, const CONVERTED: bool>(
    s: Shared<KEYS, STAGES, CONVERTED>,
    group: u32,
    half: u32,
) {
    // Opaque: or what follows from them is kept in registers from half to half.
    let (lane, group) = (misc::opaque(warp::lane_id()), misc::opaque(group));
    let (key, part) = (lane % GROUP, lane / GROUP);
    let (block, in_block) = (group / (KEYS / GROUP), group % (KEYS / GROUP));
    let stage = block % STAGES;
    let slabs = SLABS[half as usize];
    let scales = s.raw(group) + key * ROW_BYTES + ROW_SCALES + half * 8;
    let numbers = s.raw(group) + key * ROW_BYTES + half * (VALUE_DIM / 2) + part * 16;
    let target = s.half(stage, half) + in_block * slabs * 1024 + key * 128;
    let targets = [
        target + (2 * part ^ key) * 16,
        target + ((2 * part + 1) ^ key) * 16,
    ];
    // SAFETY: a whole warp; the rows are there, and the half is free when its barrier says so.
    unsafe {
        mbarrier::wait(s.free(stage, half), block / STAGES & 1 ^ 1);
        let mut slab = 0;
        while slab < SLABS[0] {
            // Two slabs have a scale.
            let scale = shared::load_f32(scales + slab * 2);
            let first = shared::load_u32x4(numbers + slab * 64);
            let second = shared::load_u32x4(numbers + slab * 64 + 64);
            let at = slab * 1024;
            shared::store_u32x4(targets[0] + at, widen([first[0], first[1]], scale));
            shared::store_u32x4(targets[1] + at, widen([first[2], first[3]], scale));
            let at = at + 1024;
            shared::store_u32x4(targets[0] + at, widen([second[0], second[1]], scale));
            shared::store_u32x4(targets[1] + at, widen([second[2], second[3]], scale));
            slab += 2;
        }
        if half == 1 {
            // What only keys have.
            let elements = s.raw(group) + key * ROW_BYTES + ROW_ROPE + part * 32;
            let at = SLABS[0] * 1024;
            let [first, second] = [
                shared::load_u32x4(elements),
                shared::load_u32x4(elements + 16),
            ];
            shared::store_u32x4(targets[0] + at, first);
            shared::store_u32x4(targets[1] + at, second);
            // Here, for both consumers have read what stood there before they free this half.
            if lane == 0 {
                let there = shared::load_u32(s.raw_there(group));
                shared::store_u32(s.there(stage, in_block), there);
            }
        }
        // The tensor cores read it.
        fence::proxy_async_shared();
        warp::sync_warp(WARP);
        if lane == 0 {
            mbarrier::arrive(s.full(stage, half));
        }
    }
}

/// Eight numbers of 8 bits, times their scale, in bf16.
#[inline(always)]
fn widen(numbers: [u32; 2], scale: f32) -> [u32; 4] {
    [
        widen_pair(numbers[0] as u16, scale),
        widen_pair((numbers[0] >> 16) as u16, scale),
        widen_pair(numbers[1] as u16, scale),
        widen_pair((numbers[1] >> 16) as u16, scale),
    ]
}

/// Two of them.
#[inline(always)]
pub(super) fn widen_pair(numbers: u16, scale: f32) -> u32 {
    let [first, second] = convert::f16x2_to_f32(convert::e4m3x2_to_f16x2(numbers));
    convert::f32x2_to_bf16x2(first * scale, second * scale)
}
