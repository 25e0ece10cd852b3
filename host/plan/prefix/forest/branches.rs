//! Where a table goes on from a node.

use super::NO_NODE;

/// A hash table of `(node, page)` with open addressing; nothing is ever removed but all at once.
#[derive(Debug, Default)]
pub(super) struct Branches {
    keys: Vec<u64>,
    children: Vec<u32>,
}

/// Where a branch belongs that is not there, until another is added.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    slot: usize,
    key: u64,
}

/// No branch has this key: page ids are below the size of their pool.
const FREE: u64 = u64::MAX;

impl Branches {
    /// Empties the table and makes room for the branches of so many members: a leaf each, and an inner
    /// node for all but one.
    pub(super) fn clear(&mut self, members: usize) {
        let slots = (members * 4).next_power_of_two();
        self.keys.clear();
        self.keys.resize(slots, FREE);
        // What stands at a free slot does not matter.
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

    /// Where a branch leads to; or, where there is none, its place for [`insert_at`](Self::insert_at).
    pub(super) fn get(&self, node: u32, page: u32) -> Result<u32, Place> {
        let (slot, key) = self.slot(node, page);
        match self.keys[slot] == key {
            true => Ok(self.children[slot]),
            false => Err(Place { slot, key }),
        }
    }

    /// Adds a branch that was looked for last, and not found.
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
