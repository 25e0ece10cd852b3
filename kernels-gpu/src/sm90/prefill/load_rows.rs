//! Loaders for pools that no tensor map can describe: pages of any size, copied row by row with `cp.async`.
//!
//! One warp copies keys, one copies values. It shares its SM's issue slots with twelve warps, so each instruction for a row
//! counts: a loader that takes longer than the products of a block is what the whole tile waits for.

use cuda_std::{async_copy, fence, mbarrier, prelude::*};

use super::{
    super::{
        by_rows::{KEYS, VECTOR},
        mma::Slabs,
        pipeline::Pipeline,
    },
    Shape,
    scheduler::PREFETCH_DISTANCE,
    shared::Shared,
};
use crate::{
    abi::{KvStrides, PrefillParams},
    common::prefill_tile::Tile,
};

/// How often a warp looks up [`KEYS`] keys for a block, at most.
const TIMES: usize = 4;

/// Rows of a lane that it learns the places of at once, by shuffles.
const PLACES: u32 = 4;

/// Rows of a lane whose addresses are in registers at once. With only one, each copy would have to wait until the
/// previous one has read its address.
const ADDRESSES: u32 = 2;

/// Where a key is.
#[derive(Clone, Copy, Default)]
struct Found {
    /// Its page. The load may still be on its way.
    page: u32,
    /// Vectors before the key in its page.
    in_page: u32,
}

/// The page table and pool layout of a tile's keys or values. `SINGLE`: pages have one token.
#[derive(Clone, Copy)]
struct Table<'a, const SINGLE: bool> {
    p: &'a PrefillParams,
    strides: &'a KvStrides,
    /// Address of the page id of key 0.
    ids: u64,
    /// The first key that the tile sees.
    lowest: i32,
}

impl<const SINGLE: bool> Table<'_, SINGLE> {
    /// Looks up a key that is not behind the last one that the tile sees, a block ahead of its use. Keys before the first are
    /// replaced by it; the mask hides them.
    ///
    /// # Safety
    /// The table is that of a tile that sees a key.
    #[inline(always)]
    unsafe fn find(self, key: i32) -> Found {
        let key = key.max(self.lowest) as u32;
        let (page, token) = if SINGLE {
            (key, 0)
        } else {
            self.p.page_size.div_rem(key)
        };
        let entry = self.ids + u64::from(page) * 4;
        Found {
            // SAFETY: the table has a page for each key of the item.
            page: unsafe { ptr::load_nc_u32(entry as *const u32) },
            in_page: token * self.strides.token,
        }
    }

    /// Vectors in the pool before a key.
    #[inline(always)]
    fn place(self, found: Found) -> u32 {
        found.page * self.strides.page + found.in_page
    }
}

/// The part of a row that a lane copies at a time, and which of its rows.
#[derive(Clone, Copy)]
struct Share {
    /// Lanes that share a row: 8, which copy a line of 128 bytes at a time, or 4, which copy half of it. Half as many lanes
    /// take half as many shuffles and addresses. But the copies of two warps by half lines keep L1 busy for 15 cycles each,
    /// those by lines for 7. Decodes on the same SM need L1, too, and so do rows of 512 bytes.
    lanes: u32,
    /// Bytes of a row in the pool.
    row_bytes: u32,
    slabs: Slabs,
}

impl Share {
    #[inline(always)]
    const fn new(shape: Shape, values: bool) -> Self {
        let row_bytes = shape.pool_bytes(values);
        Self {
            lanes: if shape.co_resident && row_bytes > 128 || row_bytes == 512 {
                8
            } else {
                4
            },
            row_bytes,
            slabs: shape.slabs(values),
        }
    }

    /// Rows that a warp copies at once.
    #[inline(always)]
    const fn at_once(self) -> u32 {
        32 / self.lanes
    }

    /// Which of the rows copied at once a lane copies. Neighbouring groups of four lanes take rows that are four apart: with
    /// the swizzle their vectors fall into different banks.
    #[inline(always)]
    const fn row(self, lane: u32) -> u32 {
        if self.lanes == 8 {
            lane / 8
        } else {
            lane / 4 % 2 * 4 + lane / 8
        }
    }

    /// Which of [`KEYS`] rows a lane looks up: one that it copies itself, so that the lane of each shuffle is a constant.
    #[inline(always)]
    const fn row_to_find(self, lane: u32) -> u32 {
        lane % self.lanes * self.at_once() + self.row(lane)
    }

    /// Where a lane's first copy goes in a block at `block`, with the swizzle.
    #[inline(always)]
    const fn target(self, block: u32, lane: u32) -> u32 {
        let row = self.row(lane);
        block + row * 128 + (lane % self.lanes ^ row) * VECTOR
    }

    /// The two targets from which those of all other copies differ by constants, if the first copy goes to `target`: the swizzle
    /// of the other half, of a line or of 8 rows, differs in one bit.
    #[inline(always)]
    const fn halves(target: u32) -> [u32; 2] {
        [target, target ^ 64]
    }

    /// Where part `part` of the lane's row number `row` goes.
    #[inline(always)]
    const fn target_of(self, halves: [u32; 2], row: u32, part: u32) -> u32 {
        let (row, vector) = (row * self.at_once(), part * self.lanes);
        let half = row % 8 / 4 ^ vector % 8 / 4;
        halves[half as usize]
            + row / 8 * self.slabs.eight
            + row % 8 * 128
            + vector / 8 * self.slabs.slab
    }

    /// Copies rows from `first` on: [`KEYS`] of them, or those left of a block of `keys` if they are fewer. A last line that is
    /// only partly in the pool ends with zeros.
    ///
    /// # Safety
    /// A whole warp comes here; only it writes the block that `halves` point into; `place`, of the row that the lane has
    /// looked up, is an offset from `source`.
    #[inline(always)]
    unsafe fn copy(self, source: u64, place: u32, halves: [u32; 2], first: u32, keys: u32) {
        let before = first / self.at_once();
        let of_lane = (keys - first).min(KEYS) / self.at_once();
        let bytes = self.lanes * VECTOR;
        let mut row = 0;
        while row < of_lane {
            let mut places = [0; PLACES as usize];
            let mut i = 0;
            while i < PLACES && row + i < of_lane {
                // SAFETY: a whole warp.
                places[i as usize] =
                    unsafe { warp::warp_shuffle_idx(warp::FULL_MASK, place, row + i, self.lanes) };
                i += 1;
            }
            let mut at = 0;
            while at < PLACES && row + at < of_lane {
                let sources: [u64; ADDRESSES as usize] = core::array::from_fn(|i| {
                    // Opaque: a shift and an addition. A multiplication would wait for the units that the softmax keeps busy.
                    let place = u64::from(places[at as usize + i]);
                    source + (misc::opaque_u64(place) << VECTOR.ilog2())
                });
                let mut part = 0;
                while part < self.row_bytes.div_ceil(bytes) {
                    let valid = self.row_bytes - part * bytes;
                    i = 0;
                    while i < ADDRESSES {
                        let target = self.target_of(halves, before + row + at + i, part);
                        let source = (sources[i as usize] + u64::from(part * bytes)) as *const u8;
                        // SAFETY: the caller's promise; what is not valid is not read.
                        unsafe {
                            if valid >= bytes {
                                async_copy::copy_cg(target, source);
                            } else {
                                let inside = warp::lane_id() % self.lanes * VECTOR < valid;
                                let read = if inside { VECTOR } else { 0 };
                                async_copy::copy_cg_zfill(target, source, read);
                            }
                        }
                        i += 1;
                    }
                    part += 1;
                }
                at += ADDRESSES;
            }
            row += PLACES;
        }
    }
}

/// Loads the blocks of all tiles, values or keys, from the last block of a tile to the first. Each lane's copies arrive
/// at the block's full barrier when they complete.
///
/// # Safety
/// A whole warp comes here; the barriers are initialised for copies by each lane.
#[inline(always)]
pub(super) unsafe fn gather<const VALUES: bool, const STAGES: u32>(p: &PrefillParams, s: Shared) {
    // SAFETY: the caller's promise.
    unsafe {
        if p.page_size.get() == 1 {
            gather_from::<VALUES, STAGES, true>(p, s);
        } else {
            gather_from::<VALUES, STAGES, false>(p, s);
        }
    }
}

/// # Safety
/// As for [`gather`]. With `SINGLE` pages have one token.
#[inline(always)]
unsafe fn gather_from<const VALUES: bool, const STAGES: u32, const SINGLE: bool>(
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
    let share = Share::new(s.shape, VALUES);
    let block_bytes = keys * s.shape.row_bytes(VALUES);
    let times = keys.div_ceil(KEYS) as usize;
    // The lane's target. It advances through the stages, which are contiguous.
    let (_, _, stages) = s.stage_of(VALUES, 0);
    let mut target = share.target(stages, lane);
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
            let head = u64::from(tile.kv_head * strides.head + lane % share.lanes);
            let source = misc::opaque_u64(pool + head * u64::from(VECTOR));
            let table = Table::<SINGLE> {
                p,
                strides,
                // Opaque, here and below: otherwise ptxas derives values anew for each row, or keeps them in registers.
                ids: misc::opaque_u64(a.page_ids + u64::from(tile.table) * 4),
                lowest: tile.lowest as i32,
            };
            // A tile that sees no key has one block, which the mask hides.
            let any = tile.end > tile.lowest;
            // The key that this lane looks up.
            let row = share.row_to_find(misc::opaque(lane));
            let mut key = tile.end as i32 - keys as i32 + row as i32;
            let mut left = tile.blocks;
            let mut found = [Found::default(); TIMES];
            let mut time = 0;
            while time < times && any {
                // Where `keys` is no multiple of 32, some lanes find keys behind the block. They are not copied, but must be in
                // the table.
                let key = (key + (time as u32 * KEYS) as i32).min(tile.end as i32 - 1);
                found[time] = table.find(key);
                time += 1;
            }
            loop {
                if !VALUES && left == PREFETCH_DISTANCE && lane == 0 && s.claims_late(tiles % 2) {
                    mbarrier::arrive(s.near_end());
                }
                let (full, free, block) = s.stage_of(VALUES, blocks.stage);
                mbarrier::wait(free, blocks.parity);
                if any {
                    let mut places = [0; TIMES];
                    time = 0;
                    while time < times {
                        places[time] = table.place(found[time]);
                        time += 1;
                    }
                    key = misc::opaque(key as u32) as i32 - keys as i32;
                    let halves = Share::halves(target);
                    time = 0;
                    while time < times {
                        let first = time as u32 * KEYS;
                        share.copy(source, places[time], halves, first, keys);
                        found[time] = table.find(key + first as i32);
                        time += 1;
                    }
                    let (full, _, _) = s.stage_of(VALUES, misc::opaque(blocks.stage));
                    async_copy::mbarrier_arrive(full);
                } else {
                    clear(block, block_bytes);
                    mbarrier::arrive(full);
                }
                blocks.advance();
                target += block_bytes;
                if blocks.stage == 0 {
                    target -= STAGES * block_bytes;
                }
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

/// Fills a block with zeros: a weight of 0 times what was there before could be NaN.
///
/// # Safety
/// A whole warp comes here, and no other warp accesses the block.
#[inline(always)]
unsafe fn clear(block: u32, bytes: u32) {
    // Opaque: a loop, not a copy of it for each vector.
    let bytes = misc::opaque(bytes);
    let mut at = warp::lane_id() * VECTOR;
    while at < bytes {
        // SAFETY: the caller's promise.
        unsafe { shared::store_u32x4(block + at, [0; 4]) };
        at += 32 * VECTOR;
    }
    fence::proxy_async_shared();
}
