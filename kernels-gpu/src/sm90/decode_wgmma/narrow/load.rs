//! The producer warpgroup: the warps that gather queries and those that load keys and values.

use cuda_std::{
    async_copy, fence, mbarrier, ptr, shared, thread,
    tma::{self, TensorMap},
    warp,
};

use super::{
    super::super::{pages::clear, pipeline::Pipeline},
    queries_8::bring,
    shared::{Shared, Unit},
};
use crate::{
    abi::{DecodeParams, WorkItem},
    common::{decode::produce::Header, half::Half},
};

const WARP: u32 = warp::FULL_MASK;

// ---- The query loaders; the first is the scheduler warp -----------------------------------------

/// Claims one unit after another, each when the previous one nears its end. Publishes its description and rows, and
/// gathers half of its queries.
///
/// # Safety
/// A whole warp comes here, with what [`Header::first`] found; the barriers are initialised.
#[inline(always)]
pub(super) unsafe fn gather(p: &DecodeParams, s: Shared, first: Header) {
    let take = |slot, header: &Header| {
        let arrived = s.rows_full(slot);
        // SAFETY: a whole warp, which has written the rows. The other query loader takes the other half.
        unsafe {
            mbarrier::arrive(arrived);
            s.queries_of(slot, header.head, header.item.rows)
                .gather(p, 0);
            async_copy::wait_all();
        }
    };
    // SAFETY: the caller's promise.
    unsafe { claim(p, s, first, take) }
}

/// As [`gather`], alone, for queries in the order of 8-bit keys.
///
/// # Safety
/// As [`gather`]'s.
#[inline(always)]
pub(super) unsafe fn gather_8<T: Half>(p: &DecodeParams, s: Shared, first: Header) {
    let take = |slot, header: &Header| {
        // SAFETY: a whole warp, which has written the rows; nobody reads the slot's queries.
        unsafe {
            let queries = s.queries_of(slot, header.head, header.item.rows);
            queries.gather(p, 0);
            queries.gather(p, 1);
            async_copy::wait_all();
            warp::sync_warp(WARP);
            bring::<T>(p, s, slot, header);
        }
    };
    // SAFETY: the caller's promise.
    unsafe { claim(p, s, first, take) }
}

/// Claims units, describes them, and has their queries taken.
///
/// # Safety
/// As [`gather`]'s; `take` fills the slot's queries.
#[inline(always)]
unsafe fn claim(p: &DecodeParams, s: Shared, first: Header, take: impl Fn(u32, &Header)) {
    // SAFETY: the launch's parameters are valid.
    let a = &unsafe { p.attention.of_this_plan() };
    let lane = warp::lane_id();
    let ctas = thread::grid_dim_x();
    let mut unit = thread::block_idx_x();
    let mut header = first;
    let mut slots = Pipeline::<2>::PRODUCER;
    let mut ends = Pipeline::<1>::CONSUMER;
    // SAFETY: a whole warp; the full and free barriers order every access to a slot.
    unsafe {
        while unit < a.units {
            mbarrier::wait(s.unit_free(slots.stage), slots.parity);
            let described = describe(p, s, &header);
            if lane == 0 {
                described.store(s.unit(slots.stage));
                mbarrier::arrive(s.unit_full(slots.stage));
            }
            list_rows(p, s, slots.stage, &header);
            take(slots.stage, &header);
            // wgmma reads these ordinary stores through the async proxy.
            fence::proxy_async_shared();
            mbarrier::arrive(s.queries_full(slots.stage));
            slots.advance();
            if described.blocks >= s.prefetch_distance() {
                mbarrier::wait(s.near_end(), ends.parity);
                ends.advance();
            }
            unit = a.next_unit(lane, ctas);
            if unit < a.units {
                header = Header::load(a, p.kv_heads, unit);
            }
        }
        mbarrier::wait(s.unit_free(slots.stage), slots.parity);
        if lane == 0 {
            Unit::NONE.store(s.unit(slots.stage));
            mbarrier::arrive(s.unit_full(slots.stage));
        }
        warp::sync_warp(WARP);
        mbarrier::arrive(s.rows_full(slots.stage));
        mbarrier::arrive(s.queries_full(slots.stage));
    }
}

#[inline(always)]
fn describe(p: &DecodeParams, s: Shared, header: &Header) -> Unit {
    let WorkItem {
        rows: tokens,
        position,
        table,
        kv_begin,
        kv_end,
        flags,
        ..
    } = header.item;
    let end = kv_end.next_multiple_of(p.piece_tokens);
    let lowest = kv_begin & !(p.piece_tokens - 1);
    let keys = s.shape.keys;
    Unit {
        tokens,
        head: header.head,
        position,
        table,
        kv_begin,
        kv_end,
        // A unit without keys walks one block that is masked entirely.
        blocks: (end.saturating_sub(lowest) + keys - 1) / keys,
        end,
        flags,
    }
    .at_least_one_block()
}

impl Unit {
    #[inline(always)]
    fn at_least_one_block(mut self) -> Self {
        self.blocks = self.blocks.max(1);
        self
    }
}

/// Writes a unit's rows to its slot.
///
/// # Safety
/// A whole warp, which owns the slot; `header` is that of one of the launch's units.
#[inline(always)]
unsafe fn list_rows(p: &DecodeParams, s: Shared, slot: u32, header: &Header) {
    let mut token = warp::lane_id();
    // SAFETY: a whole warp, which owns the slot; the plan has these rows.
    unsafe {
        while token < header.item.rows {
            let row = header.load_row(&p.attention, token);
            shared::store_u32x4(s.row(slot, token), row.words());
            token += 32;
        }
        warp::sync_warp(WARP);
    }
}

// ---- The loaders -------------------------------------------------------------------------------

/// Loads the blocks of all units, values or keys, from the last block of a unit to the first.
///
/// # Safety
/// A whole warp comes here; `map` is the tensor map of the values or keys, and the barriers are initialised.
#[inline(always)]
pub(super) unsafe fn load<const VALUES: bool, const STAGES: u32>(
    p: &DecodeParams,
    map: *const TensorMap,
    s: Shared,
) {
    let a = &p.attention;
    let lane = warp::lane_id();
    let (keys, row_bytes) = (s.shape.keys, s.shape.row_bytes());
    let piece = lane * p.piece_tokens;
    let mine = piece < keys;
    let (evict_first, evict_last) = (ptr::evict_first_policy(), ptr::evict_last_policy());
    let mut slots = Pipeline::<2>::CONSUMER;
    let mut blocks = Pipeline::<STAGES>::PRODUCER;
    let mut tail_parity = 0;
    loop {
        // SAFETY: the full and free barriers order every access to a slot or stage; a whole warp.
        let unit = unsafe {
            mbarrier::wait(s.unit_full(slots.stage), slots.parity);
            let unit = Unit::load(s.unit(slots.stage));
            mbarrier::arrive(s.unit_free(slots.stage));
            unit
        };
        slots.advance();
        if unit.tokens == 0 {
            return;
        }
        let policy = if unit.flags & WorkItem::SHARED_KEYS != 0 {
            evict_last
        } else {
            evict_first
        };
        let lowest = unit.kv_begin & !(p.piece_tokens - 1);
        let mut begin = unit.end as i32;
        let mut left = unit.blocks;
        while left > 0 {
            if !VALUES && left == s.prefetch_distance() && lane == 0 {
                // SAFETY: the scheduler warp waits for it.
                unsafe { mbarrier::arrive(s.near_end()) };
            }
            left -= 1;
            begin -= keys as i32;
            // Find the page of this lane's box before waiting for the stage.
            let at = begin + piece as i32;
            let mut corner = [0, 0, 0, 0, p.outside as i32];
            if mine && at >= lowest as i32 && at < unit.kv_end as i32 {
                let (page, in_page) = p.page_size.div_rem(at as u32);
                let entry = (a.page_ids + u64::from(unit.table + page) * 4) as *const u32;
                // SAFETY: the table has a page for each key of the item.
                let id = unsafe { ptr::load_nc_u32(entry) };
                corner[3] = (in_page / 8) as i32;
                corner[4] = (id * p.page_per_page + unit.head * p.page_per_head) as i32;
            }
            corner[2] = (unit.head * p.half_per_head) as i32;

            let (full, free, target) = if VALUES {
                (
                    s.values_full(blocks.stage),
                    s.values_free(blocks.stage),
                    s.values(blocks.stage),
                )
            } else {
                (
                    s.keys_full(blocks.stage),
                    s.keys_free(blocks.stage),
                    s.keys(blocks.stage),
                )
            };
            // This block reaches past the item's last key: values there may be anything, and 0 · NaN is NaN. They are
            // zeroed before the consumers see the block.
            let past = unit.kv_end as i32;
            let tail = VALUES && begin + keys as i32 > past && unit.end != unit.kv_end;
            // SAFETY: as above.
            unsafe {
                mbarrier::wait(free, blocks.parity);
                let arrival = if tail { s.tail() } else { full };
                if lane == 0 {
                    mbarrier::arrive_expect_tx(arrival, keys * row_bytes);
                }
                warp::sync_warp(WARP);
                if mine {
                    tma::load_tensor_hint(target + piece * row_bytes, map, corner, arrival, policy);
                }
                if tail {
                    mbarrier::wait(s.tail(), tail_parity);
                    tail_parity ^= 1;
                    let first = (past - begin) as u32;
                    clear(target, first, (unit.end as i32 - begin) as u32, row_bytes);
                    fence::proxy_async_shared();
                    warp::sync_warp(WARP);
                    if lane == 0 {
                        mbarrier::arrive(full);
                    }
                }
            }
            blocks.advance();
        }
    }
}
