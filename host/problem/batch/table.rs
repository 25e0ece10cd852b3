//! Which pages hold the keys of each row block.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::{
    super::{MAX_PAGE_SIZE, MAX_POSITION, ProblemError, fits},
    check_indptr,
};

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

    pub(super) fn check(&self, part: usize) -> Result<(), ProblemError> {
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
