//! The prefix forest: which tables begin with the same pages.
//!
//! Tables enter one by one, as into a radix tree whose edges are runs of pages. Each is first compared with
//! the one before it, whole slices at a time, so that a batch in the order of its tree hardly searches;
//! where they part, one look into a hash table of `(node, next page)` finds the branch or tells that there
//! is none. Pages are compared only as far as they are shared, so the time is linear in those.

/// In [`Node::parent`]: the node is a root.
pub(super) const NO_NODE: u32 = u32::MAX;

/// One member's table.
#[derive(Clone, Copy, Debug)]
pub(super) struct Member<'a> {
    pub pages: &'a [u32],
    /// Leading pages that may be shared (those that are full).
    pub sharable: u32,
}

/// A run of pages that the members below share, or (a leaf) the rest of one member's table.
///
/// Nodes stand in preorder: parents before children, each subtree in one run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Node {
    /// The node before it on the way, or [`NO_NODE`].
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
pub(super) struct Forest {
    /// The result.
    pub nodes: Vec<Node>,
    growing: Vec<Growing>,
    branches: Branches,
    leaves: u32,
    granule: u32,
}

impl Forest {
    /// Builds the forest of `members` members; what is shared ends at multiples of `granule` pages, as does
    /// what they say is sharable.
    pub fn build<'a>(&mut self, members: u32, granule: u32, member: impl Fn(u32) -> Member<'a>) {
        self.leaves = members;
        self.granule = granule;
        self.growing.clear();
        self.growing.resize(members as usize, Growing::default());
        self.branches.clear(members as usize);
        let mut previous = Member {
            pages: &[],
            sharable: 0,
        };
        for index in 0..members {
            let current = member(index);
            let (parent, depth) = self.descend(index, &previous, &current, &member);
            self.growing[index as usize] = Growing {
                parent,
                begin: depth,
                end: current.sharable,
                member: index,
                first_child: NO_NODE,
                next_sibling: NO_NODE,
            };
            if depth < current.sharable {
                self.branches
                    .insert(parent, self.key(current.pages, depth), index);
            }
            previous = current;
        }
        self.lay_out();
    }

    /// The page that tells the branch at `depth`: the last one of the granule, whose identity implies the
    /// others' in any sane table.
    fn key(&self, pages: &[u32], depth: u32) -> u32 {
        pages[(depth + self.granule - 1) as usize]
    }

    /// Leading pages after `depth` that both share, in whole granules.
    fn shared(&self, a: &[u32], b: &[u32], depth: u32, end: u32) -> u32 {
        let range = depth as usize..end as usize;
        let common = common_prefix(&a[range.clone()], &b[range]) as u32;
        // The usual granule spares the division.
        depth
            + if self.granule == 1 {
                common
            } else {
                common / self.granule * self.granule
            }
    }

    /// Where a new leaf belongs: the node it hangs on, and the pages that lead there.
    fn descend<'a>(
        &mut self,
        index: u32,
        previous: &Member<'_>,
        current: &Member<'_>,
        member: &impl Fn(u32) -> Member<'a>,
    ) -> (u32, u32) {
        let (mut node, mut depth) = (NO_NODE, 0);
        let with_previous = self.shared(
            previous.pages,
            current.pages,
            0,
            previous.sharable.min(current.sharable),
        );
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
        while depth < current.sharable {
            let Some(child) = self.branches.get(node, self.key(current.pages, depth)) else {
                break;
            };
            let Growing {
                end, member: of, ..
            } = self.growing[child as usize];
            let until = self.shared(
                member(of).pages,
                current.pages,
                depth,
                end.min(current.sharable),
            );
            if until == depth {
                break; // the key page stands after other pages: not the same branch
            }
            depth = until;
            node = child;
            if self.is_leaf(node) || depth < end {
                node = self.cut(node, depth, member);
                break;
            }
        }
        (node, depth)
    }

    fn is_leaf(&self, node: u32) -> bool {
        node < self.leaves
    }

    /// Cuts a node's run at `depth`; the first half becomes a new inner node, which is returned.
    fn cut<'a>(&mut self, node: u32, depth: u32, member: &impl Fn(u32) -> Member<'a>) -> u32 {
        let upper = self.growing.len() as u32;
        let Growing {
            parent,
            begin,
            end,
            member: of,
            ..
        } = self.growing[node as usize];
        let pages = member(of).pages;
        self.growing.push(Growing {
            parent,
            begin,
            end: depth,
            member: of,
            first_child: NO_NODE,
            next_sibling: NO_NODE,
        });
        self.branches
            .replace(parent, self.key(pages, begin), node, upper);
        if depth < end {
            self.branches.insert(upper, self.key(pages, depth), node);
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
                    break; // the parent hangs on its own parent already
                }
                node = parent;
            }
        }

        self.nodes.clear();
        let (mut next, mut parent) = (first_root, NO_NODE);
        loop {
            while next != NO_NODE {
                let node = growing[next as usize];
                let entry = self.nodes.len() as u32;
                let is_leaf = next < self.leaves;
                self.nodes.push(Node {
                    parent,
                    // Until the subtree ends: where its children's list goes on.
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

/// Number of leading elements that are equal.
fn common_prefix(a: &[u32], b: &[u32]) -> usize {
    // Long blocks go through memcmp, short ones through a few instructions.
    let long = equal_blocks::<32>(a, b);
    let short = long + equal_blocks::<4>(&a[long..], &b[long..]);
    let rest = a[short..].iter().zip(&b[short..]);
    short + rest.take_while(|(a, b)| a == b).count()
}

/// Number of leading elements in whole blocks that are equal.
fn equal_blocks<const BLOCK: usize>(a: &[u32], b: &[u32]) -> usize {
    let blocks = a.chunks_exact(BLOCK).zip(b.chunks_exact(BLOCK));
    blocks.take_while(|(a, b)| a == b).count() * BLOCK
}

/// A hash table of `(node, page)` with open addressing; nothing is ever removed but all at once.
#[derive(Debug, Default)]
struct Branches {
    keys: Vec<u64>,
    children: Vec<u32>,
}

/// No branch has this key: page ids are below the size of their pool.
const FREE: u64 = u64::MAX;

impl Branches {
    /// Empties the table and makes room for the branches of so many members: a leaf each, and an inner
    /// node for all but one.
    fn clear(&mut self, members: usize) {
        let slots = (members * 4).next_power_of_two();
        self.keys.clear();
        self.keys.resize(slots, FREE);
        self.children.resize(slots, NO_NODE);
    }

    /// The slot that holds the key, or the free one where it belongs.
    fn slot(&self, node: u32, page: u32) -> (usize, u64) {
        let key = u64::from(node) << 32 | u64::from(page);
        let mask = self.keys.len() - 1;
        // Fibonacci hashing: the high bits are well mixed.
        let mut slot = (key.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as usize & mask;
        while self.keys[slot] != key && self.keys[slot] != FREE {
            slot = (slot + 1) & mask;
        }
        (slot, key)
    }

    fn get(&self, node: u32, page: u32) -> Option<u32> {
        let (slot, key) = self.slot(node, page);
        (self.keys[slot] == key).then(|| self.children[slot])
    }

    /// Adds a branch, unless there is one.
    fn insert(&mut self, node: u32, page: u32, child: u32) {
        let (slot, key) = self.slot(node, page);
        if self.keys[slot] == FREE {
            (self.keys[slot], self.children[slot]) = (key, child);
        }
    }

    /// Lets a branch lead to `new`, if it led to `old`.
    fn replace(&mut self, node: u32, page: u32, old: u32, new: u32) {
        let (slot, key) = self.slot(node, page);
        if self.keys[slot] == key && self.children[slot] == old {
            self.children[slot] = new;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn forest(tables: &[&[u32]], granule: u32) -> Vec<Node> {
        let mut forest = Forest::default();
        let member = |index: u32| {
            let pages = tables[index as usize];
            let sharable = pages.len() as u32 / granule * granule;
            Member { pages, sharable }
        };
        // Twice, so that nothing of the first build may stay.
        forest.build(tables.len() as u32, granule, member);
        forest.build(tables.len() as u32, granule, member);
        forest.nodes
    }

    /// Each node as (pages, is it a leaf, entries of its subtree).
    fn shape(tables: &[&[u32]], granule: u32) -> Vec<(Vec<u32>, bool, u32)> {
        let nodes = forest(tables, granule);
        let shape = nodes.iter().enumerate().map(|(entry, node)| {
            let pages = &tables[node.member as usize][node.begin as usize..node.end as usize];
            (
                pages.to_vec(),
                node.is_leaf,
                node.subtree_end - entry as u32,
            )
        });
        shape.collect()
    }

    #[test]
    fn tables_without_common_pages_are_roots() {
        assert_eq!(shape(&[], 1), []);
        let expected = [(vec![1, 2], true, 1), (vec![], true, 1), (vec![3], true, 1)];
        assert_eq!(shape(&[&[1, 2], &[], &[3]], 1), expected);
    }

    #[test]
    fn neighbours_and_strangers_find_the_same_tree() {
        // 1 2 ─┬─ 3 ─┬─ 4
        //      │     └─ 5
        //      └─ 6
        let expected = [
            (vec![1, 2], false, 5),
            (vec![3], false, 3),
            (vec![4], true, 1),
            (vec![5], true, 1),
            (vec![6], true, 1),
        ];
        let (a, b, c): (&[u32], &[u32], &[u32]) = (&[1, 2, 3, 4], &[1, 2, 3, 5], &[1, 2, 6]);
        assert_eq!(shape(&[a, b, c], 1), expected);
        let apart = shape(&[a, &[9], c, &[8], b], 1);
        assert_eq!(apart.iter().filter(|node| !node.1).count(), 2);
        assert!(apart.contains(&(vec![1, 2], false, 5)) && apart.contains(&(vec![3], false, 3)));
    }

    #[test]
    fn a_table_that_ends_inside_another_is_an_empty_leaf() {
        let expected = [
            (vec![1, 2], false, 3),
            (vec![3], true, 1),
            (vec![], true, 1),
        ];
        assert_eq!(shape(&[&[1, 2, 3], &[1, 2]], 1), expected);
        let twins = [(vec![1, 2], false, 3), (vec![], true, 1), (vec![], true, 1)];
        assert_eq!(shape(&[&[1, 2], &[1, 2]], 1), twins);
    }

    #[test]
    fn granules_are_shared_whole() {
        let tables: [&[u32]; 3] = [&[1, 2, 3, 4, 5], &[1, 2, 3, 9, 9], &[1, 7, 7, 7]];
        let expected = [
            (vec![1, 2], false, 3),
            (vec![3, 4], true, 1),
            (vec![3, 9], true, 1),
            (vec![1, 7, 7, 7], true, 1),
        ];
        assert_eq!(shape(&tables, 2), expected);
    }

    #[test]
    fn a_page_id_in_two_places_is_no_branch() {
        // Page 5 ends the first granule of both, after different pages.
        let expected = [(vec![1, 5], true, 1), (vec![2, 5], true, 1)];
        assert_eq!(shape(&[&[1, 5], &[2, 5]], 2), expected);
    }

    #[test]
    fn the_common_prefix_of_long_slices() {
        let a: Vec<u32> = (0..100).collect();
        for at in [0, 1, 31, 32, 33, 64, 99] {
            let mut b = a.clone();
            b[at] = 1000;
            assert_eq!(common_prefix(&a, &b), at);
        }
        assert_eq!(common_prefix(&a, &a[..77]), 77);
    }
}
