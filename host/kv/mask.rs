//! Arbitrary masks as block-sparse rows: pages of one token, one row block for each query.
//!
//! A page of such a table is a *token slot*: token `t` of page `p` in a pool of `page_size`-token pages is
//! slot `p · page_size + t` (see [`KvView::by_token`](super::KvView::by_token)).

use kernels_gpu::masks::REACH;

use crate::problem::{Batch, PageTable, Part, Spec};

/// Slots of the first `kv_len` tokens on `pages`.
pub fn slots(pages: &[u32], page_size: u32, kv_len: u32) -> impl Iterator<Item = u32> {
    (0..kv_len).map(move |key| pages[(key / page_size) as usize] * page_size + key % page_size)
}

impl Part {
    /// A part in which each query token sees exactly the given slots, in this order.
    ///
    /// The first row is for query token `first_token`; the other rows follow.
    ///
    /// ```
    /// use tandem_attn::problem::{Batch, Part, Spec};
    ///
    /// // Two queries of a request on pages 9 and 4 of 4 tokens: one sees every other key, one sees all six.
    /// let all = vec![36, 37, 38, 39, 16, 17];
    /// let every_other = all.iter().copied().step_by(2).collect();
    /// let part = Part::token_level(0, 10 * 4, [every_other, all]);
    /// let batch = Batch::composed(vec![0, 2], vec![part]);
    /// batch.check(&Spec::new(8, 2, 64).non_causal())?;
    /// # Ok::<(), tandem_attn::problem::ProblemError>(())
    /// ```
    pub fn token_level<Row: IntoIterator<Item = u32>>(
        first_token: u32,
        pool_slots: u32,
        rows: impl IntoIterator<Item = Row>,
    ) -> Self {
        let mut part = Self::new(vec![first_token], PageTable::new(1, pool_slots));
        for (row, token) in rows.into_iter().zip(first_token + 1..) {
            let visible: Vec<u32> = row.into_iter().collect();
            part.table.push(&visible, visible.len() as u32);
            part.q_indptr.push(token);
        }
        part
    }
}

impl Batch {
    /// The masks ([`ancestors`](Self::ancestors)) of a tree of draft tokens. The keys of the draft tokens are the last keys of their
    /// request's table, in order. Each token sees the context, its ancestors and itself. `parents` gives the parent of each token, or
    /// `None` if it follows the context. All tokens of a request are rows of the same tiles, on the GPU and on the CPU.
    ///
    /// Rotate keys by a token's depth, not its place. A window, `Spec::with_rotary` and hooks count distances by places: a tree is then
    /// exact only as `DraftTree::batch` (feature `unstable`) gives it.
    ///
    /// ```
    /// use tandem_attn::problem::{Batch, PageTable, Spec};
    ///
    /// // Two guesses for the next token, and one that follows the first of them.
    /// let words = Batch::ancestors_of(&[None, None, Some(0)]);
    /// // The last one sees itself and the key two before, not the one between.
    /// assert_eq!(words[2] & 0b111, 0b101);
    /// let mut table = PageTable::new(16, 4);
    /// table.push(&[2, 0], 6 + 3);
    /// let batch = Batch::new(vec![0, 3], table).with_ancestors(words);
    /// batch.check(&Spec::new(8, 2, 64))?;
    /// # Ok::<(), tandem_attn::problem::ProblemError>(())
    /// ```
    ///
    /// # Panics
    /// If there are more than 64 tokens ([`push_mask_tree`](Self::push_mask_tree) takes any number), or a parent does not come before its child.
    #[must_use]
    pub fn ancestors_of(parents: &[Option<u32>]) -> Vec<u64> {
        assert!(
            parents.len() <= REACH as usize,
            "{} drafted tokens: a word reaches back {REACH} keys (Batch::push_mask_tree takes any number)",
            parents.len()
        );
        let mut paths: Vec<u64> = Vec::with_capacity(parents.len());
        for (token, &parent) in (0_u32..).zip(parents) {
            let before = parent.map_or(0, |parent| {
                assert!(
                    parent < token,
                    "token {token} cannot follow token {parent}: parents come first"
                );
                paths[parent as usize] << (token - parent)
            });
            paths.push(before | 1);
        }
        let context = |token: u32| u64::MAX.checked_shl(token + 1).unwrap_or(0);
        (0..)
            .zip(paths)
            .map(|(token, path)| path | context(token))
            .collect()
    }
}

/// One request that verifies a tree of draft tokens (speculative decoding): each token sees the context,
/// its ancestors and itself.
#[derive(Clone, Copy, Debug)]
pub struct DraftTree<'a> {
    /// Pages of the context.
    pub context: &'a [u32],
    /// Tokens of the context.
    pub context_len: u32,
    /// The parent of each draft token: a token before it, or `None` if it follows the context.
    pub parents: &'a [Option<u32>],
    /// The slot of each draft token's key.
    pub slots: &'a [u32],
}

impl DraftTree<'_> {
    /// The draft tokens that `token` sees, from the first one on.
    ///
    /// # Panics
    /// If a parent does not come before its child.
    #[must_use]
    pub fn path(&self, token: u32) -> Vec<u32> {
        let mut path = vec![token];
        let mut at = token;
        while let Some(parent) = self.parents[at as usize] {
            assert!(
                parent < at,
                "token {at} cannot follow token {parent}: parents come first"
            );
            path.push(parent);
            at = parent;
        }
        path.reverse();
        path
    }
}

impl DraftTree<'_> {
    /// A batch of draft trees: the contexts as pages of `page_size` tokens out of `pool_pages`, the trees as
    /// token slots of the same pool. Its parts take the pool's view and [`KvView::by_token`] of it, on a GPU the pool and
    /// `KvPool::by_token` of it.
    ///
    /// ```
    /// use tandem_attn::{kv::DraftTree, problem::Spec};
    ///
    /// // Two guesses for the next token, and one that follows the first of them.
    /// let tree = DraftTree {
    ///     context: &[3, 7],
    ///     context_len: 6,
    ///     parents: &[None, None, Some(0)],
    ///     slots: &[30, 31, 8],
    /// };
    /// let spec = Spec::new(8, 2, 64);
    /// let batch = DraftTree::batch(&spec, 4, 10, &[tree]);
    /// batch.check(&spec)?;
    /// // The context and itself; the last one its parent too.
    /// assert_eq!([0, 1, 2].map(|token| batch.parts[1].kv_len(token)), [1, 1, 2]);
    /// # Ok::<(), tandem_attn::problem::ProblemError>(())
    /// ```
    ///
    /// [`KvView::by_token`]: super::KvView::by_token
    ///
    /// # Panics
    /// If a tree has not one slot for each token, or a parent does not come before its child.
    #[must_use]
    pub fn batch(spec: &Spec, page_size: u32, pool_pages: u32, trees: &[Self]) -> Batch {
        let mut qo_indptr = vec![0];
        let mut context = Part::new(vec![0], PageTable::new(page_size, pool_pages));
        let mut rows = Vec::new();
        for tree in trees {
            let tokens = tree.parents.len() as u32;
            assert_eq!(
                tree.slots.len(),
                tree.parents.len(),
                "a slot for each drafted token"
            );
            let first_token = qo_indptr[qo_indptr.len() - 1];
            let paths = (0..tokens).map(|token| tree.path(token));
            // The distance to a key depends on the token's depth, so each token needs its own row if distances matter.
            if spec.counts_distances() {
                for (path, token) in paths.clone().zip(first_token + 1..) {
                    context.table.push(tree.context, tree.context_len);
                    context.q_indptr.push(token);
                    context.keys_after.push(path.len() as u32);
                }
            } else {
                context.table.push(tree.context, tree.context_len);
                context.q_indptr.push(first_token + tokens);
                context.keys_after.push(tokens);
            }
            rows.extend(paths.map(|path| {
                path.into_iter()
                    .map(|token| tree.slots[token as usize])
                    .collect::<Vec<_>>()
            }));
            qo_indptr.push(first_token + tokens);
        }
        let drafted = Part::token_level(0, pool_pages.saturating_mul(page_size), rows);
        Batch::composed(qo_indptr, vec![context, drafted])
    }
}
