//! Items on their way to a plan: which rows against which keys, not yet cut along the keys.

use std::ops::Range;

use super::{
    DeviceDescription, Kernel, PlannedRowBlock, Tile,
    cost::CostModel,
    tiles::{PrefillTile, TileTable},
};
use crate::problem::{Part, Spec};

/// A row of a gathered item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DraftRow {
    pub token: u32,
    pub position: i32,
}

/// An item before it is cut along the keys.
#[derive(Clone, Copy, Debug)]
pub(super) struct Draft {
    pub kernel: Kernel,
    /// In decode, `n` is chosen with the splits.
    pub tile: Tile,
    /// Query heads in a tile.
    pub pack: u32,
    pub part: u32,
    /// The part's page size.
    pub page_size: u32,
    /// First page of the table in the plan's page ids.
    pub table: u32,
    /// Gathered: first [`DraftRow`]. Contiguous: first query token.
    pub rows_begin: u32,
    pub rows: u32,
    /// Contiguous: of the first row.
    pub position: i32,
    pub kv_begin: u32,
    pub kv_end: u32,
    pub flags: u32,
    /// Even if it is not cut along the keys.
    pub leaves_partial: bool,
    /// Every row sees a key of any run of the keys.
    pub all_see: bool,
    /// The keys stay the same when queries move on.
    pub growable: bool,
    /// The row block whose last keys these are, among the plan's, if no other draft ends with them.
    pub tail_of: u32,
    /// Joint: where its [`DraftRun`]s begin, and how many there are. Its keys are theirs, counted through.
    pub runs_begin: u32,
    pub runs: u32,
}

/// Keys of one table that some rows of a joint draft see.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct DraftRun {
    /// First page of the table in the plan's page ids.
    pub table: u32,
    pub kv_begin: u32,
    pub kv_end: u32,
    /// Where they stand among the keys of the draft; runs begin where drafts may be cut.
    pub start: u32,
    /// Its first [`DraftRow`].
    pub rows_begin: u32,
    pub rows: u32,
    /// Other drafts read them too.
    pub is_shared: bool,
    /// As [`Draft::tail_of`].
    pub tail_of: u32,
}

/// In [`Draft::tail_of`]: of none.
pub(super) const NO_ROW_BLOCK: u32 = u32::MAX;

impl Draft {
    pub const fn kv_len(&self) -> u32 {
        self.kv_end - self.kv_begin
    }

    pub fn is_gathered(&self) -> bool {
        self.kernel == Kernel::Decode
    }

    /// Whether its rows see different tables.
    pub const fn is_joint(&self) -> bool {
        self.runs > 0
    }
}

/// A run of a draft's keys; becomes a work item.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Piece {
    pub draft: u32,
    pub kv_begin: u32,
    pub kv_end: u32,
    /// Its place in launch order: 6 bits of the launch, then 36 of the order within it.
    pub order: u64,
}

impl Piece {
    pub const fn launch(&self) -> u32 {
        (self.order >> 36) as u32
    }
}

/// A part of a batch and what its drafts depend on.
pub(super) struct PartInput<'a> {
    pub device: &'a DeviceDescription,
    /// See [`DeviceDescription::most_decode_tokens`].
    pub most_decode_tokens: u32,
    pub spec: &'a Spec,
    pub cost: &'a CostModel,
    pub tiles: &'a TileTable,
    pub part: &'a Part,
    /// The part's index.
    pub index: u32,
    /// Where the part's page ids begin in the plan's.
    pub first_page: u32,
    /// The part's row blocks, and where they begin in the plan's.
    pub row_blocks: &'a [PlannedRowBlock],
    pub first_row_block: u32,
    /// Whether the batch has other parts.
    pub composed: bool,
}

impl PartInput<'_> {
    /// Which kernel runs a row block of so many query tokens.
    pub fn kernel(&self, q_len: u32) -> Kernel {
        if q_len <= self.most_decode_tokens {
            Kernel::Decode
        } else {
            Kernel::Prefill
        }
    }

    /// The keys below `kv_len` between the first and the last that any of the rows sees.
    pub fn visible(&self, rows: &[DraftRow], kv_len: u32) -> Range<u32> {
        let positions = || rows.iter().map(|row| row.position);
        let (first, last) = (positions().min(), positions().max());
        let visible = |position: Option<i32>| {
            let position = position.unwrap_or(0);
            self.spec.variant.visible(position, kv_len)
        };
        visible(first).start..visible(last).end
    }

    /// The row blocks that run on contiguous rows.
    pub fn contiguous(&self) -> impl Iterator<Item = (usize, Range<u32>)> {
        let row_blocks = 0..self.part.row_blocks();
        let row_blocks = row_blocks.map(|row_block| (row_block, self.part.q_range(row_block)));
        row_blocks.filter(|(_, tokens)| self.kernel(tokens.end - tokens.start) == Kernel::Prefill)
    }

    /// FLOPs on the keys that contiguous rows see.
    pub fn contiguous_flops(&self) -> u64 {
        let pairs = |(row_block, tokens): (usize, Range<u32>)| {
            let (kv_len, rows) = (self.part.kv_len(row_block), tokens.end - tokens.start);
            // The keys of the row in the middle, for each row.
            let middle = self.part.first_position(row_block) + (rows / 2) as i32;
            u64::from(rows) * self.spec.variant.visible(middle, kv_len).len() as u64
        };
        self.contiguous().map(pairs).sum::<u64>() * self.spec.flops_per_pair()
    }

    /// Units of the tiles of consecutive tokens, before any is cut.
    pub fn contiguous_units(&self) -> u32 {
        let units = |(_, tokens): (usize, Range<u32>)| {
            let rows = tokens.end - tokens.start;
            let PrefillTile { tile, pack, .. } = *self.tiles.prefill(rows);
            rows.div_ceil(tile.m / pack) * self.cost.units_per_item(pack)
        };
        self.contiguous().map(units).sum()
    }

    /// Tiles of consecutive tokens, each against all keys that any of its rows sees.
    pub fn draft_contiguous(&self, drafts: &mut Vec<Draft>) {
        let Self { spec, part, .. } = self;
        for (row_block, tokens) in self.contiguous() {
            let kv_len = part.kv_len(row_block);
            let first = part.first_position(row_block);
            let PrefillTile { tile, pack, .. } = *self.tiles.prefill(tokens.end - tokens.start);
            let per_tile = tile.m / pack;
            for begin in tokens.clone().step_by(per_tile as usize) {
                let rows = per_tile.min(tokens.end - begin);
                let position = first + (begin - tokens.start) as i32;
                let kv_begin = spec.variant.visible(position, kv_len).start;
                let kv_end = spec.variant.visible(position + rows as i32 - 1, kv_len).end;
                if kv_begin < kv_end {
                    drafts.push(Draft {
                        kernel: Kernel::Prefill,
                        tile,
                        pack,
                        part: self.index,
                        page_size: part.table.page_size,
                        table: self.first_page + part.table.indptr[row_block],
                        rows_begin: begin,
                        rows,
                        position,
                        kv_begin,
                        kv_end,
                        flags: 0,
                        leaves_partial: self.composed,
                        all_see: true,
                        growable: false,
                        tail_of: NO_ROW_BLOCK,
                        runs_begin: 0,
                        runs: 0,
                    });
                }
            }
        }
    }
}
