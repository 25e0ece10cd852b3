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

/// Blocks of a tile's keys that have not been asked for when the next tile is claimed. Who claims early may claim
/// what another CTA could have begun; who claims late waits for ticket, tile and queries, about 3 µs.
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
    // the longest items of the whole launch come first.
    let per_kv_head = p.pack.div(a.group);
    let heads = a.kv_heads * per_kv_head;
    let item = div_u32(unit, heads);
    let head = unit - item * heads;
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
    let slabs = s.shape.head_dim.div_ceil(64);
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
            let (full, target) = (s.queries_full(ring.stage), s.queries(ring.stage));
            if !more {
                mbarrier::arrive(full);
                return;
            }
            ring.advance();
            if s.shape.query_stages == 1 {
                // A phase for each tile, and the ring is one ahead: 1, 0, 1, … as of one that begins free.
                mbarrier::wait(s.queries_free(), ring.stage);
            }
            mbarrier::arrive_expect_tx(full, slabs * 128 * p.pack.get() * tokens);
            let mut slab = 0;
            while slab < slabs {
                let head = p.pack.div(tile.head) as i32;
                let corner = [64 * slab as i32, 0, tile.token as i32, 0, head];
                tma::load_tensor(target + slab * s.shape.slab_bytes(), maps, corner, full);
                slab += 1;
            }
            if late {
                mbarrier::wait(s.near_end(), ends.parity);
                ends.advance();
            }
            unit = ctas + a.ticket();
        }
    }
}
