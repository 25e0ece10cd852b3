//! Builds page tables from lengths.

use tandem_attn::{
    kv::{BlockMask, BlockSparse, MaskedHeads},
    problem::{Batch, KvLayout, PageTable, ProblemError, Spec},
};

use super::{Case, Requests, Tree};

/// Seed of the page order, so that it is the same every time.
const SEED: u64 = 1;

/// Pages of larger pools are shuffled in parts of this size, which stay in a cache: anywhere in 2²⁶ pages takes seconds.
const SHUFFLED_TOGETHER: usize = 1 << 20;

/// The batch of a case: its requests, then one decode for each leaf of its tree; and whether all heads read all pages of each request.
/// With a block mask, each block of queries is a request.
pub(super) fn batch(case: &Case) -> Result<(Batch, Vec<bool>), ProblemError> {
    let trees = case.requests.iter().any(|requests| requests.branches > 0);
    let mut tables = Tables {
        page_size: case.page_size,
        drafts: Vec::new(),
        used: 0,
        rows: Vec::new(),
    };
    for &Requests {
        q_len,
        kv_len,
        count,
        branches,
        all_pages,
        one_block_in,
    } in &case.requests
    {
        for _ in 0..count {
            if trees {
                tables.drafts.extend(drafts(q_len, branches));
            }
            let pages = tables.extend(&[], kv_len);
            tables.rows.push(Row {
                q_len,
                kv_len,
                pages,
                all_pages,
                one_block_in,
            });
        }
    }
    if let Some(tree) = &case.tree {
        tables.push_tree(tree);
    }
    // The masks are those of a model, of which `spec` may be one head.
    let of_model = case.by_head.as_ref().map(|by_head| &by_head.model);
    tables.into_batch(of_model.unwrap_or(&case.spec), case.layout)
}

/// For each new token of a request, the mask of the last keys that it sees.
fn drafts(q_len: u32, branches: u32) -> Vec<u64> {
    if branches == 0 {
        return vec![u64::MAX; q_len as usize];
    }
    let parents: Vec<_> = (0..q_len)
        .map(|token| token.checked_sub(1).map(|before| before / branches))
        .collect();
    Batch::ancestors_of(&parents)
}

struct Tables {
    page_size: u32,
    /// For each query token, the mask of the last keys that it sees.
    drafts: Vec<u64>,
    /// Number of allocated pages.
    used: u32,
    rows: Vec<Row>,
}

/// A request.
struct Row {
    q_len: u32,
    kv_len: u32,
    pages: Vec<u32>,
    all_pages: bool,
    one_block_in: u32,
}

/// The blocks of queries of a prompt as a batch: what each sees.
fn masked(
    spec: &Spec,
    layout: KvLayout,
    table: &PageTable,
    row: &Row,
) -> Result<Batch, ProblemError> {
    let strides = layout.strides(table.page_size, spec.kv_heads, spec.head_dim_qk);
    let mut prompts = BlockSparse::new(spec, strides, table.pool_pages, MaskedHeads::All)?;
    let apart = row.one_block_in;
    let first = row.kv_len.saturating_sub(row.q_len);
    // Blocks of queries and of keys are as long. A block that begins within a block of keys sees both of its own.
    let mask = BlockMask::from_fn(BlockMask::KEYS, row.q_len, row.kv_len, |query, key| {
        let begin = first + query * BlockMask::KEYS;
        let last = begin + (BlockMask::KEYS - 1);
        let own = begin / BlockMask::KEYS..=last / BlockMask::KEYS;
        own.contains(&key) || (query + key).is_multiple_of(apart)
    })?;
    prompts.push(row.q_len, &row.pages, row.kv_len, &[mask])?;
    Ok(prompts.runs().swap_remove(0).batch)
}

/// The order that [`fastrand::Rng::shuffle`] gives. In builds that are not optimised, swaps of the standard library took a
/// third of the time of the command's tests.
#[allow(clippy::manual_swap)]
fn shuffle(pages: &mut [u32], random: &mut fastrand::Rng) {
    for at in 1..pages.len() {
        let other = random.usize(..=at);
        let page = pages[at];
        pages[at] = pages[other];
        pages[other] = page;
    }
}

impl Tables {
    /// The pages of `len` tokens: first the shared ones, which are full, then new ones.
    fn extend(&mut self, shared: &[u32], len: u32) -> Vec<u32> {
        let pages = len.div_ceil(self.page_size);
        let new = pages - shared.len() as u32;
        let all = shared.iter().copied().chain(self.used..self.used + new);
        let all = all.collect();
        self.used += new;
        all
    }

    fn push_tree(&mut self, tree: &Tree) {
        // Pages of the path to each node of a level; the roots have no parents.
        let mut above: Vec<Vec<u32>> = vec![Vec::new()];
        let mut len = 0;
        let levels = tree.nodes_per_level.iter().zip(&tree.tokens_per_level);
        let last = tree.nodes_per_level.len().saturating_sub(1);
        for (level, (&nodes, &tokens)) in levels.enumerate() {
            len += tokens;
            // A partly filled page also gets tokens of the children, so each child has its own copy.
            let shared_len = if level == last {
                len
            } else {
                len - len % self.page_size
            };
            let parents = above.len();
            above = (0..nodes as usize)
                .map(|node| self.extend(&above[node * parents / nodes as usize], shared_len))
                .collect();
        }
        self.rows.extend(above.into_iter().map(|pages| Row {
            q_len: 1,
            kv_len: len,
            pages,
            all_pages: false,
            one_block_in: 0,
        }));
    }

    fn into_batch(
        mut self,
        spec: &Spec,
        layout: KvLayout,
    ) -> Result<(Batch, Vec<bool>), ProblemError> {
        let mut shuffled: Vec<u32> = (0..self.used).collect();
        let mut random = fastrand::Rng::with_seed(SEED);
        let parts = shuffled.chunks_mut(SHUFFLED_TOGETHER);
        parts.for_each(|part| shuffle(part, &mut random));
        let mut table = PageTable::new(self.page_size, self.used);
        let mut qo_indptr = vec![0];
        let mut tokens = 0;
        let mut all_pages = Vec::new();
        for mut row in std::mem::take(&mut self.rows) {
            row.pages
                .iter_mut()
                .for_each(|page| *page = shuffled[*page as usize]);
            if row.one_block_in > 0 {
                let blocks = masked(spec, layout, &table, &row)?;
                let of_blocks = &blocks.parts[0].table;
                for block in 0..blocks.requests() {
                    table.try_push(of_blocks.pages(block).to_vec(), of_blocks.kv_len(block))?;
                    tokens += blocks.q_len(block);
                    qo_indptr.push(tokens);
                    all_pages.push(row.all_pages);
                }
                continue;
            }
            table.try_push(row.pages, row.kv_len)?;
            tokens += row.q_len;
            qo_indptr.push(tokens);
            all_pages.push(row.all_pages);
        }
        let batch = Batch::new(qo_indptr, table);
        if self.drafts.is_empty() {
            return Ok((batch, all_pages));
        }
        // Requests of the prefix tree are decodes without drafts.
        self.drafts.resize(tokens as usize, u64::MAX);
        Ok((batch.with_ancestors(self.drafts), all_pages))
    }
}
