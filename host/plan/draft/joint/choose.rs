//! Which rows go into joint tiles, and how many rows a tile has.

use super::{
    costs::{ItemCosts, Load},
    layout::{Inner, Leaf, TileLayout, TreeSize},
};
use crate::plan::{
    data::{Kernel, Tile},
    draft::PartInput,
    model::{CostModel, Model},
    prefix::{PackNode, Packer},
};

/// Chooses and drafts joint tiles. Buffers are reused.
#[derive(Debug, Default)]
pub struct Joiner {
    pub(super) roots: Vec<Root>,
    /// The nodes with rows of all trees.
    leaves: Vec<Leaf>,
    inner: Vec<Inner>,
    /// For each node of a tree, the rows of its item without joint tiles.
    item_rows: Vec<u32>,
    pub(super) tiles: TileLayout,
    /// Predicted time of all trees with the last choice, in picoseconds.
    pub time_ps: u64,
}

/// A tree of the forest.
#[derive(Clone, Copy, Debug)]
pub(super) struct Root {
    pub(super) node: u32,
    size: TreeSize,
    /// Keys of all nodes, each counted once.
    unique_keys: u64,
    /// Maximum number of keys that its joint tiles may read.
    most_keys: u64,
    /// Ends of its leaves and of its inner nodes in the lists of all trees.
    leaves_end: u32,
    inner_end: u32,
    /// Load of its separate items, and of joint tiles with the current choice; none if these are impossible or read too
    /// much.
    apart: Load,
    joint: Option<Load>,
}

/// The shape of joint tiles.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Choice {
    pub m: u32,
    /// Maximum number of query tokens per tile.
    pub tokens: u32,
}

/// A packed forest.
pub struct JointForest<'a, T> {
    pub packer: &'a Packer,
    /// For each node, the index of its subtree's first draft row.
    pub rows_begin: &'a [u32],
    /// Returns the table and the row block of a node.
    pub table: T,
}

/// Numbers of query tokens to try, in eighths of the most that fit into a tile.
const PARTS: [u32; 5] = [8, 6, 4, 3, 2];

/// One more than the attempts between a number of tokens that reads few enough bytes and a smaller one that does not.
const NARROWED: u32 = 2;

/// If one tile could hold all rows of a tree, joint tiles may read the tree's keys at most this many times.
const ONCE: f64 = 1.05;

impl Joiner {
    /// The fastest shape of joint tiles, or none if separate items are faster. The load of each tree with this shape is
    /// kept for [`joins`](Self::joins).
    pub fn choose(&mut self, input: &PartInput<'_>, packer: &Packer) -> Option<Choice> {
        let PartInput {
            model: Model {
                device, spec, cost, ..
            },
            tiles,
            ..
        } = *input;
        self.time_ps = 0;
        let joint = device.decode.joint.as_ref()?;
        if packer.nodes.iter().all(|node| node.is_leaf) {
            return None;
        }
        self.list_roots(input, packer, joint.bytes);
        let group = spec.group();
        let apart = self
            .roots
            .iter()
            .fold(Load::default(), |load, root| load.and(&root.apart));
        let ctas = u64::from(cost.resident_ctas(Kernel::Decode));
        let mut best = (apart.time_ps(cost), None);
        let (mut smaller, mut weighed) = (0, Choice::default());
        let multi_table = tiles.decodes().iter().filter(|choice| choice.multi_table);
        for m in multi_table.map(|choice| choice.tile.m) {
            let mut steps = Steps::new(m / group, smaller);
            while let Some(tokens) = steps.next {
                weighed = Choice { m, tokens };
                let load = self.weigh(input, &weighed);
                let time = load.time_ps(cost);
                if time < best.0 {
                    best = (time, Some(weighed));
                }
                // If every CTA has enough work, tiles of fewer rows only read more.
                let Load { longest, work, .. } = load.joint.and(&load.apart);
                if longest <= work / ctas {
                    break;
                }
                steps.advance(load.reads_too_much);
            }
            smaller = m / group;
        }
        self.time_ps = best.0;
        let choice = best.1?;
        if choice != weighed {
            self.weigh(input, &choice);
        }
        Some(choice)
    }

    /// Lists the trees and their nodes.
    fn list_roots(&mut self, input: &PartInput<'_>, packer: &Packer, bytes: f64) {
        self.roots.clear();
        self.leaves.clear();
        self.inner.clear();
        self.tiles.of = None;
        let mut costs = ItemCosts::default();
        let kv_bytes = input.model.spec.kv_bytes_per_token() as f64;
        let mut node = 0;
        while node < packer.nodes.len() {
            let end = packer.nodes[node].subtree_end as usize;
            let nodes = &packer.nodes[node..end];
            self.list_item_rows(nodes, node as u32);
            let (mut row, mut leaf_keys, mut unique_keys) = (0, 0, 0);
            for (node, &item_rows) in nodes.iter().zip(&self.item_rows) {
                let keys = node.end - node.begin;
                unique_keys += u64::from(keys);
                if item_rows > 0 && keys > 0 {
                    let is_partial = !node.is_leaf || node.start > 0;
                    costs.add(input, item_rows, node.end - node.start, is_partial);
                }
                if node.is_leaf && node.rows > 0 {
                    leaf_keys += u64::from(keys);
                    row += node.rows;
                    self.leaves.push(Leaf {
                        rows: node.rows,
                        keys,
                    });
                } else if node.rows > 0 && keys > 0 {
                    self.inner.push(Inner {
                        rows: (row, row + node.rows),
                        keys,
                    });
                }
            }
            let rows = nodes[0].rows;
            let apart = costs.take();
            let mut most_keys = apart.bytes(&input.model.spec) as f64 / kv_bytes;
            if rows <= input.tiles.decode_tokens() {
                most_keys = most_keys.min(unique_keys as f64 * ONCE);
            }
            self.roots.push(Root {
                node: node as u32,
                size: TreeSize { rows, leaf_keys },
                unique_keys,
                most_keys: (most_keys * bytes) as u64,
                leaves_end: self.leaves.len() as u32,
                inner_end: self.inner.len() as u32,
                apart: apart.load,
                joint: None,
            });
            node = end;
        }
    }

    /// Whether joint tiles are faster for a tree.
    pub fn joins(&self, root: usize, choice: &Choice, cost: &CostModel) -> bool {
        let at = self
            .roots
            .binary_search_by_key(&(root as u32), |root| root.node);
        choice.tokens > 0 && at.is_ok_and(|at| self.roots[at].joins(cost))
    }

    /// The loads of all trees with a choice. Trees that are faster as separate items stay separate.
    fn weigh(&mut self, input: &PartInput<'_>, choice: &Choice) -> Weighed {
        let Model { spec, cost, .. } = input.model;
        let group = spec.group();
        let tile = Tile { m: choice.m, n: 0 };
        let fixed = |tokens| cost.fixed_ps(Kernel::Decode, tile, group, tokens);
        let key = cost.key_ps(Kernel::Decode, tile, group);
        let cached = cost.cached_key_ps(Kernel::Decode, tile).min(key);
        let units = u64::from(cost.units_per_item(group));
        let mut weighed = Weighed::default();
        for at in 0..self.roots.len() {
            self.roots[at].joint = None;
            if self.lay_out(at, choice.tokens) {
                // One tile reads a key from memory; the other tiles find it in the cache.
                let tiles = &self.tiles.tiles;
                let root = &mut self.roots[at];
                let unique = root.unique_keys;
                let all: u64 = tiles.iter().map(|tile| u64::from(tile.keys)).sum();
                let keys = unique * key + all.saturating_sub(unique) * cached;
                let most = tiles.iter().map(|tile| tile.keys).max().unwrap_or(0);
                let count = tiles.len() as u64;
                let joint = Load {
                    work: (count * fixed(0) + keys) * units,
                    units: count * units,
                    longest: fixed(0) + (keys / all.max(1)) * u64::from(most),
                    to_cut: fixed(choice.tokens),
                    merged: false,
                    tiles: 1 << choice.m.ilog2(),
                };
                weighed.reads_too_much |= all > root.most_keys;
                root.joint = (all <= root.most_keys).then_some(joint);
            }
            let root = &self.roots[at];
            if root.joins(cost) {
                weighed.joint = root
                    .joint
                    .map_or(weighed.joint, |load| weighed.joint.and(&load));
            } else {
                weighed.apart = weighed.apart.and(&root.apart);
            }
        }
        weighed
    }

    /// Assigns the rows of a tree to tiles, and counts the keys of these. Returns false if the tree is a single
    /// request, a leaf has more rows than a tile, or a tile has too many runs.
    pub(super) fn lay_out(&mut self, at: usize, tokens: u32) -> bool {
        let Self {
            roots,
            leaves,
            inner,
            tiles: layout,
            ..
        } = self;
        let root = &roots[at];
        match layout.of {
            Some((laid, with, can)) if (laid, with) == (root.node, tokens) => return can,
            _ => {}
        }
        let (first_leaf, first_inner) = match at.checked_sub(1) {
            Some(before) => (roots[before].leaves_end, roots[before].inner_end),
            None => (0, 0),
        };
        let leaves = &leaves[first_leaf as usize..root.leaves_end as usize];
        let inner = &inner[first_inner as usize..root.inner_end as usize];
        let can = leaves.len() > 1 && layout.fill(root.size, tokens, leaves, inner);
        layout.of = Some((root.node, tokens, can));
        can
    }

    /// Lists the rows of a tree's items as they are packed. The item of a parent has the rows of the children that are not joined to
    /// it. `first` is the index of the tree's first node.
    fn list_item_rows(&mut self, nodes: &[PackNode], first: u32) {
        let item_rows = &mut self.item_rows;
        item_rows.clear();
        for node in nodes {
            item_rows.push(if node.is_leaf { node.rows } else { 0 });
            if node.parent >= first
                && node.joined == 0
                && let Some(rows) = item_rows.get_mut((node.parent - first) as usize)
            {
                *rows += node.rows;
            }
        }
    }
}

/// Numbers of query tokens per tile to try: ever fewer until one reads too much, then some above that one.
struct Steps {
    next: Option<u32>,
    most: u32,
    /// Only numbers above this one are tried.
    above: u32,
    part: usize,
    /// The last number that read few enough bytes, and the last one that did not.
    good: Option<u32>,
    too_few: Option<u32>,
    left: u32,
}

impl Steps {
    fn new(most: u32, above: u32) -> Self {
        Self {
            next: (most > above).then_some(most),
            most,
            above,
            part: 0,
            good: None,
            too_few: None,
            left: NARROWED,
        }
    }

    fn advance(&mut self, reads_too_much: bool) {
        let Some(tried) = self.next else { return };
        if reads_too_much {
            self.too_few = Some(tried);
        } else {
            self.good = Some(tried);
        }
        let last = tried;
        self.next = match (self.good, self.too_few) {
            (None, _) => None,
            (_, None) => loop {
                self.part += 1;
                match PARTS.get(self.part) {
                    Some(eighths) if self.most * eighths / 8 == last => {}
                    eighths => break eighths.map(|eighths| self.most * eighths / 8),
                }
            },
            (Some(good), Some(too_few)) => {
                self.left = self.left.saturating_sub(1);
                Some((good + too_few) / 2).filter(|&tokens| tokens > too_few && self.left > 0)
            }
        };
        self.next = self.next.filter(|&tokens| tokens > self.above);
    }
}

/// The loads of all trees with one choice.
#[derive(Default)]
struct Weighed {
    joint: Load,
    apart: Load,
    /// Whether joint tiles of some tree would read too much.
    reads_too_much: bool,
}

impl Weighed {
    /// Predicted time. Joint tiles and separate items are launched one after the other.
    fn time_ps(&self, cost: &CostModel) -> u64 {
        let both = self.joint.units > 0 && self.apart.units > 0;
        let launch = if both { cost.launch_ps() } else { 0 };
        self.joint.time_ps(cost) + self.apart.time_ps(cost) + launch
    }
}

impl Root {
    fn joins(&self, cost: &CostModel) -> bool {
        self.joint
            .is_some_and(|joint| joint.time_ps(cost) < self.apart.time_ps(cost))
    }
}
