//! Row blocks that are decodes, and the drafts of their keys.

use std::ops::Range;

use kernels_gpu::abi::WorkItem;

use crate::plan::{
    data::{Kernel, SplitMode},
    draft::{Draft, DraftRow, DraftSink, NO_ROW_BLOCK, PartInput},
    model::PrefillTile,
    split::first_key,
};

/// What the drafts of a part have in common.
#[derive(Clone, Copy, Debug)]
pub struct Common {
    /// Maximum number of query tokens per tile.
    pub per_tile: usize,
    pub split: SplitMode,
    /// Template of all drafts. Keeps the number of rows of the last draft and the tile for it.
    pub draft: Draft,
}

/// A row block that is a decode.
#[derive(Clone, Copy, Debug)]
pub struct Decode {
    /// Index of its first page in the plan's page ids.
    pub table: u32,
    pub kv_len: u32,
    /// Number of leading pages that other row blocks may share: only full pages.
    pub sharable: u32,
    pub first_token: u32,
    pub first_position: i32,
    pub tokens: u32,
    /// Index among the plan's row blocks.
    pub row_block: u32,
}

impl Decode {
    /// Its rows, in order.
    pub fn rows(&self) -> impl ExactSizeIterator<Item = DraftRow> + use<> {
        let (token, position) = (self.first_token, self.first_position);
        let row = move |row| DraftRow {
            token: token + row,
            position: position + row as i32,
        };
        (0..self.tokens).map(row)
    }
}

/// The keys of an item, and the row block whose table holds them.
pub struct ItemKeys<'a> {
    pub row_block: &'a Decode,
    pub start: u32,
    pub end: u32,
    /// Whether these are the row block's last keys.
    pub is_leaf: bool,
}

impl ItemKeys<'_> {
    /// Drafts the keys as prefills of consecutive tokens, each of which sees all keys. `position` is the position of
    /// the first token.
    pub fn draft_wide(
        &self,
        tokens: Range<u32>,
        position: i32,
        common: &Common,
        input: &PartInput<'_>,
        drafts: &mut impl DraftSink,
    ) {
        let PrefillTile { tile, pack, .. } = *input.tiles.prefill(tokens.end - tokens.start);
        let per_tile = tile.m / pack;
        for begin in tokens.clone().step_by(per_tile as usize) {
            drafts.add_prefill(Draft {
                kernel: Kernel::Prefill,
                tile,
                pack,
                table: self.row_block.table,
                rows_begin: begin,
                rows: per_tile.min(tokens.end - begin),
                // Kernels derive the positions of all rows from this one. Behind the last key, every row sees all keys.
                position: position.max(self.end as i32),
                kv_begin: self.start,
                kv_end: self.end,
                flags: WorkItem::SHARED_KEYS,
                leaves_partial: true,
                growable: true,
                tail_of: NO_ROW_BLOCK,
                ..common.draft
            });
        }
    }

    /// Drafts the keys for rows of the row block, or (`shared`) for rows of several row blocks.
    #[inline(always)] // most arguments are constant for the many row blocks that share nothing
    pub fn draft(
        &self,
        rows: Range<usize>,
        mut shared: bool,
        common: &mut Common,
        input: &PartInput<'_>,
        draft_rows: &[DraftRow],
        drafts: &mut impl DraftSink,
    ) {
        let &Self {
            row_block,
            start,
            end,
            is_leaf,
        } = self;
        let per_tile = common.per_tile;
        let whole = rows.len() <= per_tile;
        shared |= !whole;
        let mut next = rows.start;
        while next < rows.end {
            let begin = next;
            next = rows.end.min(begin + per_tile);
            let (mut kv_begin, mut kv_end) = (start, end);
            if !common.draft.all_see {
                // The tiles of a few tokens have the keys of all of them: equal items run at the same time, and all but the
                // first find the keys in L2.
                let seeing = match rows.len() as u32 > input.model.device.decode_max_tokens {
                    true => begin..next,
                    false => rows.clone(),
                };
                let visible = input.visible(&draft_rows[seeing], end);
                match common.split {
                    SplitMode::Fixed { .. } => {
                        // The rows of the tile decide: chunks of a prompt begin where the tiles of the whole prompt do.
                        let seen = input.visible(&draft_rows[begin..next], end).start;
                        kv_begin = kv_begin.max(first_key(seen, common.draft.page_size));
                        // A prompt's first rows see few of its keys.
                        if common.draft.many_rows {
                            kv_end = visible.end;
                        }
                    }
                    _ => (kv_begin, kv_end) = (kv_begin.max(visible.start), visible.end),
                }
            }
            if kv_begin < kv_end {
                let rows = (next - begin) as u32;
                if rows != common.draft.rows {
                    common.draft.rows = rows;
                    common.draft.tile.m = input.tiles.row_tile(rows);
                }
                drafts.add_decode(Draft {
                    table: row_block.table,
                    rows_begin: begin as u32,
                    kv_begin,
                    kv_end,
                    leaves_partial: common.draft.leaves_partial || !is_leaf || start > 0,
                    growable: kv_end == end,
                    tail_of: if is_leaf && whole {
                        row_block.row_block
                    } else {
                        NO_ROW_BLOCK
                    },
                    flags: WorkItem::GATHERED | if shared { WorkItem::SHARED_KEYS } else { 0 },
                    ..common.draft
                });
            }
        }
    }
}
