//! Prefills: row blocks of many tokens, in tiles of consecutive ones.

use std::ops::Range;

use super::{Draft, NO_ROW_BLOCK, PartInput};
use crate::plan::{data::Kernel, model::PrefillTile, split::has_many_rows};

impl PartInput<'_> {
    /// The row blocks that run on contiguous rows.
    fn contiguous(&self) -> impl Iterator<Item = (usize, Range<u32>)> {
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
            u64::from(rows) * self.model.spec.variant.visible(middle, kv_len).len() as u64
        };
        self.contiguous().map(pairs).sum::<u64>() * self.model.spec.flops_per_pair()
    }

    /// Units of the tiles of consecutive tokens, before any is cut.
    pub fn contiguous_units(&self) -> u32 {
        let units = |(_, tokens): (usize, Range<u32>)| {
            let rows = tokens.end - tokens.start;
            let PrefillTile { tile, pack, .. } = *self.tiles.prefill(rows);
            rows.div_ceil(tile.m / pack) * self.model.cost.units_per_item(pack)
        };
        self.contiguous().map(units).sum()
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
