//! Page tables: which pages hold the keys of each row block.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::{
    super::{Integer, MAX_PAGE_SIZE, MAX_POSITION, ProblemError, fits},
    Quantity, check_indptr,
};

/// The largest pages that contiguous memory is cut into: those of a tile of keys.
const CONTIGUOUS: u32 = 128;

/// Block-sparse rows: for each row block of queries, the pages that hold its keys, in order (CSR).
///
/// ```
/// use tandem_attn::problem::PageTable;
///
/// // A block table of a server, longer than the keys need, with padding at its end.
/// let block_table: Vec<i64> = vec![7, 3, 9, -1];
/// let mut table = PageTable::new(16, 1000);
/// table.try_push(&block_table, 20)?;
/// assert_eq!(table.pages(0), [7, 3]);
/// // The slots of some of the request's keys, as `append_paged_kv` takes them.
/// assert_eq!(table.slots(0, 15..18)?, [7 * 16 + 15, 3 * 16, 3 * 16 + 1]);
/// # Ok::<(), tandem_attn::problem::ProblemError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PageTable {
    /// Tokens in a page (the column block size): 1 (token-level sparsity, tree masks) to 4096.
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
    /// The most tokens a page may hold.
    pub const MAX_PAGE_SIZE: u32 = MAX_PAGE_SIZE;
    /// The longest row block: positions are signed 32-bit, and `i32::MAX` stands for "no window".
    pub const MAX_POSITION: u32 = MAX_POSITION;

    /// From this page id on, ids stand for the indices that runs are given
    /// ([`Batch::of_top_k`](crate::problem::Batch::of_top_k)). A pool of so many pages of one token is refused
    /// on the CPU: with 8-bit keys of one head of 64 its keys take 64 GiB.
    pub(crate) const CHOSEN: u32 = 1 << 30;

    /// A table without rows for a pool of `pool_pages` pages. [`Batch::check`](crate::problem::Batch::check) checks the page size.
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

    /// As [`new`](Self::new), but checks the page size at once.
    ///
    /// # Errors
    /// [`ProblemError::PageSize`].
    pub fn try_new(page_size: u32, pool_pages: u32) -> Result<Self, ProblemError> {
        check_page_size(0, page_size)?;
        Ok(Self::new(page_size, pool_pages))
    }

    /// A table from its arrays (CSR). [`Batch::check`](crate::problem::Batch::check) checks them.
    #[must_use]
    pub const fn from_csr(
        page_size: u32,
        pool_pages: u32,
        indptr: Vec<u32>,
        indices: Vec<u32>,
        last_page_len: Vec<u32>,
    ) -> Self {
        Self {
            page_size,
            pool_pages,
            indptr,
            indices,
            last_page_len,
        }
    }

    /// The table of a cache without pages: contiguous memory for `tokens` keys, in which each row block owns a run.
    ///
    /// Runs are cut into the largest pages that they allow, of at most 128 tokens. If one run starts at an odd token, pages
    /// have one token. Kernels are fastest with pages of a multiple of 8 tokens, so start all runs, and end the memory, at
    /// multiples of 8.
    ///
    /// ```
    /// use tandem_attn::problem::PageTable;
    ///
    /// // Two requests in a cache of 4 × 1024 tokens.
    /// let table = PageTable::contiguous(4096, &[0..700, 1024..1025])?;
    /// assert_eq!(table.page_size, 128);
    /// assert_eq!((table.kv_len(0), table.pages(1)), (700, &[8][..]));
    /// # Ok::<(), tandem_attn::problem::ProblemError>(())
    /// ```
    ///
    /// # Errors
    /// [`ProblemError::RunPastEnd`], [`ProblemError::TooLarge`].
    pub fn contiguous(tokens: u32, runs: &[Range<u32>]) -> Result<Self, ProblemError> {
        if let Some(run) = runs.iter().position(|run| run.end > tokens) {
            let got = runs[run].end;
            return Err(ProblemError::RunPastEnd { run, got, tokens });
        }
        let starts = runs.iter().filter(|run| !run.is_empty());
        let bits = starts.fold(tokens | CONTIGUOUS, |bits, run| bits | run.start);
        let page_size = 1 << bits.trailing_zeros();
        let mut table = Self::new(page_size, tokens / page_size);
        for run in runs {
            let first = run.start / page_size;
            table.try_push(first.., run.len() as u32)?;
        }
        Ok(table)
    }

    /// Appends a row block with `kv_len` keys on the first of `pages`. Entries that the keys do not need, such as pages for later
    /// tokens or padding, are ignored. [`Batch::check`](crate::problem::Batch::check), which planning calls, compares the ids with
    /// `pool_pages`; the pool may still grow until then.
    ///
    /// # Errors
    /// [`ProblemError::TooFewPages`], [`ProblemError::PageId`] for a number that no pool has as a page, [`ProblemError::PageSize`] or
    /// [`ProblemError::TooLarge`]; the table is then unchanged.
    pub fn try_push<I: Integer>(
        &mut self,
        pages: impl IntoIterator<Item = I>,
        kv_len: u32,
    ) -> Result<(), ProblemError> {
        check_page_size(0, self.page_size)?;
        fits(
            Quantity::Keys("keys of a row block"),
            kv_len.into(),
            MAX_POSITION.into(),
        )?;
        let (row_block, page_size) = (self.row_blocks(), self.page_size);
        let needed = kv_len.div_ceil(page_size);
        let first = self.indices.len();
        let end = first as u64 + u64::from(needed);
        fits(
            Quantity::Batch("the number of page ids"),
            end,
            u32::MAX.into(),
        )?;

        let pages = pages.into_iter().map(Integer::value);
        let mut wrong = None;
        let ids = pages.take(needed as usize).map_while(|id| {
            let fitting = u32::try_from(id).ok();
            wrong = wrong.or_else(|| fitting.is_none().then_some(id));
            fitting
        });
        self.indices.extend(ids);
        let got = self.indices.len() - first;
        if got < needed as usize {
            self.indices.truncate(first);
            return Err(match wrong {
                Some(id) => ProblemError::PageId {
                    row_block,
                    index: got,
                    got: id,
                },
                None => ProblemError::TooFewPages {
                    row_block,
                    kv_len,
                    got,
                    needed,
                    page_size,
                },
            });
        }
        self.indptr.push(end as u32);
        let before_last = needed.saturating_sub(1) * page_size;
        self.last_page_len.push(kv_len - before_last);
        Ok(())
    }

    /// As [`try_push`](Self::try_push), for pages that are known to be valid.
    ///
    /// # Panics
    /// If `try_push` returns an error.
    #[track_caller]
    pub fn push(&mut self, pages: &[u32], kv_len: u32) {
        if let Err(error) = self.try_push(pages, kv_len) {
            panic!("{error}");
        }
    }

    /// The slots of some positions of a row block, each `page × page_size + offset`. New keys and values of these positions are
    /// written there.
    ///
    /// # Errors
    /// [`ProblemError::PositionPastKeys`] if the row block has fewer keys, [`ProblemError::TooLarge`]
    /// if the pool has more slots than 32 bits can count.
    ///
    /// # Panics
    /// If there is no such row block.
    pub fn slots(&self, row_block: usize, positions: Range<u32>) -> Result<Vec<u32>, ProblemError> {
        let kv_len = self.kv_len(row_block);
        if positions.end > kv_len {
            return Err(ProblemError::PositionPastKeys {
                row_block,
                got: positions.end - 1,
                kv_len,
            });
        }
        let pages = self.pages(row_block);
        let slot = |position: u32| {
            let page = u64::from(pages[(position / self.page_size) as usize]);
            let slot = page * u64::from(self.page_size) + u64::from(position % self.page_size);
            // The largest 32-bit number is the slot of tokens that are not written.
            fits(Quantity::Pool("a slot"), slot, u64::from(u32::MAX) - 1)?;
            Ok(slot as u32)
        };
        positions.map(slot).collect()
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
        check_page_size(part, page_size)?;
        fits(
            Quantity::Batch("the number of page ids"),
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
        let maybe = pool_pages == 0 || pool_pages > 1 << 31 || any_from(&self.indices, pool_pages);
        if maybe && let Some(index) = self.indices.iter().position(|&id| id >= pool_pages) {
            return Err(ProblemError::PageOutOfPool {
                part,
                index,
                got: self.indices[index],
                pool_pages,
            });
        }
        let pages = self.indptr.windows(2).map(|pair| pair[1] - pair[0]);
        let blocks = pages.zip(self.last_page_len.iter().copied());
        let wrong = |pages: u32, got: u32| (got > page_size) | ((got == 0) != (pages == 0));
        // Whether any is wrong, without a branch for each. Only then, which one.
        let most = MAX_POSITION / page_size;
        let any = |any, (pages, got)| any | wrong(pages, got) | (pages > most);
        if !blocks.clone().fold(false, any) {
            return Ok(());
        }
        for (row_block, (pages, got)) in blocks.enumerate() {
            if wrong(pages, got) {
                return Err(ProblemError::LastPageLen {
                    part,
                    row_block,
                    got,
                    pages,
                    page_size,
                });
            }
            let keys = u64::from(pages) * u64::from(page_size);
            fits(
                Quantity::Keys("keys of a row block"),
                keys,
                MAX_POSITION.into(),
            )?;
        }
        Ok(())
    }
}

/// Whether any id is `pool_pages` (at most 2³¹) or more. All ids are looked at: this loop vectorises, but a search with
/// an early exit does not.
fn any_from(ids: &[u32], pool_pages: u32) -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        /// With an instruction set whose vectors have a maximum: half the instructions, and twice the width.
        #[target_feature(enable = "avx2")]
        fn largest(ids: &[u32]) -> u32 {
            ids.iter().fold(0, |largest, &id| largest.max(id))
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the machine has the instructions.
            return unsafe { largest(ids) } >= pool_pages;
        }
    }
    // For an id beyond the last page, the sign bit of the id or of its sum with `beyond` is set.
    let beyond = (1u32 << 31) - pool_pages;
    let signs = |(of, past): (u32, u32), &id: &u32| (of | id, past | id.wrapping_add(beyond));
    let (of, past) = ids.iter().fold((0, 0), signs);
    (of | past) >= 1 << 31
}

fn check_page_size(part: usize, got: u32) -> Result<(), ProblemError> {
    match got {
        1..=MAX_PAGE_SIZE => Ok(()),
        _ => Err(ProblemError::PageSize { part, got }),
    }
}
