//! The loaders of keys and values for pools that no tensor map describes: [one by one](crate::sm90::by_rows).
//!
//! The copies arrive at the block's barrier by themselves. Keys outside of the unit are copies of its first or last key, so
//! that no value has to be zeroed.

use cuda_std::{async_copy, mbarrier, misc, ptr, warp};

use super::{
    super::super::{
        by_rows::{Column, KEYS, Rows, place},
        pipeline::Pipeline,
    },
    shared::{Shared, Unit},
};
use crate::abi::{DecodeParams, WorkItem};

/// Steps of [`KEYS`] keys whose page ids are looked up ahead. More would take too many registers.
const AHEAD: usize = 2;

/// The page, as an index into the unit's table, and the token of a key. Outside of the unit, those of its first or last key.
#[inline(always)]
fn find(p: &DecodeParams, unit: &Unit, key: i32) -> (u32, u32) {
    let key = key.max(unit.kv_begin as i32).min(unit.kv_end as i32 - 1);
    p.page_size.div_rem(key as u32)
}

/// Loads the blocks of all units, values or keys, from the last block of a unit to the first.
///
/// # Safety
/// A whole warp comes here; the barriers are initialised for copies by each lane.
#[inline(always)]
pub(super) unsafe fn load<const VALUES: bool, const STAGES: u32>(p: &DecodeParams, s: Shared) {
    let a = &p.attention;
    let (pool, strides) = match VALUES {
        true => (a.v, &p.v_vectors),
        false => (a.k, &p.k_vectors),
    };
    let lane = warp::lane_id();
    let keys = s.shape.keys;
    let rows = Rows {
        key: s.shape.row_bytes(),
        element: s.shape.bytes,
    };
    let mut slots = Pipeline::<2>::CONSUMER;
    let mut blocks = Pipeline::<STAGES>::PRODUCER;
    loop {
        // SAFETY: the full and free barriers order every access to a slot or stage; a whole warp; the table has a page for
        // each key of the unit.
        unsafe {
            mbarrier::wait(s.unit_full(slots.stage), slots.parity);
            let unit = Unit::load(s.unit(slots.stage));
            mbarrier::arrive(s.unit_free(slots.stage));
            slots.advance();
            if unit.tokens == 0 {
                return;
            }
            let any = unit.kv_begin < unit.kv_end;
            let column = Column::new(p, rows, lane, any);
            let source = pool + u64::from(column.from);
            let policy = match unit.flags & WorkItem::SHARED_KEYS != 0 {
                true => ptr::evict_last_policy(),
                false => ptr::evict_first_policy(),
            };
            let id = |key: i32| {
                if !any {
                    return 0;
                }
                let (page, _) = find(p, &unit, key);
                let entry = a.page_ids + u64::from(unit.table + page) * 4;
                ptr::load_nc_u32(entry as *const u32)
            };
            // The lane's first key of the block.
            let mut key = (unit.end as i32 - keys as i32) + rows.key_of(lane) as i32;
            let mut pages = [0, KEYS as i32].map(|first| id(key + first));
            let mut left = unit.blocks;
            while left > 0 {
                if !VALUES && left == s.prefetch_distance() && lane == 0 {
                    mbarrier::arrive(s.near_end());
                }
                left -= 1;
                let (full, free, target) = match VALUES {
                    true => (
                        s.values_full(blocks.stage),
                        s.values_free(blocks.stage),
                        s.values(blocks.stage),
                    ),
                    false => (
                        s.keys_full(blocks.stage),
                        s.keys_free(blocks.stage),
                        s.keys(blocks.stage),
                    ),
                };
                mbarrier::wait(free, blocks.parity);
                let mut first = 0;
                // Opaque, so that the loop is not unrolled.
                while misc::opaque(first) < keys {
                    let mut i = 0;
                    while i < AHEAD {
                        let (_, token) = find(p, &unit, key);
                        let place = place(strides, pages[i], token, unit.head);
                        // Behind the last keys of the block come the first of the one before.
                        let back = if first + AHEAD as u32 * KEYS < keys {
                            0
                        } else {
                            2 * keys
                        };
                        pages[i] = id(key + (AHEAD as u32 * KEYS) as i32 - back as i32);
                        column.copy([source], [place], [target + first * rows.key], policy);
                        first += KEYS;
                        key += KEYS as i32;
                        i += 1;
                    }
                }
                async_copy::mbarrier_arrive(full);
                key -= 2 * keys as i32;
                blocks.advance();
            }
        }
    }
}
