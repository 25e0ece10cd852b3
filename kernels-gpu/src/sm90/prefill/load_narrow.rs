//! Loaders for 8-bit pools: rows come by copies of 16 bytes, and become 16-bit rows where the tensor cores read.
//!
//! Each lane converts the bytes that it copied itself, so that nothing is between a copy and its conversion but the
//! lane's own wait. The copies of two blocks are on their way, to two places in turn.

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
    /// Copies a block to `place`; zeros where a key is not seen. `pages` are those of its keys, and become those of
    /// the block below.
    ///
    /// # Safety
    /// A whole warp comes here; what was in the place is converted.
    #[inline(always)]
    unsafe fn copy_block(
        &self,
        table: &Table<'_>,
        key: i32,
        pages: &mut [u32; 4],
        place: u32,
        keys: u32,
    ) {
        let parts = self.row_bytes / 64;
        let mut group = 0;
        let mut rows = 0;
        // SAFETY: the caller's promise; nothing is read for a row that is nowhere.
        unsafe {
            while group < keys / 8 {
                let (time, eight) = (group as usize / 4, group % 4);
                if eight == 0 {
                    let at = key + (time as u32 * ROWS) as i32;
                    rows = table.place(at, pages[time]);
                    pages[time] = table.page(at - keys as i32);
                }
                let row = warp::warp_shuffle_idx(WARP, rows, eight, 4);
                let bytes = if row == NOWHERE { 0 } else { 16 };
                let source = self.source + u64::from(row) * 16;
                let mut part = 0;
                while part < parts {
                    let target = self.narrow + place + (group * parts + part) * 512;
                    let source = source + u64::from(part) * 64;
                    async_copy::copy_cg_zfill(target, source as *const u8, bytes);
                    part += 1;
                }
                group += 1;
            }
        }
    }

    /// Converts a block whose copies have arrived at `place`; `wide` is the lane's place in the stage.
    ///
    /// # Safety
    /// The stage is free.
    #[inline(always)]
    unsafe fn convert<C: Cache>(&self, place: u32, wide: u32, keys: u32) {
        let parts = self.row_bytes / 64;
        let copies = keys / 8 * parts;
        let mut copy = 0;
        while copy < copies {
            // All loads first: a store keeps what comes behind it from being loaded before.
            let mut narrow = [[0; 4]; TOGETHER as usize];
            let mut i = 0;
            while i < TOGETHER && copy + i < copies {
                // SAFETY: the lane's own copy.
                narrow[i as usize] =
                    unsafe { shared::load_u32x4(self.narrow + place + (copy + i) * 512) };
                i += 1;
            }
            i = 0;
            while i < TOGETHER && copy + i < copies {
                let [a, b, c, d] = narrow[i as usize].map(C::widen);
                let (group, part) = ((copy + i) / parts, (copy + i) % parts);
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
    let places = keys * row_bytes;
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
            let mut pages = table.pages(key, times);
            // Two blocks ahead: the place of each is one of two.
            let mut place = 0;
            while place < 2 {
                if place < left {
                    mine.copy_block(&table, key, &mut pages, place * places, keys);
                }
                async_copy::commit_group();
                key -= keys as i32;
                place += 1;
            }
            place = 0;
            loop {
                if !VALUES && left == CLAIM_AHEAD && lane == 0 && s.claims_late(tiles % 2) {
                    mbarrier::arrive(s.ends_soon());
                }
                let (full, free, wide) = s.stage_of(VALUES, blocks.stage);
                mbarrier::wait(free, blocks.parity);
                async_copy::wait_group::<1>();
                mine.convert::<C>(place, wide + in_stage, keys);
                // The tensor cores read what ordinary stores wrote. The fence waits for copies, too: those under way
                // are the next block's, asked for a block ago.
                fence::proxy_async_shared();
                mbarrier::arrive(full);
                if left > 2 {
                    mine.copy_block(&table, key, &mut pages, place, keys);
                }
                async_copy::commit_group();
                key = misc::opaque(key as u32) as i32 - keys as i32;
                place = places - place;
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
