//! One part of a batch: a block-sparse matrix.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::{
    super::{MAX_POSITION, ProblemError, Spec, fits},
    Masks, PageTable, Quantity, check_indptr,
};

/// One block-sparse matrix of a batch (FlashInfer's composable formats: a batch is the ⊕ of its parts).
///
/// No key may occur in two parts for the same query, since it would count twice.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Part {
    /// `[row_blocks + 1]` over query tokens: row block `r` is the tokens `q_indptr[r]..q_indptr[r + 1]`.
    /// Tokens before the first and after the last entry have no keys in this part.
    pub q_indptr: Vec<u32>,
    /// The keys of each row block.
    pub table: PageTable,
    /// `[row_blocks]`: the number of keys after this table's last key, up to the last query. Another part
    /// holds these keys. Query `i` of `n` in a row block of `l` keys has the position `l + after - n + i`.
    /// Empty means zero for all: the queries are the last tokens of their own table.
    pub keys_after: Vec<u32>,
    /// How many neighbouring tokens of the batch are one query token of this part, as its heads: 1, unless the batch has
    /// [page lists by KV head](Self::with_heads).
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub heads: u32,
}

/// The number of heads of parts that were stored without it.
const fn one() -> u32 {
    1
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde passes a reference"
)]
const fn is_one(heads: &u32) -> bool {
    *heads == 1
}

impl Default for Part {
    fn default() -> Self {
        Self::new(Vec::new(), PageTable::default())
    }
}

impl Part {
    /// Row blocks of queries and their keys; the queries are the last tokens of their own table.
    #[must_use]
    pub const fn new(q_indptr: Vec<u32>, table: PageTable) -> Self {
        Self {
            q_indptr,
            table,
            keys_after: Vec::new(),
            heads: 1,
        }
    }

    /// For a batch in which each KV head of a token is a token of its own, with its own pages: a part whose tokens are those of the
    /// model, each `heads` tokens of the batch. All heads of such a token read the same pages, and prefill kernels run the part. Its
    /// `q_indptr` counts the tokens of the model, its pool has all heads. [`PagesByHead`](crate::kv::PagesByHead) makes such batches.
    #[cfg_attr(not(feature = "unstable"), doc(hidden))]
    #[must_use]
    pub const fn with_heads(mut self, heads: u32) -> Self {
        self.heads = heads;
        self
    }

    /// With keys in other parts that come after this table's keys: see [`keys_after`](Self::keys_after).
    #[must_use]
    pub fn with_keys_after(mut self, keys_after: Vec<u32>) -> Self {
        self.keys_after = keys_after;
        self
    }

    /// Number of row blocks.
    #[must_use]
    #[inline]
    pub fn row_blocks(&self) -> usize {
        self.table.row_blocks()
    }

    /// The query tokens of a row block, as the part counts them.
    #[must_use]
    #[inline]
    pub fn q_range(&self, row_block: usize) -> Range<u32> {
        self.q_indptr[row_block]..self.q_indptr[row_block + 1]
    }

    /// The row block of a query token of the batch, if it has keys in this part.
    pub(crate) fn row_block_of(&self, token: u32) -> Option<usize> {
        let token = token / self.heads.max(1);
        let ends = &self.q_indptr[1..];
        let row_block = ends.partition_point(|&end| end <= token);
        let found = row_block < ends.len() && self.q_indptr[row_block] <= token;
        found.then_some(row_block)
    }

    /// Adds a row block of the next queries. `q_indptr` has its first entry.
    pub(crate) fn try_push<'p>(
        &mut self,
        queries: u32,
        pages: impl IntoIterator<Item = &'p u32>,
        kv_len: u32,
        after: u32,
    ) -> Result<(), ProblemError> {
        let end = self.q_indptr[self.q_indptr.len() - 1] + queries;
        self.table.try_push(pages.into_iter().copied(), kv_len)?;
        self.q_indptr.push(end);
        self.keys_after.push(after);
        Ok(())
    }

    /// Keys of a row block.
    #[must_use]
    #[inline]
    pub fn kv_len(&self, row_block: usize) -> u32 {
        self.table.kv_len(row_block)
    }

    /// Keys that other parts hold after those of a row block.
    #[must_use]
    #[inline]
    pub fn after(&self, row_block: usize) -> u32 {
        self.keys_after.get(row_block).copied().unwrap_or(0)
    }

    /// The position of a row block's first query among the keys of its table. The other queries follow.
    ///
    /// It is negative if the first keys of the table come after the first queries.
    #[must_use]
    #[inline]
    pub fn first_position(&self, row_block: usize) -> i32 {
        let Range { start, end } = self.q_range(row_block);
        let position = i64::from(self.kv_len(row_block)) + i64::from(self.after(row_block))
            - i64::from(end - start);
        position as i32
    }

    /// The position of a query token of the batch that a row block has.
    pub(crate) fn position_of(&self, row_block: usize, token: u32) -> i32 {
        let index = token / self.heads - self.q_range(row_block).start;
        self.first_position(row_block) + index as i32
    }

    /// Pairs of a query and a key of its row block, hidden or not.
    pub(super) fn pairs(&self) -> u64 {
        let row_blocks = (0..self.row_blocks()).map(|row_block| {
            self.q_range(row_block).len() as u64 * u64::from(self.kv_len(row_block))
        });
        let pairs = row_blocks.fold(0, u64::saturating_add);
        pairs.saturating_mul(self.heads.into())
    }

    /// No fewer than [`pairs`](Self::pairs), in constant time.
    pub(super) fn most_pairs(&self) -> u64 {
        let queries = match self.q_indptr[..] {
            [first, .., last] => u64::from(last - first),
            _ => 0,
        };
        let keys = self.table.indices.len() as u64 * u64::from(self.table.page_size);
        queries
            .saturating_mul(keys)
            .saturating_mul(self.heads.into())
    }

    pub(super) fn check(&self, part: usize, total_q: u32) -> Result<(), ProblemError> {
        self.table.check(part)?;
        check_indptr("q_indptr", &self.q_indptr)?;
        let row_blocks = self.row_blocks();
        if self.q_indptr.len() != row_blocks + 1 {
            return Err(ProblemError::RowBlocks {
                part,
                got: self.q_indptr.len() - 1,
                expected: row_blocks,
            });
        }
        if !self.keys_after.is_empty() && self.keys_after.len() != row_blocks {
            let (got, expected) = (self.keys_after.len(), row_blocks);
            return Err(ProblemError::Length {
                name: "keys_after",
                part,
                got,
                expected,
            });
        }
        let end = self.q_indptr[row_blocks];
        let heads = self.heads;
        if heads == 0 || !total_q.is_multiple_of(heads) {
            return Err(ProblemError::PartHeads {
                part,
                heads,
                total_q,
            });
        }
        if end > total_q / heads {
            return Err(ProblemError::PartPastQueries {
                part,
                got: end,
                total_q: total_q / heads,
            });
        }
        for (row_block, &after) in self.keys_after.iter().enumerate() {
            let position = u64::from(self.kv_len(row_block)) + u64::from(after);
            fits(
                Quantity::Keys("keys of a row block and after it"),
                position,
                MAX_POSITION.into(),
            )?;
        }
        Ok(())
    }

    /// The masks of a row block with keys are those of consecutive tokens of a request.
    pub(super) fn check_masks(&self, masks: &Masks) -> Result<(), ProblemError> {
        if masks.is_empty() {
            return Ok(());
        }
        let mut with_keys = (0..self.row_blocks()).filter(|&block| self.kv_len(block) > 0);
        with_keys.try_for_each(|block| masks.check_block(self.q_range(block)))
    }

    /// The queries of row blocks that span requests have no order: nothing may be hidden from them, and nothing may
    /// depend on distances.
    pub(super) fn check_shared_blocks(
        &self,
        part: usize,
        qo_indptr: &[u32],
        spec: &Spec,
        masked: bool,
    ) -> Result<(), ProblemError> {
        let variant = &spec.variant;
        let by_distance = spec.counts_distances() || masked;
        if (!variant.causal && !by_distance) || self.q_indptr == qo_indptr {
            return Ok(());
        }
        let mut request_ends = qo_indptr[1..].iter().copied().peekable();
        for row_block in 0..self.row_blocks() {
            let Range { start, end } = self.q_range(row_block);
            // Checked before: they are tokens of the batch.
            let [start, end] = [start, end].map(|token| token * self.heads);
            if start == end {
                continue;
            }
            while request_ends
                .next_if(|&request_end| request_end <= start)
                .is_some()
            {}
            let spans = request_ends
                .peek()
                .is_some_and(|&request_end| request_end < end);
            let (q_len, keys_after) = ((end - start) / self.heads, self.after(row_block));
            if spans && self.kv_len(row_block) > 0 && (by_distance || keys_after < q_len) {
                return Err(ProblemError::MaskedSharedBlock {
                    part,
                    row_block,
                    q_len,
                    keys_after,
                });
            }
        }
        Ok(())
    }
}
