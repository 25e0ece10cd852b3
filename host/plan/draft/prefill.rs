//! Prefills: row blocks of many tokens, in tiles of consecutive ones.

use std::ops::Range;

use super::{Draft, NO_ROW_BLOCK, PartInput};
use crate::plan::{
    data::{Kernel, SplitMode},
    model::{PrefillTile, TileTable},
    split::{has_many_rows, keys_of_piece},
};

impl PartInput<'_> {
    /// The row blocks that run on contiguous rows.
    fn contiguous(&self) -> impl Iterator<Item = (usize, Range<u32>)> {
        let row_blocks = 0..self.part.row_blocks();
        let row_blocks = row_blocks.map(|row_block| (row_block, self.part.q_range(row_block)));
        row_blocks.filter(|(_, tokens)| self.kernel(tokens.end - tokens.start) == Kernel::Prefill)
    }

    /// FLOPs on the keys that contiguous rows see: of kernels that run alone, and of those that share SMs.
    pub fn contiguous_flops(&self) -> [u64; 2] {
        let mut pairs = [0; 2];
        for (row_block, tokens) in self.contiguous() {
            let rows = tokens.end - tokens.start;
            let kernel = self.tiles.prefill(rows).kernel;
            let shares = kernel.is_some_and(|id| id.info().co_resident);
            pairs[usize::from(shares)] +=
                u64::from(rows) * self.keys_of_middle(row_block).len() as u64;
        }
        pairs.map(|pairs| pairs * self.model.spec.flops_per_pair())
    }

    /// The keys of the row in the middle of a row block, for those of each row.
    fn keys_of_middle(&self, row_block: usize) -> Range<u32> {
        let (kv_len, tokens) = (self.part.kv_len(row_block), self.part.q_range(row_block));
        let middle = (tokens.end - tokens.start) / 2;
        let position = self.part.first_position(row_block) + middle as i32;
        self.model.spec.variant.visible(position, kv_len)
    }

    /// Units of the tiles of consecutive tokens: as they are cut where splits are fixed, else before any is cut.
    pub fn contiguous_units(&self, split: SplitMode) -> u32 {
        let units = |(row_block, tokens): (usize, Range<u32>)| {
            let rows = tokens.end - tokens.start;
            let PrefillTile { tile, pack, .. } = *self.tiles.prefill(rows);
            let units = rows.div_ceil(tile.m / pack) * self.model.cost.units_per_item(pack);
            let SplitMode::Fixed { tokens } = split else {
                return units;
            };
            let keys = self.keys_of_middle(row_block);
            let piece = keys_of_piece(has_many_rows(&self.model.spec, rows), tokens);
            let pieces = keys.end.div_ceil(piece) - keys.start.min(keys.end) / piece;
            units * pieces.max(1)
        };
        self.contiguous().map(units).sum()
    }

    /// Whether contiguous rows have other tiles in another table.
    pub fn differs_in(&self, other: &TileTable) -> bool {
        self.contiguous().any(|(_, tokens)| {
            let rows = tokens.end - tokens.start;
            self.tiles.prefill(rows).kernel != other.prefill(rows).kernel
        })
    }

    /// Tiles of consecutive tokens, each against all keys that any of its rows sees.
    pub fn draft_contiguous(&self, drafts: &mut Vec<Draft>) {
        let (spec, part) = (&self.model.spec, self.part);
        for (row_block, tokens) in self.contiguous() {
            let kv_len = part.kv_len(row_block);
            let first = part.first_position(row_block);
            let PrefillTile { tile, pack, .. } = *self.tiles.prefill(tokens.end - tokens.start);
            let per_tile = tile.m / pack;
            let many_rows = has_many_rows(spec, tokens.end - tokens.start);
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
                        many_rows,
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
