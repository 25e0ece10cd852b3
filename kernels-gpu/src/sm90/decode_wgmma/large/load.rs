//! The producer warps: one claims units, one loads keys, one loads values.

use cuda_std::{
    fence, mbarrier, misc, ptr, shared, thread,
    tma::{self, TensorMap},
    warp,
};

use super::{
    super::super::pipeline::Pipeline,
    PREFETCH_DISTANCE,
    config::{BLOCK_KEYS, Keys, PIECE_KEYS, VALUE_BYTES, VALUE_DIM, VALUE_PIECES, VALUE_SLABS},
    shared::{Shared, Unit, ValueRing},
};
use crate::{
    abi::{DecodeParams, WorkItem},
    common::{decode::produce::Header, policy::Policies},
};

const WARP: u32 = warp::FULL_MASK;

// ---- Units -------------------------------------------------------------------------------------

/// Claims one unit after another, each when the previous one nears its end. Publishes its description and rows, and
/// prefetches its queries to L2.
///
/// # Safety
/// A whole warp comes here; the barriers are initialised.
#[inline(always)]
pub(super) unsafe fn claim<const DIM: u32>(p: &DecodeParams, s: Shared<DIM>) {
    // SAFETY: the launch's parameters are valid.
    let a = &unsafe { p.attention.of_this_plan() };
    let lane = warp::lane_id();
    let ctas = thread::grid_dim_x();
    let mut unit = thread::block_idx_x();
    let mut slots = Pipeline::<2>::PRODUCER;
    let mut ends = Pipeline::<1>::CONSUMER;
    // SAFETY: a whole warp; the full and free barriers order every access to a slot or stage.
    unsafe {
        while unit < a.units {
            let header = Header::load(a, p.kv_heads, unit);
            let item = &header.item;
            let first = item.kv_begin & !(p.piece_tokens - 1);
            let described = Unit::new(&header, header.head, first, BLOCK_KEYS);
            mbarrier::wait(s.unit_free(slots.stage), slots.parity);
            if lane == 0 {
                described.store(s.unit(slots.stage));
            }
            // Loaders start on the keys while the rows are looked up.
            mbarrier::arrive(s.unit_full(slots.stage));
            let mut token = lane;
            while token < item.rows {
                let words = header.load_row(a, token).words();
                shared::store_u32x4(s.row(slots.stage, token), words);
                token += 32;
            }
            mbarrier::arrive(s.rows_full(slots.stage));
            ask_for_queries(p, s, slots.stage, &described);
            slots.advance();
            if described.blocks >= PREFETCH_DISTANCE {
                mbarrier::wait(s.near_end(), ends.parity);
                ends.advance();
            }
            unit = a.next_unit(lane, ctas);
        }
        mbarrier::wait(s.unit_free(slots.stage), slots.parity);
        if lane == 0 {
            Unit::NONE.store(s.unit(slots.stage));
        }
        mbarrier::arrive(s.unit_full(slots.stage));
    }
}

/// Prefetches a unit's queries to L2. The softmax warpgroup copies them once the previous unit is done.
///
/// # Safety
/// A whole warp, which has written the rows.
#[inline(always)]
unsafe fn ask_for_queries<const DIM: u32>(
    p: &DecodeParams,
    s: Shared<DIM>,
    slot: u32,
    unit: &Unit,
) {
    const LINE: u32 = 128;
    let a = &p.attention;
    // SAFETY: a whole warp. Lanes read rows that other lanes have written.
    unsafe { warp::sync_warp(WARP) };
    let lines = a.group * (DIM * 2 / LINE);
    let mut token = 0;
    while token < unit.tokens {
        // SAFETY: the unit has the token, which has the heads of the group.
        unsafe {
            let of = shared::load_u32(s.row(slot, token));
            let element =
                u64::from(of) * u64::from(a.q_token_stride) + u64::from(unit.head * a.group * DIM);
            let mut line = warp::lane_id();
            while line < lines {
                ptr::prefetch_l2((a.q + element * 2 + u64::from(line * LINE)) as *const u8);
                line += 32;
            }
        }
        token += 1;
    }
}

// ---- Keys and values ---------------------------------------------------------------------------

/// Waits for the next unit and reads it.
///
/// # Safety
/// A whole warp comes here.
#[inline(always)]
unsafe fn unit_of<const DIM: u32>(s: Shared<DIM>, slot: u32, parity: u32) -> Unit {
    // SAFETY: the full and free barriers order every access to a slot; a whole warp.
    unsafe {
        mbarrier::wait(s.unit_full(slot), parity);
        Unit::load(s.unit(slot))
    }
}

/// The L2 policy of a unit's keys.
#[inline(always)]
unsafe fn policy_of(p: &DecodeParams, unit: &Unit) -> u64 {
    // SAFETY: the launch's parameters are valid.
    let policies = unsafe { Policies::new(p.long, p.attention.record) };
    policies.of(unit.flags & WorkItem::SHARED_KEYS != 0)
}

/// The TMA coordinates of the box that starts at a key, or at its value, whose heads have `times` as many slabs as those of keys.
/// Past the item's keys they are out of bounds, which gives zeros.
#[inline(always)]
unsafe fn corner_of(p: &DecodeParams, unit: &Unit, key: u32, times: u32) -> [i32; 5] {
    let slab = (unit.head * (p.half_per_head * times)) as i32;
    if key >= unit.kv_end {
        return [0, 0, slab, 0, p.outside as i32];
    }
    let (page, in_page) = p.page_size.div_rem(key);
    let entry = p.attention.page_ids + u64::from(unit.table + page) * 4;
    // SAFETY: the table has a page for each key of the item.
    let id = unsafe { ptr::load_nc_u32(entry as *const u32) };
    let page = id * p.page_per_page + unit.head * p.page_per_head;
    [0, 0, slab, (in_page / 8) as i32, page as i32]
}

/// Loads the keys of all units, in pieces of some columns, through `STAGES` stages.
///
/// # Safety
/// A whole warp comes here; `map` is the tensor map of the keys, and the barriers are initialised.
#[inline(always)]
pub(super) unsafe fn load_keys<const DIM: u32, const STAGES: u32>(
    p: &DecodeParams,
    map: *const TensorMap,
    s: Shared<DIM>,
) {
    const { assert!(STAGES == Keys::<DIM>::STAGES) };
    let lane = warp::lane_id();
    let key = lane * p.piece_tokens;
    let mine = key < BLOCK_KEYS;
    let mut slots = Pipeline::<2>::CONSUMER;
    let mut stages = Pipeline::<STAGES>::PRODUCER;
    // SAFETY: a whole warp; the full and free barriers order every access to a slot or stage.
    unsafe {
        loop {
            let unit = unit_of(s, slots.stage, slots.parity);
            if unit.tokens == 0 {
                return;
            }
            let policy = policy_of(p, &unit);
            let mut at = unit.first + key;
            let mut left = unit.blocks;
            while left > 0 {
                if lane == 0 && left == PREFETCH_DISTANCE {
                    mbarrier::arrive(s.near_end());
                }
                left -= 1;
                // Reloaded from shared memory for each block, to save registers.
                let unit = Unit::load(s.unit(slots.stage));
                let mut corner = [0; 5];
                if mine {
                    corner = corner_of(p, &unit, at, 1);
                }
                let mut piece = misc::opaque(0);
                while piece < Keys::<DIM>::PIECES {
                    mbarrier::wait(s.keys_free(stages.stage), stages.parity);
                    let full = s.keys_full(stages.stage);
                    if lane == 0 {
                        mbarrier::arrive_expect_tx(full, Keys::<DIM>::PIECE_BYTES);
                    }
                    warp::sync_warp(WARP);
                    if mine {
                        let target = s.keys(stages.stage) + key * (Keys::<DIM>::PIECE_SLABS * 128);
                        tma::load_tensor_hint(target, map, corner, full, policy);
                    }
                    corner[2] += Keys::<DIM>::PIECE_SLABS as i32;
                    stages.advance();
                    piece += 1;
                }
                at += BLOCK_KEYS;
            }
            mbarrier::arrive(s.unit_free(slots.stage));
            slots.advance();
        }
    }
}

/// Zeroes the values of a key; `row` is the address of its first slab.
///
/// # Safety
/// A whole warp comes here, and no other warp accesses the piece.
#[inline(always)]
unsafe fn clear(row: u32) {
    // Opaque: otherwise the lane's addresses stay in registers.
    let lane = misc::opaque(warp::lane_id());
    let at = row + lane / 8 * 1024 + lane % 8 * 16;
    // SAFETY: as above. The swizzle only permutes chunks of a zeroed row.
    unsafe {
        shared::store_u32x4(at, [0; 4]);
        shared::store_u32x4(at + 4096, [0; 4]);
    }
}

/// Loads the values of all units, in pieces of 16 keys. Values outside the item are zeroed: they may be anything, and 0
/// · NaN is NaN.
///
/// # Safety
/// A whole warp comes here; `map` is the tensor map of the values, and the barriers are initialised.
#[inline(always)]
pub(super) unsafe fn load_values<const DIM: u32>(
    p: &DecodeParams,
    map: *const TensorMap,
    s: Shared<DIM>,
) {
    const ROW_BYTES: u32 = VALUE_DIM * 2;
    let lane = warp::lane_id();
    // Each lane has a box in one of the pieces, and looks up its page once per block.
    let key = lane << p.piece_tokens.min(PIECE_KEYS).trailing_zeros();
    let (mine, in_piece) = (key / PIECE_KEYS, key % PIECE_KEYS);
    let mut ring = ValueRing::<DIM>::PRODUCER;
    // Slot and parity of the ring of units, in one register.
    let mut units = 0;
    let mut tails = 0;
    // SAFETY: a whole warp; the full and free barriers order every access to a slot or stage.
    unsafe {
        loop {
            let slot = units & 1;
            let unit = unit_of(s, slot, units >> 1 & 1);
            if unit.tokens == 0 {
                return;
            }
            let mut begin = unit.first;
            let mut left = unit.blocks;
            while left > 0 {
                left -= 1;
                // Reloaded from shared memory for each block, to save registers.
                let unit = Unit::load(s.unit(slot));
                let policy = policy_of(p, &unit);
                let mut corner = [0; 5];
                if mine < VALUE_PIECES {
                    let key = begin + mine * PIECE_KEYS + in_piece;
                    corner = corner_of(p, &unit, key, VALUE_SLABS / Keys::<DIM>::SLABS);
                }
                let mut piece = misc::opaque(0);
                while piece < VALUE_PIECES {
                    let past = begin + PIECE_KEYS;
                    let starts = begin < unit.kv_begin;
                    let ends = begin < unit.kv_end && past > unit.kv_end;
                    let tail = starts || ends;
                    let stage = ring.first + piece;
                    mbarrier::wait(s.values_free(stage), ring.parity);
                    let full = s.values_full(stage);
                    let arrival = if tail { s.tail() } else { full };
                    if lane == 0 {
                        mbarrier::arrive_expect_tx(arrival, VALUE_BYTES);
                    }
                    warp::sync_warp(WARP);
                    let target = s.values(stage);
                    if mine == piece {
                        let target = target + in_piece * ROW_BYTES;
                        tma::load_tensor_hint(target, map, corner, arrival, policy);
                    }
                    if tail {
                        mbarrier::wait(arrival, tails);
                        tails ^= 1;
                        let first = unit.kv_begin.saturating_sub(begin).min(PIECE_KEYS);
                        let last = unit.kv_end.saturating_sub(begin).min(PIECE_KEYS);
                        let mut key = misc::opaque(0);
                        while key < PIECE_KEYS {
                            if key < first || key >= last {
                                clear(target + key / 8 * (8 * ROW_BYTES) + key % 8 * 128);
                            }
                            key += 1;
                        }
                        fence::proxy_async_shared();
                        warp::sync_warp(WARP);
                        if lane == 0 {
                            mbarrier::arrive(full);
                        }
                    }
                    begin = past;
                    piece += 1;
                }
                ring.advance();
            }
            mbarrier::arrive(s.unit_free(slot));
            units += 1;
        }
    }
}
