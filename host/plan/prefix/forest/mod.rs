//! The prefix forest: which tables begin with the same pages.
//!
//! Tables are inserted one by one, as into a radix tree whose edges are runs of pages. Each is first compared with the
//! previous table, whole slices at a time: a batch in the order of its tree needs hardly any search. Where the two
//! differ, a lookup of `(node, next page)` in a hash table finds the branch, if there is one. Pages are only compared
//! as far as they are shared, so the time is linear in the shared pages.

mod branches;
#[cfg(test)]
mod tests;

use branches::{Branches, Place};

/// In [`Node::parent`]: the node is a root.
pub const NO_NODE: u32 = u32::MAX;

/// A run of pages that the members below share, or (a leaf) the rest of one member's table.
///
/// Nodes are in preorder: parents come before children, and each subtree is contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Node {
    /// The parent, or [`NO_NODE`].
    pub parent: u32,
    /// One past the last node of its subtree.
    pub subtree_end: u32,
    /// First page of the run, counted from the start of the table.
    pub begin: u32,
    /// One past the last page of the run; in a leaf, past the last page that could have been shared.
    pub end: u32,
    /// A member whose table holds the run; in a leaf, the member itself.
    pub member: u32,
    /// Whether the node is the rest of one member's table (possibly nothing).
    pub is_leaf: bool,
}

/// A node while the forest grows: leaf `i` is node `i`, inner nodes follow.
#[derive(Clone, Copy, Debug, Default)]
struct Growing {
    parent: u32,
    begin: u32,
    end: u32,
    member: u32,
    first_child: u32,
    next_sibling: u32,
}

/// The forest of a set of members. Buffers are reused.
#[derive(Debug, Default)]
pub struct Forest {
    /// The result.
    pub nodes: Vec<Node>,
    growing: Vec<Growing>,
    branches: Branches,
    leaves: u32,
}

impl Forest {
    /// Builds the forest of `members` members, each with the pages that it may share. If no two share a page, returns false and lists no nodes.
    pub fn build<'a>(&mut self, members: u32, member: impl Fn(u32) -> &'a [u32]) -> bool {
        self.leaves = members;
        self.nodes.clear();
        if !self
            .branches
            .begin_alike((0..members).filter_map(|index| member(index).first()))
        {
            return false;
        }
        self.growing.clear();
        self.growing.resize(members as usize, Growing::default());
        self.branches.clear(members as usize);
        let mut previous = &[][..];
        for index in 0..members {
            let current = member(index);
            let (parent, depth, place) = self.descend(index, previous, current, &member);
            self.growing[index as usize] = Growing {
                parent,
                begin: depth,
                end: current.len() as u32,
                member: index,
                first_child: NO_NODE,
                next_sibling: NO_NODE,
            };
            match place {
                Some(place) => self.branches.insert_at(place, index),
                None if depth < current.len() as u32 => {
                    let page = current[depth as usize];
                    self.branches.insert(parent, page, index);
                }
                None => {}
            }
            previous = current;
        }
        let shares = self.growing.len() > members as usize;
        if shares {
            self.lay_out();
        }
        shares
    }

    /// Where a new leaf belongs: its parent, the number of pages down to there, and the place of its branch if it was
    /// looked up.
    fn descend<'a>(
        &mut self,
        index: u32,
        previous: &[u32],
        current: &[u32],
        member: &impl Fn(u32) -> &'a [u32],
    ) -> (u32, u32, Option<Place>) {
        let (mut node, mut depth) = (NO_NODE, 0);
        // Most tables that differ do so in their first page.
        let with_previous = if previous.first() == current.first() {
            let limit = previous.len().min(current.len()) as u32;
            shared(previous, current, 0, limit)
        } else {
            0
        };
        if with_previous > 0 {
            node = index - 1;
            while self.growing[node as usize].begin >= with_previous {
                node = self.growing[node as usize].parent;
            }
            depth = with_previous;
            if self.is_leaf(node) || depth < self.growing[node as usize].end {
                node = self.cut(node, depth, member);
            }
        }
        while depth < current.len() as u32 {
            let child = match self.branches.get(node, current[depth as usize]) {
                Ok(child) => child,
                Err(place) => return (node, depth, Some(place)),
            };
            let Growing {
                end, member: of, ..
            } = self.growing[child as usize];
            let until = shared(member(of), current, depth, end.min(current.len() as u32));
            depth = until;
            node = child;
            if self.is_leaf(node) || depth < end {
                node = self.cut(node, depth, member);
                break;
            }
        }
        (node, depth, None)
    }

    fn is_leaf(&self, node: u32) -> bool {
        node < self.leaves
    }

    /// Cuts a node's run at `depth`; the first half becomes a new inner node, which is returned.
    fn cut<'a>(&mut self, node: u32, depth: u32, member: &impl Fn(u32) -> &'a [u32]) -> u32 {
        let upper = self.growing.len() as u32;
        let Growing {
            parent,
            begin,
            end,
            member: of,
            ..
        } = self.growing[node as usize];
        let pages = member(of);
        self.growing.push(Growing {
            parent,
            begin,
            end: depth,
            member: of,
            first_child: NO_NODE,
            next_sibling: NO_NODE,
        });
        self.branches
            .replace(parent, pages[begin as usize], node, upper);
        if depth < end {
            self.branches.insert(upper, pages[depth as usize], node);
        }
        let lower = &mut self.growing[node as usize];
        (lower.parent, lower.begin) = (upper, depth);
        upper
    }

    /// Puts the nodes into preorder.
    fn lay_out(&mut self) {
        let growing = &mut self.growing;
        let mut first_root = NO_NODE;
        for leaf in (0..self.leaves).rev() {
            let mut node = leaf;
            loop {
                let parent = growing[node as usize].parent;
                if parent == NO_NODE {
                    growing[node as usize].next_sibling = first_root;
                    first_root = node;
                    break;
                }
                let first_child = growing[parent as usize].first_child;
                growing[node as usize].next_sibling = first_child;
                growing[parent as usize].first_child = node;
                if first_child != NO_NODE {
                    break; // the parent is already linked to its own parent
                }
                node = parent;
            }
        }

        let (mut next, mut parent) = (first_root, NO_NODE);
        loop {
            while next != NO_NODE {
                let node = growing[next as usize];
                let entry = self.nodes.len() as u32;
                let is_leaf = next < self.leaves;
                self.nodes.push(Node {
                    parent,
                    // Until the subtree ends, this is the node's next sibling.
                    subtree_end: if is_leaf {
                        entry + 1
                    } else {
                        node.next_sibling
                    },
                    begin: node.begin,
                    end: node.end,
                    member: node.member,
                    is_leaf,
                });
                if is_leaf {
                    next = node.next_sibling;
                } else {
                    (next, parent) = (node.first_child, entry);
                }
            }
            let end = self.nodes.len() as u32;
            let Some(done) = self.nodes.get_mut(parent as usize) else {
                break;
            };
            (next, parent) = (done.subtree_end, done.parent);
            done.subtree_end = end;
        }
    }
}

/// The index at which `a` and `b`, which are equal up to `depth`, differ: at most `end`.
#[inline(always)]
fn shared(a: &[u32], b: &[u32], depth: u32, end: u32) -> u32 {
    let range = depth as usize..end as usize;
    depth + common_prefix(&a[range.clone()], &b[range]) as u32
}

/// Number of leading elements that are equal.
#[inline(always)]
fn common_prefix(a: &[u32], b: &[u32]) -> usize {
    // Blocks are compared as vectors, without a call.
    let blocks = a.as_chunks::<8>().0.iter().zip(b.as_chunks::<8>().0);
    let whole = blocks.take_while(|(a, b)| a == b).count() * 8;
    let rest = a[whole..].iter().zip(&b[whole..]);
    whole + rest.take_while(|(a, b)| a == b).count()
}
