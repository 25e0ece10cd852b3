//! A case: a server's steps over paged keys and values, as data. It is drawn from a seed, and kept as JSON.

mod special;

use serde::{Deserialize, Serialize};
use tandem_attn::{
    abi::KvStrides,
    kv::LATENT_656_BYTES,
    plan::PlanOptions,
    problem::{Batch, Dtype, Masks, PageTable, Spec},
};

use crate::numeric::Rng;

/// Everything that a run of the case depends on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Case {
    /// Of numbers, of the order of pages, and of which calls are made wrong.
    pub seed: u64,
    pub spec: Spec,
    pub page_size: u32,
    /// Of the first part of a batch and every other one after it, and of the rest.
    pub pools: [PoolLayout; 2],
    pub scales: Scales,
    #[serde(default)]
    pub appends: Appends,
    pub numbers: Numbers,
    /// What every byte is that nobody owns.
    pub poison: u8,
    pub sequences: Vec<Sequence>,
    pub steps: Vec<Step>,
    pub options: PlanOptions,
    /// Multiprocessors (threads) that are planned for.
    pub sms: u32,
    /// Whether rows of a tile may see different tables.
    pub joint: bool,
    /// All attention with Ampere's instructions.
    pub ampere: bool,
    /// Each step is also run by a graph: one that was captured in the first step that could be, or, by the seed, one for each
    /// choice of launches that plans need.
    pub graph: bool,
    /// Elements between the heads of a query token and those of the next, and likewise of outputs.
    pub gaps: [u32; 2],
    /// What a workspace can hold beyond what plans need.
    pub slack: u32,
    /// Wrong calls of each kind in a step.
    pub wrong: u32,
}

/// How the pages of a pool lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PoolLayout {
    /// Heads before tokens.
    pub hnd: bool,
    /// Values in the other order.
    pub values_differ: bool,
    /// A page of values behind each page of keys.
    pub paired: bool,
    /// Elements between heads, between tokens and between pages.
    pub gaps: [u32; 3],
    /// On a GPU, latent keys as two pools: the columns that are also values, and the others, in the same memory.
    #[serde(default)]
    pub two_pools: bool,
}

/// What 8-bit keys and values are multiplied by.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Scales {
    One,
    Tensor,
    Head,
    Request,
    Token,
    /// Latent keys in rows of 656 bytes, which have their scales.
    InRow,
}

/// What new keys and values of 8 bits are when they are appended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Appends {
    /// Numbers as the pool has them.
    #[default]
    Copied,
    /// Numbers of 16 bits, which are divided by the scales of the pool.
    Quantised,
    /// Numbers of 16 bits, whose scales are computed and written.
    Computed,
}

/// Calls besides those of a step, over its requests and the keys that are there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Extra {
    /// Lists of pages that differ by KV head, and requests without lists.
    ByHead,
    /// Prompts with masks of blocks: one for all heads, for each KV head, or for each query head.
    Blocks(Masked),
    /// Two runs over a part of the keys each, and their results merged.
    Merged,
    /// The new tokens as trees of drafts.
    Tree,
    /// So many keys that were chosen for each query token, some of them none.
    Chosen(u32),
}

/// As `MaskedHeads` of the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Masked {
    All,
    KvHead,
    QueryHead,
}

/// What queries and keys are drawn from.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Numbers {
    Usual,
    /// Logits in the hundreds.
    Steep,
    /// Logits up to ten thousand.
    Huge,
    /// Logits that grow along the keys, each by about so much.
    Rising,
    Falling,
    /// A key outweighs all others.
    OneKey,
    /// All keys are the same.
    Equal,
    /// Denormal numbers.
    Tiny,
    /// Keys that are infinite, here and there: whoever sees one gets NaN.
    Infinite,
}

/// A request's tokens over all steps.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sequence {
    pub tokens: u32,
    /// An earlier sequence, and how many of its first pages this one begins with.
    pub parent: Option<(usize, u32)>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Step {
    pub rows: Vec<Row>,
    /// Shared prefixes are parts of their own.
    pub composed: bool,
    /// Queries see but some of the last keys.
    pub trees: bool,
    /// Queries see but some of all keys.
    #[serde(default)]
    pub masks: bool,
    /// The plan of the step before is updated.
    pub update: bool,
    /// The same batch by other plans.
    pub others: Vec<PlanOptions>,
    #[serde(default)]
    pub extras: Vec<Extra>,
}

/// A request in a step: its new tokens are the last of its keys.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    pub sequence: usize,
    pub queries: u32,
    pub keys: u32,
}

/// Where keys and values lie, in elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pool {
    pub k: KvStrides,
    pub v: KvStrides,
    /// The first value, from the first key on; none: values have memory of their own.
    pub v_from_k: Option<usize>,
    /// Elements of the memory of keys and of that of values.
    pub elements: [usize; 2],
}

impl Case {
    /// The pages of each sequence, and the pages of the pool: three more than are used.
    pub fn tables(&self) -> (Vec<Vec<u32>>, u32) {
        let mut tables: Vec<Vec<u32>> = Vec::new();
        let mut used = 0;
        for sequence in &self.sequences {
            let pages = sequence.tokens.div_ceil(self.page_size) as usize;
            let mut table: Vec<u32> = match sequence.parent {
                Some((parent, shared)) => {
                    let parent = &tables[parent];
                    parent[..(shared as usize).min(parent.len()).min(pages)].to_vec()
                }
                None => Vec::new(),
            };
            let more = (pages - table.len()) as u32;
            table.extend(used..used + more);
            used += more;
            tables.push(table);
        }
        let mut order: Vec<u32> = (0..used + 3).collect();
        Rng(self.seed ^ 1).shuffle(&mut order);
        for page in tables.iter_mut().flatten() {
            *page = order[*page as usize];
        }
        (tables, used + 3)
    }

    /// The batch of a step.
    pub fn batch(&self, step: &Step) -> Batch {
        let (tables, pages) = self.tables();
        let mut table = PageTable::new(self.page_size, pages);
        let mut indptr = vec![0];
        for row in &step.rows {
            let held = row.keys.div_ceil(self.page_size) as usize;
            table.push(&tables[row.sequence][..held], row.keys);
            indptr.push(indptr[indptr.len() - 1] + row.queries);
        }
        let mut batch = Batch::new(indptr, table);
        if step.composed {
            batch = batch.share_prefixes();
        }
        if step.trees {
            let mut rng = Rng(self.seed ^ 2);
            // A query's own key is seen, so that no row is empty more often than by chance.
            let words = (0..batch.total_q()).map(|_| rng.bits() | rng.bits() | 1);
            batch = batch.with_ancestors(words.collect());
        }
        if step.masks {
            let mut rng = Rng(self.seed ^ 3);
            let mut masks = Masks::default();
            for row in &step.rows {
                let each = row.keys.div_ceil(64);
                let words = (0..row.queries * each).map(|_| rng.bits() | rng.bits());
                let words: Vec<_> = words.collect();
                masks
                    .push_words(row.queries, &words)
                    .expect("as many for each");
            }
            batch = batch.with_masks(masks);
        }
        batch
    }

    /// Elements of a key and of a value in the pool; bytes where rows have their scales.
    pub fn stored_dims(&self) -> [u32; 2] {
        match self.scales {
            Scales::InRow => [LATENT_656_BYTES; 2],
            _ => [self.spec.head_dim_qk, self.spec.head_dim_v],
        }
    }

    /// The type of new keys and values.
    pub fn row_dtype(&self) -> Dtype {
        match (self.appends, self.spec.q_dtype) {
            (Appends::Copied, _) => self.spec.kv_dtype,
            (_, Dtype::F16) => Dtype::F16,
            _ => Dtype::BF16,
        }
    }

    /// The most keys of a request.
    pub fn most_keys(&self) -> u32 {
        let rows = self.steps.iter().flat_map(|step| &step.rows);
        rows.map(|row| row.keys).max().unwrap_or(0)
    }

    /// The most query tokens of a step.
    pub fn most_tokens(&self) -> usize {
        let tokens = |step: &Step| step.rows.iter().map(|row| row.queries as usize).sum();
        self.steps.iter().map(tokens).max().unwrap_or(0)
    }

    pub fn pool(&self, layout: &PoolLayout, pages: u32) -> Pool {
        let spec = &self.spec;
        let strides = |hnd: bool, dim: u32| {
            let [head_gap, token_gap, page_gap] = layout.gaps;
            let (heads, page_size) = (spec.kv_heads, self.page_size);
            let (token, head, page) = match hnd {
                false => {
                    let head = dim + head_gap;
                    let token = heads * head + token_gap;
                    (token, head, page_size * token + page_gap)
                }
                true => {
                    let token = dim + head_gap;
                    let head = page_size * token + token_gap;
                    (token, head, heads * head + page_gap)
                }
            };
            KvStrides {
                page,
                token,
                head,
                page_size,
            }
        };
        let [of_k, of_v] = self.stored_dims();
        let mut k = strides(layout.hnd, of_k);
        let mut v = strides(layout.hnd != layout.values_differ, of_v);
        let mut v_from_k = None;
        if spec.latent {
            (v, v_from_k) = (k, Some(0));
        } else if layout.paired && k.page == v.page {
            v_from_k = Some(k.page as usize);
            (k.page, v.page) = (2 * k.page, 2 * v.page);
        }
        let elements = |strides: &KvStrides| pages as usize * strides.page as usize;
        let of_values = if v_from_k.is_some() { 0 } else { elements(&v) };
        Pool {
            k,
            v,
            v_from_k,
            elements: [elements(&k), of_values],
        }
    }
}
