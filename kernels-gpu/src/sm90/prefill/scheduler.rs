//! The tile scheduler: one thread claims tiles and loads their queries.

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

/// Blocks of a tile's keys still to be loaded when the next tile is claimed late. A CTA that claims too early may take
/// a tile that another CTA could have started sooner; one that claims too late waits about 3 µs for ticket, item and
/// queries.
pub(super) const PREFETCH_DISTANCE: u32 = 4;

/// Claims are late only in this many last rounds of tiles. Before that, enough tiles are left for all CTAs.
pub(super) const LATE_ROUNDS: u32 = 3;

/// Describes tile number `unit` of the launch `a`.
#[inline(always)]
unsafe fn describe<V: Variant>(
    p: &PrefillParams,
    a: &AttentionParams,
    variant: &V,
    unit: u32,
    keys: u32,
) -> Tile {
    // All heads of an item come before the next item: neighbouring CTAs then share its pages in L2, and the longest
    // items of the launch start first. Where L2 cannot hold the keys of all heads, the launch is cut into sections of
    // some KV heads, each in this order.
    let per_kv_head = p.pack.div(a.group);
    // SAFETY: the plan's record, if there is one, is readable.
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
    // A tile that sees no key walks one block that is masked entirely.
    tile.blocks = div_u32(past_blocks, keys).max(1);
    tile
}

/// Loads the queries of `tokens` tokens from the tile's token `first` on, all slabs of 64 columns.
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
    // SAFETY: one thread; the target is free, and the barrier expects these bytes.
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

/// With one stage of queries: loads each warpgroup's queries once that warpgroup has released its previous ones. Where
/// the rows of one token span both warpgroups, one box loads both. `stage` and `parity` are the tile's, `free` is the
/// parity of `queries_free`.
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
    // SAFETY: one thread; a warpgroup that has read its queries arrives at `queries_free`.
    unsafe {
        let rows = PrefillParams::query_box_rows(true, s.shape.rows(), p.pack.get());
        let tokens = p.pack.div(rows);
        if rows == s.shape.rows() {
            mbarrier::wait(s.queries_free(0), free);
            mbarrier::wait(s.queries_free(1), free);
            bring(p, maps, tile, s, [0, tokens], s.queries(0), full(0));
            // A box completes on one barrier only; the other warpgroup's is signalled afterwards.
            mbarrier::wait(full(0), parity);
            mbarrier::arrive(full(1));
            return;
        }
        // Serve the warpgroup that is free first.
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

/// Claims one tile after another, publishes its description and loads its queries. In the last [`LATE_ROUNDS`] rounds it
/// claims a tile only when the previous one nears its end.
///
/// # Safety
/// One thread of the CTA calls this; `maps` points to the tensor map of the queries, and the barriers are initialised.
#[inline(always)]
pub(super) unsafe fn schedule<V: Variant, const EXTRAS: bool>(
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
        // Reread for every tile: producer warps have few registers.
        // SAFETY: the launch's parameters are valid.
        let a = &unsafe { p.attention.of_this_plan() };
        let more = unit < a.units;
        let mut tile = Tile::NONE;
        // SAFETY: one thread; the full and free barriers order every access to a stage.
        unsafe {
            if more {
                tile = describe(p, a, variant, unit, s.shape.keys);
            }
            mbarrier::wait(s.tile_free(ring.stage), ring.parity);
            // Next to co-resident decodes the CTAs' speeds always differ, so every claim is late; that also saves
            // registers here.
            let last = s.shape.co_resident || unit + LATE_ROUNDS * ctas >= a.units;
            let late = tile.blocks >= PREFETCH_DISTANCE && last;
            tile.store(s.tile(ring.stage));
            shared::store_u32(s.late(ring.stage), u32::from(late));
            if EXTRAS {
                let limit = a.limit_of_tokens(tile.token, tile.position);
                shared::store_u32(s.limit(ring.stage), limit as u32);
            }
            mbarrier::arrive(s.tile_full(ring.stage));
            // The parity that consumers of `queries_full` wait with. A single query stage has one phase per tile.
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
