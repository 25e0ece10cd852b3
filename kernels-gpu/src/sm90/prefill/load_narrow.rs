//! Loaders for 8-bit pools: rows come by copies of 16 bytes, and become 16-bit rows where the tensor cores read.
//!
//! Each lane converts the bytes that it copied itself, so that nothing is between a copy and its conversion but the
//! lane's own wait. The copies of a block are on their way while the block before is converted, piece by piece.

use cuda_std::{async_copy, fence, mbarrier, prelude::*};

use super::{
    super::pipeline::Pipeline,
    load_rows::{NOWHERE, ROWS, Table, WARP},
    scheduler::CLAIM_AHEAD,
    shared::Shared,
};
use crate::{
    abi::PrefillParams,
    common::{cache::Cache, prefill_tile::Tile},
};

/// Which of eight rows a lane copies at a time. Four lanes share a row; the eight that write at a time have an even
/// and an odd one, whose swizzled places are in other banks.
#[inline(always)]
fn row_of_eight(lane: u32) -> u32 {
    lane / 4 % 2 + lane / 8 * 2
}

/// Copies that a lane converts together.
const TOGETHER: u32 = 4;

/// A lane's part of the way from pool to stage.
struct Lane {
    /// Where its head's rows begin, and its 16 bytes of 64 in them.
    source: u64,
    /// Where its copies come to: 512 bytes for each of the warp's.
    narrow: u32,
    /// Of each row.
    row_bytes: u32,
}

impl Lane {
    /// Copies a piece, up to [`ROWS`] of the `rows` that are left of a block; zeros where a place is [`NOWHERE`].
    ///
    /// # Safety
    /// A whole warp comes here; the piece was converted; places are those of the pool.
    #[inline(always)]
    unsafe fn copy(&self, time: u32, places: u32, rows: u32) {
        let parts = self.row_bytes / 64;
        let mut eight = 0;
        while eight < ROWS / 8 && eight < rows / 8 {
            // SAFETY: the caller's promise; nothing is read for a row that is nowhere.
            unsafe {
                let place = warp::warp_shuffle_idx(WARP, places, eight, 4);
                let bytes = if place == NOWHERE { 0 } else { 16 };
                let source = self.source + u64::from(place) * 16;
                let mut part = 0;
                while part < parts {
                    let copy = (time * (ROWS / 8) + eight) * parts + part;
                    let source = source + u64::from(part) * 64;
                    async_copy::copy_cg_zfill(self.narrow + copy * 512, source as *const u8, bytes);
                    part += 1;
                }
            }
            eight += 1;
        }
    }

    /// Converts a piece whose copies have arrived; `wide` is the lane's place in the stage.
    ///
    /// # Safety
    /// The stage is free.
    #[inline(always)]
    unsafe fn convert<C: Cache>(&self, time: u32, wide: u32, rows: u32) {
        let parts = self.row_bytes / 64;
        let eights = if rows < ROWS { rows / 8 } else { ROWS / 8 };
        let (first, copies) = (time * (ROWS / 8) * parts, eights * parts);
        let mut copy = 0;
        while copy < copies {
            // All loads first: a store keeps what comes behind it from being loaded before.
            let mut narrow = [[0; 4]; TOGETHER as usize];
            let mut i = 0;
            while i < TOGETHER && copy + i < copies {
                // SAFETY: the lane's own copy.
                narrow[i as usize] =
                    unsafe { shared::load_u32x4(self.narrow + (first + copy + i) * 512) };
                i += 1;
            }
            i = 0;
            while i < TOGETHER && copy + i < copies {
                let [a, b, c, d] = narrow[i as usize].map(C::widen);
                let (group, part) = ((first + copy + i) / parts, (copy + i) % parts);
                let to = wide + group * 16 * self.row_bytes + part * 1024;
                // SAFETY: inside the stage.
                unsafe {
                    shared::store_u32x4(to, [a[0], a[1], b[0], b[1]]);
                    shared::store_u32x4(to ^ 16, [c[0], c[1], d[0], d[1]]);
                }
                i += 1;
            }
            copy += TOGETHER;
        }
    }
}

/// Brings the blocks of all tiles, from the last to the first of each: values or keys.
///
/// # Safety
/// A whole warp comes here; the barriers are initialised for arrivals of each lane.
#[inline(always)]
pub(super) unsafe fn gather<C: Cache, const VALUES: bool, const STAGES: u32>(
    p: &PrefillParams,
    s: Shared,
) {
    let a = &p.attention;
    let (pool, strides) = if VALUES {
        (a.v, &a.v_strides)
    } else {
        (a.k, &a.k_strides)
    };
    let lane = warp::lane_id();
    let keys = s.shape.keys;
    let row_bytes = s.shape.row_bytes(VALUES) / 2;
    let times = keys.div_ceil(ROWS) as usize;
    let row = row_of_eight(lane);
    // Of 16 bytes become 32: two units of a line, swizzled.
    let in_stage = row * 128 + ((2 * (lane % 4)) ^ row) * 16;
    let mut blocks = Pipeline::<STAGES>::PRODUCER;
    // As a ring of two would be, in one register.
    let mut tiles = 0;
    loop {
        // SAFETY: the ring's barriers say what belongs to whom; a whole warp.
        unsafe {
            mbarrier::wait(s.tile_full(tiles % 2), tiles / 2 % 2);
            let tile = Tile::load(s.tile(tiles % 2));
            if tile.rows == 0 {
                return;
            }
            let head = u64::from(tile.kv_head * strides.head + lane % 4) * 16;
            let mine = Lane {
                source: misc::opaque_u64(pool + head),
                narrow: s.narrow(VALUES) + lane * 16,
                row_bytes,
            };
            let table = Table {
                p,
                strides,
                first: tile.table,
                lowest: tile.lowest as i32,
                // A tile that sees nothing may end before its first key.
                keys: tile.end.saturating_sub(tile.lowest),
            };
            // The key that the lane looks up.
            let row = row_of_eight(misc::opaque(lane)) + lane % 4 * 8;
            let mut key = tile.end as i32 - keys as i32 + row as i32;
            let mut left = tile.blocks;
            let mut pages = [0; 4];
            let mut time = 0;
            while time < times {
                pages[time] = table.page(key + (time as u32 * ROWS) as i32);
                time += 1;
            }
            time = 0;
            while time < times {
                let at = key + (time as u32 * ROWS) as i32;
                let rows = keys - time as u32 * ROWS;
                mine.copy(time as u32, table.place(at, pages[time]), rows);
                async_copy::commit_group();
                pages[time] = table.page(at - keys as i32);
                time += 1;
            }
            loop {
                if !VALUES && left == CLAIM_AHEAD && lane == 0 && s.claims_late(tiles % 2) {
                    mbarrier::arrive(s.ends_soon());
                }
                let (full, free, wide) = s.stage_of(VALUES, blocks.stage);
                mbarrier::wait(free, blocks.parity);
                key = misc::opaque(key as u32) as i32 - keys as i32;
                time = 0;
                while time < times {
                    let rows = keys - time as u32 * ROWS;
                    wait_but(times as u32 - 1);
                    mine.convert::<C>(time as u32, wide + in_stage, rows);
                    if left > 1 {
                        let at = key + (time as u32 * ROWS) as i32;
                        mine.copy(time as u32, table.place(at, pages[time]), rows);
                        pages[time] = table.page(at - keys as i32);
                    }
                    async_copy::commit_group();
                    time += 1;
                }
                // The tensor cores read what ordinary stores wrote.
                fence::proxy_async_shared();
                mbarrier::arrive(full);
                blocks.advance();
                left -= 1;
                if left == 0 {
                    break;
                }
            }
            mbarrier::arrive(s.tile_free(tiles % 2));
            tiles += 1;
        }
    }
}

/// Waits for all of the lane's groups of copies but so many, the newest.
#[inline(always)]
fn wait_but(groups: u32) {
    match groups {
        1 => async_copy::wait_group::<1>(),
        2 => async_copy::wait_group::<2>(),
        _ => async_copy::wait_group::<3>(),
    }
}
