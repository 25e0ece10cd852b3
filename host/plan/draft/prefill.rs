//! Prefills: row blocks of many query tokens, cut into tiles of consecutive tokens.

use std::ops::Range;

use super::{Draft, NO_ROW_BLOCK, PartInput};
use crate::plan::{
    data::{Kernel, SplitMode},
    model::{PrefillTile, TileTable},
    split::{has_many_rows, keys_of_piece},
};

/// Forecasts divide the tiles of a row block into at most this many groups, and take the keys of a group's middle tile
/// for all.
const ALIKE: u32 = 8;

impl PartInput<'_> {
    /// The row blocks that prefill kernels run, with their query tokens.
    fn contiguous(&self) -> impl Iterator<Item = (usize, Range<u32>)> {
        let row_blocks = 0..self.part.row_blocks();
        let row_blocks = row_blocks.map(|row_block| (row_block, self.part.q_range(row_block)));
        // Row blocks without queries or without keys have no tiles.
        row_blocks.filter(|&(row_block, ref tokens)| {
            !tokens.is_empty()
                && self.part.kv_len(row_block) > 0
                && self.kernel(tokens.end - tokens.start) == Kernel::Prefill
        })
    }

    /// Keys that prefill kernels see, and pairs of a key and a row of queries that sees it, for one KV head. Of requests that
    /// begin with the same page, only the keys of the longest count.
    pub fn prefill_keys(&self) -> [u64; 2] {
        let (spec, table) = (&self.model.spec, &self.part.table);
        let mut pairs = 0;
        let of_block = |(row_block, tokens): (usize, Range<u32>)| {
            let (kv_len, first) = (
                self.part.kv_len(row_block),
                self.part.first_position(row_block),
            );
            let rows = tokens.end - tokens.start;
            let seen = |token: u32| spec.variant.visible(first + token as i32, kv_len);
            let [begin, end] = [seen(0), seen(rows.saturating_sub(1))];
            let both = u64::from(begin.end - begin.start) + u64::from(end.end - end.start);
            pairs += u64::from(rows) * u64::from(spec.group()) * both / 2;
            let page = table.indices.get(table.indptr[row_block] as usize);
            (page.copied(), end.end.saturating_sub(begin.start))
        };
        let mut keys: Vec<_> = self.contiguous().map(of_block).collect();
        keys.sort_unstable();
        let longest = keys.chunk_by(|a, b| a.0 == b.0).filter_map(<[_]>::last);
        let keys: u64 = longest.map(|&(_, keys)| u64::from(keys)).sum();
        [keys, pairs].map(|sum| sum * u64::from(self.part.heads))
    }

    /// Counts the tiles of prefills, for forecasts. `add` is called for each group of similar tiles with their index in
    /// [`TileTable::prefills`], their number of units, and the keys of one unit. Fixed splits are counted as they are
    /// cut. In other modes, tiles are counted whole.
    ///
    /// [`TileTable::prefills`]: crate::plan::model::TileTable::prefills
    pub fn contiguous_tiles(&self, split: SplitMode, mut add: impl FnMut(usize, u32, f64)) {
        let spec = &self.model.spec;
        for (row_block, tokens) in self.contiguous() {
            let rows = tokens.end - tokens.start;
            let choice = *self.tiles.prefill(rows);
            let same = |step: &PrefillTile| {
                (step.kernel, step.tile, step.pack) == (choice.kernel, choice.tile, choice.pack)
            };
            let launch = self.tiles.prefills().iter().position(same).unwrap_or(0);
            let PrefillTile { tile, pack, .. } = choice;
            let per_tile = tile.m / pack;
            let tiles = rows.div_ceil(per_tile);
            let (kv_len, first) = (
                self.part.kv_len(row_block),
                self.part.first_position(row_block),
            );
            let step = tiles.div_ceil(ALIKE);
            for begin in (0..tiles).step_by(step as usize) {
                let alike = step.min(tiles - begin);
                let from = (begin + alike / 2) * per_tile;
                let position = first + from as i32;
                let last = position + per_tile.min(rows - from) as i32 - 1;
                let start = spec.variant.visible(position, kv_len).start;
                let end = spec.variant.visible(last, kv_len).end;
                let keys = end.saturating_sub(start);
                let pieces = match split {
                    SplitMode::Fixed { tokens } => {
                        let piece = keys_of_piece(
                            has_many_rows(spec, rows.saturating_mul(self.part.heads)),
                            tokens,
                        );
                        (end.div_ceil(piece).saturating_sub(start / piece)).max(1)
                    }
                    _ => 1,
                };
                let of_item = self.model.cost.units_per_item(pack) * self.part.heads;
                let units = alike.saturating_mul(of_item);
                let units = units.saturating_mul(pieces);
                add(launch, units, f64::from(keys) / f64::from(pieces));
            }
        }
    }

    /// Whether any prefill takes another kernel in the other table.
    pub fn differs_in(&self, other: &TileTable) -> bool {
        self.contiguous().any(|(_, tokens)| {
            let rows = tokens.end - tokens.start;
            self.tiles.prefill(rows).kernel != other.prefill(rows).kernel
        })
    }

    /// Drafts the prefills: tiles of consecutive tokens, each with all keys that any of its rows sees.
    pub fn draft_contiguous(&self, drafts: &mut Vec<Draft>) {
        let (spec, part) = (&self.model.spec, self.part);
        for (row_block, tokens) in self.contiguous() {
            let kv_len = part.kv_len(row_block);
            let first = part.first_position(row_block);
            let PrefillTile { tile, pack, .. } = *self.tiles.prefill(tokens.end - tokens.start);
            let per_tile = tile.m / pack;
            let many_rows =
                has_many_rows(spec, (tokens.end - tokens.start).saturating_mul(part.heads));
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
                        heads: part.heads,
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
