//! Workloads: batches described by their lengths, and the page tables made from them.
//!
//! `docs/guide/workloads.md` documents the JSON format. Files with the cases of the PAT, POD and FastTree papers can be
//! read, too.

mod chosen;
mod file;
pub(crate) mod json;
mod layout;
mod papers;
mod place;

pub use chosen::Chosen;
pub(crate) use place::Place;

use std::path::Path;

use serde::{Deserialize, Serialize};
use tandem_attn::{
    kv::{BlockMask, PagesByHead},
    problem::{Batch, Dtype, KvLayout, PageTable, ProblemError, Spec},
};

use crate::{Failure, hooks::Numbers, input, memory, table::counted};

/// Requests of equal lengths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object with q_len and kv_len")]
pub struct Requests {
    /// New query tokens of each request; 1 is a decode step.
    pub q_len: u32,
    /// Keys of each request, including those of the new tokens.
    pub kv_len: u32,
    /// Number of requests.
    #[serde(default = "one")]
    pub count: u32,
    /// The new tokens form a tree of drafted tokens, at most 64, each with this number of children. If 0, they form a
    /// chain.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub branches: u32,
    /// If heads read pages of their own: here they all read all pages.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub all_pages: bool,
    /// A block mask: each block of 128 queries sees one of so many blocks of 128 keys before its own, and its own. 0: all.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub one_block_in: u32,
}

const fn is_zero(number: &u32) -> bool {
    *number == 0
}

const fn one() -> u32 {
    1
}

/// Decode steps that share prefixes: one request for each node of the last level.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(
    deny_unknown_fields,
    expecting = "an object with nodes_per_level and tokens_per_level"
)]
pub struct Tree {
    /// Number of nodes in each level, the root level first. The nodes of a level are distributed evenly over those of
    /// the level above.
    pub nodes_per_level: Vec<u32>,
    /// Number of tokens of a node in each level.
    pub tokens_per_level: Vec<u32>,
}

/// The description of one batch.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// Name in tables and results.
    pub name: String,
    /// The heads.
    pub spec: Spec,
    /// Number of tokens in a page.
    pub page_size: u32,
    /// Layout of a page.
    pub layout: KvLayout,
    /// Requests without a common prefix.
    pub requests: Vec<Requests>,
    /// Requests that share prefixes.
    pub tree: Option<Tree>,
    /// If set, each KV head of a model reads its own pages, and `spec` describes one head.
    pub by_head: Option<ByHead>,
    /// If set, this number of keys is chosen for each query token, by indices in the memory of the GPU.
    pub top_k: Option<u32>,
    /// The numbers of the hooks of `spec`.
    pub numbers: Numbers,
}

/// How each head chooses its pages.
#[derive(Clone, Debug, PartialEq)]
pub struct ByHead {
    /// The model with all its heads.
    pub model: Spec,
    /// Number of pages in each list, spread over the request's pages, including the last one.
    pub pages: u32,
}

impl ByHead {
    /// The page lists of a model's heads, chosen from the pages of its requests.
    pub(super) fn lists(
        &self,
        layout: KvLayout,
        (batch, all_pages): (&Batch, &[bool]),
    ) -> Result<PagesByHead, ProblemError> {
        let Spec {
            kv_heads,
            head_dim_qk,
            ..
        } = self.model;
        let table = &batch.parts[0].table;
        let strides = layout.strides(table.page_size, kv_heads, head_dim_qk);
        let mut lists = PagesByHead::new(&self.model, strides, table.pool_pages)?;
        for (request, &all_pages) in all_pages.iter().enumerate() {
            let (pages, keys) = (table.pages(request), table.kv_len(request));
            if all_pages {
                lists.push_whole(batch.q_len(request), pages, keys)?;
                continue;
            }
            let count = pages.len().min(self.pages as usize);
            let of_head = |head: u32| -> Vec<u32> {
                let apart = pages.len() / count.max(1);
                let first = head as usize % apart.max(1);
                let spread = (1..count).map(|at| pages[(at - 1) * apart + first]);
                spread.chain(pages.last().copied()).collect()
            };
            let left_out = (pages.len() - count) as u32 * table.page_size;
            let of_heads: Vec<_> = (0..kv_heads).map(of_head).collect();
            let of_heads: Vec<_> = of_heads
                .iter()
                .map(|list| (&list[..], keys - left_out))
                .collect();
            lists.push(batch.q_len(request), &of_heads)?;
        }
        Ok(lists)
    }
}

/// Maximum number of pages of a case; more would not fit any device.
const MAX_PAGES: u64 = 1 << 26;

/// Maximum number of requests of a case.
const MAX_REQUESTS: u64 = 1 << 20;

/// Maximum number of nodes of a tree in all levels: more take minutes, also without tokens.
const MAX_NODES: u64 = 16 * MAX_REQUESTS;

/// Maximum number of pairs of a block of queries and one of keys in the block masks of a case: more take minutes.
const MAX_MASKED: u64 = 1 << 30;

/// A description names this number of requests and levels of a tree.
const MOST_NAMED: usize = 8;

/// Maximum number of query tokens of a case, as plans count them.
const MAX_TOKENS: u64 = i32::MAX as u64;

impl Case {
    /// The batch, with page tables on shuffled pages. If keys are chosen, it has these as pages of one token.
    ///
    /// # Errors
    /// [`Failure::Input`] that names the case and the reason.
    pub fn batch(&self) -> Result<Batch, Failure> {
        Ok(self.batches()?.0)
    }

    /// The [`batch`](Self::batch), and what a GPU is given to plan and to run if keys are chosen: the same keys, which the
    /// host does not know.
    ///
    /// # Errors
    /// As [`batch`](Self::batch).
    pub fn batches(&self) -> Result<(Batch, Option<Chosen>), Failure> {
        let batch = self.with_all_keys()?;
        let Some(k) = self.top_k else {
            return Ok((batch, None));
        };
        let tokens = self.tokens_of_pool(&batch, k)?;
        let indices = chosen::indices(&self.spec, &batch, k);
        let chosen = Chosen {
            planned: Batch::of_top_k(batch.total_q(), k)?,
            indices,
        };
        let known = Batch::of_indices(k, &chosen.indices, tokens)?;
        Ok((known, Some(chosen)))
    }

    /// The batch that is planned: if keys are chosen, their number without the keys.
    ///
    /// # Errors
    /// As [`batch`](Self::batch).
    pub fn planned(&self) -> Result<Batch, Failure> {
        let batch = self.with_all_keys()?;
        let Some(k) = self.top_k else {
            return Ok(batch);
        };
        self.tokens_of_pool(&batch, k)?;
        Ok(Batch::of_top_k(batch.total_q(), k)?)
    }

    /// The tokens of a batch's pool, if indices can name `k` of them for each query token.
    fn tokens_of_pool(&self, batch: &Batch, k: u32) -> Result<u32, Failure> {
        let table = &batch.parts[0].table;
        let of_pool = u64::from(table.pool_pages) * u64::from(table.page_size);
        self.check_chosen(of_pool, k)?;
        Ok(of_pool as u32)
    }

    /// Checks the numbers of chosen keys and of tokens in the pool, before indices of that size are made.
    fn check_chosen(&self, of_pool: u64, k: u32) -> Result<(), Failure> {
        let count = self.tokens().saturating_mul(k.into());
        if count > MAX_TOKENS || of_pool > MAX_TOKENS {
            return Err(Failure::Input(format!(
                "case {:?}: top_k: {count} keys of a pool of {of_pool} tokens: give at most {MAX_TOKENS} of both",
                self.name
            )));
        }
        // Indices, and the pages of a batch that is made of them.
        memory::check(
            &format!("case {:?}", self.name),
            16 * count,
            "make it smaller",
        )
    }

    /// The batch in which each query token sees all keys.
    fn with_all_keys(&self) -> Result<Batch, Failure> {
        let wrong = |reason: String| Failure::Input(format!("case {:?}: {reason}", self.name));
        self.spec
            .check()
            .map_err(|error| wrong(error.to_string()))?;
        // Check the sizes before memory of that size is allocated.
        for (count, what, most) in [
            (self.count(), "requests", MAX_REQUESTS),
            (self.tokens(), "query tokens", MAX_TOKENS),
            (self.nodes(), "nodes in all levels", MAX_NODES),
            (
                self.masked_pairs(),
                "blocks of 128 queries × blocks of 128 keys under masks",
                MAX_MASKED,
            ),
        ] {
            if count > most {
                return Err(wrong(format!(
                    "requests and tree: {count} {what}: give at most {most}"
                )));
            }
        }
        if self.page_size == 0 {
            return Err(wrong(format!(
                "page_size is 0: give 1 to {}",
                PageTable::MAX_PAGE_SIZE
            )));
        }
        let pages = self.pages();
        if pages > MAX_PAGES {
            return Err(wrong(format!(
                "requests and tree: {pages} pages of {} tokens: give at most {MAX_PAGES}, or a larger page_size",
                self.page_size
            )));
        }
        if let Some(k) = self.top_k {
            self.check_chosen(pages * u64::from(self.page_size), k)?;
        }
        // Page ids, shuffled and in tables, and requests with their page lists. The bits of block masks are fewer than the others.
        let listed = pages.max(self.listed_pages());
        let (blocks, of_blocks) = self.masked_blocks();
        let needed = 24_u64
            .saturating_mul(listed.saturating_add(of_blocks))
            .saturating_add(256 * (self.count() + blocks));
        memory::check(&format!("case {:?}", self.name), needed, "make it smaller")?;
        let (mut batch, all_pages) =
            layout::batch(self).map_err(|error| wrong(error.to_string()))?;
        if let Some(by_head) = &self.by_head {
            let lists = by_head.lists(self.layout, (&batch, &all_pages));
            batch = lists.map_err(|error| wrong(error.to_string()))?.batch();
        }
        batch
            .check(&self.spec)
            .map_err(|error| wrong(error.to_string()))?;
        Ok(batch)
    }

    /// Number of requests, including those of the tree.
    pub(crate) fn count(&self) -> u64 {
        let of_tree = self.leaves();
        let requests = self.requests.iter().map(|r| u64::from(r.count));
        requests.fold(of_tree, u64::saturating_add)
    }

    fn leaves(&self) -> u64 {
        let tree = self.tree.as_ref();
        tree.and_then(|tree| tree.nodes_per_level.last())
            .map_or(0, |&nodes| nodes.into())
    }

    /// Number of nodes of the tree in all levels.
    fn nodes(&self) -> u64 {
        let levels = self.tree.iter().flat_map(|tree| &tree.nodes_per_level);
        levels.map(|&nodes| u64::from(nodes)).sum()
    }

    /// Numbers of requests with a block mask: how many there are, with how many blocks of queries and of keys.
    fn masks(&self) -> impl Iterator<Item = (&Requests, [u64; 3])> {
        let masked = self.requests.iter().filter(|one| one.one_block_in > 0);
        masked.map(|one| {
            let blocks = |tokens: u32| u64::from(tokens.div_ceil(BlockMask::KEYS));
            let counts = [one.count.into(), blocks(one.q_len), blocks(one.kv_len)];
            (one, counts)
        })
    }

    /// Number of bits of all block masks.
    fn masked_pairs(&self) -> u64 {
        let pairs = self
            .masks()
            .map(|(_, [count, queries, keys])| (queries * keys).saturating_mul(count));
        pairs.fold(0, u64::saturating_add)
    }

    /// Upper bounds of the number of blocks of queries with a mask, and of the pages that they list: each is a request.
    fn masked_blocks(&self) -> (u64, u64) {
        // With heads of their own pages, the blocks are added to the lists of heads.
        let lists = if self.by_head.is_some() { 2 } else { 1 };
        let pages = u64::from(BlockMask::KEYS.div_ceil(self.page_size.max(1))) * lists;
        let of_request = |(one, [count, queries, keys]): (&Requests, [u64; 3])| {
            let before = keys.saturating_sub(queries);
            // Of the blocks before the own ones, one in some; the own ones; and one that the division cuts off.
            let chosen = queries * (before + queries / 2) / u64::from(one.one_block_in);
            let listed = (chosen + 3 * queries).saturating_mul(pages);
            (count.saturating_mul(queries), count.saturating_mul(listed))
        };
        self.masks().map(of_request).fold((0, 0), |sum, one| {
            (sum.0.saturating_add(one.0), sum.1.saturating_add(one.1))
        })
    }

    /// Number of query tokens of all requests.
    pub(crate) fn tokens(&self) -> u64 {
        let requests = self.requests.iter();
        let tokens = requests.map(|r| u64::from(r.q_len) * u64::from(r.count));
        tokens.fold(self.leaves(), u64::saturating_add)
    }

    /// Lower bound of the number of pages in the tables; shared pages count once.
    fn pages(&self) -> u64 {
        let page_size = self.page_size.max(1);
        let requests = self
            .requests
            .iter()
            .map(|r| u64::from(r.count) * u64::from(r.kv_len.div_ceil(page_size)));
        let tree = self.tree.iter().flat_map(|tree| {
            let levels = tree.nodes_per_level.iter().zip(&tree.tokens_per_level);
            levels.map(|(&nodes, &tokens)| u64::from(nodes) * u64::from(tokens.div_ceil(page_size)))
        });
        requests.chain(tree).fold(0, u64::saturating_add)
    }

    /// Number of entries of page lists during construction: each tree node also lists the pages above it, and each head
    /// has its own list.
    fn listed_pages(&self) -> u64 {
        let page_size = self.page_size.max(1);
        let (mut len, mut of_tree) = (0_u32, 0_u64);
        if let Some(tree) = &self.tree {
            for (&nodes, &tokens) in tree.nodes_per_level.iter().zip(&tree.tokens_per_level) {
                len = len.saturating_add(tokens);
                let listed = u64::from(nodes) * u64::from(len.div_ceil(page_size));
                of_tree = of_tree.saturating_add(listed);
            }
        }
        let of_heads = self.by_head.iter().flat_map(|by_head| {
            let heads = u64::from(by_head.model.kv_heads);
            self.requests.iter().map(move |r| {
                let most = if r.all_pages { u32::MAX } else { by_head.pages };
                let pages = r.kv_len.div_ceil(page_size).min(most);
                heads.saturating_mul(u64::from(r.count) * u64::from(pages))
            })
        });
        of_heads.fold(of_tree, u64::saturating_add)
    }

    /// The lengths in words: `64 decodes × 8192, 1 chunk of 1024 @ 8192`. Of long lists, the first ones.
    #[must_use]
    pub fn lengths(&self) -> String {
        let named = self.requests.iter().take(MOST_NAMED);
        let mut words: Vec<String> = named
            .map(
                |&Requests {
                     q_len,
                     kv_len,
                     count,
                     branches,
                     one_block_in,
                     ..
                 }| match q_len {
                    _ if branches > 0 => {
                        format!(
                            "{} of {q_len} @ {kv_len}",
                            counted(count as usize, "draft tree")
                        )
                    }
                    _ if one_block_in > 0 => {
                        format!(
                            "{} of {q_len} @ {kv_len} on one block in {one_block_in}",
                            counted(count as usize, "chunk")
                        )
                    }
                    1 => format!("{} × {kv_len}", counted(count as usize, "decode")),
                    _ => format!("{} of {q_len} @ {kv_len}", counted(count as usize, "chunk")),
                },
            )
            .collect();
        if let Some(more @ 1..) = self.requests.len().checked_sub(MOST_NAMED) {
            words.push(format!("{more} more"));
        }
        if let Some(tree) = &self.tree {
            words.push(format!(
                "tree {} of {} tokens",
                levels(&tree.nodes_per_level),
                levels(&tree.tokens_per_level)
            ));
        }
        words.join(", ")
    }

    /// The heads in words: `32/8 × 128 bf16`.
    #[must_use]
    pub fn heads(&self) -> String {
        let Spec {
            head_dim_qk,
            head_dim_v,
            latent,
            q_dtype,
            kv_dtype,
            compute,
            ..
        } = self.spec;
        let of_model = self.by_head.as_ref().map(|by_head| &by_head.model);
        let Spec {
            q_heads, kv_heads, ..
        } = *of_model.unwrap_or(&self.spec);
        let mut words = format!("{q_heads}/{kv_heads} × {head_dim_qk}");
        if head_dim_v != head_dim_qk {
            words += &format!("/{head_dim_v}");
        }
        if latent {
            words += " latent";
        }
        words += &format!(" {}", dtype_name(q_dtype));
        if kv_dtype != q_dtype {
            words += &format!(", KV {}", dtype_name(kv_dtype));
        }
        if compute == tandem_attn::problem::Compute::F8 {
            words += ", products f8";
        }
        words
    }
}

/// The numbers of a tree's levels in words. Of long lists, the first ones.
fn levels(numbers: &[u32]) -> String {
    let named = numbers.iter().take(MOST_NAMED);
    let mut words: Vec<_> = named.map(u32::to_string).collect();
    if let Some(more @ 1..) = numbers.len().checked_sub(MOST_NAMED) {
        words.push(format!("{more} more"));
    }
    words.join(",")
}

/// Data type in which prefills compute, as a flag.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Compute {
    /// 16-bit matrix products
    #[default]
    F16,
    /// e4m3 matrix products, for keys and values of that type; queries and weights are rounded to it
    F8,
}

impl From<Compute> for tandem_attn::problem::Compute {
    fn from(compute: Compute) -> Self {
        match compute {
            Compute::F16 => Self::F16,
            Compute::F8 => Self::F8,
        }
    }
}

/// Names of element types in workload files and results.
const DTYPES: [(&str, Dtype); 5] = [
    ("bf16", Dtype::BF16),
    ("f16", Dtype::F16),
    ("f32", Dtype::F32),
    ("f8e4m3", Dtype::F8E4M3),
    ("f8e5m2", Dtype::F8E5M2),
];

/// The name of an element type.
#[must_use]
pub fn dtype_name(dtype: Dtype) -> &'static str {
    let known = DTYPES.iter().find(|(_, known)| *known == dtype);
    known.map_or("other", |(name, _)| name)
}

/// The element type with a name.
///
/// # Errors
/// The known names.
pub fn dtype_of(name: &str) -> Result<Dtype, String> {
    let known = DTYPES.iter().find(|(known, _)| *known == name);
    known.map(|(_, dtype)| *dtype).ok_or_else(|| {
        let names = DTYPES.map(|(name, _)| name).join(", ");
        format!("give one of {names}")
    })
}

/// The suites that are part of the command.
const SUITES: [(&str, &str); 9] = [
    ("quick", include_str!("../../suites/quick.json")),
    ("decode", include_str!("../../suites/decode.json")),
    ("decode8", include_str!("../../suites/decode8.json")),
    ("prefill", include_str!("../../suites/prefill.json")),
    ("pod", include_str!("../../suites/pod.json")),
    ("pat", include_str!("../../suites/pat.json")),
    ("mla", include_str!("../../suites/mla.json")),
    ("variants", include_str!("../../suites/variants.json")),
    ("ranks", include_str!("../../suites/ranks.json")),
];

/// A suite by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Suite {
    /// A short run of everything, small enough for a CPU.
    Quick,
    /// Decode steps: few and many, short and long, even and ragged.
    Decode,
    /// Decode steps on 8-bit keys and values.
    Decode8,
    /// Prompts and chunks.
    Prefill,
    /// A prompt chunk and decodes in one batch.
    Pod,
    /// Decodes that share prefixes: the 20 trees of PAT's Figure 10 under its 4 head settings.
    Pat,
    /// Latent attention: decodes of 16, 64 and 128 heads, new tokens, pages of any size, a shared prefix, keys chosen by indices.
    Mla,
    /// Sinks and windows as in gpt-oss, biases, sigmoid weights, rotary embeddings, and trees and chains of drafted tokens.
    Variants,
    /// Batches for several GPUs: long contexts, large batches, long prompts, and a small batch.
    Ranks,
    /// decode, decode8, prefill, pod, pat, mla and variants.
    All,
}

impl Suite {
    /// The cases.
    ///
    /// # Panics
    /// Never: a test reads every suite.
    #[must_use]
    pub fn cases(self) -> Vec<Case> {
        let wanted = |name: &str| match self {
            Self::Quick => name == "quick",
            Self::Decode => name == "decode",
            Self::Decode8 => name == "decode8",
            Self::Prefill => name == "prefill",
            Self::Pod => name == "pod",
            Self::Pat => name == "pat",
            Self::Mla => name == "mla",
            Self::Variants => name == "variants",
            Self::Ranks => name == "ranks",
            Self::All => !["quick", "ranks"].contains(&name),
        };
        let suites = SUITES.iter().filter(|(name, _)| wanted(name));
        suites
            .flat_map(|(name, text)| parse(name, text).expect("embedded suites are read in a test"))
            .collect()
    }
}

/// Reads the cases of a file.
///
/// # Errors
/// [`Failure::Read`], or [`Failure::Input`] that shows the position.
pub fn load(path: &Path) -> Result<Vec<Case>, Failure> {
    let text = input::text(path, input::MOST_JSON)?;
    parse(&path.display().to_string(), &text)
}

/// The cases whose names contain a text; all without a text.
///
/// # Errors
/// [`Failure::Input`] if there are none.
pub fn matching(mut cases: Vec<Case>, text: Option<&str>) -> Result<Vec<Case>, Failure> {
    if let Some(text) = text {
        let first = cases.first().map(|case| case.name.clone());
        cases.retain(|case| case.name.contains(text));
        if cases.is_empty() {
            let first = first.unwrap_or_default();
            return Err(Failure::Input(format!(
                "no case has {text:?} in its name; the first is called {first:?}"
            )));
        }
    }
    Ok(cases)
}

/// Parses the cases in a text; messages use `name` for it.
///
/// # Errors
/// [`Failure::Input`] that shows the position.
pub fn parse(name: &str, text: &str) -> Result<Vec<Case>, Failure> {
    let value: serde_json::Value = json::read(name, text)?;
    let cases = match papers::recognise(&value) {
        Some(paper) => papers::cases(paper, name, text)?,
        None => file::cases(name, text)?,
    };
    if cases.is_empty() {
        return Err(Failure::Input(format!("{name} has no cases")));
    }
    Ok(cases)
}

#[cfg(test)]
mod tests;
