//! The warps that bring keys of 656 bytes and convert them to bf16.
//!
//! One warp brings rows, 16 keys at a time, as far ahead as there are places. Three warps convert the left halves of 8 keys
//! in turn, and three the right ones, so that a place is free as soon as it can be. Each lane has 16 columns of a key for each slab of 64: what 8 lanes read or write at a time lies in different banks,
//! for 656 is 41 times 16, and the slabs are swizzled.

use cuda_std::{convert, fence, mbarrier, misc, shared, warp};

use super::{
    super::pipeline::Pipeline,
    PREFETCH_DISTANCE,
    config::{
        CONVERTERS, GROUP, RAW_BARRIERS, RAW_KEYS, RAW_SLOTS, ROW_BYTES, ROW_ROPE, ROW_SCALES,
        SLABS, VALUE_DIM,
    },
    load::{Entry, Rows, policy},
    shared::{Shared, Unit, Units},
};
use crate::abi::LatentParams;

const WARP: u32 = warp::FULL_MASK;

/// What is said of rows in place of the keys that are there: there are no more.
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
    // Places for keys, of all units so far.
    let mut place = 0;
    // SAFETY: a whole warp; the barriers say what belongs to whom.
    unsafe {
        loop {
            mbarrier::wait(s.unit_full(slots.stage), slots.parity);
            let unit = Unit::load(s.unit(slots.stage));
            if unit.tokens == 0 {
                break;
            }
            let policy = policy(p, unit.flags);
            let mut entry = Entry::look_up(p, &unit, 0);
            let mut block = 0;
            while block < unit.blocks {
                if warp::lane_id() == 0 && block + PREFETCH_DISTANCE == unit.blocks {
                    mbarrier::arrive(s.near_end());
                }
                let rows = Rows::find::<RAW_KEYS>(p, entry);
                block += 1;
                entry = Entry::look_up(p, &unit, block);
                // Opaque: or both places are one piece of code, whose registers there are not.
                let mut first = misc::opaque(0);
                while first < KEYS {
                    // Opaque: or it is counted in 16 bits.
                    let of_all = misc::opaque(place);
                    mbarrier::wait(s.raw_free(of_all), of_all / RAW_SLOTS & 1 ^ 1);
                    let (full, there) = (s.raw_full(of_all), s.raw_there(of_all));
                    rows.bring::<RAW_KEYS>(s.raw(of_all), first, full, there, policy);
                    place += 1;
                    first += RAW_KEYS;
                }
            }
            mbarrier::arrive(s.unit_free(slots.stage));
            slots.advance();
        }
        // Of the next places each pair of converters has a group.
        let end = place + (CONVERTERS / 2).div_ceil(RAW_KEYS / GROUP);
        while place < end {
            mbarrier::wait(s.raw_free(place), place / RAW_SLOTS & 1 ^ 1);
            if warp::lane_id() == 0 {
                shared::store_u32(s.raw_there(place), END);
            }
            mbarrier::arrive(s.raw_full(place));
            place += 1;
        }
    }
}

/// Converts a half of a warp's groups of all units.
///
/// # Safety
/// A whole warp comes here, as one of half of the [`CONVERTERS`]; the barriers are initialised.
#[inline(always)]
pub(super) unsafe fn convert<
    const HALF: u32,
    const KEYS: u32,
    const STAGES: u32,
    const CONVERTED: bool,
>(
    s: Shared<KEYS, STAGES, CONVERTED>,
    converter: u32,
) {
    // Counted over all units. Opaque: or it is counted in 16 bits.
    let mut group = misc::opaque(converter);
    // SAFETY: a whole warp; the barriers say what belongs to whom.
    unsafe {
        loop {
            let place = group / (RAW_KEYS / GROUP);
            mbarrier::wait(s.raw_full(place), place / RAW_BARRIERS & 1);
            if shared::load_u32(s.raw_there(place)) == END {
                return;
            }
            widen_half::<HALF, _, _, _>(s, group);
            group += CONVERTERS / 2;
        }
    }
}

/// Converts a half of a group's rows to its place in a block.
#[inline(always)]
unsafe fn widen_half<const HALF: u32, const KEYS: u32, const STAGES: u32, const CONVERTED: bool>(
    s: Shared<KEYS, STAGES, CONVERTED>,
    group: u32,
) {
    // Opaque: or what follows from them is kept in registers from group to group.
    let (lane, group) = (misc::opaque(warp::lane_id()), misc::opaque(group));
    let (key, part) = (lane % GROUP, lane / GROUP);
    let (block, in_block) = (group / (KEYS / GROUP), group % (KEYS / GROUP));
    let stage = block % STAGES;
    let slabs = SLABS[HALF as usize];
    let place = group / (RAW_KEYS / GROUP);
    let first_key = group % (RAW_KEYS / GROUP) * GROUP;
    let row = s.raw(place) + (first_key + key) * ROW_BYTES;
    let target = s.half(stage, HALF) + in_block * slabs * 1024 + key * 128;
    let targets = [
        target + (2 * part ^ key) * 16,
        target + ((2 * part + 1) ^ key) * 16,
    ];
    // SAFETY: a whole warp; the rows are there, and the half is free when its barrier says so.
    unsafe {
        // All that it reads is under way before the first of it is needed.
        let numbers = row + HALF * (VALUE_DIM / 2) + part * 16;
        let numbers = [0, 64, 128, 192].map(|slab| shared::load_u32x4(numbers + slab));
        // Two slabs have a scale.
        let scales = shared::load_f32x2(row + ROW_SCALES + HALF * 8);
        mbarrier::wait(s.free(stage, HALF), block / STAGES & 1 ^ 1);
        let mut slab = 0;
        while slab < SLABS[0] as usize {
            let (four, scale) = (numbers[slab], scales[slab / 2]);
            let at = slab as u32 * 1024;
            shared::store_u32x4(targets[0] + at, widen([four[0], four[1]], scale));
            shared::store_u32x4(targets[1] + at, widen([four[2], four[3]], scale));
            slab += 1;
        }
        if HALF == 1 {
            // What only keys have.
            let elements = row + ROW_ROPE + part * 32;
            let at = SLABS[0] * 1024;
            let [first, second] = [
                shared::load_u32x4(elements),
                shared::load_u32x4(elements + 16),
            ];
            shared::store_u32x4(targets[0] + at, first);
            shared::store_u32x4(targets[1] + at, second);
            // Here, for both consumers have read what stood there before they free this half.
            if lane == 0 {
                let there = shared::load_u32(s.raw_there(place)) >> first_key & 0xff;
                shared::store_u32(s.there(stage, in_block), there);
            }
        }
        // Each lane has read of the rows, and arrives for itself.
        mbarrier::arrive(s.raw_free(place));
        // The tensor cores read it.
        fence::proxy_async_shared();
        warp::sync_warp(WARP);
        if lane == 0 {
            mbarrier::arrive(s.full(stage, HALF));
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
