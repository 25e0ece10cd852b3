//! Decodes: row blocks of few tokens, packed by the prefixes they share.

use kernels_gpu::abi::WorkItem;

use super::{
    Kernel, PackRule, PlanOptions, SplitMode,
    draft::{Draft, DraftRow, PartInput},
    forest::{Forest, Member, NO_NODE},
    pack::{PackCosts, PackNode, Packer},
};

/// Buffers that keep their memory from plan to plan.
#[derive(Debug, Default)]
pub(super) struct Gatherer {
    forest: Forest,
    packer: Packer,
    /// The row blocks that decode.
    members: Vec<u32>,
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
        let PartInput { part, .. } = input;
        self.members.clear();
        self.members
            .extend((0..part.row_blocks() as u32).filter(|&row_block| {
                let tokens = part.q_range(row_block as usize).len() as u32;
                tokens > 0 && input.kernel(tokens) == Kernel::Decode
            }));
        self.grow(input, options);
        self.packer
            .pack(options.packing, pack_costs(input, options));
        for node in 0..self.packer.nodes.len() {
            self.draft_node(node, input, drafts, draft_rows);
        }
    }

    /// The prefix forest, in tokens.
    fn grow(&mut self, input: &PartInput<'_>, options: &PlanOptions) {
        let table = &input.part.table;
        let page_size = table.page_size;
        // Independent of the batch means: cut nowhere but where every request is cut anyway.
        let granule = match options.split {
            SplitMode::Fixed { tokens } => tokens / page_size,
            _ => 1,
        };
        let Self {
            forest,
            packer,
            members,
        } = self;
        forest.build(members.len() as u32, granule, |member| {
            let row_block = members[member as usize] as usize;
            let sharable = match options.packing {
                PackRule::Off => 0,
                _ => table.kv_len(row_block) / page_size,
            };
            Member {
                pages: table.pages(row_block),
                sharable,
            }
        });
        packer.nodes.clear();
        packer.nodes.extend(forest.nodes.iter().map(|node| {
            let row_block = members[node.member as usize] as usize;
            let (end, rows) = if node.is_leaf {
                (
                    table.kv_len(row_block),
                    input.part.q_range(row_block).len() as u32,
                )
            } else {
                (node.end * page_size, 0)
            };
            PackNode {
                parent: node.parent,
                subtree_end: node.subtree_end,
                begin: node.begin * page_size,
                end,
                rows,
                is_leaf: node.is_leaf,
                joined: 0,
                start: 0,
            }
        }));
        for node in (0..packer.nodes.len()).rev() {
            let PackNode { parent, rows, .. } = packer.nodes[node];
            if parent != NO_NODE {
                packer.nodes[parent as usize].rows += rows;
            }
        }
    }

    /// The item of a node: its own row block, or the rows of the children that are cut from it.
    fn draft_node(
        &self,
        index: usize,
        input: &PartInput<'_>,
        drafts: &mut Vec<Draft>,
        draft_rows: &mut Vec<DraftRow>,
    ) {
        let nodes = &self.packer.nodes;
        let node = &nodes[index];
        if node.is_empty() {
            return;
        }
        let rows_begin = draft_rows.len();
        let mut shared = node.joined > 0;
        if node.is_leaf {
            self.push_rows(index, input, draft_rows);
        } else {
            let mut child = index + 1;
            while child < node.subtree_end as usize {
                let below = &nodes[child];
                if below.joined > 0 && !below.is_empty() {
                    shared = true;
                } else {
                    let subtree = child..below.subtree_end as usize;
                    for leaf in subtree.filter(|&node| nodes[node].is_leaf) {
                        self.push_rows(leaf, input, draft_rows);
                    }
                }
                child = below.subtree_end as usize;
            }
        }

        let PartInput {
            spec, tiles, part, ..
        } = input;
        let row_block = self.members[self.forest.nodes[index].member as usize] as usize;
        let per_tile = tiles.max_tokens(Kernel::Decode) as usize;
        shared |= draft_rows.len() - rows_begin > per_tile;
        for begin in (rows_begin..draft_rows.len()).step_by(per_tile) {
            let rows = &draft_rows[begin..draft_rows.len().min(begin + per_tile)];
            let positions = || rows.iter().map(|row| row.position);
            let (Some(first), Some(last)) = (positions().min(), positions().max()) else {
                continue;
            };
            let kv_begin = spec.variant.visible(first, node.end).start.max(node.start);
            let kv_end = spec.variant.visible(last, node.end).end;
            if kv_begin < kv_end {
                drafts.push(Draft {
                    kernel: Kernel::Decode,
                    tile: tiles.select(Kernel::Decode, rows.len() as u32, kv_end - kv_begin),
                    part: input.index,
                    page_size: part.table.page_size,
                    table: input.first_page + part.table.indptr[row_block],
                    rows_begin: begin as u32,
                    rows: rows.len() as u32,
                    position: first,
                    kv_begin,
                    kv_end,
                    flags: WorkItem::GATHERED | if shared { WorkItem::SHARED_KEYS } else { 0 },
                });
            }
        }
    }

    /// The rows of a leaf.
    fn push_rows(&self, leaf: usize, input: &PartInput<'_>, draft_rows: &mut Vec<DraftRow>) {
        let row_block = self.members[self.forest.nodes[leaf].member as usize] as usize;
        let tokens = input.part.q_range(row_block);
        let first = input.part.first_position(row_block);
        draft_rows.extend(
            tokens
                .zip(first..)
                .map(|(token, position)| DraftRow { token, position }),
        );
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
        tile_tokens: input.tiles.max_tokens(Kernel::Decode),
    }
}
