//! The tile description that the warps of a prefill CTA exchange, for all architectures.

use cuda_std::prelude::*;

use crate::{
    abi::{AttentionParams, DIRECT, WorkItem},
    common::divisor::Divisor,
    common::variant::{Pair, Query, Variant},
};

/// Rows of an item for one query head, or for `pack` query heads of one KV head (pack_gqa): row `r` is token `r /
/// pack`, head `r % pack`.
#[derive(Clone, Copy)]
pub struct Tile {
    /// The first query token.
    pub token: u32,
    /// The slot of its partial states, or [`DIRECT`].
    pub slot: u32,
    /// Rows that exist.
    pub rows: u32,
    /// The first query head.
    pub head: u32,
    /// Its KV head.
    pub kv_head: u32,
    /// Position of the first row.
    pub position: i32,
    /// The item's first key.
    pub kv_begin: u32,
    /// One past its last.
    pub kv_end: u32,
    /// Index into the plan's page ids of the table's first page, that of key 0.
    pub table: u32,
    /// The first key that any row sees.
    pub lowest: u32,
    /// One past the last key that any row sees; the last block ends here.
    pub end: u32,
    /// Blocks of keys.
    pub blocks: u32,
}

/// A tile's place in the launch.
pub struct Place {
    /// Index of the item.
    pub item: u32,
    /// The first of its tokens.
    pub from: u32,
    /// The largest number of tokens.
    pub most: u32,
    /// The KV head.
    pub kv_head: u32,
    /// Which of that KV head's groups of `pack` query heads.
    pub in_group: u32,
}

impl Tile {
    /// No rows: the end of all work.
    pub const NONE: Self = Self {
        token: 0,
        slot: 0,
        rows: 0,
        head: 0,
        kv_head: 0,
        position: 0,
        kv_begin: 0,
        kv_end: 0,
        table: 0,
        lowest: 0,
        end: 0,
        blocks: 0,
    };

    /// The tile at a place; `blocks` is left 0.
    ///
    /// # Safety
    /// - The place is in the launch whose work `a` is.
    #[inline(always)]
    pub unsafe fn at<V: Variant>(
        a: &AttentionParams,
        variant: &V,
        place: &Place,
        pack: u32,
    ) -> Self {
        let at = (a.items + u64::from(place.item) * size_of::<WorkItem>() as u64) as *const u32;
        // SAFETY: one of the launch's items: ten words that no thread writes.
        let ([token, count], [table, kv_begin], [kv_end, position], [slot, _]) = unsafe {
            (
                ptr::load_nc_u32x2(at),
                ptr::load_nc_u32x2(at.add(2)),
                ptr::load_nc_u32x2(at.add(4)),
                ptr::load_nc_u32x2(at.add(6)),
            )
        };
        let count = count.saturating_sub(place.from).min(place.most);
        let position = (position + place.from) as i32;
        let lowest = variant.visible_keys(position).0.max(kv_begin as i32);
        let last = variant.visible_keys(position + count as i32 - 1).1;
        Self {
            token: token + place.from,
            slot: if slot == DIRECT {
                slot
            } else {
                slot + place.from
            },
            rows: count * pack,
            head: place.kv_head * a.group + place.in_group * pack,
            kv_head: place.kv_head,
            position,
            kv_begin,
            kv_end,
            table,
            lowest: lowest as u32,
            end: last.saturating_add(1).max(0).min(kv_end as i32) as u32,
            blocks: 0,
        }
    }

    /// Token (counted from the tile's first) and head of a row.
    #[inline(always)]
    pub fn place(&self, pack: &Divisor, row: u32) -> (u32, u32) {
        let (token, head) = pack.div_rem(row);
        (token, self.head + head)
    }

    /// The query of a row, as a pair with key 0.
    #[inline(always)]
    pub fn query<V: Variant>(&self, pack: &Divisor, variant: &V, row: u32) -> Pair {
        let (token, head) = self.place(pack, row);
        let query = Query {
            token: self.token + token,
            head,
            position: self.position + token as i32,
        };
        Pair::new(variant, query, 0)
    }

    /// The first and the last key of the item that a row sees.
    #[inline(always)]
    pub fn sees<V: Variant>(&self, pack: &Divisor, variant: &V, row: u32) -> (i32, i32) {
        let (first, last) = variant.visible_keys(self.position + pack.div(row) as i32);
        (
            first.max(self.kv_begin as i32),
            last.min(self.kv_end as i32 - 1),
        )
    }

    /// Writes the tile to shared memory.
    ///
    /// # Safety
    /// - `at` is the shared address of 48 bytes, aligned to 16, that only the caller accesses.
    #[inline(always)]
    pub unsafe fn store(&self, at: u32) {
        // SAFETY: the caller's promise.
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

    /// Reads what was [stored](Self::store).
    ///
    /// # Safety
    /// - It was stored at this address, and a barrier completed since.
    #[inline(always)]
    pub unsafe fn load(at: u32) -> Self {
        // SAFETY: the caller's promise.
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
