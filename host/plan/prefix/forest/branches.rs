//! How tables continue from a node.

use super::NO_NODE;

/// A hash table with open addressing, from `(node, next page)` to a child. Entries are only removed all at once.
#[derive(Debug, Default)]
pub(super) struct Branches {
    keys: Vec<u64>,
    children: Vec<u32>,
    /// The first pages of tables, in a hash table of their own.
    firsts: Vec<u32>,
}

/// The free slot for a branch that was not found. It is valid until another branch is added.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    slot: usize,
    key: u64,
}

/// The key of a free slot. No branch has it, because page ids are less than the size of their pool.
const FREE: u64 = u64::MAX;

impl Branches {
    /// Empties the table and makes room for the branches of `members` members: one leaf each, and one inner node fewer.
    pub(super) fn clear(&mut self, members: usize) {
        let slots = (members * 4).next_power_of_two();
        self.keys.clear();
        self.keys.resize(slots, FREE);
        // The children of free slots are never read.
        self.children.resize(slots, NO_NODE);
    }

    /// Whether two tables begin with the same page.
    pub(super) fn begin_alike<'a>(&mut self, firsts: impl Iterator<Item = &'a u32>) -> bool {
        let most = firsts.size_hint().1.unwrap_or(0);
        let mask = (most * 2).next_power_of_two() - 1;
        self.firsts.clear();
        self.firsts.resize(mask + 1, FREE as u32);
        for &page in firsts {
            let mut slot = hash(page.into()) & mask;
            while self.firsts[slot] != FREE as u32 {
                if self.firsts[slot] == page {
                    return true;
                }
                slot = (slot + 1) & mask;
            }
            self.firsts[slot] = page;
        }
        false
    }

    /// The slot that holds the key, or the free one where it belongs.
    fn slot(&self, node: u32, page: u32) -> (usize, u64) {
        let key = u64::from(node) << 32 | u64::from(page);
        let mask = self.keys.len() - 1;
        let mut slot = hash(key) & mask;
        while self.keys[slot] != key && self.keys[slot] != FREE {
            slot = (slot + 1) & mask;
        }
        (slot, key)
    }

    /// The child of a branch. If there is none, the place for [`insert_at`](Self::insert_at).
    pub(super) fn get(&self, node: u32, page: u32) -> Result<u32, Place> {
        let (slot, key) = self.slot(node, page);
        match self.keys[slot] == key {
            true => Ok(self.children[slot]),
            false => Err(Place { slot, key }),
        }
    }

    /// Adds a branch that the last [`get`](Self::get) did not find.
    pub(super) fn insert_at(&mut self, Place { slot, key }: Place, child: u32) {
        (self.keys[slot], self.children[slot]) = (key, child);
    }

    /// Adds a branch, unless there is one.
    pub(super) fn insert(&mut self, node: u32, page: u32, child: u32) {
        let (slot, key) = self.slot(node, page);
        if self.keys[slot] == FREE {
            (self.keys[slot], self.children[slot]) = (key, child);
        }
    }

    /// Lets a branch lead to `new`, if it led to `old`.
    pub(super) fn replace(&mut self, node: u32, page: u32, old: u32, new: u32) {
        let (slot, key) = self.slot(node, page);
        if self.keys[slot] == key && self.children[slot] == old {
            self.children[slot] = new;
        }
    }
}

/// Fibonacci hashing: the high bits are well mixed.
const fn hash(key: u64) -> usize {
    (key.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as usize
}
