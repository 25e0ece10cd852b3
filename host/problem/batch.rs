//! The requests.

use std::{collections::HashMap, ops::Range};

use serde::{Deserialize, Serialize};

use super::{MAX_PAGE_SIZE, MAX_POSITION, ProblemError, Spec, Variant, fits};

/// Block-sparse rows: for each row block of queries, the pages that hold its keys, in order (CSR).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageTable {
    /// Tokens in a page (the column block size): 1 (token-level sparsity, tree masks) to 128.
    pub page_size: u32,
    /// Pages in the pool; every index is below it.
    pub pool_pages: u32,
    /// `[row_blocks + 1]`: row block `r` owns `indices[indptr[r]..indptr[r + 1]]`.
    pub indptr: Vec<u32>,
    /// Page ids.
    pub indices: Vec<u32>,
    /// `[row_blocks]`: tokens in the last page, `1..=page_size`; 0 exactly where there are no pages.
    pub last_page_len: Vec<u32>,
}

impl Default for PageTable {
    fn default() -> Self {
        Self::new(1, 0)
    }
}

impl PageTable {
    /// A table without rows, over a pool of `pool_pages` pages.
    #[must_use]
    pub fn new(page_size: u32, pool_pages: u32) -> Self {
        Self {
            page_size,
            pool_pages,
            indptr: vec![0],
            indices: Vec::new(),
            last_page_len: Vec::new(),
        }
    }

    /// The table of a cache without pages: memory for `tokens` keys one after the other, of which each row
    /// block owns a run.
    ///
    /// Runs are cut into the largest pages that they allow. Kernels read pages of a multiple of 8 tokens
    /// fastest: where all runs and the end of the memory are at such multiples.
    ///
    /// ```
    /// use tandem_attn::problem::PageTable;
    ///
    /// // Two requests in a cache of 4 × 1024 tokens.
    /// let table = PageTable::contiguous(4096, &[0..700, 1024..1025]);
    /// assert_eq!(table.page_size, 128);
    /// assert_eq!((table.kv_len(0), table.pages(1)), (700, &[8][..]));
    /// ```
    ///
    /// # Panics
    /// If a run ends after the memory.
    #[must_use]
    pub fn contiguous(tokens: u32, runs: &[Range<u32>]) -> Self {
        let starts = runs.iter().filter(|run| !run.is_empty());
        let bits = starts.fold(tokens | MAX_PAGE_SIZE, |bits, run| bits | run.start);
        let page_size = 1 << bits.trailing_zeros();
        let mut table = Self::new(page_size, tokens / page_size);
        for run in runs {
            assert!(
                run.end <= tokens,
                "a run ends at {}, the memory at {tokens}",
                run.end
            );
            let pages = match run.is_empty() {
                true => 0..0,
                false => run.start / page_size..run.end.div_ceil(page_size),
            };
            let pages: Vec<u32> = pages.collect();
            table.push(&pages, run.len() as u32);
        }
        table
    }

    /// Appends a row block whose `kv_len` keys lie on `pages`.
    ///
    /// # Panics
    /// If `pages` is not exactly as long as `kv_len` keys need.
    pub fn push(&mut self, pages: &[u32], kv_len: u32) {
        assert_eq!(
            pages.len(),
            kv_len.div_ceil(self.page_size) as usize,
            "{kv_len} keys on pages of {} tokens",
            self.page_size
        );
        self.indices.extend_from_slice(pages);
        self.indptr.push(self.indices.len() as u32);
        let before_last = (pages.len() as u32).saturating_sub(1) * self.page_size;
        self.last_page_len.push(kv_len - before_last);
    }

    /// Number of row blocks.
    #[must_use]
    #[inline]
    pub fn row_blocks(&self) -> usize {
        self.last_page_len.len()
    }

    /// The pages of a row block.
    #[must_use]
    #[inline]
    pub fn pages(&self, row_block: usize) -> &[u32] {
        &self.indices[self.indptr[row_block] as usize..self.indptr[row_block + 1] as usize]
    }

    /// Keys of a row block.
    #[must_use]
    #[inline]
    pub fn kv_len(&self, row_block: usize) -> u32 {
        let pages = self.indptr[row_block + 1] - self.indptr[row_block];
        pages.saturating_sub(1) * self.page_size + self.last_page_len[row_block]
    }

    fn check(&self, part: usize) -> Result<(), ProblemError> {
        let &Self {
            page_size,
            pool_pages,
            ..
        } = self;
        if page_size == 0 || page_size > MAX_PAGE_SIZE {
            return Err(ProblemError::PageSize {
                part,
                got: page_size,
            });
        }
        fits(
            "the number of page ids",
            self.indices.len() as u64,
            u32::MAX.into(),
        )?;
        check_indptr("table.indptr", &self.indptr)?;
        let (start, end) = (self.indptr[0], self.indptr[self.indptr.len() - 1] as usize);
        if start != 0 {
            return Err(ProblemError::IndptrStart {
                name: "table.indptr",
                got: start,
            });
        }
        if end != self.indices.len() {
            let (name, of) = ("table.indptr", "page ids");
            return Err(ProblemError::IndptrEnd {
                name,
                got: end,
                of,
                expected: self.indices.len(),
            });
        }
        let (got, expected) = (self.last_page_len.len(), self.indptr.len() - 1);
        if got != expected {
            return Err(ProblemError::Length {
                name: "table.last_page_len",
                part,
                got,
                expected,
            });
        }
        // All at once first: it vectorises, a search with an early exit does not. Below 2³¹ pages, an id
        // beyond the last page shows in a sign bit.
        let beyond = (1u32 << 31).wrapping_sub(pool_pages);
        let signs = |(of, past): (u32, u32), &id: &u32| (of | id, past | id.wrapping_add(beyond));
        let maybe = pool_pages == 0 || pool_pages > 1 << 31 || {
            let (of, past) = self.indices.iter().fold((0, 0), signs);
            (of | past) >= 1 << 31
        };
        if maybe && let Some(index) = self.indices.iter().position(|&id| id >= pool_pages) {
            return Err(ProblemError::PageOutOfPool {
                part,
                index,
                got: self.indices[index],
                pool_pages,
            });
        }
        for (row_block, &got) in self.last_page_len.iter().enumerate() {
            let pages = self.indptr[row_block + 1] - self.indptr[row_block];
            if got > page_size || (got == 0) != (pages == 0) {
                return Err(ProblemError::LastPageLen {
                    part,
                    row_block,
                    got,
                    pages,
                    page_size,
                });
            }
            let keys = u64::from(pages) * u64::from(page_size);
            fits("keys of a row block", keys, MAX_POSITION.into())?;
        }
        Ok(())
    }
}

/// One block-sparse matrix of a batch (FlashInfer's composable formats: a batch is the ⊕ of its parts).
///
/// No key may stand in two parts for the same query: it would count twice.
#[derive(Clone, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Part {
    /// `[row_blocks + 1]` over query tokens: row block `r` is the tokens `q_indptr[r]..q_indptr[r + 1]`.
    /// Tokens before the first and after the last entry have no keys in this part.
    pub q_indptr: Vec<u32>,
    /// The keys of each row block.
    pub table: PageTable,
    /// `[row_blocks]`: keys that stand after this table's last one, before the queries end (another part
    /// holds them): query `i` of `n` in a row block of `l` keys stands at position `l + after - n + i`.
    /// Empty: zero for all (the queries are the last tokens of their own table).
    pub keys_after: Vec<u32>,
}

impl Part {
    /// Row blocks of queries and their keys; the queries are the last tokens of their own table.
    #[must_use]
    pub const fn new(q_indptr: Vec<u32>, table: PageTable) -> Self {
        Self {
            q_indptr,
            table,
            keys_after: Vec::new(),
        }
    }

    /// With other parts holding keys that stand after this table's.
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

    /// The query tokens of a row block.
    #[must_use]
    #[inline]
    pub fn q_range(&self, row_block: usize) -> Range<u32> {
        self.q_indptr[row_block]..self.q_indptr[row_block + 1]
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

    /// Where the first query of a row block stands among the keys of its table; the next ones follow.
    ///
    /// Negative where the first keys of the table come after the first queries.
    #[must_use]
    #[inline]
    pub fn first_position(&self, row_block: usize) -> i32 {
        let Range { start, end } = self.q_range(row_block);
        let position = i64::from(self.kv_len(row_block)) + i64::from(self.after(row_block))
            - i64::from(end - start);
        position as i32
    }

    fn check(&self, part: usize, total_q: u32) -> Result<(), ProblemError> {
        self.table.check(part)?;
        check_indptr("q_indptr", &self.q_indptr)?;
        let row_blocks = self.row_blocks();
        if self.q_indptr.len() != row_blocks + 1 {
            let (got, expected) = (self.q_indptr.len() - 1, row_blocks);
            return Err(ProblemError::Length {
                name: "q_indptr (less one)",
                part,
                got,
                expected,
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
        if end > total_q {
            return Err(ProblemError::PartPastQueries {
                part,
                got: end,
                total_q,
            });
        }
        for (row_block, &after) in self.keys_after.iter().enumerate() {
            let position = u64::from(self.kv_len(row_block)) + u64::from(after);
            fits(
                "keys of a row block and after it",
                position,
                MAX_POSITION.into(),
            )?;
        }
        Ok(())
    }

    /// Row blocks that span requests have no order among their queries, so nothing may be hidden from any.
    fn check_shared_blocks(
        &self,
        part: usize,
        qo_indptr: &[u32],
        variant: &Variant,
    ) -> Result<(), ProblemError> {
        if (!variant.causal && variant.window_left.is_none()) || self.q_indptr == qo_indptr {
            return Ok(());
        }
        let mut request_ends = qo_indptr[1..].iter().copied().peekable();
        for row_block in 0..self.row_blocks() {
            let Range { start, end } = self.q_range(row_block);
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
            let (q_len, keys_after) = (end - start, self.after(row_block));
            if spans
                && self.kv_len(row_block) > 0
                && (variant.window_left.is_some() || keys_after < q_len)
            {
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

/// The requests of one step: ragged queries against paged keys.
///
/// Most batches have a single part whose row blocks are the requests. A request may have no queries, or
/// no keys: a query that sees no key gives output 0 and LSE −∞.
#[derive(Clone, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Batch {
    /// `[requests + 1]`: request `r` owns the query tokens `qo_indptr[r]..qo_indptr[r + 1]`.
    pub qo_indptr: Vec<u32>,
    /// At least one part.
    pub parts: Vec<Part>,
}

impl Batch {
    /// The usual batch: one table, one row block per request.
    #[must_use]
    pub fn new(qo_indptr: Vec<u32>, table: PageTable) -> Self {
        Self {
            parts: vec![Part::new(qo_indptr.clone(), table)],
            qo_indptr,
        }
    }

    /// A batch of several tables.
    #[must_use]
    pub const fn composed(qo_indptr: Vec<u32>, parts: Vec<Part>) -> Self {
        Self { qo_indptr, parts }
    }

    /// Number of requests.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.qo_indptr.len().saturating_sub(1)
    }

    /// Query tokens of all requests.
    #[must_use]
    pub fn total_q(&self) -> u32 {
        self.qo_indptr.last().copied().unwrap_or(0)
    }

    /// Query tokens of a request.
    #[must_use]
    pub fn q_len(&self, request: usize) -> u32 {
        self.qo_indptr[request + 1] - self.qo_indptr[request]
    }

    /// Keys that the last query of a request can reach, over all parts; 0 for a request without queries.
    #[must_use]
    pub fn kv_len(&self, request: usize) -> u64 {
        if self.q_len(request) == 0 {
            return 0;
        }
        let last = self.qo_indptr[request + 1] - 1;
        let keys = |part: &Part| {
            let ends = &part.q_indptr[1..];
            let row_block = ends.partition_point(|&end| end <= last);
            (row_block < ends.len() && part.q_indptr[row_block] <= last)
                .then(|| part.kv_len(row_block))
        };
        self.parts.iter().filter_map(keys).map(u64::from).sum()
    }

    /// Everything that can be wrong about the batch, in time linear in its size.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn check(&self, spec: &Spec) -> Result<(), ProblemError> {
        check_indptr("qo_indptr", &self.qo_indptr)?;
        if self.qo_indptr[0] != 0 {
            return Err(ProblemError::IndptrStart {
                name: "qo_indptr",
                got: self.qo_indptr[0],
            });
        }
        if self.parts.is_empty() {
            return Err(ProblemError::NoParts);
        }
        let total_q = self.total_q();
        let rows = u64::from(total_q) * u64::from(spec.q_heads);
        fits("query tokens × query heads", rows, i32::MAX as u64)?;
        for (index, part) in self.parts.iter().enumerate() {
            part.check(index, total_q)?;
            part.check_shared_blocks(index, &self.qo_indptr, &spec.variant)?;
            let head_dim = spec.head_dim_qk.max(spec.head_dim_v);
            let page =
                u64::from(part.table.page_size) * u64::from(spec.kv_heads) * u64::from(head_dim);
            fits("elements of a page", page, u32::MAX.into())?;
        }
        if let ([part], true) = (self.parts.as_slice(), spec.variant.causal) {
            for row_block in 0..part.row_blocks() {
                let Range { start, end } = part.q_range(row_block);
                let (q_len, kv_len) = (end - start, part.kv_len(row_block) + part.after(row_block));
                if q_len > kv_len && kv_len > 0 {
                    return Err(ProblemError::MoreQueriesThanKeys {
                        row_block,
                        q_len,
                        kv_len,
                    });
                }
            }
        }
        Ok(())
    }

    /// Whether the keys of the new tokens (each row block's last, one per query) may be written: a page
    /// that is written must stand once in the tables of its part. The batch is checked already.
    ///
    /// # Errors
    /// [`ProblemError::WritesSharedPage`].
    pub fn check_append(&self) -> Result<(), ProblemError> {
        for (index, part) in self.parts.iter().enumerate() {
            let mut writers = HashMap::new();
            for row_block in (0..part.row_blocks()).filter(|&r| part.after(r) == 0) {
                let queries = part.q_range(row_block).len() as u32;
                let kept = part.kv_len(row_block).saturating_sub(queries) / part.table.page_size;
                let written = if queries == 0 {
                    &[][..]
                } else {
                    &part.table.pages(row_block)[kept as usize..]
                };
                writers.extend(written.iter().map(|&page| (page, (row_block, 0))));
            }
            for &page in &part.table.indices {
                if let Some((row_block, uses)) = writers.get_mut(&page) {
                    *uses += 1;
                    if *uses > 1 {
                        return Err(ProblemError::WritesSharedPage {
                            part: index,
                            row_block: *row_block,
                            page,
                        });
                    }
                }
            }
        }
        Ok(())
    }
}

fn check_indptr(name: &'static str, indptr: &[u32]) -> Result<(), ProblemError> {
    if indptr.is_empty() {
        return Err(ProblemError::IndptrEmpty { name });
    }
    match indptr.windows(2).position(|pair| pair[1] < pair[0]) {
        Some(at) => Err(ProblemError::IndptrFalls {
            name,
            index: at + 1,
            previous: indptr[at],
            got: indptr[at + 1],
        }),
        None => Ok(()),
    }
}
