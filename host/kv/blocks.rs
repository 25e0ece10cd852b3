//! Block masks of prompts: which blocks of 128 keys each block of queries sees.
//!
//! Each block of queries becomes a request, whose page table has only the pages of the key blocks that it sees. Skipped blocks are
//! neither read nor multiplied. The key block that contains the queries themselves comes last, as the causal mask
//! requires. This needs no special kernel; the planner sees ordinary requests.

use std::ops::Range;

use kernels_gpu::abi::KvStrides;

use super::strided::Strided;
use crate::problem::{Batch, PageTable, Part, ProblemError, Spec};

/// One bit for each block of queries and block of [128 keys](Self::KEYS) of a request: whether these queries see these keys.
/// A causal mask still applies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockMask {
    rows: u32,
    tokens: u32,
    keys: u32,
    bits: Vec<u64>,
}

impl BlockMask {
    /// Keys of a block.
    pub const KEYS: u32 = 128;

    /// A mask that hides everything, for `tokens` new tokens in blocks of `rows`, and `keys` keys.
    ///
    /// # Errors
    /// [`ProblemError::BlockRows`] if `rows` is neither 64 nor 128.
    pub fn new(rows: u32, tokens: u32, keys: u32) -> Result<Self, ProblemError> {
        if rows != 64 && rows != 128 {
            return Err(ProblemError::BlockRows { got: rows });
        }
        let mut mask = Self {
            rows,
            tokens,
            keys,
            bits: Vec::new(),
        };
        let [queries, keys] = mask.blocks();
        let bits = queries as usize * keys as usize;
        mask.bits.resize(bits.div_ceil(64), 0);
        Ok(mask)
    }

    /// A mask from a function of the index of a query block and the index of a key block.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn from_fn(
        rows: u32,
        tokens: u32,
        keys: u32,
        sees: impl Fn(u32, u32) -> bool,
    ) -> Result<Self, ProblemError> {
        let mut mask = Self::new(rows, tokens, keys)?;
        let [queries, keys] = mask.blocks();
        for query in 0..queries {
            (0..keys)
                .filter(|&key| sees(query, key))
                .for_each(|key| mask.see(query, key));
        }
        Ok(mask)
    }

    /// Number of queries of a block.
    #[must_use]
    pub const fn rows(&self) -> u32 {
        self.rows
    }

    /// Number of query blocks and of key blocks.
    #[must_use]
    pub const fn blocks(&self) -> [u32; 2] {
        [
            self.tokens.div_ceil(self.rows),
            self.keys.div_ceil(Self::KEYS),
        ]
    }

    /// Lets a block of queries see a block of keys.
    ///
    /// # Panics
    /// If there is no such block.
    pub fn see(&mut self, query: u32, key: u32) {
        let bit = self.bit(query, key);
        self.bits[bit / 64] |= 1 << (bit % 64);
    }

    /// Whether a block of queries sees a block of keys.
    ///
    /// # Panics
    /// If there is no such block.
    #[must_use]
    pub fn sees(&self, query: u32, key: u32) -> bool {
        let bit = self.bit(query, key);
        self.bits[bit / 64] >> (bit % 64) & 1 != 0
    }

    fn bit(&self, query: u32, key: u32) -> usize {
        let [queries, keys] = self.blocks();
        assert!(
            query < queries && key < keys,
            "block {query} of queries and {key} of keys, of {queries} and {keys}"
        );
        query as usize * keys as usize + key as usize
    }
}

/// Which heads have a block mask of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MaskedHeads {
    /// All heads have the same mask.
    All,
    /// Each KV head, with its query heads, has its own mask.
    KvHead,
    /// Each query head has its own mask.
    QueryHead,
}

/// Prompts with block masks, and their runs: one run, or one for each head with its own masks.
///
/// ```
/// use half::bf16;
/// use tandem_attn::{
///     Cpu, kv::{BlockMask, BlockSparse, KvView, MaskedHeads}, plan::{PlanOptions, Planner},
///     problem::{KvLayout, Spec},
/// };
///
/// let (spec, page_size, pages) = (Spec::new(8, 2, 64), 16, 24);
/// let pool = vec![bf16::ONE; 24 * 16 * 2 * 64];
/// let view = KvView::new(&spec, KvLayout::Nhd, page_size, &pool, &pool);
/// let mut prompts = BlockSparse::new(&spec, view.k_strides, pages, MaskedHeads::All)?;
/// // 384 tokens: each block sees itself, and the last one the first.
/// let mask = BlockMask::from_fn(128, 384, 384, |query, key| query == key || (query, key) == (2, 0))?;
/// let table: Vec<u32> = (0..24).collect();
/// prompts.push(384, &table, 384, &[mask])?;
///
/// let (cpu, run) = (Cpu::new(), &prompts.runs()[0]);
/// assert_eq!(run.batch.parts[0].table.kv_len(2), 256);
/// let plan = Planner::new().plan(prompts.spec(), &run.batch, &cpu.device(), &PlanOptions::default())?;
/// let (q, mut out) = (vec![bf16::ONE; 384 * 8 * 64], vec![bf16::ZERO; 384 * 8 * 64]);
/// cpu.run(&plan, &q, &[view], &mut out, None)?;
/// assert_eq!(out, q);
/// # Ok::<(), tandem_attn::Error>(())
/// ```
///
/// A run of some heads reads [`KvView::by_head`](super::KvView::by_head) and its query heads of each token, on a GPU
/// [`KvPool::by_head`](crate::gpu::KvPool::by_head) and
/// [`DeviceTensor::heads`](crate::gpu::DeviceTensor::heads); its LSEs are `[tokens, heads of the run]`.
#[derive(Clone, Debug)]
pub struct BlockSparse {
    spec: Spec,
    masked: MaskedHeads,
    /// Query heads per KV head of the given specification.
    group: u32,
    pages: u32,
    strided: Strided,
    runs: Vec<Rows>,
}

/// A run while prompts are added.
#[derive(Clone, Debug)]
struct Rows {
    q_indptr: Vec<u32>,
    table: PageTable,
    keys_after: Vec<u32>,
}

impl Rows {
    /// Drops all row blocks but the first ones.
    fn truncate(&mut self, row_blocks: usize) {
        let Self {
            q_indptr,
            table,
            keys_after,
        } = self;
        keys_after.truncate(row_blocks);
        q_indptr.truncate(row_blocks + 1);
        table.indptr.truncate(row_blocks + 1);
        table.last_page_len.truncate(row_blocks);
        table.indices.truncate(table.indptr[row_blocks] as usize);
    }
}

/// One run of [`BlockSparse`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockSparseRun {
    /// Its query heads.
    pub q_heads: Range<u32>,
    /// Its batch.
    pub batch: Batch,
}

impl BlockSparse {
    /// An empty set of prompts, for a pool of `pages` pages with these strides.
    ///
    /// # Errors
    /// [`ProblemError::Blocks`] if the specification has a window, hooks or a rotary embedding: blocks are skipped, so distances are
    /// unknown. [`ProblemError::BlockPages`] if the page size does not divide 128. For masks by head
    /// [`ProblemError::UnevenHeads`], [`ProblemError::TooLarge`]. Those of [`Spec::check`].
    pub fn new(
        spec: &Spec,
        strides: KvStrides,
        pages: u32,
        masked: MaskedHeads,
    ) -> Result<Self, ProblemError> {
        spec.check()?;
        let variant = &spec.variant;
        let what = [
            (variant.window_left.is_some(), "a window"),
            (variant.hooks.is_some(), "hooks"),
            (spec.rotary.is_some(), "a rotary embedding"),
        ];
        if let Some((_, what)) = what.into_iter().find(|&(there, _)| there) {
            return Err(ProblemError::Blocks { what });
        }
        let page_size = strides.page_size;
        if page_size == 0 || !BlockMask::KEYS.is_multiple_of(page_size) {
            return Err(ProblemError::BlockPages { page_size });
        }
        let (heads, runs, strided) = match masked {
            MaskedHeads::All => ([spec.q_heads, spec.kv_heads], 1, Strided::whole(pages)),
            MaskedHeads::KvHead => {
                let strided = Strided::by_head(strides, pages, spec.kv_heads)?;
                ([spec.group(), 1], spec.kv_heads, strided)
            }
            MaskedHeads::QueryHead => {
                let strided = Strided::by_head(strides, pages, spec.kv_heads)?;
                ([1, 1], spec.q_heads, strided)
            }
        };
        let empty = Rows {
            q_indptr: vec![0],
            table: PageTable::new(page_size, strided.pages),
            keys_after: Vec::new(),
        };
        let mut of_run = *spec;
        [of_run.q_heads, of_run.kv_heads] = heads;
        Ok(Self {
            spec: of_run,
            masked,
            group: spec.group(),
            pages,
            strided,
            runs: vec![empty; runs as usize],
        })
    }

    /// Adds a prompt or a chunk: the number of new tokens, the pages of its keys, the number of keys (the last ones are those of the
    /// new tokens), and one mask for all heads or one for each head that has its own.
    ///
    /// # Errors
    /// [`ProblemError::BlockMasks`], [`ProblemError::BlockMask`], [`ProblemError::BlockTokens`], [`ProblemError::NoPage`],
    /// and those of [`PageTable::try_push`]. Nothing is added then.
    pub fn push(
        &mut self,
        tokens: u32,
        pages: &[u32],
        keys: u32,
        masks: &[BlockMask],
    ) -> Result<(), ProblemError> {
        let (got, expected) = (masks.len(), self.runs.len());
        if got != expected {
            return Err(ProblemError::BlockMasks { got, expected });
        }
        for mask in masks {
            let (got, expected) = ([mask.tokens, mask.keys], [tokens, keys]);
            if got != expected {
                return Err(ProblemError::BlockMask { got, expected });
            }
        }
        if self.spec.variant.causal && tokens > keys {
            return Err(ProblemError::BlockTokens { tokens, keys });
        }
        if let Some(&got) = pages.iter().find(|&&page| page >= self.pages) {
            let pages = self.pages;
            return Err(ProblemError::NoPage { got, pages });
        }
        let page_size = self.runs[0].table.page_size;
        PageTable::new(page_size, self.pages).try_push(pages.to_vec(), keys)?;

        let row_blocks = self.runs.iter().map(|run| run.keys_after.len());
        let row_blocks: Vec<_> = row_blocks.collect();
        let added = self.add_rows(tokens, pages, masks);
        if added.is_err() {
            for (run, &row_blocks) in self.runs.iter_mut().zip(&row_blocks) {
                run.truncate(row_blocks);
            }
        }
        added
    }

    /// Adds the rows of a prompt to all runs. After an error, some are added.
    fn add_rows(
        &mut self,
        tokens: u32,
        pages: &[u32],
        masks: &[BlockMask],
    ) -> Result<(), ProblemError> {
        let page_size = self.runs[0].table.page_size;
        for (index, mask) in masks.iter().enumerate() {
            let kv_head = match self.masked {
                MaskedHeads::All => 0,
                MaskedHeads::KvHead => index as u32,
                MaskedHeads::QueryHead => index as u32 / self.group,
            };
            for query in 0..mask.blocks()[0] {
                let first = query * mask.rows;
                let mut rest = first..(first + mask.rows).min(tokens);
                while !rest.is_empty() {
                    let seen = self.seen(mask, query, &rest);
                    let ids = seen.blocks.iter().flat_map(|block| {
                        let end = block.end.div_ceil(page_size) as usize;
                        &pages[(block.start / page_size) as usize..end]
                    });
                    let ids: Vec<u32> = ids.map(|&page| self.strided.id(page, kv_head)).collect();
                    let keys = seen.blocks.iter().map(|block| block.len() as u32).sum();
                    let run = &mut self.runs[index];
                    run.table.try_push(ids, keys)?;
                    run.keys_after.push(seen.after);
                    let last = run.q_indptr[run.q_indptr.len() - 1];
                    run.q_indptr.push(last + seen.tokens);
                    rest.start += seen.tokens;
                }
            }
        }
        Ok(())
    }

    /// What the first tokens of a block of queries see: those tokens that are in one block of keys.
    fn seen(&self, mask: &BlockMask, query: u32, rest: &Range<u32>) -> Seen {
        const KEYS: u32 = BlockMask::KEYS;
        let block = |key: u32| key * KEYS..((key + 1) * KEYS).min(mask.keys);
        let chosen = |end: u32| (0..end).filter(|&key| mask.sees(query, key)).map(block);
        if !self.spec.variant.causal {
            return Seen {
                blocks: chosen(mask.blocks()[1]).collect(),
                tokens: rest.len() as u32,
                after: 0,
            };
        }
        let position = mask.keys - mask.tokens + rest.start;
        let own = position / KEYS;
        let tokens = (rest.len() as u32).min((own + 1) * KEYS - position);
        let mut blocks: Vec<_> = chosen(own).collect();
        let mut after = tokens;
        if mask.sees(query, own) {
            // The keys of a table end with the key of its last query.
            blocks.push(own * KEYS..position + tokens);
            after = 0;
        }
        // Without their own block, queries come after all keys that they see.
        Seen {
            blocks,
            tokens,
            after,
        }
    }

    /// The specification of each [run](Self::runs): all heads, a KV head with its group, or one query head.
    #[must_use]
    pub const fn spec(&self) -> &Spec {
        &self.spec
    }

    /// The runs: one for all heads, or one for each head with masks, in their order.
    #[must_use]
    pub fn runs(&self) -> Vec<BlockSparseRun> {
        let heads = self.spec.q_heads;
        let run = |(index, rows): (u32, &Rows)| {
            let Rows {
                q_indptr,
                table,
                keys_after,
            } = rows.clone();
            let part = Part::new(q_indptr.clone(), table).with_keys_after(keys_after);
            BlockSparseRun {
                q_heads: index * heads..(index + 1) * heads,
                batch: Batch::composed(q_indptr, vec![part]),
            }
        };
        (0..).zip(&self.runs).map(run).collect()
    }
}

/// What neighbouring queries see.
struct Seen {
    /// Keys, block by block.
    blocks: Vec<Range<u32>>,
    /// Number of queries.
    tokens: u32,
    /// As [`Part::keys_after`].
    after: u32,
}
