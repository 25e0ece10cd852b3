//! What a unit is: some query tokens of an item, for one KV head.

use cuda_std::prelude::*;

use super::Shared;
use crate::{
    abi::{GatherDecodeParams, QueryRow, WorkItem},
    common::{
        decode::{KEYS, produce::Header},
        variant::Variant,
    },
};

/// As all lanes know it.
#[derive(Clone, Copy)]
pub(super) struct Unit {
    /// Query tokens; perhaps none, as not every item has as many pieces as the largest.
    pub tokens: u32,
    /// The KV head.
    pub head: u32,
    /// First page of the table.
    pub table: u32,
    /// First key position, and one past the last.
    pub begin: u32,
    pub end: u32,
    /// One past the last key that all rows see.
    pub seen_by_all: u32,
    /// Whether other items read the keys too.
    pub shared_keys: bool,
}

impl Unit {
    /// Reads a unit and, a lane for each, its rows to shared memory.
    ///
    /// # Safety
    /// Whole warps; the unit is one of the launch's; nobody reads the rows of the unit before.
    #[inline(always)]
    pub(super) unsafe fn read<V: Variant>(
        p: &GatherDecodeParams,
        variant: &V,
        s: Shared,
        lane: u32,
        unit: u32,
    ) -> Self {
        let a = &p.attention;
        // SAFETY: the caller's promise.
        unsafe {
            let (piece, head) = p.kv_heads.div_rem(unit);
            let (index, piece) = p.cuts.div_rem(piece);
            let this_plan = a.of_this_plan();
            let mut header = Header::load(&this_plan, p.kv_heads, index * a.kv_heads);
            header.item.cut(piece * p.tile_tokens, p.tile_tokens);
            let item = &header.item;
            if lane < item.rows {
                let QueryRow {
                    token,
                    position,
                    slot,
                    merge,
                } = header.load_row(a, lane);
                shared::store_u32x4(s.token(lane), [token, position as u32, slot, merge]);
            }
            warp::sync_warp(warp::FULL_MASK);
            let windowed = a.variant.window_left != i32::MAX;
            let (_, high) = variant.visible_keys(item.position);
            let high = a.seen_by_all(high);
            Self {
                tokens: item.rows,
                head,
                table: item.table,
                begin: item.kv_begin,
                end: item.kv_end,
                seen_by_all: if windowed {
                    0
                } else {
                    high.saturating_add(1).clamp(0, item.kv_end as i32) as u32
                },
                shared_keys: item.flags & WorkItem::SHARED_KEYS != 0,
            }
        }
    }

    /// Where the first chunk begins.
    #[inline(always)]
    pub(super) const fn first_key(&self) -> u32 {
        self.begin & !(KEYS - 1)
    }

    /// Chunks; none where there are no keys to see, or no rows.
    #[inline(always)]
    pub(super) const fn chunks(&self) -> u32 {
        if self.end > self.begin && self.tokens > 0 {
            (self.end - self.first_key()).div_ceil(KEYS)
        } else {
            0
        }
    }

    /// Whether some row does not see all keys of the chunk at `first`.
    #[inline(always)]
    pub(super) const fn masks(&self, first: u32) -> bool {
        first < self.begin || first + KEYS > self.seen_by_all
    }
}

/// The row of one of the unit's query tokens.
///
/// # Safety
/// It was read.
#[inline(always)]
pub(super) unsafe fn row(s: Shared, token: u32) -> QueryRow {
    // SAFETY: the caller's promise.
    let [token, position, slot, merge] = unsafe { shared::load_u32x4(s.token(token)) };
    QueryRow {
        token,
        position: position as i32,
        slot,
        merge,
    }
}
