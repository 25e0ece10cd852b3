//! A quick look at whether a batch only appended.
//!
//! Most steps append a token to each request, and no request needs another page. The arrays of such a batch are the same but for the
//! lengths of last pages. Comparing them whole takes a fraction of the time of looking at each row block.

use crate::problem::{Batch, PageTable, Part};

/// The arrays of the batch of a plan, or none if the plan is not of decodes that can all grow: then each row block is
/// looked at. Plans that do the same are equal, whether they have these arrays or not.
#[derive(Clone, Debug, Default)]
pub struct Appended {
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
    pub const NONE: Self = Self {
        q_indptr: Vec::new(),
        indptr: Vec::new(),
        last_page_len: Vec::new(),
    };

    /// Keeps nothing.
    pub fn clear(&mut self) {
        self.last_page_len.clear();
    }

    /// Keeps the arrays of a batch that has one part, without masks and without keys of requests elsewhere.
    pub fn keep(&mut self, batch: &Batch) {
        self.clear();
        if let Some(part) = plain(batch) {
            self.q_indptr.clone_from(&part.q_indptr);
            self.indptr.clone_from(&part.table.indptr);
            self.last_page_len.clone_from(&part.table.last_page_len);
        }
    }

    /// By how many tokens each request of a batch is longer, if that is all that changed.
    pub fn growth(&self, batch: &Batch, page_size: u32) -> Option<u32> {
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
    pub fn grow(&mut self, by: u32) {
        self.last_page_len.iter_mut().for_each(|last| *last += by);
    }
}

/// The part of a batch that has one, without masks and without keys of requests elsewhere.
fn plain(batch: &Batch) -> Option<&Part> {
    match &batch.parts[..] {
        [part] if !batch.has_masks() && part.keys_after.is_empty() && part.heads == 1 => Some(part),
        _ => None,
    }
}
