//! One step: what it computes, and the inputs that a backend needs.

use tandem_attn::{
    kv::PageCopy,
    problem::{Batch, PageTable},
};

use super::{
    RequestId,
    attention::{Chunk, StepShape},
};

/// Consecutive tokens of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The request.
    pub request: RequestId,
    /// Position of the first token; all tokens before it are computed already.
    pub first: u32,
    /// Number of tokens to compute. Each attends to itself and all tokens before it.
    pub tokens: u32,
    /// Whether the next token is sampled from the last token's logits. If so, all known tokens are then computed.
    pub samples: bool,
    /// Whether it is a decode: one generated token.
    pub decode: bool,
}

/// A copy of a page from device to host, or back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Swap {
    /// Copy a device page to a host page.
    Out {
        /// Page of the pool.
        device: u32,
        /// Page of the host pool.
        host: u32,
    },
    /// Copy a host page to a device page.
    In {
        /// Page of the host pool.
        host: u32,
        /// Page of the pool.
        device: u32,
    },
}

/// A request that lost its pages to others and waits again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preemption {
    /// The request.
    pub request: RequestId,
    /// Whether its keys were swapped to the host. If not, they will be computed again.
    pub swapped: bool,
}

/// The work of one step. Keep the value from step to step: its memory is reused.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Step {
    /// The entries, in batch order.
    pub entries: Vec<Entry>,
    /// Copies between host and device, in order, before all other work.
    pub swaps: Vec<Swap>,
    /// Copies within the pool, after the swaps and before new keys are written.
    pub copies: Vec<PageCopy>,
    /// Requests that were preempted.
    pub preempted: Vec<Preemption>,
    pub(super) shape: StepShape,
    pub(super) tokens: u32,
}

impl Step {
    /// Number of tokens to compute.
    #[must_use]
    pub const fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Whether there is nothing to compute.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Its lengths, which determine its time.
    #[must_use]
    pub const fn shape(&self) -> &StepShape {
        &self.shape
    }

    pub(super) fn clear(&mut self) {
        self.entries.clear();
        self.swaps.clear();
        self.copies.clear();
        self.preempted.clear();
        self.shape.clear();
        self.tokens = 0;
    }

    pub(super) fn push(&mut self, entry: Entry) {
        self.tokens += entry.tokens;
        let keys = entry.first + entry.tokens;
        if entry.decode {
            self.shape.push_decode(keys);
        } else {
            self.shape.chunks.push(Chunk {
                tokens: entry.tokens,
                keys,
            });
        }
        self.shape.sampled += u32::from(entry.samples);
        self.entries.push(entry);
    }
}

/// A step as arrays: the batch to plan, and the inputs of each query token. Reused from step to step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepInputs {
    /// The planner's input: one row block for each entry.
    pub batch: Batch,
    /// Where the key and the value of each token are written: `page × page_size + offset`.
    pub slots: Vec<u32>,
    /// Position of each token in its request.
    pub positions: Vec<u32>,
    /// Token ids; 0 for requests without ids.
    pub tokens: Vec<u32>,
    /// `[entries]`: the query token whose logits give the next token; `None` if the entry does not sample.
    pub logits: Vec<Option<u32>>,
    /// Entries whose one token was sampled by a step that is not resolved yet, so that its id is not known: see
    /// [`Composer::advance`](crate::Composer::advance).
    pub awaited: Vec<u32>,
}

impl StepInputs {
    pub(super) fn clear(&mut self, page_size: u32, pool_pages: u32) {
        clear_batch(&mut self.batch, page_size, pool_pages);
        self.slots.clear();
        self.positions.clear();
        self.tokens.clear();
        self.logits.clear();
        self.awaited.clear();
    }

    pub(super) fn push(&mut self, entry: &Entry, pages: &[u32], page_size: u32, tokens: &[u32]) {
        push_row(&mut self.batch, entry, pages, page_size);
        let positions = entry.first..entry.first + entry.tokens;
        self.slots.extend(positions.clone().map(|position| {
            pages[(position / page_size) as usize] * page_size + position % page_size
        }));
        self.tokens.extend(
            positions
                .clone()
                .map(|position| tokens.get(position as usize).copied().unwrap_or(0)),
        );
        self.positions.extend(positions);
        let last = self.positions.len() as u32 - 1;
        self.logits.push(entry.samples.then_some(last));
    }
}

/// Empties a batch but keeps its memory.
pub(super) fn clear_batch(batch: &mut Batch, page_size: u32, pool_pages: u32) {
    batch.qo_indptr.clear();
    batch.qo_indptr.push(0);
    batch.parts.truncate(1);
    if batch.parts.is_empty() {
        batch.parts.push(Default::default());
    }
    let part = &mut batch.parts[0];
    part.q_indptr.clear();
    part.q_indptr.push(0);
    part.keys_after.clear();
    let PageTable {
        indptr,
        indices,
        last_page_len,
        ..
    } = &mut part.table;
    indptr.clear();
    indptr.push(0);
    indices.clear();
    last_page_len.clear();
    part.table.page_size = page_size;
    part.table.pool_pages = pool_pages;
}

pub(super) fn push_row(batch: &mut Batch, entry: &Entry, pages: &[u32], page_size: u32) {
    let keys = entry.first + entry.tokens;
    let part = &mut batch.parts[0];
    part.table
        .push(&pages[..keys.div_ceil(page_size) as usize], keys);
    let end = batch.qo_indptr[batch.qo_indptr.len() - 1] + entry.tokens;
    batch.qo_indptr.push(end);
    part.q_indptr.push(end);
}
