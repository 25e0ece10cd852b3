//! The pages of one request.

use super::{OutOfPages, PageCopy, PagePool};
use crate::problem::{PageTable, ProblemError};

/// The pages of one request, and the number of tokens on them.
///
/// Call [`Sequence::release`] to return the pages. Dropping a sequence leaks them.
///
/// ```
/// use tandem_attn::{kv::{PagePool, Sequence}, problem::PageTable};
///
/// let mut pool = PagePool::new(8, 4);
/// let mut prompt = Sequence::default();
/// assert_eq!(prompt.append(&mut pool, 6)?, None); // pages 0 and 1
/// let mut sample = prompt.fork(&mut pool); // shares both
/// let copy = sample.append(&mut pool, 1)?.expect("page 1 is half full and shared");
/// assert_eq!((prompt.pages(), sample.pages()), (&[0, 1][..], &[0, copy.to][..]));
///
/// let mut table = PageTable::new(pool.page_size(), pool.pages());
/// prompt.push_to(&mut table);
/// sample.push_to(&mut table);
/// assert_eq!((table.kv_len(0), table.kv_len(1)), (6, 7));
/// # Ok::<(), tandem_attn::kv::OutOfPages>(())
/// ```
#[derive(Debug, Default, PartialEq, Eq)]
#[must_use = "its pages are leaked unless it is released"]
pub struct Sequence {
    pages: Vec<u32>,
    len: u32,
    /// Tokens in a page; 0 while there are no pages.
    page_size: u32,
}

impl Sequence {
    /// A sequence on full pages to which the caller already holds references, as
    /// [`PrefixCache::acquire`](super::PrefixCache::acquire) does.
    pub fn from_pages(pool: &PagePool, pages: Vec<u32>) -> Self {
        let page_size = match pages.is_empty() {
            true => 0,
            false => pool.page_size(),
        };
        let len = pages.len() as u32 * page_size;
        Self {
            pages,
            len,
            page_size,
        }
    }

    /// Number of tokens.
    #[must_use]
    pub const fn len(&self) -> u32 {
        self.len
    }

    /// Whether there are no tokens.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The pages, in order.
    #[must_use]
    pub fn pages(&self) -> &[u32] {
        &self.pages
    }

    /// The pages, for the prefix cache to trade duplicates.
    pub(super) fn pages_mut(&mut self) -> &mut [u32] {
        &mut self.pages
    }

    /// Number of pages that [`Sequence::append`] would allocate; `u32::MAX`, which no pool has, for more tokens than 32 bits count.
    ///
    /// # Panics
    /// As [`append`](Self::append).
    #[must_use]
    pub fn pages_for(&self, pool: &PagePool, tokens: u32) -> u32 {
        self.check_pool(pool);
        let Some(len) = self.len.checked_add(tokens) else {
            return u32::MAX;
        };
        let grown = len.div_ceil(pool.page_size()) - self.pages.len() as u32;
        grown + u32::from(self.copies_last(pool, tokens).is_some())
    }

    /// Makes room for more tokens at the end. If the last page is partly filled and shared, it is replaced by a new page; the
    /// caller must make the returned copy before it writes.
    ///
    /// # Errors
    /// [`OutOfPages`]; the sequence and the pool are then unchanged.
    ///
    /// # Panics
    /// If the sequence has pages of a pool with another page size.
    pub fn append(
        &mut self,
        pool: &mut PagePool,
        tokens: u32,
    ) -> Result<Option<PageCopy>, OutOfPages> {
        pool.reserve(self.pages_for(pool, tokens))?;
        let mut copy = None;
        if let Some(last) = self.copies_last(pool, tokens) {
            copy = pool.make_unique(last)?;
            if let (Some(PageCopy { to, .. }), Some(last)) = (copy, self.pages.last_mut()) {
                *last = to;
            }
        }
        self.len += tokens;
        while (self.pages.len() as u32) < self.len.div_ceil(pool.page_size()) {
            self.pages.push(pool.alloc()?);
            self.page_size = pool.page_size();
        }
        Ok(copy)
    }

    /// Drops the tokens from `len` on and releases the pages that only they used, for example rejected draft tokens.
    ///
    /// # Panics
    /// As [`append`](Self::append).
    pub fn truncate(&mut self, pool: &mut PagePool, len: u32) {
        self.check_pool(pool);
        self.len = self.len.min(len);
        for page in self
            .pages
            .drain(self.len.div_ceil(pool.page_size()) as usize..)
        {
            pool.release(page);
        }
        if self.pages.is_empty() {
            self.page_size = 0;
        }
    }

    fn check_pool(&self, pool: &PagePool) {
        assert!(
            self.pages.is_empty() || self.page_size == pool.page_size(),
            "the sequence has pages of {} tokens and the pool of {}: use the pool of its pages",
            self.page_size,
            pool.page_size()
        );
    }

    /// Another sequence on the same pages, for parallel sampling or beam search.
    pub fn fork(&self, pool: &mut PagePool) -> Self {
        self.pages.iter().for_each(|&page| pool.retain(page));
        Self {
            pages: self.pages.clone(),
            ..*self
        }
    }

    /// Releases all pages.
    pub fn release(self, pool: &mut PagePool) {
        self.pages.into_iter().for_each(|page| {
            pool.release(page);
        });
    }

    /// Appends the sequence to a table as a row block.
    ///
    /// # Errors
    /// [`ProblemError::SequencePages`] if the table has another page size, and the errors of [`PageTable::try_push`]. The table is
    /// then unchanged.
    pub fn try_push_to(&self, table: &mut PageTable) -> Result<(), ProblemError> {
        let (got, expected) = (self.page_size, table.page_size);
        if !self.pages.is_empty() && got != expected {
            return Err(ProblemError::SequencePages { got, expected });
        }
        table.try_push(self.pages.iter().copied(), self.len)
    }

    /// As [`try_push_to`](Self::try_push_to), for a table with the page size of the pool.
    ///
    /// # Panics
    /// If `try_push_to` returns an error.
    #[track_caller]
    pub fn push_to(&self, table: &mut PageTable) {
        if let Err(error) = self.try_push_to(table) {
            panic!("{error}");
        }
    }

    /// The last page, if it must be copied before `tokens` can be written.
    fn copies_last(&self, pool: &PagePool, tokens: u32) -> Option<u32> {
        let half_filled = !self.len.is_multiple_of(pool.page_size());
        self.pages
            .last()
            .copied()
            .filter(|&last| tokens > 0 && half_filled && pool.refs(last) > 1)
    }
}
