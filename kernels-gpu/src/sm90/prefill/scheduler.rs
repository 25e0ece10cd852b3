//! The scheduler warp: claims tiles and brings their queries.

use cuda_std::{
    math::div_u32,
    mbarrier,
    prelude::*,
    tma::{self, TensorMap},
};

use super::{super::pipeline::Pipeline, shared::Shared};
use crate::{
    abi::{AttentionParams, PrefillParams},
    common::prefill_tile::{Place, Tile},
    common::variant::Variant,
};

/// Blocks of a tile's keys that have not been asked for when the next tile is claimed. A CTA that claims early may take
/// what another CTA could have begun; one that claims late waits for ticket, tile and queries, about 3 µs.
pub(super) const PREFETCH_DISTANCE: u32 = 4;

/// Claims are late in so many last rounds of tiles. Before that there are enough left for everybody.
pub(super) const LATE_ROUNDS: u32 = 3;

/// Describes unit `unit` of the launch whose work `a` is.
#[inline(always)]
unsafe fn describe<V: Variant>(
    p: &PrefillParams,
    a: &AttentionParams,
    variant: &V,
    unit: u32,
    keys: u32,
) -> Tile {
    // All heads of an item before the next one: neighbours read the same pages at the same time, and
    // the longest items of the whole launch come first. Where L2 does not hold the keys of all heads, that is so for
    // some KV heads at a time.
    let per_kv_head = p.pack.div(a.group);
    // SAFETY: the record, if there is one, can be read.
    let heads = per_kv_head * unsafe { p.heads_together(a) };
    let of_section = div_u32(a.units, a.kv_heads * per_kv_head) * heads;
    let section = div_u32(unit, of_section);
    let unit = unit - section * of_section;
    let item = div_u32(unit, heads);
    let head = section * heads + unit - item * heads;
    let kv_head = div_u32(head, per_kv_head);
    let place = Place {
        item,
        from: 0,
        most: u32::MAX,
        kv_head,
        in_group: head - kv_head * per_kv_head,
    };
    // SAFETY: the unit is one of the launch's.
    let mut tile = unsafe { Tile::at(a, variant, &place, p.pack.get()) };
    tile.lowest -= tile.lowest % p.box_tokens;
    tile.end = tile.end.next_multiple_of(p.box_tokens);
    let past_blocks = tile.end.saturating_sub(tile.lowest) + keys - 1;
    // A tile that sees nothing walks one block, all of it masked.
    tile.blocks = div_u32(past_blocks, keys).max(1);
    tile
}

/// Brings queries of so many tokens from one of the tile's tokens on, all slabs of their heads.
#[inline(always)]
unsafe fn bring(
    p: &PrefillParams,
    maps: *const TensorMap,
    tile: &Tile,
    s: Shared,
    [first, tokens]: [u32; 2],
    target: u32,
    full: u32,
) {
    let slabs = s.shape.head_dim.div_ceil(64);
    // SAFETY: one thread; the place is free, and the barrier awaits these bytes.
    unsafe {
        mbarrier::arrive_expect_tx(full, slabs * 128 * p.pack.get() * tokens);
        let mut slab = 0;
        while slab < slabs {
            let head = p.pack.div(tile.head) as i32;
            let corner = [64 * slab as i32, 0, (tile.token + first) as i32, 0, head];
            tma::load_tensor(target + slab * s.shape.slab_bytes(), maps, corner, full);
            slab += 1;
        }
    }
}

/// Brings each warpgroup its queries when it has read its last ones; those of both together where a token has rows of
/// two. `stage` and `parity` are of the tile, `free` is the parity of its queries' place.
#[inline(always)]
unsafe fn bring_to_each(
    p: &PrefillParams,
    maps: *const TensorMap,
    tile: &Tile,
    s: Shared,
    [stage, parity]: [u32; 2],
    free: u32,
) {
    let full = |consumer| s.queries_full(stage, consumer);
    // SAFETY: one thread; who has read its queries says so.
    unsafe {
        let rows = PrefillParams::query_box_rows(true, s.shape.rows(), p.pack.get());
        let tokens = p.pack.div(rows);
        if rows == s.shape.rows() {
            mbarrier::wait(s.queries_free(0), free);
            mbarrier::wait(s.queries_free(1), free);
            bring(p, maps, tile, s, [0, tokens], s.queries(0), full(0));
            // A box has one barrier.
            mbarrier::wait(full(0), parity);
            mbarrier::arrive(full(1));
            return;
        }
        // Whoever is the first.
        let mut waiting = 0b11_u32;
        while waiting != 0 {
            let mut consumer = 0;
            while consumer < 2 {
                let bit = 1 << consumer;
                if waiting & bit != 0 && mbarrier::test_wait(s.queries_free(consumer), free) {
                    waiting ^= bit;
                    let target = s.queries(0) + consumer * 64 * 128;
                    let first = consumer * tokens;
                    bring(p, maps, tile, s, [first, tokens], target, full(consumer));
                }
                consumer += 1;
            }
        }
    }
}

/// Claims tile after tile, the last ones when the one before comes to its end, publishes what it is and loads its
/// queries.
///
/// # Safety
/// One thread of the CTA comes here; `maps` begin with that of the queries, and the barriers are initialised.
#[inline(always)]
pub(super) unsafe fn schedule<V: Variant>(
    p: &PrefillParams,
    maps: *const TensorMap,
    variant: &V,
    s: Shared,
) {
    let tokens = p.pack.div(s.shape.rows());
    let ctas = thread::grid_dim_x();
    let mut unit = thread::block_idx_x();
    let mut ring = Pipeline::<2>::PRODUCER;
    let mut ends = Pipeline::<1>::CONSUMER;
    loop {
        // Read again for every unit: there are few registers here.
        // SAFETY: as the launch is.
        let a = &unsafe { p.attention.of_this_plan() };
        let more = unit < a.units;
        let mut tile = Tile::NONE;
        // SAFETY: one thread; the ring's barriers say what belongs to whom.
        unsafe {
            if more {
                tile = describe(p, a, variant, unit, s.shape.keys);
            }
            mbarrier::wait(s.tile_free(ring.stage), ring.parity);
            // Beside decodes CTAs differ in pace all the time, and there are fewer registers.
            let last = s.shape.co_resident || unit + LATE_ROUNDS * ctas >= a.units;
            let late = tile.blocks >= PREFETCH_DISTANCE && last;
            tile.store(s.tile(ring.stage));
            shared::store_u32(s.late(ring.stage), u32::from(late));
            mbarrier::arrive(s.tile_full(ring.stage));
            // The parity that who awaits the queries has; the place of one tile's has a phase for each tile.
            let here = [ring.stage, ring.parity ^ 1];
            let full = s.queries_full(ring.stage, 0);
            ring.advance();
            if !more {
                mbarrier::arrive(full);
                if s.shape.query_stages == 1 {
                    mbarrier::arrive(s.queries_full(here[0], 1));
                }
                return;
            }
            if s.shape.query_stages == 1 {
                bring_to_each(p, maps, &tile, s, here, here[0] ^ 1);
            } else {
                let target = s.queries(here[0]);
                bring(p, maps, &tile, s, [0, tokens], target, full);
            }
            if late {
                mbarrier::wait(s.near_end(), ends.parity);
                ends.advance();
            }
            unit = ctas + a.ticket();
        }
    }
}
