//! Page lists that differ by KV head, as in Quest and MInference, and requests beside them whose heads read the same pages.
//!
//! Each pair of a new token and a KV head becomes a request of a specification with one KV head. No data moves.
//! Queries `[tokens, q_heads, dim]` are `[tokens · kv_heads, group, dim]` in the same memory, and so are outputs and LSEs.
//! If the page stride of a pool is a multiple of its head stride, the part of a page that belongs to one head is a page of the view
//! that [`KvView::by_head`](super::KvView::by_head) returns.
//!
//! The tokens of a prompt would not follow each other in that view, as a tile of a prefill needs them. So prompts are a part whose tokens
//! are those of the model ([`Part::with_heads`](crate::problem::Part::with_heads)).

use kernels_gpu::abi::KvStrides;

use super::{
    blocks::{BlockMask, BlockSparse, MaskedHeads},
    strided::Strided,
};
use crate::{
    plan::LIST_TOKENS,
    problem::{self, Batch, PageTable, Part, ProblemError, Quantity, Spec},
};

/// Page lists of requests by KV head, requests without lists, and the one batch that computes them all.
///
/// ```
/// use half::bf16;
/// use tandem_attn::{
///     Cpu, kv::{KvView, PagesByHead}, plan::{PlanOptions, Planner},
///     problem::{KvLayout, Spec},
/// };
///
/// let (spec, page_size, pages) = (Spec::new(8, 2, 64), 16, 10);
/// let pool = vec![bf16::ONE; 10 * 16 * 2 * 64];
/// let view = KvView::new(&spec, KvLayout::Nhd, page_size, &pool, &pool);
/// let mut lists = PagesByHead::new(&spec, view.k_strides, pages)?;
/// // A decode: the first KV head reads two pages of which the last has 5 keys, the second one three.
/// lists.push(1, &[(&[7, 3], 21), (&[0, 7, 3], 37)])?;
/// // A prompt of 40 tokens, all of them new, and a decode: all heads read all pages.
/// lists.push_whole(40, &[2, 6, 4], 40)?;
/// lists.push_whole(1, &[9, 1], 30)?;
///
/// let (cpu, batch) = (Cpu::new(), lists.batch());
/// let plan = Planner::new().plan(lists.spec(), &batch, &cpu.device(), &PlanOptions::default())?;
/// let (q, mut out) = (vec![bf16::ONE; 42 * 8 * 64], vec![bf16::ZERO; 42 * 8 * 64]);
/// // Lists read the pool by head. The second part, of the prompts, reads it as it is; without prompts there is no such part.
/// let pools = [view.by_head()?, view];
/// cpu.run(&plan, &q, &pools[..batch.parts.len()], &mut out, None)?;
/// assert_eq!(out, q);
/// # Ok::<(), tandem_attn::Error>(())
/// ```
///
/// On a GPU pools and tensors are [`KvPool::by_head`](crate::gpu::KvPool::by_head) and
/// [`DeviceTensor::by_kv_head`](crate::gpu::DeviceTensor::by_kv_head), limits of a workspace
/// [`BatchLimits::by_kv_head`](crate::plan::BatchLimits::by_kv_head), and launch sets have the prompts by
/// [`LaunchSet::with_prompts_of_heads`](crate::gpu::LaunchSet::with_prompts_of_heads).
#[derive(Clone, Debug)]
pub struct PagesByHead {
    spec: Spec,
    kv_heads: u32,
    pages: u32,
    strides: KvStrides,
    strided: Strided,
    /// Requests of the batch: `[requests + 1]` query tokens of it.
    qo_indptr: Vec<u32>,
    /// Tokens of single heads.
    lists: Part,
    /// Tokens whose heads read the same pages.
    prompts: Part,
}

impl PagesByHead {
    /// An empty set of lists, for a pool of `pages` pages with these strides.
    ///
    /// # Errors
    /// [`ProblemError::ByHead`] if the specification has a window, hooks or a rotary embedding: lists skip keys, so positions are
    /// unknown, and the data of hooks does not fit. [`ProblemError::UnevenHeads`], [`ProblemError::TooLarge`], and those of
    /// [`Spec::check`].
    pub fn new(spec: &Spec, strides: KvStrides, pages: u32) -> Result<Self, ProblemError> {
        spec.check()?;
        if let Some(what) = spec.not_by_head() {
            return Err(ProblemError::ByHead { what });
        }
        let strided = Strided::by_head(strides, pages, spec.kv_heads)?;
        let mut one = Spec {
            q_heads: spec.group(),
            kv_heads: 1,
            ..*spec
        };
        if one.variant.sinks {
            let of_model = one.variant.sink_tokens;
            one.variant.sink_tokens = of_model.saturating_mul(spec.kv_heads);
        }
        let part = |pages| Part::new(vec![0], PageTable::new(strides.page_size, pages));
        Ok(Self {
            spec: one,
            kv_heads: spec.kv_heads,
            pages,
            strides,
            strided,
            qo_indptr: vec![0],
            lists: part(strided.pages),
            prompts: part(pages).with_heads(spec.kv_heads),
        })
    }

    /// Adds a request: the number of new tokens, and for each KV head the pages that it reads and the number of keys on them (the last
    /// ones are those of the new tokens).
    ///
    /// # Errors
    /// [`ProblemError::HeadLists`], [`ProblemError::BlockTokens`], [`ProblemError::NoPage`], and those of [`PageTable::try_push`]. Nothing is added then.
    pub fn push(&mut self, tokens: u32, lists: &[(&[u32], u32)]) -> Result<(), ProblemError> {
        let (got, expected) = (lists.len(), self.kv_heads);
        if got != expected as usize {
            return Err(ProblemError::HeadLists { got, expected });
        }
        // A list without keys is allowed: its queries see nothing.
        let short = lists.iter().find(|(_, keys)| (1..tokens).contains(keys));
        if let (Some(&(_, keys)), true) = (short, self.spec.variant.causal) {
            return Err(ProblemError::BlockTokens { tokens, keys });
        }
        let mut table = PageTable::new(self.strides.page_size, self.strided.pages);
        for token in 0..tokens {
            for (head, &(pages, keys)) in (0..).zip(lists) {
                if let Some(&got) = pages.iter().find(|&&page| page >= self.pages) {
                    let pages = self.pages;
                    return Err(ProblemError::NoPage { got, pages });
                }
                let hidden = match self.spec.variant.causal {
                    true => tokens - 1 - token,
                    false => 0,
                };
                let ids: Vec<u32> = pages
                    .iter()
                    .map(|&page| self.strided.id(page, head))
                    .collect();
                table.try_push(ids, keys.saturating_sub(hidden))?;
            }
        }
        let first = self.last_token();
        if table.row_blocks() > 0 {
            reach(&mut self.lists, first);
        }
        for (row, end) in (0..table.row_blocks()).zip(first + 1..) {
            self.lists.table.push(table.pages(row), table.kv_len(row));
            self.lists.q_indptr.push(end);
            self.qo_indptr.push(end);
        }
        Ok(())
    }

    /// Adds a request whose heads all read the same pages: the number of new tokens, the pages of its keys, and the number of keys, of
    /// which the last ones are those of the new tokens. A decode or a prompt without page lists.
    ///
    /// # Errors
    /// [`ProblemError::BlockTokens`], [`ProblemError::NoPage`], and those of [`PageTable::try_push`]. Nothing is added then.
    pub fn push_whole(
        &mut self,
        tokens: u32,
        pages: &[u32],
        keys: u32,
    ) -> Result<(), ProblemError> {
        // Without prompts, decode kernels run all requests of a batch.
        if tokens <= LIST_TOKENS {
            return self.push(tokens, &vec![(pages, keys); self.kv_heads as usize]);
        }
        if self.spec.variant.causal && (1..tokens).contains(&keys) {
            return Err(ProblemError::BlockTokens { tokens, keys });
        }
        self.check_pages(pages)?;
        let mut one = Part::new(vec![0], PageTable::new(self.strides.page_size, self.pages));
        one.try_push(tokens, pages, keys, 0)?;
        self.add(&one)
    }

    /// Adds a prompt with a block mask, which is the same for all heads: as [`BlockSparse::push`](super::BlockSparse::push) with
    /// [`MaskedHeads::All`].
    ///
    /// # Errors
    /// Those of [`BlockSparse::new`](super::BlockSparse::new) and [`BlockSparse::push`](super::BlockSparse::push). Nothing is added then.
    pub fn push_masked(
        &mut self,
        tokens: u32,
        pages: &[u32],
        keys: u32,
        mask: &BlockMask,
    ) -> Result<(), ProblemError> {
        let model = self.spec.times(self.kv_heads);
        let mut masked = BlockSparse::new(&model, self.strides, self.pages, MaskedHeads::All)?;
        masked.push(tokens, pages, keys, std::slice::from_ref(mask))?;
        let runs = masked.runs();
        runs.iter()
            .flat_map(|run| &run.batch.parts)
            .try_for_each(|part| self.add(part))
    }

    /// Adds the row blocks of a part as requests whose heads read the same pages.
    fn add(&mut self, part: &Part) -> Result<(), ProblemError> {
        let mut tokens = part.q_indptr.last().copied().unwrap_or(0);
        let first = self.last_token();
        // All heads of a token are tokens of the batch, whose number fits 32 bits.
        let last = u64::from(first) + u64::from(tokens) * u64::from(self.kv_heads);
        problem::fits(
            Quantity::Batch("query tokens × KV heads"),
            last,
            i32::MAX as u64,
        )?;
        // Each table fits, so that nothing is added if all of them do not.
        let ids = self.prompts.table.indices.len() as u64 + part.table.indices.len() as u64;
        let what = Quantity::Batch("the number of page ids");
        problem::fits(what, ids, u32::MAX.into())?;
        tokens = first / self.kv_heads;
        reach(&mut self.prompts, tokens);
        for row in 0..part.row_blocks() {
            let queries = part.q_range(row).len() as u32;
            self.prompts.try_push(
                queries,
                part.table.pages(row),
                part.kv_len(row),
                part.after(row),
            )?;
            tokens += queries;
            self.qo_indptr.push(tokens * self.kv_heads);
        }
        Ok(())
    }

    fn check_pages(&self, pages: &[u32]) -> Result<(), ProblemError> {
        let limit = self.pages;
        match pages.iter().find(|&&page| page >= limit) {
            Some(&got) => Err(ProblemError::NoPage { got, pages: limit }),
            None => Ok(()),
        }
    }

    /// Query tokens of the batch so far.
    fn last_token(&self) -> u32 {
        self.qo_indptr[self.qo_indptr.len() - 1]
    }

    /// The KV head of each query token of the [batch](Self::batch). A pool with a scale for each KV head becomes a view with a scale for
    /// each request ([`KvScales::Request`](super::KvScales::Request)): these are its `of_token`, and its requests the KV heads.
    #[must_use]
    pub fn heads(&self) -> Vec<u32> {
        let tokens = self.last_token();
        (0..tokens).map(|token| token % self.kv_heads).collect()
    }

    /// The specification of the [batch](Self::batch): one KV head and its group. If the model has sinks, a run is given all of
    /// them, `[q_heads]` of the model, which are `[sink_tokens, q_heads]` of this specification.
    #[must_use]
    pub const fn spec(&self) -> &Spec {
        &self.spec
    }

    /// The batch. Its first part has a request of one query token for each new token and KV head, and reads a pool
    /// [by head](super::KvView::by_head). If there are prompts whose heads read the same pages, they are a second part, which reads
    /// the pool as it is.
    #[must_use]
    pub fn batch(&self) -> Batch {
        let mut parts = vec![self.lists.clone()];
        if self.prompts.row_blocks() > 0 {
            parts.push(self.prompts.clone());
        }
        Batch::composed(self.qo_indptr.clone(), parts)
    }
}

/// Gives the tokens of other parts before `token` a row block without keys.
fn reach(part: &mut Part, token: u32) {
    let end = part.q_indptr[part.q_indptr.len() - 1];
    if end == token {
        return;
    }
    if part.row_blocks() == 0 {
        part.q_indptr = vec![token];
        return;
    }
    part.q_indptr.push(token);
    part.table.push(&[], 0);
    if !part.keys_after.is_empty() {
        part.keys_after.push(0);
    }
}
