//! Where the keys of a request are, in a batch with requests beside page lists by KV head.

use tandem_attn::problem::{Batch, Part};

/// The row block of a request that has its keys.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place<'a> {
    pub part: &'a Part,
    pub row_block: usize,
}

impl<'a> Place<'a> {
    /// The place of a request. The first part has those without keys, too.
    pub(crate) fn of(batch: &'a Batch, request: usize) -> Self {
        let first = batch.qo_indptr[request];
        let with_keys = batch.parts.iter().find_map(|part| {
            let token = first / part.heads;
            // Empty row blocks come before the row block that begins at the same token.
            let behind = part.q_indptr.partition_point(|&begin| begin <= token);
            let row_block = behind.checked_sub(1)?;
            let is_there = row_block < part.row_blocks() && part.kv_len(row_block) > 0;
            is_there.then_some(Self { part, row_block })
        });
        with_keys.unwrap_or(Self {
            part: &batch.parts[0],
            row_block: request.min(batch.parts[0].row_blocks().saturating_sub(1)),
        })
    }

    /// The pages of a query token of the batch, by the ids of the first part. In a part of several heads these are parts of pages, which
    /// lie head by head: the layout is [`Hnd`](tandem_attn::problem::KvLayout::Hnd).
    pub(crate) fn pages(&self, token: u32) -> Vec<u32> {
        let heads = self.part.heads;
        let pages = self.part.table.pages(self.row_block).iter();
        pages.map(|page| page * heads + token % heads).collect()
    }
}
