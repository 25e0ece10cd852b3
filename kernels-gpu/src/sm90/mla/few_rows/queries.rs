//! The scheduler warp: prepares the rows of each unit and loads its queries.

use cuda_std::{mbarrier, shared, tma::TensorMap, warp};

use super::shared::Shared;
use crate::{
    abi::LatentParams,
    common::{decode::produce::Header, variant::Variant},
    sm90::{
        mla::{
            load::{bring_queries, claim},
            shared::{QueryPlace as _, Units as _},
            swapped::{NONE, Swapped as _},
            visible::seen,
        },
        pipeline::Pipeline,
    },
};

const WARP: u32 = warp::FULL_MASK;

/// Claims units; stores each row's visible keys and first reference, and loads the queries.
///
/// # Safety
/// As [`claim`]'s; `map` is the tensor map of the queries.
#[inline(always)]
pub(super) unsafe fn claim_rows<V: Variant, const ROWS: u32, const STAGES: u32>(
    p: &LatentParams,
    variant: &V,
    map: *const TensorMap,
    s: Shared<ROWS, STAGES>,
    first: Header,
) {
    let mut queries = Pipeline::<1>::PRODUCER;
    // SAFETY: the caller's promises; the unit's rows were written.
    unsafe {
        claim(p, s, first, |slot, unit| {
            // Lanes read rows that other lanes have written.
            warp::sync_warp(WARP);
            let row = warp::lane_id();
            if row < ROWS {
                let (token, _) = p.heads.div_rem(row);
                let position = s.load_row(slot, token.min(unit.tokens - 1)).position;
                let seen = seen(variant, unit, position);
                shared::store_u32x2(s.seen(slot, row), seen.map(|key| key as u32));
                shared::store_f32(s.reference(slot, row), NONE);
            }
            mbarrier::wait(s.queries_free(), queries.parity);
            queries.advance();
            // Lane 0 arrives with the copies. The others arrive for themselves, since racecheck cannot follow their stores
            // through the arrival of lane 0.
            if row > 0 {
                mbarrier::arrive(s.queries_full());
            }
            warp::sync_warp(WARP);
            bring_queries(p, map, s, slot, unit);
        });
    }
}
