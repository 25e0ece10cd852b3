//! Which rows read a shared prefix together: packing by the bytes it saves.
//!
//! Every edge of the prefix forest is either *cut* (the rows below leave a partial state at the parent's
//! keys, which are read once for all of them) or *joined* (the child's item reads the parent's keys too,
//! and no partial state is needed). An item reads its keys once per query tile; a partial state is written
//! and read back. The exact packing minimises the sum over the whole forest by dynamic programming: the
//! best cost of a subtree depends only on where the run of keys that reaches it begins, which is at one of
//! its ancestors.

use self::exact::{Choice, Inner, MAX_LEVELS};
use super::forest::NO_NODE;
use crate::plan::data::Join;

mod exact;
#[cfg(test)]
mod tests;
mod uniform;

/// What packing weighs, in bytes over all heads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PackCosts {
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
            return u64::from(rows > 0); // the usual case, without a division
        }
        u64::from(rows.div_ceil(self.tile_tokens))
    }
}

/// A node of the forest as packing sees it: in tokens instead of pages.
#[derive(Clone, Copy, Debug)]
pub struct PackNode {
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
    /// Whether the node has no keys of its own. Its rows then belong to its parent's item.
    pub const fn is_empty(&self) -> bool {
        self.begin == self.end
    }
}

/// Packs forests. Buffers are reused.
#[derive(Debug, Default)]
pub struct Packer {
    /// The forest in preorder, with the decisions.
    pub nodes: Vec<PackNode>,
    costs: PackCosts,
    inner: Vec<Inner>,
    /// For each inner node, the best cost of its subtree, by the number of ancestors that the run of keys has passed.
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

impl Packer {
    /// Decides `joined` and `start` of every node, so that the fewest bytes move.
    pub fn pack(&mut self, costs: PackCosts) {
        self.costs = costs;
        self.exact();
    }

    /// The same by a rule: joins a child to its parent where the rule says so.
    pub fn pack_by(&mut self, rule: impl Fn(&Join) -> bool, costs: PackCosts) {
        self.costs = costs;
        for index in 0..self.nodes.len() {
            let node = self.nodes[index];
            if node.parent == NO_NODE {
                (self.nodes[index].joined, self.nodes[index].start) = (0, node.begin);
            }
            let node = self.nodes[index];
            let mut rows_left = node.rows;
            let mut child = index + 1;
            while child < node.subtree_end as usize {
                let below = self.nodes[child];
                let edge = Join {
                    parent_keys: node.end - node.begin,
                    item_keys: node.end - node.start,
                    rows: below.rows,
                    rows_left,
                    tile_tokens: costs.tile_tokens,
                };
                let joined = !below.is_empty() && rule(&edge);
                if joined {
                    rows_left -= below.rows;
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
