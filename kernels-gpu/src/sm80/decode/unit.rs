//! A unit: some query tokens of an item, for one KV head.

use cuda_std::prelude::*;

use super::{config::ROWS, shared::Shared};
use crate::{
    abi::{GatherDecodeParams, QueryRow, WorkItem},
    common::{
        decode::{KEYS, produce::Header},
        variant::Variant,
    },
};

/// Blocks of 8 rows in a tile.
pub(super) const ROW_BLOCKS: usize = ROWS as usize / 8;

/// The warps that share a unit.
#[derive(Clone, Copy)]
pub(in super::super) struct Team {
    /// The first of them in the CTA.
    pub first: u32,
    /// Their number: one, or all warps of the CTA.
    pub size: u32,
}

impl Team {
    /// A barrier of the team: CTA-wide, or `syncwarp` for a single warp.
    ///
    /// # Safety
    /// Whole warps, all of the team.
    #[inline(always)]
    pub(super) unsafe fn sync(self) {
        if self.size > 1 {
            thread::sync_threads();
        } else {
            // SAFETY: the caller's promise.
            unsafe { warp::sync_warp(warp::FULL_MASK) };
        }
    }
}

/// A unit, uniform over the lanes.
#[derive(Clone, Copy)]
pub(super) struct Unit {
    /// Query tokens; may be 0, as all items are cut into as many pieces as the largest.
    pub tokens: u32,
    /// The KV head.
    pub head: u32,
    /// Index into the plan's page ids of the table's first page, that of key 0.
    pub table: u32,
    /// First key position, and one past the last.
    pub begin: u32,
    pub end: u32,
    /// One past the last key that all rows see.
    pub seen_by_all: u32,
    /// Whether other items also read the keys.
    pub shared_keys: bool,
}

impl Unit {
    /// Reads a unit, and copies its rows to shared memory, one per lane.
    ///
    /// # Safety
    /// Whole warps; the unit is one of the launch's; no lane reads the previous unit's rows any more.
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
                shared::store_u32x4(s.token(lane), header.load_row(a, lane).words());
            }
            warp::sync_warp(warp::FULL_MASK);
            let windowed = a.variant.window_left != i32::MAX;
            let (_, high) = variant.visible_keys(item.position);
            let high = a.seen_by_all(high, item.position);
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

    /// First key of the first chunk.
    #[inline(always)]
    pub(super) const fn first_key(&self) -> u32 {
        self.begin & !(KEYS - 1)
    }

    /// Chunks; 0 if no key is visible or there are no rows.
    #[inline(always)]
    pub(super) const fn chunks(&self) -> u32 {
        if self.end > self.begin && self.tokens > 0 {
            (self.end - self.first_key()).div_ceil(KEYS)
        } else {
            0
        }
    }

    /// Whether a row does not see all keys of the chunk at `first`.
    #[inline(always)]
    pub(super) const fn masks(&self, first: u32) -> bool {
        first < self.begin || first + KEYS > self.seen_by_all
    }
}

/// The row of one of the unit's query tokens.
///
/// # Safety
/// The unit's rows were read.
#[inline(always)]
pub(super) unsafe fn row(s: Shared, token: u32) -> QueryRow {
    // SAFETY: the caller's promise.
    QueryRow::from_words(unsafe { shared::load_u32x4(s.token(token)) })
}
