//! A quick look at whether a batch only appended.
//!
//! Most steps append a token to each request, and no request needs another page. The arrays of such a batch are the same but for the
//! lengths of last pages. Comparing them whole takes a fraction of the time of looking at each row block.

use super::data::Plan;
use crate::problem::{Batch, PageTable, Part};

/// The arrays of the batch of a plan, or none if the plan is not of decodes that can all grow: then each row block is
/// looked at. Plans that do the same are equal, whether they have these arrays or not.
#[derive(Clone, Debug, Default)]
pub(super) struct Appended {
    q_indptr: Vec<u32>,
    indptr: Vec<u32>,
    last_page_len: Vec<u32>,
}

impl PartialEq for Appended {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Appended {
    pub(super) const NONE: Self = Self {
        q_indptr: Vec::new(),
        indptr: Vec::new(),
        last_page_len: Vec::new(),
    };

    /// Keeps nothing.
    pub(super) fn clear(&mut self) {
        self.last_page_len.clear();
    }

    /// Keeps the arrays of the batch of a plan.
    fn keep(&mut self, batch: &Batch, plan: &Plan) {
        self.clear();
        let Some(part) = plain(batch).filter(|_| plan.growable) else {
            return;
        };
        // A row block without an item at its end cannot grow; one without queries does not move.
        let grows = plan.row_blocks.iter().fold(true, |all, block| {
            all & (block.tail != u32::MAX) & (block.tokens > 0)
        });
        if grows {
            self.q_indptr.clone_from(&part.q_indptr);
            self.indptr.clone_from(&part.table.indptr);
            self.last_page_len.clone_from(&part.table.last_page_len);
        }
    }

    /// By how many tokens each request of a batch is longer, if that is all that changed.
    fn growth(&self, batch: &Batch, page_size: u32) -> Option<u32> {
        let part = plain(batch)?;
        let PageTable {
            indptr,
            last_page_len,
            ..
        } = &part.table;
        let first = *self.last_page_len.first()?;
        let by = last_page_len.first()?.wrapping_sub(first);
        let same = part.table.page_size == page_size
            && last_page_len.len() == self.last_page_len.len()
            && *indptr == self.indptr
            && part.q_indptr == self.q_indptr
            && by <= page_size;
        // The OR of all bits that differ, and of all numbers that must not be negative.
        let lens = last_page_len.iter().zip(&self.last_page_len);
        let (different, room) = lens.fold((0, 0), |(different, room), (&now, &before)| {
            let differs = now.wrapping_sub(before) ^ by;
            (different | differs, room | page_size.wrapping_sub(now))
        });
        (same && different == 0 && room as i32 >= 0).then_some(by)
    }

    /// After each request has become longer by so many tokens.
    fn grow(&mut self, by: u32) {
        self.last_page_len.iter_mut().for_each(|last| *last += by);
    }
}

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
        let mut appended = std::mem::take(&mut self.appended);
        appended.keep(batch, self);
        self.appended = appended;
    }
}

/// The part of a batch that has one, without masks and without keys of requests elsewhere.
fn plain(batch: &Batch) -> Option<&Part> {
    match &batch.parts[..] {
        [part] if !batch.has_masks() && part.keys_after.is_empty() && part.heads == 1 => Some(part),
        _ => None,
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
