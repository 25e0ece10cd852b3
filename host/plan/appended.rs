//! Steps that only append to each request.

use super::data::Plan;
use crate::problem::{Batch, PageTable};

impl Plan {
    /// By how many tokens each request of a batch is longer than planned, if that is all that changed.
    pub(super) fn appends(&self, batch: &Batch) -> Option<u32> {
        let planned = self.parts.first().filter(|_| self.growable)?;
        let by = self.appended.growth(batch, planned.page_size)?;
        let table = &batch.parts[0].table;
        let same = self.total_q == batch.total_q()
            && table.indices.len() == self.page_ids.len()
            && same_ends(table, &self.page_ids);
        same.then_some(by)
    }

    /// Makes each row block longer by so many keys.
    pub(super) fn append(&mut self, by: u32) {
        let Self {
            row_blocks, items, ..
        } = self;
        for block in row_blocks {
            block.position = block.position.wrapping_add_unsigned(by);
            block.kv_len = block.kv_len.wrapping_add(by);
            if let Some(item) = items.get_mut(block.tail as usize) {
                item.kv_end = block.kv_len;
            }
        }
        self.appended.grow(by);
    }

    /// Keeps what [`appends`](Self::appends) compares of a batch.
    pub(super) fn keep_arrays(&mut self, batch: &Batch) {
        // A row block without an item at its end cannot grow; one without queries does not move.
        let grows = self.row_blocks.iter().fold(self.growable, |all, block| {
            all & (block.tail != u32::MAX) & (block.tokens > 0)
        });
        match grows {
            true => self.appended.keep(batch),
            false => self.appended.clear(),
        }
    }
}

/// Whether the tables begin and end with the planned pages. A separate loop, so that the CPU waits for several pages at
/// a time.
#[inline(always)]
pub(super) fn same_ends(table: &PageTable, planned: &[u32]) -> bool {
    let now = &table.indices[..planned.len()];
    let mut different = 0;
    for (&begin, &end) in table.indptr.iter().zip(&table.indptr[1..]) {
        let (first, last) = (begin as usize, (end as usize).wrapping_sub(1));
        if first <= last && last < planned.len() {
            different |= (now[first] ^ planned[first]) | (now[last] ^ planned[last]);
        }
    }
    different == 0
}
