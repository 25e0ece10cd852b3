//! The warp that claims units: it says what each is, lists its rows, and brings its queries.

use cuda_std::{
    fence, mbarrier, shared, thread,
    tma::{self, TensorMap},
    warp,
};

use super::super::{
    super::pipeline::Pipeline,
    PREFETCH_DISTANCE,
    config::SLAB_BYTES,
    shared::{Unit, Units},
};
use crate::{
    abi::{LatentParams, QueryRow},
    common::decode::produce::Header,
};

const WARP: u32 = warp::FULL_MASK;

/// Claims unit after unit, each when the one before comes to its end, and publishes what it is and which rows it has;
/// then calls `ready` with the unit's slot and the unit.
///
/// # Safety
/// A whole warp comes here; the barriers are initialised.
#[inline(always)]
pub(in crate::sm90::mla) unsafe fn claim<U: Units>(
    p: &LatentParams,
    s: U,
    mut ready: impl FnMut(u32, &Unit),
) {
    // SAFETY: as the launch is.
    let a = &unsafe { p.attention.of_this_plan() };
    let lane = warp::lane_id();
    let ctas = thread::grid_dim_x();
    let mut unit = thread::block_idx_x();
    let mut slots = Pipeline::<2>::PRODUCER;
    let mut ends = Pipeline::<1>::CONSUMER;
    // SAFETY: a whole warp; the barriers say what belongs to whom.
    unsafe {
        while unit < a.units {
            let header = Header::load(a, p.tiles, unit);
            let item = &header.item;
            let shift = p.piece_tokens.trailing_zeros();
            let first = item.kv_begin >> shift << shift;
            let described = Unit {
                tokens: item.rows,
                head: header.head * p.heads.get(),
                position: item.position,
                table: item.table,
                first,
                kv_begin: item.kv_begin,
                kv_end: item.kv_end,
                // A unit without keys walks one block, all of it masked.
                blocks: ((item.kv_end - first + U::KEYS - 1) / U::KEYS).max(1),
                flags: item.flags,
            };
            mbarrier::wait(s.unit_free(slots.stage), slots.parity);
            if lane == 0 {
                described.store(s.unit(slots.stage));
            }
            // The loaders begin while the rows are looked up.
            mbarrier::arrive(s.unit_full(slots.stage));
            let mut token = lane;
            while token < item.rows {
                let QueryRow {
                    token: of,
                    position,
                    slot,
                    merge,
                } = header.load_row(a, token);
                let row = [of, position as u32, slot, merge];
                shared::store_u32x4(s.row(slots.stage, token), row);
                token += 32;
            }
            mbarrier::arrive(s.rows_full(slots.stage));
            ready(slots.stage, &described);
            slots.advance();
            if described.blocks >= PREFETCH_DISTANCE {
                mbarrier::wait(s.near_end(), ends.parity);
                ends.advance();
            }
            let ticket = if lane == 0 { a.ticket() } else { 0 };
            unit = ctas + warp::warp_shuffle_idx(WARP, ticket, 0, 32);
        }
        mbarrier::wait(s.unit_free(slots.stage), slots.parity);
        if lane == 0 {
            Unit::NONE.store(s.unit(slots.stage));
        }
        mbarrier::arrive(s.unit_full(slots.stage));
    }
}

/// Shared memory that begins with a unit's queries.
pub(in crate::sm90::mla) trait QueryPlace: Units {
    /// Slabs of 64 columns in shared memory.
    const SLABS: u32;

    /// The first slab, all rows of one after the other.
    #[inline(always)]
    fn queries(self) -> u32 {
        self.base()
    }
    /// The unit's queries are there.
    #[inline(always)]
    fn queries_full(self) -> u32 {
        Self::RING.barrier(self.base(), 6)
    }
    /// Nobody reads them any more.
    #[inline(always)]
    fn queries_free(self) -> u32 {
        Self::RING.barrier(self.base(), 7)
    }

    /// Sets the queries to zero: tiles may not have all rows.
    ///
    /// # Safety
    /// All `threads` of the CTA come here, and then to a barrier; nobody uses the queries before.
    #[inline(always)]
    unsafe fn clear_queries(self, threads: u32) {
        let mut at = thread::thread_idx_x() * 16;
        while at < Self::SLABS * SLAB_BYTES {
            // SAFETY: the queries' memory, and the caller's promise.
            unsafe { shared::store_u32x4(self.queries() + at, [0; 4]) };
            at += threads * 16;
        }
        // Queries come by bulk copies.
        fence::proxy_async_shared();
    }
}

/// [`claim`], and brings each unit's queries.
///
/// # Safety
/// A whole warp comes here; `map` is that of the queries, and the barriers are initialised.
#[inline(always)]
pub(in crate::sm90::mla) unsafe fn claim_with_queries<S: QueryPlace>(
    p: &LatentParams,
    map: *const TensorMap,
    s: S,
) {
    let mut queries = Pipeline::<1>::PRODUCER;
    // SAFETY: the caller's promises; the unit's rows were listed.
    unsafe {
        claim(p, s, |slot, unit| {
            // Lanes read the rows of others.
            warp::sync_warp(WARP);
            mbarrier::wait(s.queries_free(), queries.parity);
            queries.advance();
            bring_queries(p, map, s, slot, unit);
        });
    }
}

/// A box for each token and slab, a lane each.
#[inline(always)]
unsafe fn bring_queries<S: QueryPlace>(
    p: &LatentParams,
    map: *const TensorMap,
    s: S,
    slot: u32,
    unit: &Unit,
) {
    let (lane, heads) = (warp::lane_id(), p.heads.get());
    let slabs = S::SLABS;
    let boxes = unit.tokens * slabs;
    // SAFETY: the rows are listed, and their place is free.
    unsafe {
        if lane == 0 {
            mbarrier::arrive_expect_tx(s.queries_full(), boxes * heads * 128);
        }
        warp::sync_warp(WARP);
        let mut index = lane;
        while index < boxes {
            let (token, slab) = (index / slabs, index % slabs);
            let of = shared::load_u32(s.row(slot, token));
            let target = s.queries() + slab * SLAB_BYTES + token * heads * 128;
            let corner = [0, unit.head as i32, slab as i32, of as i32, 0];
            tma::load_tensor(target, map, corner, s.queries_full());
            index += 32;
        }
    }
}
