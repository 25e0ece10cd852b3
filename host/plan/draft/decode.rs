//! Decodes: row blocks of few tokens, packed by the prefixes they share.

use std::ops::Range;

use kernels_gpu::abi::WorkItem;

use self::keys::{Common, Decode, ItemKeys};
use super::{
    Draft, DraftRow, DraftSink, Drafts, NO_ROW_BLOCK, PartInput,
    joint::{Choice, Joiner, JointForest},
};
use crate::plan::{
    data::{Kernel, PackRule, PlanOptions, PlannedRowBlock, Rules, SplitMode, Tile},
    model::Model,
    prefix::{Forest, NO_NODE, PackCosts, PackNode, Packer},
    split::has_many_rows,
};

mod keys;

/// Buffers that keep their memory from plan to plan.
#[derive(Debug, Default)]
pub struct DecodeDrafter {
    forest: Forest,
    packer: Packer,
    members: Vec<Decode>,
    /// For each node, the index of its subtree's first draft row.
    rows_begin: Vec<u32>,
    joiner: Joiner,
    /// What drafting the current part again needs; set if prefills may read its prefixes beside the decodes.
    again: Option<Common>,
    choice: Option<Choice>,
}

/// Prefills may read a prefix that at least this many rows of a KV head share.
const WIDE_ROWS: u32 = 128;
/// They do if the prefix has at least `WIDE_KEYS` keys, the products of all such prefixes take `WIDE_NS` and this part
/// of the step (`WIDE_PART`), and the step takes `WIDE_STEP_PS`. Forecasts of shorter steps are not accurate enough.
const WIDE_KEYS: u32 = 256;
const WIDE_NS: f64 = 6e3;
const WIDE_PART: f64 = 0.08;
const WIDE_STEP_PS: u64 = 45_000_000;

impl DecodeDrafter {
    /// Drafts the decodes of a part. Returns whether the part has prefills, too.
    pub fn draft(
        &mut self,
        input: &PartInput<'_>,
        options: &PlanOptions,
        rules: &Rules,
        drafts: &mut Drafts,
    ) -> bool {
        let (part, spec) = (input.part, &input.model.spec);
        self.again = None;
        self.members.clear();
        self.members.reserve(input.row_blocks.len());
        let (mut one_each, mut has_prefills) = (true, false);
        let ends = part.table.indptr[1..].iter();
        let tables = part.table.indptr.iter().zip(ends);
        for (row_block, (planned, (&begin, &end))) in
            input.row_blocks.iter().zip(tables).enumerate()
        {
            let PlannedRowBlock {
                first_token,
                tokens,
                position,
                kv_len,
                capacity,
                ..
            } = *planned;
            // Beside parts of several heads, their tokens are row blocks without keys, too.
            if tokens == 0 || kv_len == 0 {
                continue;
            }
            if input.kernel(tokens) != Kernel::Decode {
                has_prefills = true;
                continue;
            }
            one_each &= tokens == 1;
            // Only full pages can be shared. The comparison avoids a division for each row block.
            let full = (end - begin) - u32::from(kv_len < capacity);
            let sharable = match options.packing {
                PackRule::Off => 0,
                // In a tile of several requests each of so many rows would leave a partial state.
                _ if tokens > input.model.most_decode_tokens => 0,
                _ => full,
            };
            self.members.push(Decode {
                table: input.first_page + begin,
                kv_len,
                sharable,
                first_token,
                first_position: position,
                tokens,
                row_block: input.first_row_block + row_block as u32,
            });
        }
        if self.members.is_empty() {
            return has_prefills;
        }
        // Without a window, the last query token of a row block sees all its keys, and without a causal mask every
        // token does.
        let all_see = spec.variant.window_left.is_none() && (one_each || !spec.variant.causal);
        let mut common = Common {
            per_tile: input.tiles.decode_tokens() as usize,
            split: options.split,
            draft: Draft {
                kernel: Kernel::Decode,
                tile: Tile::default(),
                pack: input.tiles.decode_pack(),
                part: input.index,
                heads: 1,
                page_size: part.table.page_size,
                table: 0,
                rows_begin: 0,
                rows: 0,
                position: 0,
                kv_begin: 0,
                kv_end: 0,
                flags: WorkItem::GATHERED,
                leaves_partial: input.composed,
                all_see,
                many_rows: false,
                growable: true,
                tail_of: NO_ROW_BLOCK,
                runs_begin: 0,
                runs: 0,
            },
        };
        if !self.grow(input, &mut drafts.rows) {
            self.draft_apart(&mut common, input, drafts);
            return has_prefills;
        }
        let costs = pack_costs(input);
        match (options.packing, rules.join) {
            (PackRule::Off, _) => self.packer.pack_by(|_| true, costs),
            (_, Some(rule)) => self.packer.pack_by(rule, costs),
            _ => self.packer.pack(costs),
        }
        let cut_freely = match options.split {
            SplitMode::Makespan => rules.chunk.is_none(),
            split => split == SplitMode::Off,
        };
        let fastest = options.packing == PackRule::Fastest && rules.join.is_none();
        let joins = fastest && options.decode_tile.is_none();
        // Beside prefills, decodes run in other kernels.
        let alone = !input.composed && !has_prefills && !input.beside_heads;
        // In joint tiles, every row sees all keys of its runs: there is no mask.
        let all_see = all_see && !input.masked;
        let may_join = joins && cut_freely && all_see && alone;
        self.choice = match may_join {
            true => self.joiner.choose(input, &self.packer),
            false => None,
        };
        // Prefills read a prefix for all decodes from behind it, so their distances would be wrong.
        let may_be_wide = options.split == SplitMode::Makespan && !spec.counts_distances();
        if may_join && may_be_wide {
            self.again = Some(common);
        }
        self.draft_nodes(&mut common, input, drafts);
        has_prefills
    }

    /// Drafts the packed forest.
    fn draft_nodes(&mut self, common: &mut Common, input: &PartInput<'_>, drafts: &mut Drafts) {
        let mut node = 0;
        while node < self.packer.nodes.len() {
            let is_root = self.packer.nodes[node].parent == NO_NODE;
            match self.choice {
                Some(choice) if is_root && self.joiner.joins(node, &choice, &input.model.cost) => {
                    self.join(node, &choice, input, drafts);
                    node = self.packer.nodes[node].subtree_end as usize;
                }
                _ => {
                    let Drafts { items, rows, .. } = &mut *drafts;
                    self.draft_node(node, false, common, input, rows, items);
                    node += 1;
                }
            }
        }
    }

    /// Predicted time of the last drafts, in picoseconds. None if prefills cannot read the prefixes, or if the wide
    /// prefixes are too small for that to pay. `any` accepts every size.
    pub fn time_ps(&self, model: &Model, any: bool) -> Option<u64> {
        self.again.as_ref()?;
        let group = model.spec.group();
        let wide = self.packer.nodes.iter().filter(|node| {
            !node.is_leaf
                && node.rows.saturating_mul(group) >= WIDE_ROWS
                && node.end - node.start >= WIDE_KEYS
        });
        let pairs = wide.map(|node| u64::from(node.rows) * u64::from(node.end - node.start));
        let flops = pairs.sum::<u64>() as f64 * model.spec.flops_per_pair() as f64;
        let step_ps = self.joiner.time_ps;
        let (least_ps, least_flops) = if any {
            (1, 1.0)
        } else {
            let least_ns = WIDE_NS.max(WIDE_PART * step_ps as f64 / 1e3);
            (WIDE_STEP_PS, least_ns * model.device.flops_per_ns)
        };
        (step_ps >= least_ps && flops >= least_flops).then_some(step_ps)
    }

    /// Drafts the part again, with prefills in the input's tiles for the wide prefixes. `rows` are those of the first drafts; more
    /// are added. Returns whether there are such prefixes.
    pub fn draft_wide(
        &self,
        input: &PartInput<'_>,
        rows: &mut Vec<DraftRow>,
        drafts: &mut impl DraftSink,
    ) -> bool {
        let Some(mut common) = self.again else {
            return false;
        };
        common.per_tile = input.tiles.decode_tokens() as usize;
        common.draft.pack = input.tiles.decode_pack();
        let mut any = false;
        for node in 0..self.packer.nodes.len() {
            any |= self.draft_node(node, true, &mut common, input, rows, drafts);
        }
        any
    }

    /// Drafts a tree in joint tiles.
    fn join(&mut self, root: usize, choice: &Choice, input: &PartInput<'_>, drafts: &mut Drafts) {
        let Self {
            forest,
            packer,
            members,
            rows_begin,
            joiner,
            ..
        } = self;
        let forest = JointForest {
            packer,
            rows_begin,
            table: |node: usize| {
                let Decode {
                    table, row_block, ..
                } = members[forest.nodes[node].member as usize];
                (table, row_block)
            },
        };
        joiner.draft(input, choice, root, &forest, drafts);
    }

    /// Builds the prefix forest, in tokens, and lists the rows of its leaves in order, so that the rows of a subtree are consecutive.
    /// Returns false if no pages are shared; then there is no forest.
    fn grow(&mut self, input: &PartInput<'_>, draft_rows: &mut Vec<DraftRow>) -> bool {
        let table = &input.part.table;
        let page_size = table.page_size;
        let Self {
            forest,
            packer,
            members,
            rows_begin,
            ..
        } = self;
        packer.nodes.clear();
        rows_begin.clear();
        let shares = forest.build(members.len() as u32, |member| {
            let Decode {
                table: first,
                sharable,
                ..
            } = members[member as usize];
            let first = (first - input.first_page) as usize;
            &table.indices[first..first + sharable as usize]
        });
        if !shares {
            return false;
        }
        for node in &forest.nodes {
            rows_begin.push(draft_rows.len() as u32);
            let (mut end, mut rows) = (node.end * page_size, 0);
            if node.is_leaf {
                let member = &members[node.member as usize];
                (end, rows) = (member.kv_len, member.tokens);
                draft_rows.extend(member.rows());
            }
            packer.nodes.push(PackNode {
                parent: node.parent,
                subtree_end: node.subtree_end,
                begin: node.begin * page_size,
                end,
                rows,
                is_leaf: node.is_leaf,
                joined: 0,
                start: 0,
            });
        }
        rows_begin.push(draft_rows.len() as u32);
        for (node, &first) in packer.nodes.iter_mut().zip(&*rows_begin) {
            if !node.is_leaf {
                node.rows = rows_begin[node.subtree_end as usize] - first;
            }
        }
        true
    }

    /// Drafts items of one row block each.
    fn draft_apart(&self, common: &mut Common, input: &PartInput<'_>, drafts: &mut Drafts) {
        let Drafts { items, rows, .. } = drafts;
        for row_block in &self.members {
            // Decode kernels may also run prompts, which can have many rows.
            common.draft.many_rows =
                common.split.is_fixed() && has_many_rows(&input.model.spec, row_block.tokens);
            let begin = rows.len();
            rows.extend(row_block.rows());
            let keys = ItemKeys {
                row_block,
                start: 0,
                end: row_block.kv_len,
                is_leaf: true,
            };
            let of_block = begin..rows.len();
            keys.draft(of_block, false, common, input, rows, items);
        }
    }

    /// Drafts the item of a node: the rows of its row block, or the rows of the children that are cut from it. With
    /// `wide`, prefills read a wide prefix instead; only then the result is true.
    fn draft_node(
        &self,
        index: usize,
        wide: bool,
        common: &mut Common,
        input: &PartInput<'_>,
        draft_rows: &mut Vec<DraftRow>,
        drafts: &mut impl DraftSink,
    ) -> bool {
        let node = &self.packer.nodes[index];
        if node.is_empty() {
            return false;
        }
        let mut rows = self.subtree_rows(index);
        let mut shared = node.joined > 0;
        let children = || {
            let children = self.packer.children(index);
            children.map(|child| (child, self.packer.nodes[child].joined > 0))
        };
        if !node.is_leaf && children().any(|(_, joined)| joined) {
            shared = true;
            let begin = draft_rows.len();
            for (child, _) in children().filter(|(_, joined)| !joined) {
                draft_rows.extend_from_within(self.subtree_rows(child));
            }
            rows = begin..draft_rows.len();
        }
        let keys = ItemKeys {
            row_block: &self.members[self.forest.nodes[index].member as usize],
            start: node.start,
            end: node.end,
            is_leaf: node.is_leaf,
        };
        if wide
            && !node.is_leaf
            && rows.len() as u32 * input.model.spec.group() >= WIDE_ROWS
            && node.end - node.start >= WIDE_KEYS
            && let Some((first, position)) = consecutive(&draft_rows[rows.clone()])
        {
            let tokens = first..first + rows.len() as u32;
            keys.draft_wide(tokens, position, common, input, drafts);
            return true;
        }
        keys.draft(rows, shared, common, input, draft_rows, drafts);
        false
    }

    fn subtree_rows(&self, index: usize) -> Range<usize> {
        let end = self.packer.nodes[index].subtree_end as usize;
        self.rows_begin[index] as usize..self.rows_begin[end] as usize
    }
}

/// The first token and its position, if the rows are consecutive tokens in any order.
fn consecutive(rows: &[DraftRow]) -> Option<(u32, i32)> {
    let first = rows.iter().min_by_key(|row| row.token)?;
    let last = rows.iter().map(|row| row.token).max()?;
    let all = (last - first.token) as usize + 1 == rows.len();
    all.then_some((first.token, first.position))
}

/// The costs that packing weighs for a part.
fn pack_costs(input: &PartInput<'_>) -> PackCosts {
    let spec = &input.model.spec;
    PackCosts {
        kv_bytes: spec.kv_bytes_per_token(),
        partial_bytes: 2 * spec.partial_bytes_per_token(),
        tile_tokens: input.tiles.decode_tokens(),
    }
}
