//! Joint tiles: rows that share some of their keys and see others alone, in one tile.
//!
//! Cutting a prefix off gives every row below it a partial state, for which memory is written and read. Where
//! tensor cores have products to spare, it is cheaper to let a tile read the keys of all its rows, each
//! hidden from the rows whose keys they are not: then nothing is left to merge. A prefix is read once for each
//! tile, as it would be in an item of its own.

use kernels_gpu::abi::WorkItem;

use super::{
    Kernel, Tile,
    cost::CostModel,
    draft::{Draft, DraftRun, NO_ROW_BLOCK, PartInput},
    pack::{PackNode, Packer},
    split::granule_of,
};
/// Chooses and drafts joint tiles. Buffers are reused.
#[derive(Debug, Default)]
pub(super) struct Joiner {
    roots: Vec<Root>,
    /// The tile of each row of the roots that are looked at.
    tile_of: Vec<u32>,
    /// Keys and runs of each tile.
    loads: Vec<(u32, u32)>,
    /// Runs with their tiles, in preorder.
    runs: Vec<(u32, u32, DraftRun)>,
}

/// A tree of the forest.
#[derive(Clone, Copy, Debug)]
struct Root {
    node: u32,
    /// Its items apart, and in joint tiles of the choice at hand, if it can be.
    apart: Load,
    joint: Option<Load>,
}

/// What items take, in picoseconds.
#[derive(Clone, Copy, Debug, Default)]
struct Load {
    /// On all CTAs together, of so many units.
    work: u64,
    units: u64,
    /// Of the longest unit.
    longest: u64,
    /// More for each CTA, if units are cut.
    to_cut: u64,
    /// There are partial states even if none is.
    merged: bool,
    /// A bit for each row tile, by its logarithm.
    tiles: u32,
}

impl Load {
    fn and(self, other: &Self) -> Self {
        Self {
            work: self.work + other.work,
            units: self.units + other.units,
            longest: self.longest.max(other.longest),
            to_cut: self.to_cut.max(other.to_cut),
            merged: self.merged | other.merged,
            tiles: self.tiles | other.tiles,
        }
    }

    /// Until the last CTA is done and all is merged: with units cut, or as they are.
    fn time_ps(&self, cost: &CostModel) -> u64 {
        let ctas = u64::from(cost.resident_ctas(Kernel::Decode));
        let spread = self.work / ctas;
        let rounds = self.units.div_ceil(ctas) * (self.work / self.units.max(1));
        let merge = |merged: bool| if merged { cost.apart_ps() } else { 0 };
        let whole = rounds.max(self.longest) + merge(self.merged);
        let cut = spread + spread / 16 + self.to_cut + merge(true);
        let launches = u64::from(self.tiles.count_ones().saturating_sub(1));
        whole.min(cut) + launches * cost.launch_ps()
    }
}

/// How rows are put into joint tiles.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Choice {
    m: u32,
    /// Query tokens of a tile, at most.
    tokens: u32,
}

/// A packed forest.
pub(super) struct JointForest<'a, T> {
    pub packer: &'a Packer,
    /// Where the rows of each subtree begin.
    pub rows_begin: &'a [u32],
    /// A node's table and row block.
    pub table: T,
}

/// Eighths of the most query tokens that tiles of are tried.
const PARTS: [u32; 5] = [8, 6, 4, 3, 2];

impl Joiner {
    /// The best way to form joint tiles, if there is any that is better than none; what it is for the single
    /// trees is kept for [`joins`](Self::joins).
    pub fn choose(&mut self, input: &PartInput<'_>, packer: &Packer) -> Option<Choice> {
        let PartInput {
            device,
            spec,
            cost,
            tiles,
            ..
        } = *input;
        let rows = &device.decode.joint.as_ref()?.m;
        self.roots.clear();
        let mut node = 0;
        let mut any = false;
        while node < packer.nodes.len() {
            let root = &packer.nodes[node];
            any |= !root.is_leaf;
            self.roots.push(Root {
                node: node as u32,
                apart: apart(input, packer, node),
                joint: None,
            });
            node = root.subtree_end as usize;
        }
        if !any {
            return None;
        }
        let group = spec.group();
        let apart = self
            .roots
            .iter()
            .fold(Load::default(), |load, root| load.and(&root.apart));
        let ctas = u64::from(cost.resident_ctas(Kernel::Decode));
        let mut best = (apart.time_ps(cost), None);
        let mut smaller = 0;
        for &m in rows.iter().filter(|&&m| tiles.key_tile(m, u32::MAX) > 0) {
            let most = m / group;
            let mut last = 0;
            for eighths in PARTS {
                let tokens = most * eighths / 8;
                // So few are the smaller tile's.
                if tokens == last || tokens <= smaller {
                    continue;
                }
                last = tokens;
                let choice = Choice { m, tokens };
                let load = self.weigh(input, packer, &choice);
                let time = load.time_ps(cost);
                if time < best.0 {
                    best = (time, Some(choice));
                }
                // Where every CTA has enough to do, fewer rows only mean that more is read.
                if load.longest <= load.work / ctas {
                    break;
                }
            }
            smaller = most;
        }
        let choice = best.1?;
        self.weigh(input, packer, &choice);
        Some(choice)
    }

    /// Whether a tree goes into joint tiles.
    pub fn joins(&self, root: usize, choice: &Choice, cost: &CostModel) -> bool {
        let at = self
            .roots
            .binary_search_by_key(&(root as u32), |root| root.node);
        choice.tokens > 0 && at.is_ok_and(|at| self.roots[at].joins(cost))
    }

    /// The work of all trees; those that are better apart are.
    fn weigh(&mut self, input: &PartInput<'_>, packer: &Packer, choice: &Choice) -> Load {
        let PartInput { spec, cost, .. } = *input;
        let group = spec.group();
        let tile = Tile { m: choice.m, n: 0 };
        let fixed = |tokens| cost.fixed_ps(Kernel::Decode, tile, group, tokens);
        let key = cost.key_ps(Kernel::Decode, tile, group);
        let cached = cost.cached_key_ps(Kernel::Decode, tile).min(key);
        let units = u64::from(cost.units_per_item(group));
        let mut total = Load::default();
        for at in 0..self.roots.len() {
            let node = self.roots[at].node as usize;
            self.roots[at].joint = None;
            if self.lay_out(packer, node, choice.tokens) {
                let nodes = &packer.nodes[node..packer.nodes[node].subtree_end as usize];
                // Each key is read once, and found in the cache by all tiles but one.
                let unique: u64 = nodes.iter().map(own_keys).sum();
                let all: u64 = self.loads.iter().map(|load| u64::from(load.0)).sum();
                let keys = unique * key + all.saturating_sub(unique) * cached;
                let most = self.loads.iter().map(|load| load.0).max().unwrap_or(0);
                self.roots[at].joint = Some(Load {
                    work: (self.loads.len() as u64 * fixed(0) + keys) * units,
                    units: self.loads.len() as u64 * units,
                    longest: fixed(0) + (keys / all.max(1)) * u64::from(most),
                    to_cut: fixed(choice.tokens),
                    merged: false,
                    tiles: 1 << choice.m.ilog2(),
                });
            }
            total = total.and(self.roots[at].better(cost));
        }
        total
    }

    /// Gives the rows of a tree their tiles, and finds what these read. Not if the tree is a single request,
    /// or what shares a tile is too much.
    fn lay_out(&mut self, packer: &Packer, root: usize, tokens: u32) -> bool {
        self.tile_of.clear();
        self.loads.clear();
        let nodes = &packer.nodes[root..packer.nodes[root].subtree_end as usize];
        if nodes[0].is_leaf {
            return false;
        }
        let leaves = || nodes.iter().filter(|node| node.is_leaf && node.rows > 0);
        // Tiles of about the same rows and about the same keys.
        let tiles = u64::from(nodes[0].rows.div_ceil(tokens));
        let keys: u64 = leaves().map(own_keys).sum();
        let enough = keys.div_ceil(tiles);
        let (mut tile, mut rows, mut keys) = (0, 0, 0);
        for leaf in leaves() {
            if leaf.rows > tokens {
                return false;
            }
            if rows > 0 && (rows + leaf.rows > tokens || keys + own_keys(leaf) / 2 > enough) {
                (tile, rows, keys) = (tile + 1, 0, 0);
            }
            rows += leaf.rows;
            keys += own_keys(leaf);
            self.tile_of
                .extend(std::iter::repeat_n(tile, leaf.rows as usize));
        }
        self.loads.resize(tile as usize + 1, (0, 0));
        let mut row = 0;
        for node in nodes {
            if !node.is_empty() && node.rows > 0 {
                let tiles = self.tile_of[row] as usize
                    ..=self.tile_of[row + node.rows as usize - 1] as usize;
                for (keys, runs) in &mut self.loads[tiles] {
                    *keys += node.end - node.begin;
                    *runs += 1;
                }
            }
            if node.is_leaf {
                row += node.rows as usize;
            }
        }
        self.loads
            .iter()
            .all(|&(_, runs)| runs <= WorkItem::MAX_RUNS)
    }

    /// Drafts a tree in joint tiles.
    pub fn draft<T: Fn(usize) -> (u32, u32)>(
        &mut self,
        input: &PartInput<'_>,
        choice: &Choice,
        root: usize,
        forest: &JointForest<'_, T>,
        drafts: &mut Vec<Draft>,
        draft_runs: &mut Vec<DraftRun>,
    ) {
        let PartInput { spec, part, .. } = *input;
        let JointForest {
            packer, rows_begin, ..
        } = *forest;
        let page_size = part.table.page_size;
        self.lay_out(packer, root, choice.tokens);
        self.runs.clear();
        let first_row = rows_begin[root];
        let end = packer.nodes[root].subtree_end as usize;
        let nodes = packer.nodes[root..end].iter().zip(&rows_begin[root..end]);
        for (index, (node, &first)) in (root..end).zip(nodes) {
            if node.is_empty() || node.rows == 0 {
                continue;
            }
            let (table, row_block) = (forest.table)(index);
            let (mut begin, end) = (first, first + node.rows);
            let tile_at = |row: u32| self.tile_of[(row - first_row) as usize];
            let is_shared = tile_at(begin) != tile_at(end - 1);
            while begin < end {
                let tile = tile_at(begin);
                let next = (begin + 1..end)
                    .find(|&row| tile_at(row) != tile)
                    .unwrap_or(end);
                let run = DraftRun {
                    table,
                    kv_begin: node.begin,
                    kv_end: node.end,
                    start: 0,
                    rows_begin: begin,
                    rows: next - begin,
                    is_shared,
                    tail_of: if node.is_leaf {
                        row_block
                    } else {
                        NO_ROW_BLOCK
                    },
                };
                self.runs.push((tile, self.runs.len() as u32, run));
                begin = next;
            }
        }
        self.runs
            .sort_unstable_by_key(|&(tile, order, _)| (tile, order));
        for runs in self.runs.chunk_by(|a, b| a.0 == b.0) {
            let runs_begin = draft_runs.len() as u32;
            let mut start = 0;
            for &(_, _, run) in runs {
                draft_runs.push(DraftRun { start, ..run });
                start += (run.kv_end - run.kv_begin).next_multiple_of(granule_of(page_size));
            }
            let rows_begin = runs.iter().map(|run| run.2.rows_begin).min().unwrap_or(0);
            let rows_end = runs.iter().map(|run| run.2.rows_begin + run.2.rows).max();
            drafts.push(Draft {
                kernel: Kernel::Decode,
                tile: Tile { m: choice.m, n: 0 },
                pack: spec.group(),
                part: input.index,
                page_size,
                table: runs[0].2.table,
                rows_begin,
                rows: rows_end.unwrap_or(rows_begin) - rows_begin,
                position: 0,
                kv_begin: 0,
                kv_end: start,
                flags: WorkItem::GATHERED,
                leaves_partial: false,
                all_see: true,
                growable: true,
                tail_of: NO_ROW_BLOCK,
                runs_begin,
                runs: runs.len() as u32,
            });
        }
    }
}

impl Root {
    fn better(&self, cost: &CostModel) -> &Load {
        let joint = self.joint.as_ref();
        joint
            .filter(|joint| joint.time_ps(cost) < self.apart.time_ps(cost))
            .unwrap_or(&self.apart)
    }

    fn joins(&self, cost: &CostModel) -> bool {
        self.joint
            .is_some_and(|joint| joint.time_ps(cost) < self.apart.time_ps(cost))
    }
}

fn own_keys(node: &PackNode) -> u64 {
    u64::from(node.end - node.begin)
}

/// What a tree's items take as they are packed.
fn apart(input: &PartInput<'_>, packer: &Packer, root: usize) -> Load {
    let PartInput {
        spec, cost, tiles, ..
    } = *input;
    let group = spec.group();
    let units = u64::from(cost.units_per_item(group));
    let per_tile = tiles.decode_tokens();
    let mut load = Load::default();
    for index in root..packer.nodes[root].subtree_end as usize {
        let node = &packer.nodes[index];
        let rows = packer.item_rows(index);
        if rows == 0 || node.is_empty() {
            continue;
        }
        let is_partial = !node.is_leaf || node.start > 0;
        let tile = Tile {
            m: tiles.row_tile(rows.min(per_tile)),
            n: 0,
        };
        let fixed = |tokens| cost.fixed_ps(Kernel::Decode, tile, group, tokens);
        let (first, other) = (
            cost.key_ps(Kernel::Decode, tile, group),
            cost.cached_key_ps(Kernel::Decode, tile),
        );
        let keys = u64::from(node.end - node.start);
        let others = u64::from(rows.div_ceil(per_tile)) - 1;
        let partials = fixed(if is_partial { rows } else { 0 }) - fixed(0);
        let item = fixed(0) + keys * first;
        let all = item + others * (fixed(0) + keys * other) + partials;
        load = load.and(&Load {
            work: all * units,
            units: (1 + others) * units,
            longest: item,
            to_cut: fixed(rows.min(per_tile)),
            merged: is_partial,
            tiles: 1 << tile.m.ilog2(),
        });
    }
    load
}
