//! The scheduler warp: claims units, writes their descriptions and rows, and loads their queries.

use cuda_std::{
    mbarrier, shared, thread,
    tma::{self, TensorMap},
    warp,
};

use super::super::{
    super::pipeline::Pipeline,
    PREFETCH_DISTANCE,
    shared::{QueryPlace, Unit, Units},
};
use crate::{abi::LatentParams, common::decode::produce::Header};

const WARP: u32 = warp::FULL_MASK;

/// Claims one unit after another, each when the previous one nears its end. Publishes its description and rows, then
/// calls `ready` with the unit's slot and the unit.
///
/// # Safety
/// A whole warp comes here, with what [`Header::first`] found; the barriers are initialised.
#[inline(always)]
pub(in crate::sm90::mla) unsafe fn claim<U: Units>(
    p: &LatentParams,
    s: U,
    first: Header,
    mut ready: impl FnMut(u32, &Unit),
) {
    // SAFETY: the launch's parameters are valid.
    let a = &unsafe { p.attention.of_this_plan() };
    let lane = warp::lane_id();
    let ctas = thread::grid_dim_x();
    let mut unit = thread::block_idx_x();
    let mut header = first;
    let mut slots = Pipeline::<2>::PRODUCER;
    let mut ends = Pipeline::<1>::CONSUMER;
    // SAFETY: a whole warp; the full and free barriers order every access to a slot.
    unsafe {
        while unit < a.units {
            let item = &header.item;
            let shift = p.piece_tokens.trailing_zeros();
            let first = item.kv_begin >> shift << shift;
            let described = Unit::new(&header, header.head * p.heads.get(), first, U::KEYS);
            mbarrier::wait(s.unit_free(slots.stage), slots.parity);
            if lane == 0 {
                described.store(s.unit(slots.stage));
            }
            // Loaders start on the keys while the rows are looked up.
            mbarrier::arrive(s.unit_full(slots.stage));
            let mut token = lane;
            while token < item.rows {
                let words = header.load_row(a, token).words();
                shared::store_u32x4(s.row(slots.stage, token), words);
                token += 32;
            }
            mbarrier::arrive(s.rows_full(slots.stage));
            ready(slots.stage, &described);
            slots.advance();
            if described.blocks >= PREFETCH_DISTANCE {
                mbarrier::wait(s.near_end(), ends.parity);
                ends.advance();
            }
            unit = a.next_unit(lane, ctas);
            if unit < a.units {
                header = Header::load(a, p.tiles, unit);
            }
        }
        mbarrier::wait(s.unit_free(slots.stage), slots.parity);
        if lane == 0 {
            Unit::NONE.store(s.unit(slots.stage));
        }
        mbarrier::arrive(s.unit_full(slots.stage));
    }
}

/// As [`claim`], and loads each unit's queries.
///
/// # Safety
/// As [`claim`]'s; `map` is the tensor map of the queries.
#[inline(always)]
pub(in crate::sm90::mla) unsafe fn claim_with_queries<S: QueryPlace>(
    p: &LatentParams,
    map: *const TensorMap,
    s: S,
    first: Header,
) {
    let mut queries = Pipeline::<1>::PRODUCER;
    // SAFETY: the caller's promises; the unit's rows were written.
    unsafe {
        claim(p, s, first, |slot, unit| {
            // Lanes read rows that other lanes have written.
            warp::sync_warp(WARP);
            mbarrier::wait(s.queries_free(), queries.parity);
            queries.advance();
            bring_queries(p, map, s, slot, unit);
        });
    }
}

/// Issues one TMA box per token and slab, distributed over the lanes.
#[inline(always)]
pub(in crate::sm90::mla) unsafe fn bring_queries<S: QueryPlace>(
    p: &LatentParams,
    map: *const TensorMap,
    s: S,
    slot: u32,
    unit: &Unit,
) {
    let (lane, heads) = (warp::lane_id(), p.heads.get());
    let slabs = S::SLABS;
    let boxes = unit.tokens * slabs;
    // SAFETY: the rows are written, and the queries' place is free.
    unsafe {
        if lane == 0 {
            mbarrier::arrive_expect_tx(s.queries_full(), boxes * heads * 128);
        }
        warp::sync_warp(WARP);
        let mut index = lane;
        while index < boxes {
            let (token, slab) = (index / slabs, index % slabs);
            let of = shared::load_u32(s.row(slot, token));
            let target = s.queries() + slab * (S::ROWS * 128) + token * heads * 128;
            let corner = [0, unit.head as i32, slab as i32, of as i32, 0];
            tma::load_tensor(target, map, corner, s.queries_full());
            index += 32;
        }
    }
}
