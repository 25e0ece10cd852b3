//! Loads of queries: one bulk copy per token.

use cuda_std::{mbarrier, tma};

use super::layout::Layout;
use crate::{abi::DecodeParams, common::decode::produce::Header};

/// Starts the loads of a unit's queries, one token per lane. Lane 0 must arrive at `unit_full` afterwards.
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
    // SAFETY: the caller's promise; lane 0 expects the bytes before the warp issues the copies.
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

/// The queries of the first unit, loaded by a consumer warp, which has no other work yet.
#[derive(Clone, Copy)]
pub(super) struct FirstQueries {
    tokens: u32,
    head: u32,
    token: u32,
}

impl FirstQueries {
    /// Looks up their addresses.
    ///
    /// # Safety
    /// The unit is the launch's.
    #[inline(always)]
    pub unsafe fn look_up(p: &DecodeParams, header: Header, lane: u32) -> Self {
        // SAFETY: the caller's promise.
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

    /// Loads them.
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
            // SAFETY: the caller's promise; slot 0 is the first unit's. The arrival at `unit_full` waits for
            // `unit_listed`, because whoever waits for the queries also reads the unit.
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
