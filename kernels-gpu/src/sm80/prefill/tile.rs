//! What the warps of a CTA share: the tile and the places of queries, keys and values.

use cuda_std::prelude::*;

use super::Shape;
use crate::{
    abi::{DIRECT, GatherPrefillParams, WorkItem},
    variant::{Pair, Variant},
};

/// Rows of an item for one head, or for `pack` heads that share keys.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    /// The first query token and its slot (or [`DIRECT`]).
    pub(super) token: u32,
    pub(super) slot: u32,
    /// Rows that exist.
    pub(super) rows: u32,
    /// The first query head, and its KV head.
    pub(super) head: u32,
    pub(super) kv_head: u32,
    /// Position of the first row.
    pub(super) position: i32,
    /// The item's keys and its page table.
    pub(super) kv_begin: u32,
    pub(super) kv_end: u32,
    pub(super) table: u32,
    /// Keys that any row sees: `lowest .. end`, in blocks that end at `end`.
    pub(super) lowest: u32,
    pub(super) end: u32,
    pub(super) blocks: u32,
}

impl Tile {
    /// Describes unit `unit` of the launch.
    #[inline(always)]
    pub(super) unsafe fn describe<V: Variant>(
        p: &GatherPrefillParams,
        variant: &V,
        shape: Shape,
        unit: u32,
    ) -> Self {
        let a = &p.attention;
        // All heads of an item before the next one: neighbours read the same pages at the same time, and
        // the longest items of the whole launch come first.
        let (piece, head) = p.heads.div_rem(unit);
        let (item, cut) = p.cuts.div_rem(piece);
        let (kv_head, in_group) = p.heads_per_kv_head.div_rem(head);
        let pack = p.pack.get();

        let at = (a.items + u64::from(item) * size_of::<WorkItem>() as u64) as *const u32;
        // SAFETY: `item` is one of the launch's, ten words that nobody writes.
        let ([token, count], [table, kv_begin], [kv_end, position], [slot, _]) = unsafe {
            (
                ptr::load_nc_u32x2(at),
                ptr::load_nc_u32x2(at.add(2)),
                ptr::load_nc_u32x2(at.add(4)),
                ptr::load_nc_u32x2(at.add(6)),
            )
        };
        let before = cut * p.tile_tokens;
        let count = count.saturating_sub(before).min(p.tile_tokens);
        let position = (position + before) as i32;
        let first = variant.visible_keys(position).0.max(kv_begin as i32);
        let last = variant.visible_keys(position + count as i32 - 1).1;
        let end = last.saturating_add(1).max(0).min(kv_end as i32) as u32;
        let lowest = first as u32;
        let keys = end.saturating_sub(lowest);
        Self {
            token: token + before,
            slot: if slot == DIRECT { slot } else { slot + before },
            rows: count * pack,
            head: kv_head * a.group + in_group * pack,
            kv_head,
            position,
            kv_begin,
            kv_end,
            table,
            lowest,
            end,
            blocks: if count == 0 {
                0
            } else {
                keys.div_ceil(shape.keys)
            },
        }
    }

    /// Token (counted from the tile's first) and head of a row.
    #[inline(always)]
    pub(super) fn place(&self, p: &GatherPrefillParams, row: u32) -> (u32, u32) {
        let (token, head) = p.pack.div_rem(row);
        (token, self.head + head)
    }

    /// Whose a row is; the key is left open.
    #[inline(always)]
    pub(super) fn query(&self, p: &GatherPrefillParams, row: u32) -> Pair {
        let (token, head) = self.place(p, row);
        Pair {
            token: self.token + token,
            head,
            position: self.position + token as i32,
            key: 0,
        }
    }

    /// The first and the last key that a row sees.
    #[inline(always)]
    pub(super) fn sees<V: Variant>(
        &self,
        p: &GatherPrefillParams,
        variant: &V,
        row: u32,
    ) -> (i32, i32) {
        let (first, last) = variant.visible_keys(self.position + p.pack.div(row) as i32);
        (
            first.max(self.kv_begin as i32),
            last.min(self.kv_end as i32 - 1),
        )
    }

    #[inline(always)]
    pub(super) unsafe fn store(&self, at: u32) {
        // SAFETY: the caller owns the tile's bytes.
        unsafe {
            shared::store_u32x4(at, [self.token, self.slot, self.rows, self.head]);
            shared::store_u32x4(
                at + 16,
                [
                    self.kv_head,
                    self.position as u32,
                    self.kv_begin,
                    self.kv_end,
                ],
            );
            shared::store_u32x4(at + 32, [self.table, self.lowest, self.end, self.blocks]);
        }
    }

    #[inline(always)]
    pub(super) unsafe fn load(at: u32) -> Self {
        // SAFETY: the tile was stored, with a barrier between.
        unsafe {
            let [token, slot, rows, head] = shared::load_u32x4(at);
            let [kv_head, position, kv_begin, kv_end] = shared::load_u32x4(at + 16);
            let [table, lowest, end, blocks] = shared::load_u32x4(at + 32);
            Self {
                token,
                slot,
                rows,
                head,
                kv_head,
                position: position as i32,
                kv_begin,
                kv_end,
                table,
                lowest,
                end,
                blocks,
            }
        }
    }
}

/// Shared addresses. All matrices lie in slabs of 64 columns, rows of 128 bytes whose chunks of 16 are
/// swizzled by the row: neither the rows of a chunk nor the chunks of a row meet in a bank.
#[derive(Clone, Copy)]
pub(super) struct Shared {
    pub(super) base: u32,
    pub(super) shape: Shape,
}

impl Shared {
    #[inline(always)]
    pub(super) fn queries(self) -> u32 {
        self.base
    }
    /// A block of the ring.
    #[inline(always)]
    pub(super) fn ring(self, place: u32) -> u32 {
        self.base + self.shape.ring_offset() + place * self.shape.block_bytes()
    }
    #[inline(always)]
    pub(super) fn tile(self) -> u32 {
        self.base + self.shape.tile_offset()
    }
    /// The unit that comes next.
    #[inline(always)]
    pub(super) fn next(self) -> u32 {
        self.tile() + 48
    }
    /// What a warp's rows see.
    #[inline(always)]
    pub(super) fn seen(self, warp: u32) -> u32 {
        self.tile() + 64 + warp * 16
    }
}
