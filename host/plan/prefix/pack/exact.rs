//! Packing with the fewest bytes, by dynamic programming over the forest.

use super::{
    PackCosts, PackNode, Packer,
    uniform::{Run, Uniform, Weighed},
};
use crate::plan::{data::Join, prefix::forest::NO_NODE};

/// Inner nodes are joined over at most this many levels, which keeps packing linear. If a forest is deeper, the result
/// is compared with those of simpler rules.
pub const MAX_LEVELS: usize = 12;

/// What the dynamic program keeps of an inner node.
#[derive(Clone, Copy, Debug, Default)]
pub struct Inner {
    /// Rows of leaves without keys.
    pub empty_rows: u32,
    /// Leaves with keys.
    pub leaves: u32,
    /// Rows of each such leaf; none if they differ.
    pub leaf_rows: Option<u32>,
    /// Keys of those leaves, counted once per tile.
    pub leaf_tile_keys: u64,
    pub has_inner_children: bool,
}

/// Children that can be cut with the same gain: one child, or all leaves of a node.
#[derive(Clone, Copy, Debug)]
pub struct Choice {
    /// Bytes saved by cutting one, if the parent's keys are read anyway. Always positive.
    pub gain: u64,
    pub rows: u32,
    pub count: u32,
    /// The child, or [`NO_NODE`] for the leaves.
    pub child: u32,
}

impl Packer {
    /// Decides so that the fewest bytes move.
    pub fn exact(&mut self) {
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

    /// The node as a [`Uniform`], if it is one.
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

    /// The best cost of a subtree that a run of keys reaches, and the children to cut for it. `self.choices` then holds
    /// these children.
    fn weigh(&mut self, index: usize, run: Run) -> Weighed {
        let node = self.nodes[index];
        let inner = self.inner[self.inner_of[index] as usize];
        let PackCosts {
            kv_bytes,
            partial_bytes,
            ..
        } = self.costs;
        let run_bytes = kv_bytes * u64::from(node.end - run.start);
        // A row whose run starts at the row's first key leaves no partial state, unless it is cut further down.
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
        // Children that cannot be joined, because the run already spans the maximum of levels.
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
        // Children that fit one tile together are all cut, or none is.
        all.cost = cost + tiles * run_bytes - gain;
        if all.cost < none.cost { all } else { none }
    }

    /// The best choice if cut children may fill several tiles: those that save most per row are cut first.
    fn knapsack(&mut self, none: Weighed, cost: u64, run_bytes: u64, fixed_rows: u32) -> Weighed {
        // Most gain per row first. Equal children keep their order.
        let denser = |a: &Choice, b: &Choice| {
            (u128::from(b.gain) * u128::from(a.rows))
                .cmp(&(u128::from(a.gain) * u128::from(b.rows)))
        };
        if !self.choices.is_sorted_by(|a, b| denser(a, b).is_le()) {
            self.choices.sort_by(denser);
        }
        // Among equal children, every number is tried. Among others, the best choice may be missed by part of a tile.
        let alike = |a: &Choice, b: &Choice| (a.gain, a.rows) == (b.gain, b.rows);
        let any_number = |choice: &Choice| choice.count == 1 || choice.rows == 1;
        let exact = self.choices.is_sorted_by(alike) && self.choices.iter().all(any_number);
        self.approximate |= !exact;

        let mut best = none;
        let (mut rows, mut saved, mut leaves) = (fixed_rows, 0, 0);
        for (at, choice) in self.choices.iter().enumerate() {
            let all_rows = rows + choice.rows * choice.count;
            // All of them, or as many as fill the current tile or the last but one.
            let fill = |tiles: u64| {
                (tiles as u32 * self.costs.tile_tokens).saturating_sub(rows) / choice.rows
            };
            let fills = match choice.count {
                1 => [0; 2],
                _ => [
                    fill(self.costs.tiles(rows)),
                    fill(self.costs.tiles(all_rows) - 1),
                ],
            };
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

    /// If some choice may not be the best, compares the result with those of simpler rules.
    fn keep_the_best(&mut self) {
        let mut best = self.bytes();
        let decisions = |nodes: &[PackNode], kept: &mut Vec<_>| {
            kept.clear();
            kept.extend(nodes.iter().map(|node| (node.joined, node.start)));
        };
        decisions(&self.nodes, &mut self.kept);
        for rule in [Join::has_many_rows, Join::has_many_rows_or_no_more_tiles] {
            self.pack_by(rule, self.costs);
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
}

/// Value of [`PackNode::joined`] while the parent chooses: the child is cut.
const CUT: u32 = u32::MAX;
