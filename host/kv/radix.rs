//! A prefix cache: a radix tree over token ids whose edges are runs of pages.

use std::{
    collections::{BTreeMap, HashMap},
    ops::Bound,
};

use super::{PagePool, Sequence};

/// A prefix cache: pages of keys that were computed for earlier requests, found by their tokens.
///
/// The cache holds full pages, with one reference each. Requests that begin with the same tokens get the same page ids;
/// the planner finds shared prefixes by these ids. [`evict`](Self::evict) frees the least recently used pages first, leaves
/// before their parents, and never a page that a request holds. A clone holds the same pages, so use it with a clone of the pool.
///
/// Equal tokens mean equal keys here. Where keys depend on something else, too, use one cache for each value of it (such as a LoRA
/// adapter) on the same pool, or ids that no other content has (for the places of an image, a hash of the image).
///
/// ```
/// use tandem_attn::kv::{PagePool, PrefixCache, Sequence};
///
/// let mut pool = PagePool::new(16, 4);
/// let mut cache = PrefixCache::new(pool.page_size());
/// let prompt: Vec<u32> = (100..110).collect();
///
/// let mut first = Sequence::default();
/// let _ = first.append(&mut pool, 10)?;
/// cache.insert(&mut pool, &prompt, &mut first); // its two full pages
///
/// let second = cache.acquire(&mut pool, &prompt);
/// assert_eq!((second.len(), second.pages()), (8, &first.pages()[..2]));
/// # second.release(&mut pool);
/// # Ok::<(), tandem_attn::kv::OutOfPages>(())
/// ```
#[derive(Clone, Debug)]
pub struct PrefixCache {
    page_size: usize,
    nodes: Vec<Node>,
    vacant: Vec<usize>,
    /// Leaves by [`Node::used`].
    leaves: BTreeMap<u64, usize>,
    clock: u64,
    pages: u32,
}

/// A prefix that stays in the cache until it is unpinned.
#[derive(Debug)]
#[must_use = "the pages stay taken until the pin is given back"]
pub struct Pin(Sequence);

impl Pin {
    /// Number of pinned tokens; always whole pages.
    #[must_use]
    pub const fn len(&self) -> u32 {
        self.0.len()
    }

    /// The pinned pages.
    #[must_use]
    pub fn pages(&self) -> &[u32] {
        self.0.pages()
    }

    /// Whether nothing was found to pin.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[derive(Clone, Debug, Default)]
struct Node {
    parent: usize,
    /// The tokens of the edge to this node, `page_size` for each of `pages`.
    tokens: Vec<u32>,
    pages: Vec<u32>,
    /// Children, by the tokens of the first page of their edges.
    children: HashMap<Box<[u32]>, usize>,
    /// Time of the last use: no two nodes have the same, and parents are later than their children.
    used: u64,
}

const ROOT: usize = 0;

impl PrefixCache {
    /// An empty cache of pages of `page_size` tokens.
    ///
    /// # Panics
    /// If the page size is zero.
    #[must_use]
    pub fn new(page_size: u32) -> Self {
        assert!(page_size > 0, "a page holds at least one token");
        Self {
            page_size: page_size as usize,
            nodes: vec![Node::default()],
            vacant: Vec::new(),
            leaves: BTreeMap::new(),
            clock: 0,
            pages: 0,
        }
    }

    /// Pages in the cache.
    #[must_use]
    pub const fn pages(&self) -> u32 {
        self.pages
    }

    /// Number of leading tokens that are cached, in whole pages. This does not count as a use.
    #[must_use]
    pub fn matches(&self, tokens: &[u32]) -> usize {
        let mut matched = 0;
        self.walk(tokens, |_, common| matched += common * self.page_size);
        matched
    }

    /// A new sequence on the cached pages of the longest cached prefix of `tokens`. It holds a reference to each page.
    ///
    /// The last token of a prompt must always be computed, so pass the prompt without its last token.
    ///
    /// # Panics
    /// If the pool has another page size.
    pub fn acquire(&mut self, pool: &mut PagePool, tokens: &[u32]) -> Sequence {
        self.check_pool(pool);
        let mut pages = Vec::new();
        let node = self.walk(tokens, |node, common| {
            pages.extend_from_slice(&self.nodes[node].pages[..common])
        });
        self.touch(node);
        pages.iter().for_each(|&page| pool.retain(page));
        Sequence::from_pages(pool, pages)
    }

    /// Adds the full pages of a sequence of `tokens` to the cache. If a prefix is already cached on other pages,
    /// the sequence uses the cached pages from now on and releases its own. Returns the number of pages added.
    ///
    /// # Panics
    /// If there are fewer tokens than the sequence has, or the pool has another page size.
    pub fn insert(&mut self, pool: &mut PagePool, tokens: &[u32], sequence: &mut Sequence) -> u32 {
        self.check_pool(pool);
        assert!(
            tokens.len() >= sequence.len() as usize,
            "a token id for each token of the sequence"
        );
        let full = sequence.len() as usize / self.page_size;
        let mut rest = &tokens[..full * self.page_size];
        let mut pages = &mut sequence.pages_mut()[..full];
        let mut node = ROOT;
        while let Some(mut child) = self.child(node, rest) {
            let common = self.common(child, rest);
            if common < self.nodes[child].pages.len() {
                child = self.split(child, common);
            }
            let (known, new) = pages.split_at_mut(common);
            for (own, &cached) in known.iter_mut().zip(&self.nodes[child].pages) {
                pool.retain(cached);
                pool.release(*own);
                *own = cached;
            }
            (pages, rest, node) = (new, &rest[common * self.page_size..], child);
        }
        if !pages.is_empty() {
            pages.iter().for_each(|&page| pool.retain(page));
            self.pages += pages.len() as u32;
            node = self.add_leaf(node, rest.to_vec(), pages.to_vec());
        }
        self.touch(node);
        pages.len() as u32
    }

    fn check_pool(&self, pool: &PagePool) {
        assert_eq!(
            pool.page_size() as usize,
            self.page_size,
            "page size of pool and cache"
        );
    }

    /// Protects the longest cached prefix of `tokens` from eviction.
    ///
    /// # Panics
    /// If the pool has another page size.
    pub fn pin(&mut self, pool: &mut PagePool, tokens: &[u32]) -> Pin {
        Pin(self.acquire(pool, tokens))
    }

    /// Ends a pin.
    pub fn unpin(&mut self, pool: &mut PagePool, pin: Pin) {
        pin.0.release(pool);
    }

    /// Number of pages that only the cache holds, counted up to `most`: so many [`evict`](Self::evict) can free.
    #[must_use]
    pub fn unused(&self, pool: &PagePool, most: u32) -> u32 {
        let pages = self.nodes.iter().flat_map(|node| &node.pages);
        let unused = pages.filter(|&&page| pool.refs(page) == 1);
        unused.take(most as usize).count() as u32
    }

    /// Frees up to `wanted` pages, the least recently used first. Returns the number of pages freed.
    pub fn evict(&mut self, pool: &mut PagePool, wanted: u32) -> u32 {
        let (mut freed, mut after) = (0, 0);
        // A node that becomes a leaf here was used later than its children, so the loop still reaches it.
        while freed < wanted
            && let Some((&used, &leaf)) = self
                .leaves
                .range((Bound::Excluded(after), Bound::Unbounded))
                .next()
        {
            freed += self.trim(pool, leaf, wanted - freed);
            after = used;
        }
        freed
    }

    /// Evicts pages from the end of a leaf's edge, and the leaf if none are left.
    fn trim(&mut self, pool: &mut PagePool, leaf: usize, wanted: u32) -> u32 {
        let node = &mut self.nodes[leaf];
        let unused = node
            .pages
            .iter()
            .rev()
            .take_while(|&&page| pool.refs(page) == 1)
            .take(wanted as usize);
        let freed = unused.count();
        let kept = node.pages.len() - freed;
        node.pages.drain(kept..).for_each(|page| {
            pool.release(page);
        });
        let cut = node.tokens.split_off(kept * self.page_size);
        if kept == 0 {
            let (used, parent) = (node.used, node.parent);
            self.leaves.remove(&used);
            self.vacant.push(leaf);
            let parent_node = &mut self.nodes[parent];
            parent_node.children.remove(&cut[..self.page_size]);
            if parent != ROOT && parent_node.children.is_empty() {
                self.leaves.insert(parent_node.used, parent);
            }
        }
        self.pages -= freed as u32;
        freed as u32
    }

    /// Follows `tokens` as far as they are cached. Calls back with each node on the way and the number of pages of its
    /// edge that agree. Returns the last node.
    fn walk(&self, tokens: &[u32], mut visit: impl FnMut(usize, usize)) -> usize {
        let (mut node, mut rest) = (ROOT, tokens);
        while let Some(child) = self.child(node, rest) {
            let common = self.common(child, rest);
            visit(child, common);
            rest = &rest[common * self.page_size..];
            node = child;
            if common < self.nodes[child].pages.len() {
                break;
            }
        }
        node
    }

    fn child(&self, node: usize, tokens: &[u32]) -> Option<usize> {
        self.nodes[node]
            .children
            .get(tokens.get(..self.page_size)?)
            .copied()
    }

    /// Pages of a node's edge that agree with `tokens`.
    fn common(&self, node: usize, tokens: &[u32]) -> usize {
        let edge = self.nodes[node].tokens.chunks_exact(self.page_size);
        edge.zip(tokens.chunks_exact(self.page_size))
            .take_while(|(a, b)| a == b)
            .count()
    }

    /// Cuts a node's edge after `pages`: a new node takes the upper part and is returned.
    fn split(&mut self, node: usize, pages: usize) -> usize {
        let tokens = pages * self.page_size;
        let Node { parent, .. } = self.nodes[node];
        let used = self.tick();
        let upper_tokens: Vec<u32> = self.nodes[node].tokens.drain(..tokens).collect();
        let upper_pages = self.nodes[node].pages.drain(..pages).collect();
        let first: Box<[u32]> = upper_tokens[..self.page_size].into();
        let upper = self.add_node(Node {
            parent,
            tokens: upper_tokens,
            pages: upper_pages,
            used,
            ..Node::default()
        });
        self.nodes[parent].children.insert(first, upper);
        // The lower part becomes a child of the upper part. It keeps its index, and so its place among the leaves.
        let lower_first = self.nodes[node].tokens[..self.page_size].into();
        self.nodes[upper].children.insert(lower_first, node);
        self.nodes[node].parent = upper;
        upper
    }

    fn add_leaf(&mut self, parent: usize, tokens: Vec<u32>, pages: Vec<u32>) -> usize {
        self.leaves.remove(&self.nodes[parent].used);
        let first = tokens[..self.page_size].into();
        let used = self.tick();
        let leaf = self.add_node(Node {
            parent,
            tokens,
            pages,
            used,
            ..Node::default()
        });
        self.nodes[parent].children.insert(first, leaf);
        self.leaves.insert(used, leaf);
        leaf
    }

    fn add_node(&mut self, node: Node) -> usize {
        match self.vacant.pop() {
            Some(index) => {
                self.nodes[index] = node;
                index
            }
            None => {
                self.nodes.push(node);
                self.nodes.len() - 1
            }
        }
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Marks a node and all above it as used now.
    fn touch(&mut self, mut node: usize) {
        while node != ROOT {
            let now = self.tick();
            let before = std::mem::replace(&mut self.nodes[node].used, now);
            if self.nodes[node].children.is_empty() {
                self.leaves.remove(&before);
                self.leaves.insert(now, node);
            }
            node = self.nodes[node].parent;
        }
    }
}
