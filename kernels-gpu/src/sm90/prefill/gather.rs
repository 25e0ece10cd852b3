//! Loaders for pools that tensor maps cannot describe: pages of any size, copied row by row.

use cuda_std::{async_copy, mbarrier, prelude::*};

use super::{super::ring::Ring, CLAIM_AHEAD, tile::Shared};
use crate::{
    abi::{KvStrides, PrefillParams},
    prefill::Tile,
};

const WARP: u32 = !0;

/// Rows whose places a warp looks up at a time, a lane each.
const LOOKED_UP: u32 = 32;

/// A row that the tile does not see: it becomes zero, whatever is in the pool.
const NOWHERE: u32 = u32::MAX;

/// Where a row is: its page, and what is left in vectors of 16 bytes. Not added up before it is needed: that
/// would wait for the page.
#[derive(Clone, Copy)]
struct Place {
    page: u32,
    rest: u32,
}

/// Looks up a row of a block. The tile stays in shared memory: there are few registers here.
#[inline(always)]
unsafe fn look_up(
    p: &PrefillParams,
    strides: &KvStrides,
    keys: u32,
    tile: u32,
    begin: i32,
    row: u32,
) -> Place {
    // SAFETY: the tile is this loader's until it says otherwise.
    let (kv_head, [table, lowest, _, _]) =
        unsafe { (shared::load_u32(tile + 16), shared::load_u32x4(tile + 32)) };
    let position = begin + row as i32;
    // A block ends where the tile does, or before.
    if position < lowest as i32 || row >= keys {
        return Place {
            page: 0,
            rest: NOWHERE,
        };
    }
    let (page, in_page) = p.page_size.div_rem(position as u32);
    let entry = (p.attention.page_ids + u64::from(table + page) * 4) as *const u32;
    Place {
        // SAFETY: the table has a page for each key of the item.
        page: unsafe { ptr::load_nc_u32(entry) },
        rest: in_page * strides.token + kv_head * strides.head,
    }
}

/// Brings the blocks of all tiles, from the last to the first of each: values or keys. Each lane's copies
/// arrive at the block's barrier when they are done.
///
/// # Safety
/// A whole warp comes here; the barriers are initialised for copies by each lane.
#[inline(always)]
pub(super) unsafe fn gather<const VALUES: bool, const STAGES: u32>(p: &PrefillParams, s: Shared) {
    let a = &p.attention;
    let (pool, strides) = if VALUES {
        (a.v, &a.v_strides)
    } else {
        (a.k, &a.k_strides)
    };
    let lane = warp::lane_id();
    let keys = s.shape.keys;
    let row_bytes = s.shape.row_bytes(VALUES);
    let mut tiles = Ring::<2>::CONSUMER;
    let mut blocks = Ring::<STAGES>::PRODUCER;
    loop {
        // SAFETY: the ring's barriers say what belongs to whom; a whole warp.
        unsafe {
            mbarrier::wait(s.tile_full(tiles.stage), tiles.parity);
            let at = s.tile(tiles.stage);
            let Tile { rows, end, .. } = Tile::load(at);
            if rows == 0 {
                return;
            }
            let mut begin = end as i32 - keys as i32;
            let mut place = look_up(p, strides, keys, at, begin, lane);
            loop {
                // Keys of this block and those before it.
                let left = begin + keys as i32 - shared::load_u32(at + 36) as i32;
                let soon = (CLAIM_AHEAD * keys) as i32;
                if !VALUES && lane == 0 && left <= soon && left > soon - keys as i32 {
                    if s.claims_late(tiles.stage) {
                        mbarrier::arrive(s.ends_soon());
                    }
                }
                let (_, free, block) = s.stage_of(VALUES, blocks.stage);
                mbarrier::wait(free, blocks.parity);
                // A lane copies 16 bytes of the `lane / 8`th of 4 rows, and of the one 4 further down. Swizzled.
                let by = misc::opaque(lane);
                let mut target = block + by / 8 * 128 + ((by % 8) ^ (by / 8)) * 16;
                // Not unrolled: there are few registers here.
                let mut first = misc::opaque(0);
                while first < keys {
                    let places = place.page * strides.page + place.rest;
                    let count = (keys - first).min(LOOKED_UP);
                    first += LOOKED_UP;
                    let (of, from) = match first < keys {
                        true => (begin, first),
                        false => (begin - keys as i32, 0),
                    };
                    place = look_up(p, strides, keys, at, of, from + lane);
                    let mut row = 0;
                    while row < count {
                        let copy = |row, target| {
                            let of = warp::warp_shuffle_idx(WARP, places, row + lane / 8, 32);
                            let exists = of != NOWHERE;
                            let vector = if exists { of + lane % 8 } else { 0 };
                            let source = pool + u64::from(vector) * 16;
                            let mut slab = 0;
                            while slab < row_bytes / 128 {
                                async_copy::copy_cg_zfill(
                                    target + slab * 1024,
                                    (source + u64::from(slab) * 128) as *const u8,
                                    if exists { 16 } else { 0 },
                                );
                                slab += 1;
                            }
                        };
                        // The fourth row further down is swizzled otherwise.
                        copy(row, target);
                        copy(row + 4, (target + 4 * 128) ^ 64);
                        target += 8 * row_bytes;
                        row += 8;
                    }
                }
                let (full, _, _) = s.stage_of(VALUES, misc::opaque(blocks.stage));
                async_copy::mbarrier_arrive(full);
                blocks.advance();
                if begin <= shared::load_u32(at + 36) as i32 {
                    break;
                }
                begin -= keys as i32;
            }
            mbarrier::arrive(s.tile_free(tiles.stage));
            tiles.advance();
        }
    }
}
