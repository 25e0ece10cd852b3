//! Decodes: row blocks of few tokens, packed by the prefixes they share.

use std::ops::Range;

use kernels_gpu::abi::WorkItem;

use super::{
    Kernel, PackRule, PlanOptions, SplitMode, Tile,
    draft::{Draft, DraftRow, NO_ROW_BLOCK, PartInput},
    forest::{Forest, Member},
    pack::{PackCosts, PackNode, Packer},
};

/// Buffers that keep their memory from plan to plan.
#[derive(Debug, Default)]
pub(super) struct Gatherer {
    forest: Forest,
    packer: Packer,
    members: Vec<Decode>,
    /// For each node, where the rows of its subtree begin among the draft's.
    rows_begin: Vec<u32>,
}

/// A row block that decodes.
#[derive(Clone, Copy, Debug)]
struct Decode {
    /// Its first page among the plan's page ids.
    table: u32,
    kv_len: u32,
    /// Leading pages that others may share: those that are full.
    sharable: u32,
    first_token: u32,
    first_position: i32,
    tokens: u32,
    /// Among the plan's row blocks.
    row_block: u32,
}

impl Gatherer {
    /// Drafts the decodes of a part.
    pub fn gather(
        &mut self,
        input: &PartInput<'_>,
        options: &PlanOptions,
        drafts: &mut Vec<Draft>,
        draft_rows: &mut Vec<DraftRow>,
    ) {
        let PartInput { part, spec, .. } = *input;
        self.members.clear();
        let mut one_each = true;
        let page_size = part.table.page_size;
        let granule = sharing_granule(options, page_size);
        for row_block in 0..part.row_blocks() {
            let tokens = part.q_range(row_block);
            let q_len = tokens.end - tokens.start;
            if q_len > 0 && input.kernel(q_len) == Kernel::Decode {
                one_each &= q_len == 1;
                let kv_len = part.kv_len(row_block);
                // Full pages; divisions are spared where there are many row blocks.
                let last_is_full = part.table.last_page_len[row_block] == page_size;
                let pages = part.table.pages(row_block).len() as u32;
                let full = if last_is_full {
                    pages
                } else {
                    pages.saturating_sub(1)
                };
                let sharable = match (options.packing, granule) {
                    (PackRule::Off, _) => 0,
                    (_, 1) => full,
                    _ => full / granule * granule,
                };
                self.members.push(Decode {
                    table: input.first_page + part.table.indptr[row_block],
                    kv_len,
                    sharable,
                    first_token: tokens.start,
                    first_position: part.first_position(row_block),
                    tokens: q_len,
                    row_block: input.first_row_block + row_block as u32,
                });
            }
        }
        if self.members.is_empty() {
            return;
        }
        self.grow(input, options);
        self.lay_out_rows(draft_rows);
        self.packer
            .pack(options.packing, pack_costs(input, options));
        // The last query of a row block sees all its keys, and no window hides the first.
        let all_see = spec.variant.window_left.is_none() && (one_each || !spec.variant.causal);
        for node in 0..self.packer.nodes.len() {
            self.draft_node(node, all_see, &options.split, input, drafts, draft_rows);
        }
    }

    /// The prefix forest, in tokens.
    fn grow(&mut self, input: &PartInput<'_>, options: &PlanOptions) {
        let table = &input.part.table;
        let page_size = table.page_size;
        let granule = sharing_granule(options, page_size);
        let Self {
            forest,
            packer,
            members,
            ..
        } = self;
        forest.build(members.len() as u32, granule, |member| {
            let Decode {
                table: first,
                sharable,
                ..
            } = members[member as usize];
            let first = (first - input.first_page) as usize;
            Member {
                pages: &table.indices[first..first + sharable as usize],
                sharable,
            }
        });
        packer.nodes.clear();
        packer
            .nodes
            .extend(forest.nodes.iter().map(|node| PackNode {
                parent: node.parent,
                subtree_end: node.subtree_end,
                begin: node.begin * page_size,
                end: if node.is_leaf {
                    members[node.member as usize].kv_len
                } else {
                    node.end * page_size
                },
                rows: 0,
                is_leaf: node.is_leaf,
                joined: 0,
                start: 0,
            }));
    }

    /// The rows of all leaves in the order of the forest, so that those of a subtree stand together.
    fn lay_out_rows(&mut self, draft_rows: &mut Vec<DraftRow>) {
        let Self {
            forest,
            packer,
            members,
            rows_begin,
        } = self;
        rows_begin.clear();
        for node in &forest.nodes {
            rows_begin.push(draft_rows.len() as u32);
            if node.is_leaf {
                let Decode {
                    first_token,
                    first_position,
                    tokens,
                    ..
                } = members[node.member as usize];
                draft_rows.extend((0..tokens).map(|row| DraftRow {
                    token: first_token + row,
                    position: first_position + row as i32,
                }));
            }
        }
        rows_begin.push(draft_rows.len() as u32);
        for (index, node) in packer.nodes.iter_mut().enumerate() {
            node.rows = rows_begin[node.subtree_end as usize] - rows_begin[index];
        }
    }

    /// The item of a node: its own row block, or the rows of the children that are cut from it.
    fn draft_node(
        &self,
        index: usize,
        all_see: bool,
        split: &SplitMode,
        input: &PartInput<'_>,
        drafts: &mut Vec<Draft>,
        draft_rows: &mut Vec<DraftRow>,
    ) {
        let PartInput {
            spec, tiles, part, ..
        } = *input;
        let node = &self.packer.nodes[index];
        if node.is_empty() {
            return;
        }
        let mut rows = self.subtree_rows(index);
        let some_joined = self
            .packer
            .children(index)
            .any(|child| self.packer.nodes[child].joined > 0);
        if some_joined {
            let begin = draft_rows.len();
            for child in self
                .packer
                .children(index)
                .filter(|&child| self.packer.nodes[child].joined == 0)
            {
                draft_rows.extend_from_within(self.subtree_rows(child));
            }
            rows = begin..draft_rows.len();
        }
        let per_tile = tiles.decode_tokens() as usize;
        let whole = rows.len() <= per_tile;
        let shared = some_joined || node.joined > 0 || !whole;
        let row_block = &self.members[self.forest.nodes[index].member as usize];
        let mut next = rows.start;
        while next < rows.end {
            let begin = next;
            let end = rows.end.min(begin + per_tile);
            next = end;
            let (mut kv_begin, mut kv_end) = (node.start, node.end);
            if !all_see {
                let positions = || draft_rows[begin..end].iter().map(|row| row.position);
                let (first, last) = (positions().min(), positions().max());
                let visible =
                    |position: Option<i32>| spec.variant.visible(position.unwrap_or(0), node.end);
                let (first, last) = (visible(first).start, visible(last).end);
                match *split {
                    // Whole chunks, or the rows at hand would move the tiles of others.
                    SplitMode::Fixed { tokens } => kv_begin = kv_begin.max(first / tokens * tokens),
                    _ => (kv_begin, kv_end) = (kv_begin.max(first), last),
                }
            }
            if kv_begin < kv_end {
                let rows = (end - begin) as u32;
                drafts.push(Draft {
                    kernel: Kernel::Decode,
                    tile: Tile {
                        m: tiles.row_tile(rows),
                        n: 0,
                    },
                    pack: spec.group(),
                    part: input.index,
                    page_size: part.table.page_size,
                    table: row_block.table,
                    rows_begin: begin as u32,
                    rows,
                    position: 0,
                    kv_begin,
                    kv_end,
                    leaves_partial: input.composed || !node.is_leaf || node.start > 0,
                    all_see,
                    growable: kv_end == node.end,
                    tail_of: if node.is_leaf && whole {
                        row_block.row_block
                    } else {
                        NO_ROW_BLOCK
                    },
                    flags: WorkItem::GATHERED | if shared { WorkItem::SHARED_KEYS } else { 0 },
                });
            }
        }
    }

    fn subtree_rows(&self, index: usize) -> Range<usize> {
        let end = self.packer.nodes[index].subtree_end as usize;
        self.rows_begin[index] as usize..self.rows_begin[end] as usize
    }
}
/// Pages that are shared as one, or not at all. Results that do not depend on the batch are cut nowhere but
/// where every request is cut anyway.
const fn sharing_granule(options: &PlanOptions, page_size: u32) -> u32 {
    match options.split {
        SplitMode::Fixed { tokens } => tokens / page_size,
        _ => 1,
    }
}

/// What packing weighs for a part.
fn pack_costs(input: &PartInput<'_>, options: &PlanOptions) -> PackCosts {
    let spec = input.spec;
    // Where every chunk leaves a partial state anyway, cutting costs none.
    let partial_bytes = match options.split {
        SplitMode::Fixed { .. } => 0,
        _ => 2 * spec.partial_bytes_per_token(),
    };
    PackCosts {
        kv_bytes: spec.kv_bytes_per_token(),
        partial_bytes,
        tile_tokens: input.tiles.decode_tokens(),
    }
}
