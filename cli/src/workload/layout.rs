//! Builds page tables from lengths.

use tandem_attn::problem::{Batch, PageTable, ProblemError};

use super::{Case, Requests, Tree};

/// Seed of the page order, so that it is the same every time.
const SEED: u64 = 1;

/// Pages of larger pools are shuffled in parts of this size, which stay in a cache: anywhere in 2²⁶ pages takes seconds.
const SHUFFLED_TOGETHER: usize = 1 << 20;

/// The batch of a case: its requests, then one decode for each leaf of its tree.
pub(super) fn batch(case: &Case) -> Result<Batch, ProblemError> {
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
    } in &case.requests
    {
        for _ in 0..count {
            if trees {
                tables.drafts.extend(drafts(q_len, branches));
            }
            let pages = tables.extend(&[], kv_len);
            tables.rows.push((q_len, kv_len, pages));
        }
    }
    if let Some(tree) = &case.tree {
        tables.push_tree(tree);
    }
    tables.into_batch()
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
    /// Number of query tokens, number of keys, and pages of each request.
    rows: Vec<(u32, u32, Vec<u32>)>,
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
        self.rows
            .extend(above.into_iter().map(|pages| (1, len, pages)));
    }

    fn into_batch(mut self) -> Result<Batch, ProblemError> {
        let mut shuffled: Vec<u32> = (0..self.used).collect();
        let mut random = fastrand::Rng::with_seed(SEED);
        let parts = shuffled.chunks_mut(SHUFFLED_TOGETHER);
        parts.for_each(|part| random.shuffle(part));
        let mut table = PageTable::new(self.page_size, self.used);
        let mut qo_indptr = vec![0];
        let mut tokens = 0;
        for (q_len, kv_len, mut pages) in std::mem::take(&mut self.rows) {
            pages
                .iter_mut()
                .for_each(|page| *page = shuffled[*page as usize]);
            table.try_push(pages, kv_len)?;
            tokens += q_len;
            qo_indptr.push(tokens);
        }
        let batch = Batch::new(qo_indptr, table);
        if self.drafts.is_empty() {
            return Ok(batch);
        }
        // Requests of the prefix tree are decodes without drafts.
        self.drafts.resize(tokens as usize, u64::MAX);
        Ok(batch.with_ancestors(self.drafts))
    }
}
