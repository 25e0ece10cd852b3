//! The rows of a unit: the token and query head of each, and how a consumer warp loads their queries.

use cuda_std::shared;

use super::{layout::Layout, mainloop::Consumer, unit::Unit};
use crate::{
    abi::QueryRow,
    common::{
        cache::{self, Cache, Stored},
        decode::tile::Rows,
        half::Half,
    },
};

impl<const DIM: u32, const ROWS: u32, const WARPS: u32, const CACHE: u32>
    Consumer<'_, DIM, ROWS, WARPS, CACHE>
{
    /// Starts the rows of a unit, whose queries are in shared memory.
    ///
    /// # Safety
    /// The lanes come together; `slot` is the unit's.
    #[inline(always)]
    pub(super) unsafe fn start<T: Half, const DIM_BLOCKS: usize, const ROW_BLOCKS: usize>(
        &self,
        rows: &mut Rows<DIM_BLOCKS, ROW_BLOCKS>,
        slot: u32,
        unit: &Unit,
        lane: u32,
    ) where
        Stored<T, CACHE>: Cache,
    {
        let head = unit.head * self.params.group;
        // With pairs of KV heads, a row that does not exist would be past the unit's queries; it uses those of the last
        // token.
        let row = if <Stored<T, CACHE>>::SCALED {
            lane / 4
        } else {
            lane % 8
        };
        let (token, in_unit) = self.place(row);
        let first = self.dense((token.min(unit.tokens - 1), in_unit));
        let pair = [first, self.group.get()];
        // SAFETY: the caller's promise.
        unsafe {
            let queries = self.layout.queries(slot)
                + self.block() * Layout::<DIM, ROWS, WARPS, CACHE>::OWN_ROWS * DIM * 2;
            rows.start::<Stored<T, CACHE>>(queries, lane, pair, |row| {
                let (token, in_unit) = self.place(row);
                // Rows that do not exist use the last token.
                (self.row(slot, token.min(unit.tokens - 1)), head + in_unit)
            });
        }
    }

    /// Index of the thread among those of the consumer warps.
    #[inline(always)]
    pub(super) const fn thread(&self) -> u32 {
        self.warp * 32 + self.lane
    }

    /// The warp's place among the chunks at a time.
    #[inline(always)]
    pub(super) const fn turn(&self) -> u32 {
        self.warp / Layout::<DIM, ROWS, WARPS, CACHE>::PER_CHUNK
    }

    /// Which rows of the tile the warp has: index among the warps that share a chunk.
    #[inline(always)]
    pub(super) const fn block(&self) -> u32 {
        self.warp % Layout::<DIM, ROWS, WARPS, CACHE>::PER_CHUNK
    }

    /// The token of one of the warp's rows, and its query head within the unit. With two KV heads, the first half of the
    /// rows is of one head, the second half of the other.
    #[inline(always)]
    pub(super) fn place(&self, row: u32) -> (u32, u32) {
        let row = self.block() * Layout::<DIM, ROWS, WARPS, CACHE>::OWN_ROWS + row;
        let of_head = ROWS / cache::kv_heads(CACHE);
        let (token, in_group) = self.group.div_rem(row % of_head);
        (token, row / of_head * self.group.get() + in_group)
    }

    /// The row of a token and a query head in the order of the queries in memory.
    #[inline(always)]
    pub(super) fn dense(&self, (token, in_unit): (u32, u32)) -> u32 {
        token * self.params.group + in_unit
    }

    /// For a row in the order of the queries in memory: its token, its query head within the unit, and its row of the
    /// tile.
    #[inline(always)]
    pub(super) fn of_dense(&self, row: u32) -> (u32, u32, u32) {
        let (group, (nth, in_group)) = (self.group.get(), self.group.div_rem(row));
        if cache::kv_heads(CACHE) == 1 {
            return (nth, in_group, row);
        }
        let (token, second) = (nth / 2, nth % 2);
        let in_tile = second * ROWS / 2 + token * group + in_group;
        (token, second * group + in_group, in_tile)
    }

    /// The row description of one of a unit's tokens.
    ///
    /// # Safety
    /// `slot` is filled, and its unit has the token.
    #[inline(always)]
    pub(super) unsafe fn row(&self, slot: u32, token: u32) -> QueryRow {
        // SAFETY: the caller's promise.
        QueryRow::from_words(unsafe { shared::load_u32x4(self.layout.token(slot, token)) })
    }
}
