//! The tile of a unit, and the shared-memory addresses of queries, keys and values.

use super::Shape;
use crate::{
    abi::GatherPrefillParams,
    common::prefill_tile::{Place, Tile},
    common::variant::Variant,
};

/// Describes unit `unit` of the launch.
///
/// # Safety
/// The unit is one of the launch's.
#[inline(always)]
pub(super) unsafe fn describe<V: Variant>(
    p: &GatherPrefillParams,
    variant: &V,
    shape: Shape,
    unit: u32,
) -> Tile {
    // All heads of an item come before the next item: neighbouring CTAs then share its pages in L2, and the longest
    // items of the launch start first.
    let (piece, head) = p.heads.div_rem(unit);
    let (item, cut) = p.cuts.div_rem(piece);
    let (kv_head, in_group) = p.heads_per_kv_head.div_rem(head);
    let place = Place {
        item,
        from: cut * p.tile_tokens,
        most: p.tile_tokens,
        kv_head,
        in_group,
    };
    // SAFETY: the caller's promise.
    let mut tile = unsafe { Tile::at(&p.attention, variant, &place, p.pack.get()) };
    if tile.rows > 0 {
        let keys = tile.end.saturating_sub(tile.lowest);
        tile.blocks = keys.div_ceil(shape.keys);
    } else {
        // It may come after the last token, and the masks of a tile's token are read.
        tile.token = 0;
    }
    tile
}

/// Shared addresses. Matrices are stored in slabs of 64 columns: rows of 128 bytes, with chunks of 16 bytes swizzled by
/// the row. Neither reads along a row nor along a column have bank conflicts.
#[derive(Clone, Copy)]
pub(in super::super) struct Shared {
    pub base: u32,
    pub shape: Shape,
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
    /// Address of the next unit.
    #[inline(always)]
    pub(super) fn next(self) -> u32 {
        self.tile() + 48
    }
    /// Address of the factors of the rows' products with keys, of general kernels. The rows of a lane are side by side:
    /// `lane / 4`, and those 8, 16 and 24 after it.
    #[inline(always)]
    pub(super) fn factors(self, warp: u32, lane: u32) -> u32 {
        let of_lane = self.shape.warp_rows() / 8 * 4;
        self.base
            + self.shape.shared_bytes()
            + warp * self.shape.warp_rows() * 4
            + lane / 4 * of_lane
    }
    /// Address of the factor of one row.
    #[inline(always)]
    pub(super) fn factor(self, row: u32) -> u32 {
        let rows = self.shape.warp_rows();
        self.factors(row / rows, row % 8 * 4) + row % rows / 8 * 4
    }
    /// Address of the keys that a warp's rows see.
    #[inline(always)]
    pub(super) fn seen(self, warp: u32) -> u32 {
        self.tile() + 64 + warp * 16
    }
}
