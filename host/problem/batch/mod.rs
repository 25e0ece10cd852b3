//! The requests.

mod masks;
mod part;
mod table;

pub use masks::Masks;
pub use part::Part;
pub use table::PageTable;

use std::{collections::HashMap, ops::Range};

use kernels_gpu::state::{MOST_SINK_TOKENS, exact_sinks};
use serde::{Deserialize, Serialize};

use super::{ProblemError, Quantity, Spec, fits};

/// The most operations of a batch: minutes on the fastest GPU. Sums of costs, with all their weights, then stay within
/// 64 bits.
const MAX_WORK: u64 = 1 << 58;

/// The requests of one step: ragged queries and paged keys.
///
/// Most batches have a single part, whose row blocks are the requests. A request may have no queries or
/// no keys. A query that sees no key gives output 0 and LSE −∞.
#[derive(Clone, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Batch {
    /// `[requests + 1]`: request `r` owns the query tokens `qo_indptr[r]..qo_indptr[r + 1]`.
    pub qo_indptr: Vec<u32>,
    /// At least one part.
    pub parts: Vec<Part>,
    /// `[total_q]`, or empty: a bit mask for each query token that says which of the last 64 keys it sees, in addition to the
    /// causal mask and the window. Bit `d` is the key `d` positions before the token's own; bit 0 is its own key.
    /// `u64::MAX` hides nothing: so have the tokens of other requests of the batch. [`ancestors_of`](Self::ancestors_of) computes the
    /// masks for trees of draft tokens.
    ///
    /// Masks change no distances. A window, a rotary embedding in attention and hooks count them by a token's place, which is its
    /// depth only in a chain; where that matters, `kv::DraftTree::batch` (feature `unstable`) gives each token its depth.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ancestors: Vec<u64>,
    /// Masks of any keys, of all query tokens; empty if there are none, or if [`ancestors`](Self::ancestors) suffice. See
    /// [`push_mask`](Self::push_mask).
    #[serde(default, skip_serializing_if = "Masks::is_empty")]
    pub masks: Masks,
}

impl Batch {
    /// The usual batch: one table, one row block per request, in the order of `qo_indptr`.
    ///
    /// The keys of a request include those of its new tokens, which come last: append their keys before attention, and push the
    /// length that includes them. A request without new tokens in this step has the same entry twice in `qo_indptr`.
    ///
    /// ```
    /// use tandem_attn::problem::{Batch, PageTable, Spec};
    ///
    /// let mut table = PageTable::new(16, 10);
    /// table.push(&[7, 3], 20); // a prompt of 20 tokens, all of them new
    /// table.push(&[5], 9); // waits in this step
    /// table.push(&[9, 1, 4], 41); // a decode after 40 tokens
    /// let batch = Batch::new(vec![0, 20, 20, 21], table);
    /// batch.check(&Spec::new(32, 8, 128))?;
    /// # Ok::<(), tandem_attn::problem::ProblemError>(())
    /// ```
    #[must_use]
    pub fn new(qo_indptr: Vec<u32>, table: PageTable) -> Self {
        Self {
            parts: vec![Part::new(qo_indptr.clone(), table)],
            qo_indptr,
            ancestors: Vec::new(),
            masks: Masks::NONE,
        }
    }

    /// A batch of several parts, each with a page table of its own.
    #[must_use]
    pub const fn composed(qo_indptr: Vec<u32>, parts: Vec<Part>) -> Self {
        Self {
            qo_indptr,
            parts,
            ancestors: Vec::new(),
            masks: Masks::NONE,
        }
    }

    /// Sparse attention with indices on the device: a request for each of `tokens` query tokens, with `k` keys each. The indices
    /// are passed to each run on a GPU (`gpu::RunTensors::with_indices`). Only kernels of latent keys in rows of 656 bytes
    /// (`KvScales::InRow`) read them, on Hopper; all other runs, those without indices and those on the CPU are refused. If the
    /// host knows the indices, use [`of_indices`](Self::of_indices), which all kernels run.
    ///
    /// Pages of the batch have one token, whatever the page size with which the pool was filled.
    ///
    /// # Errors
    /// [`ProblemError::TooLarge`] if there are too many tokens or keys, [`ProblemError::Indices`] if `k` is 0.
    pub fn of_top_k(tokens: u32, k: u32) -> Result<Self, ProblemError> {
        if k == 0 {
            return Err(ProblemError::Indices { got: 0, k });
        }
        let all = u64::from(tokens) * u64::from(k);
        fits(
            Quantity::Batch("query tokens × their keys"),
            all,
            (1 << 31) - u64::from(PageTable::CHOSEN),
        )?;
        let mut table = PageTable::new(1, PageTable::CHOSEN + all as u32);
        for token in 0..tokens {
            let first = PageTable::CHOSEN + token * k;
            table.try_push(first..first + k, k)?;
        }
        Ok(Self::new((0..=tokens).collect(), table))
    }

    /// Sparse attention: a request for each query token, with the keys that an indexer chose for it from a pool of
    /// `pool_tokens`. Each token has `k` entries of `indices`; −1 means no key.
    ///
    /// An index is `page × page_size + offset`, as in [`PageTable::slots`]; pages of the batch have one token. Positions
    /// count the chosen keys only, so a window has no meaning; with a causal mask each query sees all of its keys.
    ///
    /// ```
    /// use tandem_attn::problem::Batch;
    ///
    /// let batch = Batch::of_indices(3, &[7, -1, 2, -1, -1, -1], 8)?;
    /// assert_eq!(batch.parts[0].table.pages(0), [7, 2]);
    /// assert_eq!((batch.total_q(), batch.kv_len(1)), (2, 0));
    /// # Ok::<(), tandem_attn::problem::ProblemError>(())
    /// ```
    ///
    /// # Errors
    /// [`ProblemError::Indices`] if `indices` is not a multiple of `k`, [`ProblemError::PageId`] for other negative
    /// indices, [`ProblemError::TooLarge`].
    pub fn of_indices(k: u32, indices: &[i32], pool_tokens: u32) -> Result<Self, ProblemError> {
        let got = indices.len();
        if k == 0 || !got.is_multiple_of(k as usize) {
            return Err(ProblemError::Indices { got, k });
        }
        let tokens = got / k as usize;
        fits(
            Quantity::Batch("query tokens"),
            tokens as u64,
            i32::MAX as u64,
        )?;
        let mut table = PageTable::new(1, pool_tokens);
        for chosen in indices.chunks_exact(k as usize) {
            let there = chosen.iter().filter(|&&index| index != -1);
            table.try_push(there.clone(), there.count() as u32)?;
        }
        Ok(Self::new((0..=tokens as u32).collect(), table))
    }

    /// With masks of the last keys: see [`ancestors`](Self::ancestors).
    #[must_use]
    pub fn with_ancestors(mut self, ancestors: Vec<u64>) -> Self {
        self.ancestors = ancestors;
        self
    }

    /// With masks of any keys that are those of another batch of the same requests: see [`push_mask`](Self::push_mask).
    #[must_use]
    pub fn with_masks(mut self, masks: Masks) -> Self {
        self.masks = masks;
        self
    }

    /// Whether bits hide keys from query tokens: ancestors or masks.
    pub(crate) const fn has_masks(&self) -> bool {
        !self.ancestors.is_empty() || !self.masks.is_empty()
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

    /// Number of keys of a request's last query before masks, over all parts; 0 for a request without queries.
    #[must_use]
    pub fn kv_len(&self, request: usize) -> u64 {
        if self.q_len(request) == 0 {
            return 0;
        }
        let last = self.qo_indptr[request + 1] - 1;
        let keys = |part: &Part| Some(part.kv_len(part.row_block_of(last)?));
        self.parts.iter().filter_map(keys).map(u64::from).sum()
    }

    /// Checks the whole batch, in time linear in its size.
    ///
    /// # Errors
    /// The first error that is found.
    pub fn check(&self, spec: &Spec) -> Result<(), ProblemError> {
        self.check_requests()?;
        if self.parts.is_empty() {
            return Err(ProblemError::NoParts);
        }
        let total_q = self.total_q();
        if !self.ancestors.is_empty() {
            let (got, expected) = (self.ancestors.len(), total_q as usize);
            if got != expected {
                return Err(ProblemError::Ancestors { got, expected });
            }
            if !spec.variant.causal {
                return Err(ProblemError::AncestorsNotCausal);
            }
            if !self.masks.is_empty() {
                return Err(ProblemError::MasksAndAncestors);
            }
        }
        self.masks.check(total_q)?;
        let rows = u64::from(total_q) * u64::from(spec.q_heads);
        fits(
            Quantity::Batch("query tokens × query heads"),
            rows,
            i32::MAX as u64,
        )?;
        if spec.variant.sink_tokens > 1 {
            let most = exact_sinks(spec.variant.sink_tokens.min(MOST_SINK_TOKENS));
            fits(
                Quantity::Batch("query tokens that have sinks in turn"),
                u64::from(total_q),
                most.into(),
            )?;
        }
        // Masks count the tokens of the batch, so what parts of several heads refuse comes first.
        self.check_heads(spec)?;
        for (index, part) in self.parts.iter().enumerate() {
            part.check(index, total_q)?;
            part.check_shared_blocks(index, &self.qo_indptr, spec, self.has_masks())?;
            part.check_masks(&self.masks)?;
            let head_dim = spec.head_dim_qk.max(spec.head_dim_v);
            let heads = u64::from(spec.kv_heads) * u64::from(part.heads);
            let page = u64::from(part.table.page_size) * heads * u64::from(head_dim);
            fits(Quantity::Page("elements of a page"), page, u32::MAX.into())?;
        }
        self.check_work(spec)?;
        // A query alone is not too many.
        let several = |part: &Part| {
            let queries = part.q_indptr.windows(2).map(|pair| pair[1] - pair[0]);
            queries.fold(0, u32::max) > 1
        };
        if let ([part], true) = (self.parts.as_slice(), spec.variant.causal)
            && several(part)
        {
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

    fn check_requests(&self) -> Result<(), ProblemError> {
        let name = "qo_indptr";
        check_indptr(name, &self.qo_indptr)?;
        match self.qo_indptr[0] {
            0 => Ok(()),
            got => Err(ProblemError::IndptrStart { name, got }),
        }
    }

    /// Checks what tells the tokens and the keys of a request.
    fn check_arrays(&self) -> Result<(), ProblemError> {
        self.check_requests()?;
        let mut parts = self.parts.iter().enumerate();
        parts.try_for_each(|(index, part)| part.check(index, self.total_q()))
    }

    /// Checks parts whose heads are tokens of the batch. What depends on the query head or the token does not know of them.
    fn check_heads(&self, spec: &Spec) -> Result<(), ProblemError> {
        let several = |part: &&Part| part.heads > 1;
        let Some(first) = self.parts.iter().find(several) else {
            return Ok(());
        };
        let other = first.heads;
        let differs = |(_, part): &(usize, &Part)| part.heads > 1 && part.heads != other;
        if let Some((part, of_part)) = self.parts.iter().enumerate().find(differs) {
            let got = of_part.heads;
            return Err(ProblemError::PartsOfHeads { part, got, other });
        }
        let refused = [
            (spec.latent, "latent keys"),
            (self.has_masks(), "masks as bits"),
        ];
        let refused = refused.into_iter().find(|&(there, _)| there);
        match refused.map(|(_, what)| what).or_else(|| spec.not_by_head()) {
            Some(what) => Err(ProblemError::ByHead { what }),
            None => {
                let mut parts = self.parts.iter().enumerate();
                parts.try_for_each(|(index, part)| spec.check_sinks_of(index, part.heads))
            }
        }
    }

    /// Checks that sums of costs stay within 64 bits.
    fn check_work(&self, spec: &Spec) -> Result<(), ProblemError> {
        let work = |pairs: fn(&Part) -> u64| {
            let parts = self.parts.iter().map(pairs);
            let pairs = parts.fold(0, u64::saturating_add);
            pairs.saturating_mul(spec.flops_per_pair())
        };
        // Each row block is looked at only if all queries times all keys would be too much.
        if work(Part::most_pairs) <= MAX_WORK {
            return Ok(());
        }
        let exact = work(Part::pairs);
        fits(
            Quantity::Batch("operations on all queries and keys"),
            exact,
            MAX_WORK,
        )
    }

    /// Checks that the keys of the new tokens (the last keys of each row block, one per query) may be written: a page
    /// that is written must occur only once in the tables of its part. Call [`check`](Self::check) first.
    ///
    /// # Errors
    /// [`ProblemError::WritesSharedPage`].
    ///
    /// # Panics
    /// It may panic for a batch that [`check`](Self::check) refuses.
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
    // A whole array is looked at in fewer instructions than until the first place.
    if indptr.is_sorted() {
        return Ok(());
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
