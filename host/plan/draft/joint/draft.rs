//! Drafts of trees in joint tiles.

use kernels_gpu::abi::WorkItem;

use super::{
    choose::{Choice, Joiner, JointForest},
    layout::TileLayout,
};
use crate::plan::{
    data::{Kernel, Tile},
    draft::{Draft, DraftRun, Drafts, NO_ROW_BLOCK, PartInput, aligned, split_alignment},
};

impl Joiner {
    /// Drafts a tree in joint tiles.
    pub fn draft<T: Fn(usize) -> (u32, u32)>(
        &mut self,
        input: &PartInput<'_>,
        choice: &Choice,
        root: usize,
        forest: &JointForest<'_, T>,
        drafts: &mut Drafts,
    ) {
        let (spec, part) = (&input.model.spec, input.part);
        let draft_runs = &mut drafts.runs;
        let JointForest {
            packer, rows_begin, ..
        } = *forest;
        let page_size = part.table.page_size;
        let at = self
            .roots
            .binary_search_by_key(&(root as u32), |root| root.node);
        self.lay_out(at.unwrap_or_default(), choice.tokens);
        let TileLayout { tile_of, tiles, .. } = &mut self.tiles;
        let mut next_run = draft_runs.len() as u32;
        let first_run = next_run;
        for tile in tiles.iter_mut() {
            tile.next_run = next_run;
            next_run += tile.runs;
        }
        draft_runs.resize(next_run as usize, DraftRun::default());

        let first_row = rows_begin[root];
        let end = packer.nodes[root].subtree_end as usize;
        let nodes = packer.nodes[root..end].iter().zip(&rows_begin[root..end]);
        for (index, (node, &first)) in (root..end).zip(nodes) {
            if node.is_empty() || node.rows == 0 {
                continue;
            }
            let (table, row_block) = (forest.table)(index);
            let (mut begin, end) = (first - first_row, first - first_row + node.rows);
            let last = tile_of[end as usize - 1];
            let is_shared = tile_of[begin as usize] != last;
            for tile in &mut tiles[tile_of[begin as usize] as usize..=last as usize] {
                let next = end.min(tile.rows_end);
                draft_runs[tile.next_run as usize] = DraftRun {
                    table,
                    kv_begin: node.begin,
                    kv_end: node.end,
                    start: 0,
                    rows_begin: first_row + begin,
                    rows: next - begin,
                    is_shared,
                    tail_of: if node.is_leaf {
                        row_block
                    } else {
                        NO_ROW_BLOCK
                    },
                };
                tile.next_run += 1;
                begin = next;
            }
        }
        let alignment = split_alignment(page_size);
        let mut runs_begin = first_run;
        for tile in tiles.iter().filter(|tile| tile.runs > 0) {
            let runs = &mut draft_runs[runs_begin as usize..tile.next_run as usize];
            let (mut start, mut rows_begin, mut rows_end) = (0, u32::MAX, 0);
            for run in &mut *runs {
                run.start = start;
                start += aligned(run.kv_end - run.kv_begin, alignment);
                rows_begin = rows_begin.min(run.rows_begin);
                rows_end = rows_end.max(run.rows_begin + run.rows);
            }
            drafts.items.push(Draft {
                kernel: Kernel::Decode,
                tile: Tile { m: choice.m, n: 0 },
                pack: spec.group(),
                part: input.index,
                heads: 1,
                page_size,
                table: runs[0].table,
                rows_begin,
                rows: rows_end - rows_begin,
                position: 0,
                kv_begin: 0,
                kv_end: start,
                flags: WorkItem::GATHERED,
                leaves_partial: false,
                all_see: true,
                many_rows: false,
                growable: true,
                tail_of: NO_ROW_BLOCK,
                runs_begin,
                runs: tile.runs,
            });
            runs_begin = tile.next_run;
        }
    }
}
