//! Allocation and reference counts of pages.

use thiserror::Error;

/// There are not enough free pages. Nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error(
    "{wanted} pages are wanted and {free} of {total} are free: evict cached prefixes, preempt a request, or \
     make the pool larger"
)]
pub struct OutOfPages {
    /// Pages asked for.
    pub wanted: u32,
    /// Pages that are free.
    pub free: u32,
    /// Pages in the pool.
    pub total: u32,
}

/// A copy of a page that the caller must make, because the page is about to be written and another request reads it.
///
/// Copy keys and values of all layers, and the page's scales if each token has one, before the page is written:
/// [`Cpu::copy_pages`](crate::Cpu::copy_pages), on a GPU `Gpu::copy_pages` on the stream of the append.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[must_use = "the new page holds nothing until the old one is copied to it"]
pub struct PageCopy {
    /// The shared page.
    pub from: u32,
    /// The page that takes its place.
    pub to: u32,
}

/// Allocation and reference counts of pages; the memory itself is the caller's.
///
/// Sequences and the prefix cache hold references to a page. It is free again when the last reference is released.
///
/// ```
/// use tandem_attn::kv::PagePool;
///
/// let mut pool = PagePool::new(2, 16);
/// let page = pool.alloc()?;
/// pool.retain(page); // another request reads it, too
/// let copy = pool.make_unique(page)?.expect("it was shared");
/// assert_eq!((pool.refs(page), pool.refs(copy.to), pool.free_pages()), (1, 1, 0));
/// # Ok::<(), tandem_attn::kv::OutOfPages>(())
/// ```
#[derive(Clone, Debug)]
pub struct PagePool {
    page_size: u32,
    refs: Vec<u32>,
    /// Free pages. The last one is allocated next.
    free: Vec<u32>,
}

impl PagePool {
    /// `pages` free pages of `page_size` tokens.
    ///
    /// # Panics
    /// If the page size is zero.
    #[must_use]
    pub fn new(pages: u32, page_size: u32) -> Self {
        assert!(page_size > 0, "a page holds at least one token");
        Self {
            page_size,
            refs: vec![0; pages as usize],
            free: (0..pages).rev().collect(),
        }
    }

    /// Tokens in a page.
    #[must_use]
    pub const fn page_size(&self) -> u32 {
        self.page_size
    }

    /// Total number of pages.
    #[must_use]
    pub fn pages(&self) -> u32 {
        self.refs.len() as u32
    }

    /// Number of free pages.
    #[must_use]
    pub fn free_pages(&self) -> u32 {
        self.free.len() as u32
    }

    /// Reference count of a page.
    ///
    /// # Panics
    /// If there is no such page.
    #[must_use]
    #[track_caller]
    pub fn refs(&self, page: u32) -> u32 {
        match self.refs.get(page as usize) {
            Some(&refs) => refs,
            None => self.has_no(page),
        }
    }

    /// References to a page that may be changed.
    #[track_caller]
    fn refs_mut(&mut self, page: u32) -> &mut u32 {
        if page >= self.pages() {
            self.has_no(page);
        }
        &mut self.refs[page as usize]
    }

    #[track_caller]
    fn has_no(&self, page: u32) -> ! {
        panic!(
            "there is no page {page}: the pool has {} pages",
            self.pages()
        )
    }

    /// Allocates a free page, with a reference count of one.
    ///
    /// # Errors
    /// [`OutOfPages`].
    pub fn alloc(&mut self) -> Result<u32, OutOfPages> {
        self.reserve(1)?;
        let page = self.free.pop().expect("one is free");
        self.refs[page as usize] = 1;
        Ok(page)
    }

    /// Checks that `wanted` pages are free.
    ///
    /// # Errors
    /// [`OutOfPages`] if they are not.
    pub fn reserve(&self, wanted: u32) -> Result<(), OutOfPages> {
        let (free, total) = (self.free_pages(), self.pages());
        if wanted <= free {
            Ok(())
        } else {
            Err(OutOfPages {
                wanted,
                free,
                total,
            })
        }
    }

    /// Adds a reference to a page.
    ///
    /// # Panics
    /// If the page is free, or there is no such page.
    #[track_caller]
    pub fn retain(&mut self, page: u32) {
        let refs = self.refs_mut(page);
        assert!(*refs > 0, "page {page} is free and cannot be retained");
        *refs += 1;
    }

    /// Releases a reference to a page. Returns whether the page is free now.
    ///
    /// # Panics
    /// If the page is free already, or there is no such page.
    #[track_caller]
    pub fn release(&mut self, page: u32) -> bool {
        let refs = self.refs_mut(page);
        assert!(*refs > 0, "page {page} is free already");
        *refs -= 1;
        let freed = *refs == 0;
        if freed {
            self.free.push(page);
        }
        freed
    }

    /// Makes a page safe to write (copy-on-write). If the page is shared, the caller's reference moves to a new page, and the
    /// caller must make the returned copy. `None` if the page was not shared.
    ///
    /// # Errors
    /// [`OutOfPages`] if the page is shared and no page is free.
    ///
    /// # Panics
    /// If the page is free, or there is no such page.
    #[track_caller]
    pub fn make_unique(&mut self, page: u32) -> Result<Option<PageCopy>, OutOfPages> {
        match self.refs(page) {
            0 => panic!("page {page} is free and cannot be written"),
            1 => return Ok(None),
            _ => {}
        }
        let to = self.alloc()?;
        self.release(page);
        Ok(Some(PageCopy { from: page, to }))
    }
}
