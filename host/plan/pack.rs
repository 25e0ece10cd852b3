//! Which rows read a shared prefix together: packing by the bytes it saves.
//!
//! Every edge of the prefix forest is either *cut* (the rows below leave a partial state at the parent's
//! keys, which are read once for all of them) or *joined* (the child's item reads the parent's keys too,
//! and no partial state is needed). An item reads its keys once per query tile; a partial state is written
//! and read back. [`PackRule::Exact`] minimises the sum over the whole forest by dynamic programming: the
//! best cost of a subtree depends only on where the run of keys that reaches it begins, which is at one of
//! its ancestors.

use serde::{Deserialize, Serialize};

use super::forest::NO_NODE;

/// How decodes that share prefixes are packed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum PackRule {
    /// The least time: as [`Apart`](Self::Apart), or in joint tiles, whose rows see different keys, where the
    /// device has kernels for them.
    #[default]
    Exact,
    /// The fewest bytes, for the real element types, group size and query tile. All rows of a tile see the
    /// same keys.
    Apart,
    /// The rule of the PAT paper: join a child of `s` queries to a parent of `l` keys where `4·s ≥ l`.
    PatPaper,
    /// The rule of PAT's published code: `l` counts inherited keys, and a child is joined too where that
    /// needs no more query tiles.
    PatPublished,
    /// Every row block on its own.
    Off,
}

/// What packing weighs, in bytes over all heads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PackCosts {
    /// Keys and values of one token.
    pub kv_bytes: u64,
    /// Write and read of one query token's partial state.
    pub partial_bytes: u64,
    /// Query tokens that a tile holds at most.
    pub tile_tokens: u32,
}

impl PackCosts {
    fn tiles(&self, rows: u32) -> u64 {
        if rows <= self.tile_tokens {
            return u64::from(rows > 0); // nearly always: spares the division
        }
        u64::from(rows.div_ceil(self.tile_tokens))
    }
}

/// A node of the forest as packing sees it: in tokens instead of pages.
#[derive(Clone, Copy, Debug)]
pub(super) struct PackNode {
    /// As [`Node`](super::forest::Node): preorder.
    pub parent: u32,
    pub subtree_end: u32,
    /// First key and one past the last.
    pub begin: u32,
    pub end: u32,
    /// Query tokens of the leaves below.
    pub rows: u32,
    pub is_leaf: bool,
    /// Decided: how many ancestors the node's item is joined to.
    pub joined: u32,
    /// Decided: the first key of the node's item.
    pub start: u32,
}

impl PackNode {
    /// Without keys of its own: its rows are its parent's.
    pub const fn is_empty(&self) -> bool {
        self.begin == self.end
    }
}

/// Inner nodes are joined over at most so many levels; keeps packing linear. Where a forest is deeper, the
/// result is compared with the other rules'.
const MAX_LEVELS: usize = 12;

/// Packs forests. Buffers are reused.
#[derive(Debug, Default)]
pub(super) struct Packer {
    /// The forest in preorder, with the decisions.
    pub nodes: Vec<PackNode>,
    costs: PackCosts,
    inner: Vec<Inner>,
    /// Of each of those, the best cost of the subtree, by the number of ancestors that the run of keys comes
    /// down.
    best: Vec<[u64; MAX_LEVELS]>,
    /// For each node that is no leaf, its entry in `inner`.
    inner_of: Vec<u32>,
    choices: Vec<Choice>,
    /// Whether a choice was made that may not be the best.
    approximate: bool,
    /// Partial states per row of each node, for [`bytes`](Self::bytes).
    segments: Vec<u32>,
    /// The best decisions so far, while rules are compared.
    kept: Vec<(u32, u32)>,
}

/// What the dynamic program keeps of an inner node.
#[derive(Clone, Copy, Debug, Default)]
struct Inner {
    /// Rows of leaves without keys.
    empty_rows: u32,
    /// Leaves with keys.
    leaves: u32,
    /// Rows of each such leaf; none if they differ.
    leaf_rows: Option<u32>,
    /// Keys of those leaves, counted once per tile.
    leaf_tile_keys: u64,
    has_inner_children: bool,
}

/// Where the run of keys that reaches a node begins.
#[derive(Clone, Copy, Debug)]
struct Run {
    /// So many ancestors above.
    above: u32,
    /// At this key.
    start: u32,
}

/// Most inner nodes: leaves of a kind that fit one tile, which are all cut or all joined.
#[derive(Clone, Copy, Debug)]
struct Uniform {
    leaves: u32,
    /// Of the leaves' own keys.
    bytes: u64,
    /// Of a leaf's partial state.
    partial_bytes: u64,
    kv_bytes: u64,
    /// One past the node's keys.
    end: u32,
}

impl Uniform {
    #[inline]
    fn weigh(&self, run: Run) -> Weighed {
        let run_bytes = self.kv_bytes * u64::from(self.end - run.start);
        let is_partial = u64::from(run.start > 0);
        let leaves = u64::from(self.leaves);
        let joined = (run_bytes + is_partial * self.partial_bytes) * leaves;
        let cut = 2 * self.partial_bytes * leaves + run_bytes;
        let (bytes, leaves) = if cut < joined {
            (cut, self.leaves)
        } else {
            (joined, 0)
        };
        Weighed {
            cost: self.bytes + bytes,
            choices: 0,
            leaves,
        }
    }
}

/// Children that can be cut with the same gain: one child, or all leaves of a node.
#[derive(Clone, Copy, Debug)]
struct Choice {
    /// Bytes saved by cutting one, if the parent's keys are read anyway. Always positive.
    gain: u64,
    rows: u32,
    count: u32,
    /// The child, or [`NO_NODE`] for the leaves.
    child: u32,
}

/// The best way to cut a node's children: those of the first choices, and so many of the uniform leaves.
#[derive(Clone, Copy, Debug)]
struct Weighed {
    cost: u64,
    choices: usize,
    leaves: u32,
}

impl Packer {
    /// Decides `joined` and `start` of every node.
    pub fn pack(&mut self, rule: PackRule, costs: PackCosts) {
        self.costs = costs;
        match rule {
            PackRule::Exact | PackRule::Apart => self.exact(),
            PackRule::PatPaper => self.top_down(|_, parent, child, _| {
                4 * u64::from(child.rows) >= u64::from(parent.end - parent.begin)
            }),
            PackRule::PatPublished => self.top_down(|costs, parent, child, remaining| {
                let (all, without) = (costs.tiles(remaining), costs.tiles(remaining - child.rows));
                4 * u64::from(child.rows) >= u64::from(parent.end - parent.start)
                    || without + costs.tiles(child.rows) <= all
            }),
            PackRule::Off => self.top_down(|_, _, _, _| true),
        }
    }

    /// Joins a child to its parent where the rule says so, given the rows that are left at the parent.
    fn top_down(&mut self, joins: impl Fn(&PackCosts, &PackNode, &PackNode, u32) -> bool) {
        for index in 0..self.nodes.len() {
            let node = self.nodes[index];
            if node.parent == NO_NODE {
                (self.nodes[index].joined, self.nodes[index].start) = (0, node.begin);
            }
            let node = self.nodes[index];
            let mut remaining = node.rows;
            let mut child = index + 1;
            while child < node.subtree_end as usize {
                let below = self.nodes[child];
                let joined = !below.is_empty() && joins(&self.costs, &node, &below, remaining);
                if joined {
                    remaining -= below.rows;
                }
                self.decide(child, joined);
                child = below.subtree_end as usize;
            }
        }
    }

    fn decide(&mut self, child: usize, join: bool) {
        let PackNode { parent, begin, .. } = self.nodes[child];
        let parent = self.nodes[parent as usize];
        let decided = if join {
            (parent.joined + 1, parent.start)
        } else {
            (0, begin)
        };
        (self.nodes[child].joined, self.nodes[child].start) = decided;
    }

    /// The fewest bytes.
    fn exact(&mut self) {
        self.approximate = false;
        self.summarise();
        self.best.resize(self.inner.len(), [0; MAX_LEVELS]);
        for index in (0..self.nodes.len()).rev() {
            let node = self.nodes[index];
            if node.is_leaf {
                continue;
            }
            let inner = self.inner_of[index] as usize;
            let uniform = self.uniform(index);
            let (mut start, mut ancestor) = (node.begin, node.parent);
            for above in 0..MAX_LEVELS {
                let run = Run {
                    above: above as u32,
                    start,
                };
                let weighed = match &uniform {
                    Some(uniform) => uniform.weigh(run),
                    None => self.weigh(index, run),
                };
                self.best[inner][above] = weighed.cost;
                let Some(above) = self.nodes.get(ancestor as usize) else {
                    break;
                };
                (start, ancestor) = (above.begin, above.parent);
            }
        }
        for index in 0..self.nodes.len() {
            let node = self.nodes[index];
            if node.parent == NO_NODE {
                (self.nodes[index].joined, self.nodes[index].start) = (0, node.begin);
            }
            if !node.is_leaf {
                let PackNode { joined, start, .. } = self.nodes[index];
                self.choose(
                    index,
                    Run {
                        above: joined,
                        start,
                    },
                );
            }
        }
        if self.approximate {
            self.keep_the_best();
        }
    }

    /// Cuts and joins the children of a node in the best way.
    fn choose(&mut self, index: usize, run: Run) {
        if let Some(uniform) = self.uniform(index) {
            let join = uniform.weigh(run).leaves == 0;
            let children = index + 1..self.nodes[index].subtree_end as usize;
            for child in &mut self.nodes[children] {
                (child.joined, child.start) = if join {
                    (run.above + 1, run.start)
                } else {
                    (0, child.begin)
                };
            }
            return;
        }
        let Weighed {
            choices,
            leaves: mut cut_leaves,
            ..
        } = self.weigh(index, run);
        for choice in &self.choices[..choices] {
            if choice.child != NO_NODE {
                self.nodes[choice.child as usize].joined = CUT;
            }
        }
        let uniform = self.inner[self.inner_of[index] as usize]
            .leaf_rows
            .is_some();
        let mut child = index + 1;
        while child < self.nodes[index].subtree_end as usize {
            let below = self.nodes[child];
            let cut = if below.is_leaf && !below.is_empty() && uniform {
                let cut = cut_leaves > 0;
                cut_leaves = cut_leaves.saturating_sub(1);
                cut
            } else {
                let too_far = !below.is_leaf && run.above as usize + 1 == MAX_LEVELS;
                below.is_empty() || below.joined == CUT || too_far
            };
            self.decide(child, !cut);
            child = below.subtree_end as usize;
        }
    }

    /// The node, if it is one of the simple ones.
    fn uniform(&self, index: usize) -> Option<Uniform> {
        let Inner {
            empty_rows: 0,
            leaves,
            leaf_rows: Some(rows),
            leaf_tile_keys,
            has_inner_children: false,
        } = self.inner[self.inner_of[index] as usize]
        else {
            return None;
        };
        let PackCosts {
            kv_bytes,
            partial_bytes,
            tile_tokens,
        } = self.costs;
        (rows * leaves <= tile_tokens).then(|| Uniform {
            leaves,
            bytes: kv_bytes * leaf_tile_keys,
            partial_bytes: partial_bytes * u64::from(rows),
            kv_bytes,
            end: self.nodes[index].end,
        })
    }

    /// The best cost of a subtree that a run of keys reaches, and the way to it; `self.choices` then holds
    /// the children that it speaks of.
    fn weigh(&mut self, index: usize, run: Run) -> Weighed {
        let node = self.nodes[index];
        let inner = self.inner[self.inner_of[index] as usize];
        let PackCosts {
            kv_bytes,
            partial_bytes,
            ..
        } = self.costs;
        let run_bytes = kv_bytes * u64::from(node.end - run.start);
        // A row whose run starts at its first key leaves no partial state, unless it is cut further down.
        let is_partial = u64::from(run.start > 0);
        let join_rows = |tiles: u64, rows: u32| {
            tiles * run_bytes + is_partial * partial_bytes * u64::from(rows)
        };

        let cut_leaf = |rows: u32| 2 * partial_bytes * u64::from(rows);

        self.choices.clear();
        let mut cost = is_partial * partial_bytes * u64::from(inner.empty_rows)
            + kv_bytes * inner.leaf_tile_keys;
        let mut all = Weighed {
            cost: 0,
            choices: 0,
            leaves: 0,
        };
        let (mut gain, mut rows_to_cut) = (0, 0);
        if let (1.., Some(rows)) = (inner.leaves, inner.leaf_rows) {
            let count = u64::from(inner.leaves);
            let (joined, cut) = (join_rows(self.costs.tiles(rows), rows), cut_leaf(rows));
            cost += joined * count;
            if joined > cut {
                gain = (joined - cut) * count;
                rows_to_cut = rows * inner.leaves;
                all.leaves = inner.leaves;
            }
        }
        // Children that no run may join any more.
        let (mut cut_bytes, mut cut_rows) = (0, 0);
        if inner.has_inner_children || inner.leaf_rows.is_none() {
            let mut choices = std::mem::take(&mut self.choices);
            for child in self.children(index) {
                let PackNode { is_leaf, rows, .. } = self.nodes[child];
                let (joined, cut) = if !is_leaf {
                    let best = &self.best[self.inner_of[child] as usize];
                    let cut = best[0] + partial_bytes * u64::from(rows);
                    let Some(&joined) = best.get(run.above as usize + 1) else {
                        (cut_bytes, cut_rows) = (cut_bytes + cut, cut_rows + rows);
                        continue;
                    };
                    (joined, cut)
                } else if inner.leaf_rows.is_none() && !self.nodes[child].is_empty() {
                    (join_rows(self.costs.tiles(rows), rows), cut_leaf(rows))
                } else {
                    continue;
                };
                cost += joined;
                if joined > cut {
                    choices.push(Choice {
                        gain: joined - cut,
                        rows,
                        count: 1,
                        child: child as u32,
                    });
                    (gain, rows_to_cut) = (gain + joined - cut, rows_to_cut + rows);
                }
            }
            all.choices = choices.len();
            self.choices = choices;
            self.approximate |= cut_rows > 0;
            cost += cut_bytes;
        }
        let fixed_rows = inner.empty_rows + cut_rows;
        let none = Weighed {
            cost: cost + self.costs.tiles(fixed_rows) * run_bytes,
            choices: 0,
            leaves: 0,
        };
        let tiles = self.costs.tiles(fixed_rows + rows_to_cut);
        if tiles > 1 {
            if let (1.., Some(rows)) = (all.leaves, inner.leaf_rows) {
                let cut = cut_leaf(rows);
                let gain = join_rows(self.costs.tiles(rows), rows) - cut;
                self.choices.push(Choice {
                    gain,
                    rows,
                    count: all.leaves,
                    child: NO_NODE,
                });
            }
            return self.knapsack(none, cost, run_bytes, fixed_rows);
        }
        // What fits one tile is cut as a whole or not at all.
        all.cost = cost + tiles * run_bytes - gain;
        if all.cost < none.cost { all } else { none }
    }

    /// The best choice where cut children may fill several tiles: the densest first.
    fn knapsack(&mut self, none: Weighed, cost: u64, run_bytes: u64, fixed_rows: u32) -> Weighed {
        // Most gain per row first; the order among equals is that of the children.
        let denser = |a: &Choice, b: &Choice| {
            (u128::from(b.gain) * u128::from(a.rows))
                .cmp(&(u128::from(a.gain) * u128::from(b.rows)))
        };
        if !self.choices.is_sorted_by(|a, b| denser(a, b).is_le()) {
            self.choices.sort_by(denser);
        }
        // Of equal children every number is tried; among others the best may be missed by part of a tile.
        let alike = |a: &Choice, b: &Choice| (a.gain, a.rows) == (b.gain, b.rows);
        let any_number = |choice: &Choice| choice.count == 1 || choice.rows == 1;
        let exact = self.choices.is_sorted_by(alike) && self.choices.iter().all(any_number);
        self.approximate |= !exact;

        let mut best = none;
        let (mut rows, mut saved, mut leaves) = (fixed_rows, 0, 0);
        for (at, choice) in self.choices.iter().enumerate() {
            let all_rows = rows + choice.rows * choice.count;
            // All of them, or so many that they fill the tile at hand or the last but one.
            let fill = |tiles: u64| {
                (tiles as u32 * self.costs.tile_tokens).saturating_sub(rows) / choice.rows
            };
            let fills = [
                fill(self.costs.tiles(rows)),
                fill(self.costs.tiles(all_rows) - 1),
            ];
            let some = fills
                .into_iter()
                .filter(|count| (1..choice.count).contains(count));
            let is_leaves = choice.child == NO_NODE;
            for count in some.chain([choice.count]) {
                let read = self.costs.tiles(rows + count * choice.rows) * run_bytes;
                let total = cost + read - (saved + choice.gain * u64::from(count));
                if total < best.cost {
                    best = Weighed {
                        cost: total,
                        choices: at + 1,
                        leaves: if is_leaves { count } else { leaves },
                    };
                }
            }
            rows = all_rows;
            saved += choice.gain * u64::from(choice.count);
            leaves += if is_leaves { choice.count } else { 0 };
        }
        best
    }

    /// Finds the inner nodes and what their leaves have in common.
    fn summarise(&mut self) {
        self.inner.clear();
        self.inner_of.clear();
        for node in &self.nodes {
            self.inner_of.push(self.inner.len() as u32);
            if !node.is_leaf {
                self.inner.push(Inner::default());
            }
            if node.parent == NO_NODE {
                continue;
            }
            let parent = &mut self.inner[self.inner_of[node.parent as usize] as usize];
            if !node.is_leaf {
                parent.has_inner_children = true;
            } else if node.is_empty() {
                parent.empty_rows += node.rows;
            } else {
                if parent.leaves == 0 {
                    parent.leaf_rows = Some(node.rows);
                } else if parent.leaf_rows != Some(node.rows) {
                    parent.leaf_rows = None;
                }
                parent.leaves += 1;
                parent.leaf_tile_keys +=
                    self.costs.tiles(node.rows) * u64::from(node.end - node.begin);
            }
        }
    }

    /// Where a choice was not certainly the best, a simpler rule may have found a better one.
    fn keep_the_best(&mut self) {
        let mut best = self.bytes();
        let decisions = |nodes: &[PackNode], kept: &mut Vec<_>| {
            kept.clear();
            kept.extend(nodes.iter().map(|node| (node.joined, node.start)));
        };
        decisions(&self.nodes, &mut self.kept);
        for rule in [PackRule::PatPaper, PackRule::PatPublished] {
            self.pack(rule, self.costs);
            let bytes = self.bytes();
            if bytes < best {
                best = bytes;
                decisions(&self.nodes, &mut self.kept);
            }
        }
        for (node, &(joined, start)) in self.nodes.iter_mut().zip(&self.kept) {
            (node.joined, node.start) = (joined, start);
        }
    }

    /// The bytes that the decisions move: keys and values once per tile, partial states.
    pub fn bytes(&mut self) -> u64 {
        self.segments.clear();
        let mut bytes = 0;
        for index in 0..self.nodes.len() {
            let node = self.nodes[index];
            let above = if node.parent == NO_NODE {
                0
            } else {
                self.segments[node.parent as usize]
            };
            let segments = above + u32::from(node.joined == 0 && !node.is_empty());
            self.segments.push(segments);
            if node.is_leaf && segments > 1 {
                bytes += self.costs.partial_bytes * u64::from(node.rows * segments);
            }
            bytes += self.costs.kv_bytes
                * self.costs.tiles(self.item_rows(index))
                * u64::from(node.end - node.start);
        }
        bytes
    }

    /// The children of a node.
    pub fn children(&self, index: usize) -> impl Iterator<Item = usize> {
        let end = self.nodes[index].subtree_end as usize;
        let next = move |child: usize| {
            let next = self.nodes[child].subtree_end as usize;
            (next < end).then_some(next)
        };
        let first = (!self.nodes[index].is_leaf).then_some(index + 1);
        std::iter::successors(first, move |&child| next(child))
    }

    /// The rows of the item at a node: those below that are not joined to it.
    pub fn item_rows(&self, index: usize) -> u32 {
        let node = &self.nodes[index];
        if node.is_leaf {
            return if node.is_empty() { 0 } else { node.rows };
        }
        let cut = self
            .children(index)
            .map(|child| &self.nodes[child])
            .filter(|child| child.joined == 0);
        cut.map(|child| child.rows).sum()
    }
}

/// In [`PackNode::joined`], while its parent chooses: to be cut.
const CUT: u32 = u32::MAX;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A tree as nested nodes, flattened to preorder.
    #[derive(Clone, Debug)]
    struct Tree {
        keys: u32,
        /// Of a leaf.
        rows: u32,
        children: Vec<Tree>,
    }

    fn leaf(keys: u32, rows: u32) -> Tree {
        Tree {
            keys,
            rows,
            children: Vec::new(),
        }
    }

    fn node(keys: u32, children: Vec<Tree>) -> Tree {
        Tree {
            keys,
            rows: 0,
            children,
        }
    }

    fn flatten(tree: &Tree, parent: u32, begin: u32, nodes: &mut Vec<PackNode>) -> u32 {
        let index = nodes.len();
        let (end, is_leaf) = (begin + tree.keys, tree.children.is_empty());
        nodes.push(PackNode {
            parent,
            subtree_end: 0,
            begin,
            end,
            rows: tree.rows,
            is_leaf,
            joined: 0,
            start: 0,
        });
        let below: u32 = tree
            .children
            .iter()
            .map(|child| flatten(child, index as u32, end, nodes))
            .sum();
        nodes[index].rows += below;
        nodes[index].subtree_end = nodes.len() as u32;
        nodes[index].rows
    }

    fn packer(trees: &[Tree]) -> Packer {
        let mut packer = Packer::default();
        for tree in trees {
            flatten(tree, NO_NODE, 0, &mut packer.nodes);
        }
        packer
    }

    fn bytes(trees: &[Tree], rule: PackRule, costs: PackCosts) -> u64 {
        let mut packer = packer(trees);
        packer.pack(rule, costs);
        packer.bytes()
    }

    /// The fewest bytes over all ways to cut and join.
    fn fewest(trees: &[Tree], costs: PackCosts) -> u64 {
        let mut packer = packer(trees);
        packer.costs = costs;
        let edges: Vec<_> = (0..packer.nodes.len())
            .filter(|&at| packer.nodes[at].parent != NO_NODE)
            .collect();
        let ways = (0..1u32 << edges.len()).map(|way| {
            for at in 0..packer.nodes.len() {
                if packer.nodes[at].parent == NO_NODE {
                    continue;
                }
                let edge = edges.iter().position(|&edge| edge == at).unwrap();
                let join = way >> edge & 1 == 1 && !packer.nodes[at].is_empty();
                packer.decide(at, join);
            }
            packer.bytes()
        });
        ways.min().unwrap()
    }

    const COSTS: PackCosts = PackCosts {
        kv_bytes: 4096,
        partial_bytes: 33024,
        tile_tokens: 32,
    };

    #[test]
    fn a_long_prefix_is_cut_and_a_short_one_joined() {
        let tree = |prefix| node(prefix, vec![leaf(100, 1), leaf(100, 1)]);
        let starts = |prefix| {
            let mut packer = packer(&[tree(prefix)]);
            packer.pack(PackRule::Exact, COSTS);
            packer
                .nodes
                .iter()
                .map(|node| node.start)
                .collect::<Vec<_>>()
        };
        // Cutting saves one read of the prefix and costs four partial states: 32 tokens' worth.
        assert_eq!(starts(33), [0, 33, 33]);
        assert_eq!(starts(32), [0, 0, 0]);
    }

    #[test]
    fn the_rules_of_pat() {
        let tree = node(64, vec![leaf(10, 15), leaf(10, 16)]);
        let starts = |rule| {
            let mut packer = packer(std::slice::from_ref(&tree));
            packer.pack(rule, COSTS);
            packer
                .nodes
                .iter()
                .map(|node| node.start)
                .collect::<Vec<_>>()
        };
        assert_eq!(starts(PackRule::PatPaper), [0, 64, 0]);
        // 31 rows are one tile; without either child there is still one left.
        assert_eq!(starts(PackRule::PatPublished), [0, 64, 0]);
        assert_eq!(starts(PackRule::Off), [0, 0, 0]);
    }

    #[test]
    fn deep_chains_stay_linear_and_no_worse_than_the_rules() {
        let deep = (0..200).fold(leaf(5, 1), |below, level| {
            node(20 + level % 3, vec![below, leaf(7, 1)])
        });
        let trees = [deep];
        let exact = bytes(&trees, PackRule::Exact, COSTS);
        for rule in [PackRule::PatPaper, PackRule::PatPublished, PackRule::Off] {
            assert!(exact <= bytes(&trees, rule, COSTS), "{rule:?}");
        }
    }

    fn trees() -> impl Strategy<Value = Vec<Tree>> {
        let keys = prop_oneof![1u32..40, 1u32..400];
        let leaf = (
            prop_oneof![1 => Just(0u32), 6 => keys.clone()],
            prop_oneof![4 => Just(1u32), 1 => 1u32..9],
        )
            .prop_map(|(keys, rows)| leaf(keys, rows));
        let tree = leaf.prop_recursive(3, 12, 5, move |below| {
            (keys.clone(), prop::collection::vec(below, 2..5))
                .prop_map(|(keys, children)| node(keys, children))
        });
        prop::collection::vec(tree, 1..3)
    }

    fn costs() -> impl Strategy<Value = PackCosts> {
        (1u64..8, prop_oneof![Just(0u64), 1u64..60], 1u32..9).prop_map(
            |(kv_bytes, partial_bytes, tile_tokens)| PackCosts {
                kv_bytes,
                partial_bytes,
                tile_tokens,
            },
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn exact_is_the_fewest_bytes(trees in trees(), costs in costs()) {
            let mut packer = packer(&trees);
            let edges = packer.nodes.len() - trees.len();
            prop_assume!(edges <= 12);
            packer.pack(PackRule::Exact, costs);
            let (exact, fewest) = (packer.bytes(), fewest(&trees, costs));
            let bound = if packer.approximate { fewest * 11 / 10 } else { fewest };
            prop_assert!(exact <= bound, "{} for {}", exact, fewest);
            for rule in [PackRule::PatPaper, PackRule::PatPublished, PackRule::Off] {
                prop_assert!(exact <= bytes(&trees, rule, costs), "{:?}", rule);
            }
        }
    }
}
