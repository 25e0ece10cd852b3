//! Trees of draft tokens: each sees its context, the tokens before it on its path, and itself.

use tandem_attn::{
    kv::DraftTree,
    problem::{Batch, PageTable},
};

use super::Runner;
use crate::{numeric::Rng, oracle};

/// The context and the new tokens of a request.
struct Drafted {
    context: Vec<u32>,
    context_len: u32,
    parents: Vec<Option<u32>>,
    /// Of all keys, those of the new tokens last.
    slots: Vec<u32>,
}

impl Drafted {
    fn tree(&self) -> DraftTree<'_> {
        DraftTree {
            context: &self.context,
            context_len: self.context_len,
            parents: &self.parents,
            slots: &self.slots[self.context_len as usize..],
        }
    }

    /// The slots that a token sees.
    fn seen(&self, mut token: u32) -> Vec<u32> {
        let of_token = |token: u32| self.slots[(self.context_len + token) as usize];
        let mut path = vec![of_token(token)];
        while let Some(parent) = self.parents[token as usize] {
            token = parent;
            path.push(of_token(token));
        }
        let context = self.slots[..self.context_len as usize].iter().copied();
        context.chain(path.into_iter().rev()).collect()
    }
}

impl Runner<'_> {
    pub(super) fn tree(&mut self, at: usize, q: &[f32], rng: &mut Rng) -> Result<(), String> {
        let (case, page_size) = (self.case, self.case.page_size);
        let (spec, pool) = (self.in_16_bits(), self.pools()[at % 2]);
        let Some(by_token) = pool.by_token() else {
            self.tally
                .unsupported("tokens that are not evenly spaced are no pages");
            return Ok(());
        };
        let (tables, pages) = case.tables();
        let mut all = Vec::new();
        for row in case.steps[at].rows.iter().filter(|row| row.queries > 0) {
            let table = &tables[row.sequence];
            let context_len = row.keys - row.queries;
            let parent = |token| rng.below(token as usize + 1).checked_sub(1);
            let parents = (0..row.queries).map(parent);
            let slot = |key: u32| table[(key / page_size) as usize] * page_size + key % page_size;
            all.push(Drafted {
                context: table[..context_len.div_ceil(page_size) as usize].to_vec(),
                context_len,
                parents: parents
                    .map(|parent| parent.map(|token| token as u32))
                    .collect(),
                slots: (0..row.keys).map(slot).collect(),
            });
        }
        let trees: Vec<_> = all.iter().map(Drafted::tree).collect();
        let batch = DraftTree::batch(&spec, page_size, pages, &trees);
        // A request for each token, whose keys are those that it sees.
        let mut table = PageTable::new(1, pages * page_size);
        for drafted in &all {
            for token in 0..drafted.parents.len() as u32 {
                let seen = drafted.seen(token);
                table.push(&seen, seen.len() as u32);
            }
        }
        let tokens = table.row_blocks() as u32;
        let alone = Batch::new((0..=tokens).collect(), table);
        let right = oracle::right(case, &alone, &self.world, q);
        let mut given = self.given(0, tokens as usize);
        given.pools = vec![pool, by_token];
        self.call_and_judge("trees of draft tokens", &spec, &batch, &given, right)
    }
}
