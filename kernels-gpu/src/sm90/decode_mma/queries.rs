//! Queries come by bulk copies, a token each.

use cuda_std::{mbarrier, tma};

use super::layout::Layout;
use crate::{abi::DecodeParams, common::decode::produce::Header};

/// Starts to bring the queries of a unit, a token for each lane. The first lane arrives at the unit's barrier
/// some time later.
///
/// # Safety
/// The lanes come together; the slot's queries are not in use.
#[inline(always)]
pub(super) unsafe fn load_queries<
    const DIM: u32,
    const ROWS: u32,
    const WARPS: u32,
    const CACHE: u32,
>(
    p: &DecodeParams,
    layout: &Layout<DIM, ROWS, WARPS, CACHE>,
    lane: u32,
    slot: u32,
    tokens: u32,
    head: u32,
    token: u32,
) {
    let a = &p.attention;
    let full = layout.unit_full(slot);
    let bytes = a.group * DIM * 2;
    // SAFETY: the caller's promise; a warp's lanes stay in order.
    unsafe {
        if lane == 0 {
            mbarrier::expect_tx(full, tokens * bytes);
        }
        if lane < tokens {
            let element =
                u64::from(token) * u64::from(a.q_token_stride) + u64::from(head * a.group * DIM);
            let target = layout.queries(slot) + lane * bytes;
            tma::load_bulk(target, (a.q + element * 2) as *const u8, bytes, full);
        }
    }
}

/// The queries of the first unit, which some warp brings that has nothing to do yet.
#[derive(Clone, Copy)]
pub(super) struct FirstQueries {
    tokens: u32,
    head: u32,
    token: u32,
}

impl FirstQueries {
    /// Looks them up.
    ///
    /// # Safety
    /// The unit is the launch's.
    #[inline(always)]
    pub unsafe fn look_up(p: &DecodeParams, header: Header, lane: u32) -> Self {
        // SAFETY: as the launch is.
        unsafe {
            let tokens = header.item.rows;
            let token = if lane < tokens {
                header.load_row(&p.attention, lane).token
            } else {
                0
            };
            Self {
                tokens,
                head: header.head,
                token,
            }
        }
    }

    /// Brings them.
    ///
    /// # Safety
    /// The lanes come together; the barriers are initialised.
    #[inline(always)]
    pub unsafe fn load<const DIM: u32, const ROWS: u32, const WARPS: u32, const CACHE: u32>(
        self,
        p: &DecodeParams,
        layout: &Layout<DIM, ROWS, WARPS, CACHE>,
        lane: u32,
    ) {
        if self.tokens > 0 {
            // SAFETY: the caller's promise; the slot is the first unit's. Who waits for the queries takes it that
            // the unit is listed.
            unsafe {
                load_queries(p, layout, lane, 0, self.tokens, self.head, self.token);
                mbarrier::wait(layout.unit_listed(0), 0);
                if lane == 0 {
                    mbarrier::arrive(layout.unit_full(0));
                }
            }
        }
    }
}
