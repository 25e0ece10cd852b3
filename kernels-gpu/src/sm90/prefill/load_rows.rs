//! Loaders for pools that no tensor map can describe: pages of any size, copied row by row with `cp.async`.

use cuda_std::{async_copy, mbarrier, prelude::*};

use super::{
    super::{mma::Slabs, pipeline::Pipeline},
    scheduler::PREFETCH_DISTANCE,
    shared::Shared,
};
use crate::{
    abi::{KvStrides, PrefillParams},
    common::prefill_tile::Tile,
};

pub(super) const WARP: u32 = warp::FULL_MASK;

/// Rows that a warp looks up and copies at a time, one per lane. A block has at most four times as many.
pub(super) const ROWS: u32 = 32;

/// The place of a row that the tile does not see. It is filled with zeros, whatever the pool holds.
pub(super) const NOWHERE: u32 = u32::MAX;

/// Copies of a lane whose addresses are in registers at once. With only one, each copy would have to wait until the
/// previous one has read its address.
const TOGETHER: usize = 2;

/// The page table and pool layout of a tile's keys or values.
#[derive(Clone, Copy)]
pub(super) struct Table<'a> {
    pub(super) p: &'a PrefillParams,
    pub(super) strides: &'a KvStrides,
    /// Index into the plan's page ids of the table's first page, that of key 0.
    pub(super) first: u32,
    /// The keys that the tile sees: the first, and their number.
    pub(super) lowest: i32,
    pub(super) keys: u32,
}

impl Table<'_> {
    /// The index of a key's page in the table, and its token in that page, if the tile sees the key.
    #[inline(always)]
    fn find(self, key: i32) -> Option<(u32, u32)> {
        (((key - self.lowest) as u32) < self.keys).then(|| self.p.page_size.div_rem(key as u32))
    }

    /// Loads the page id of a key, one block ahead of its use, so that no instruction stalls on this load.
    ///
    /// # Safety
    /// The table is that of a tile.
    #[inline(always)]
    pub(super) unsafe fn page(self, key: i32) -> u32 {
        let Some((page, _)) = self.find(key) else {
            return 0;
        };
        let entry = self.p.attention.page_ids + u64::from(self.first + page) * 4;
        // SAFETY: the table has a page for each key of the item.
        unsafe { ptr::load_nc_u32(entry as *const u32) }
    }

    /// The offset of a key in the pool, in vectors of 16 bytes.
    #[inline(always)]
    pub(super) fn place(self, key: i32, page: u32) -> u32 {
        match self.find(key) {
            Some((_, token)) => page * self.strides.page + token * self.strides.token,
            None => NOWHERE,
        }
    }
}

/// Which of eight rows a lane copies at a time. Neighbouring groups of four lanes take rows that are four apart: with
/// the swizzle their 16-byte chunks fall into different banks.
#[inline(always)]
fn row_of_eight(lane: u32) -> u32 {
    lane / 4 % 2 * 4 + lane / 8
}

/// Copies up to [`ROWS`] of the `rows` left of a block; rows at [`NOWHERE`] become zeros. Four lanes share the four
/// rows that they looked up and copy 64 bytes of a row at a time, so one shuffled place serves many copies. A row has
/// `row_bytes` in the pool; the rest of its last 64 bytes is zeroed.
///
/// # Safety
/// A whole warp comes here; only it writes the rows at `target`; `places` are offsets from `source`.
#[inline(always)]
unsafe fn copy(source: u64, places: u32, target: u32, rows: u32, row_bytes: u32, slabs: Slabs) {
    let halves = [target, target ^ 64];
    let mut eight = 0;
    while eight < ROWS / 8 {
        if eight == ROWS / 16 && rows == ROWS / 2 {
            break;
        }
        let mut sources = [0; TOGETHER];
        let mut bytes = [0; TOGETHER];
        let mut i = 0;
        // SAFETY: the caller's promise; nothing is read for a row at `NOWHERE`.
        unsafe {
            while i < TOGETHER {
                let place = warp::warp_shuffle_idx(WARP, places, eight + i as u32, 4);
                bytes[i] = if place == NOWHERE { 0 } else { 16 };
                sources[i] = source + u64::from(place) * 16;
                i += 1;
            }
            let mut part = 0;
            while part < row_bytes.div_ceil(64) {
                if part == row_bytes / 64 && warp::lane_id() % 4 * 16 >= row_bytes % 64 {
                    bytes = [0; TOGETHER];
                }
                i = 0;
                while i < TOGETHER {
                    let behind = (eight + i as u32) * slabs.eight + part / 2 * slabs.slab;
                    let source = sources[i] + u64::from(part) * 64;
                    let target = halves[part as usize % 2] + behind;
                    async_copy::copy_cg_zfill(target, source as *const u8, bytes[i]);
                    i += 1;
                }
                part += 1;
            }
        }
        eight += TOGETHER as u32;
    }
}

/// Loads the blocks of all tiles, values or keys, from the last block of a tile to the first. Each lane's copies arrive
/// at the block's full barrier when they complete.
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
    // Bytes of a row in shared memory, where a cut slab takes the space of a whole one, and the bytes between rows.
    let row_bytes = s.shape.row_bytes(VALUES);
    let slabs = s.shape.slabs(VALUES);
    let row_step = slabs.eight / 8;
    let times = keys.div_ceil(ROWS) as usize;
    let copied = times as u32 * ROWS;
    // This lane's swizzled target. It advances through the stages, which are contiguous.
    let (_, _, stages) = s.stage_of(VALUES, 0);
    let row = row_of_eight(lane);
    let mut target = stages + row * 128 + ((lane % 4) ^ row) * 16;
    let mut blocks = Pipeline::<STAGES>::PRODUCER;
    // Counts tiles; replaces a `Pipeline<2>` to save a register.
    let mut tiles = 0;
    loop {
        // SAFETY: the full and free barriers order every access to a stage; a whole warp.
        unsafe {
            mbarrier::wait(s.tile_full(tiles % 2), tiles / 2 % 2);
            let tile = Tile::load(s.tile(tiles % 2));
            if tile.rows == 0 {
                return;
            }
            let head = u64::from(tile.kv_head * strides.head + lane % 4) * 16;
            let source = misc::opaque_u64(pool + head);
            let table = Table {
                p,
                strides,
                first: tile.table,
                lowest: tile.lowest as i32,
                // A tile that sees no key may have its end before its first key.
                keys: tile.end.saturating_sub(tile.lowest),
            };
            // The key that this lane looks up. Opaque, here and below: otherwise ptxas keeps derived values in
            // registers.
            let row = row_of_eight(misc::opaque(lane)) + lane % 4 * 8;
            let mut key = tile.end as i32 - keys as i32 + row as i32;
            let mut left = tile.blocks;
            let mut pages = [0; 4];
            let mut time = 0;
            while time < times {
                pages[time] = table.page(key + (time as u32 * ROWS) as i32);
                time += 1;
            }
            loop {
                if !VALUES && left == PREFETCH_DISTANCE && lane == 0 && s.claims_late(tiles % 2) {
                    mbarrier::arrive(s.near_end());
                }
                let (_, free, _) = s.stage_of(VALUES, blocks.stage);
                mbarrier::wait(free, blocks.parity);
                time = 0;
                while time < times {
                    key = misc::opaque(key as u32) as i32;
                    let places = table.place(key, pages[time]);
                    pages[time] = table.page(key - keys as i32);
                    let rows = keys - time as u32 * ROWS;
                    copy(
                        source,
                        places,
                        target,
                        rows,
                        s.shape.pool_bytes(VALUES),
                        slabs,
                    );
                    target += ROWS * row_step;
                    key += ROWS as i32;
                    time += 1;
                }
                let (full, _, _) = s.stage_of(VALUES, misc::opaque(blocks.stage));
                async_copy::mbarrier_arrive(full);
                blocks.advance();
                target = target.wrapping_add((keys * row_bytes).wrapping_sub(copied * row_step));
                if blocks.stage == 0 {
                    target -= STAGES * keys * row_bytes;
                }
                left -= 1;
                if left == 0 {
                    break;
                }
                key -= (keys + copied) as i32;
            }
            mbarrier::arrive(s.tile_free(tiles % 2));
            tiles += 1;
        }
    }
}
