//! Verifies shares against their batch: each query sees each of its keys once.

use super::{ShardDefect, Sharding, Share};
use crate::problem::{Batch, Spec};

/// Keys that a query sees on one page: part, page id and offsets on the page. If distances matter, also that of the
/// first key from the query.
type Seen = (usize, u32, u32, u32, i32);

impl Sharding {
    /// Whether the shares compute the batch: each query head of each token in one group of ranks, which together see its
    /// keys, each once.
    ///
    /// It takes time in proportion to query tokens × pages.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn verify(&self, spec: &Spec, batch: &Batch, shares: &[Share]) -> Result<(), ShardDefect> {
        if shares.len() != self.ranks() as usize {
            return Err(ShardDefect::Shares {
                got: shares.len(),
                expected: self.ranks(),
            });
        }
        for share in shares {
            share.check_ranges(spec, batch, self.ranks())?;
            let (rank, checked) = (share.rank, share.batch.check(&share.spec));
            checked.map_err(|error| ShardDefect::Batch {
                rank,
                reason: error.to_string(),
            })?;
        }
        let (tokens, heads) = (batch.total_q(), spec.q_heads);
        let mut computed = vec![0_u32; (tokens * heads) as usize];
        let first_of = |share: &&Share| share.rank == share.group.start;
        for first in shares.iter().filter(first_of) {
            let group = &shares[first.group.start as usize..first.group.end as usize];
            let got = group
                .iter()
                .filter(|share| share.spec.variant.sinks)
                .count();
            let expected = usize::from(spec.variant.sinks);
            if got != expected {
                let first = first.rank;
                return Err(ShardDefect::Sinks {
                    first,
                    got,
                    expected,
                });
            }
            for (own, token) in (0..).zip(first.whole_tokens()) {
                for head in first.q_heads.clone() {
                    computed[(token * heads + head) as usize] += 1;
                }
                let mut expected = seen(spec, batch, token);
                let mut got: Vec<Seen> = group
                    .iter()
                    .flat_map(|share| seen(&share.spec, &share.batch, own))
                    .collect();
                expected.sort_unstable();
                got.sort_unstable();
                if got != expected {
                    return Err(ShardDefect::Seen {
                        token,
                        first: first.rank,
                        last: first.group.end - 1,
                    });
                }
            }
        }
        match computed.iter().position(|&got| got != 1) {
            None => Ok(()),
            Some(at) => Err(ShardDefect::Computed {
                token: at as u32 / heads,
                head: at as u32 % heads,
                got: computed[at],
            }),
        }
    }
}

impl Share {
    /// Checks that its tokens, heads and ranks exist.
    fn check_ranges(&self, spec: &Spec, batch: &Batch, ranks: u32) -> Result<(), ShardDefect> {
        let tokens = self
            .tokens
            .iter()
            .map(|run| ("tokens", run, batch.total_q()));
        let all = [
            ("query heads", &self.q_heads, spec.q_heads),
            ("ranks of the group", &self.group, ranks),
        ];
        for (what, range, limit) in tokens.chain(all) {
            let empty = what.starts_with("ranks") && !range.contains(&self.rank);
            if range.start > range.end || range.end > limit || empty {
                return Err(ShardDefect::Range {
                    rank: self.rank,
                    what,
                    begin: range.start,
                    end: range.end,
                    limit,
                });
            }
        }
        Ok(())
    }
}

/// What a query token sees.
fn seen(spec: &Spec, batch: &Batch, token: u32) -> Vec<Seen> {
    // What depends on distances: masks as bits, variants, and the rotary embedding.
    let of_spec = spec.variant.hooks.is_some() || spec.rotary.is_some();
    let measured = of_spec || batch.has_masks();
    let mut all = Vec::new();
    for (index, part) in batch.parts.iter().enumerate() {
        let Some(row_block) = part.row_block_of(token) else {
            continue;
        };
        let position = part.position_of(row_block, token);
        let keys = spec.variant.visible(position, part.kv_len(row_block));
        let page_size = part.table.page_size;
        let mut key = keys.start;
        while key < keys.end {
            let end = ((key / page_size + 1) * page_size).min(keys.end);
            let page = part.table.pages(row_block)[(key / page_size) as usize];
            let before = match measured {
                true => position - key as i32,
                false => 0,
            };
            all.push((index, page, key % page_size, end - key, before));
            key = end;
        }
    }
    all
}
