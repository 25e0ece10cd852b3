//! Distributes queries over ranks, each of which has all keys.

use std::ops::Range;

use super::ShardError;
use crate::problem::{Batch, PageTable, Part, Spec};

/// Long prompts are cut at multiples of this number of tokens: whole tiles of every kernel.
const STEP: u32 = 128;

/// The tokens of each rank.
pub(super) struct RankTokens<'a> {
    spec: &'a Spec,
    tokens: Vec<Vec<Range<u32>>>,
}

impl<'a> RankTokens<'a> {
    pub(super) fn new(spec: &'a Spec, batch: &Batch, ranks: u32) -> Result<Self, ShardError> {
        let mut tokens = vec![Vec::new(); ranks as usize];
        let long = |request: &usize| batch.q_len(*request) >= 2 * ranks * STEP;
        let range = |request: usize| batch.qo_indptr[request]..batch.qo_indptr[request + 1];
        for request in (0..batch.requests()).filter(long) {
            let (Range { start, .. }, len) = (range(request), batch.q_len(request));
            let cut = |index: u32| match index {
                index if index == 2 * ranks => start + len,
                index => {
                    start
                        + (u64::from(len) * u64::from(index) / u64::from(2 * ranks)) as u32 / STEP
                            * STEP
                }
            };
            for run in 0..2 * ranks {
                let rank = run.min(2 * ranks - 1 - run);
                tokens[rank as usize].push(cut(run)..cut(run + 1));
            }
        }
        // Neighbouring requests stay together, because they may share prefixes.
        let short: Vec<_> = (0..batch.requests()).filter(|r| !long(r)).collect();
        let work = |&request: &usize| {
            let queries = u64::from(batch.q_len(request));
            queries * (batch.kv_len(request) + 1)
        };
        let all: u64 = short.iter().map(work).sum();
        let mut done = 0;
        for request in short {
            let middle = done + work(&request) / 2;
            let rank = (u128::from(middle) * u128::from(ranks) / u128::from(all.max(1))) as usize;
            tokens[rank.min(ranks as usize - 1)].push(range(request));
            done += work(&request);
        }
        for tokens in &mut tokens {
            tokens.retain(|run| !run.is_empty());
            tokens.sort_unstable_by_key(|run| run.start);
            // Row blocks that span requests stay whole: a copy for each request would copy their page ids, too.
            tokens.dedup_by(|next, last| {
                let meet = last.end == next.start;
                if meet {
                    last.end = next.end;
                }
                meet
            });
        }
        Ok(Self { spec, tokens })
    }

    /// The batch of a rank, and the runs of tokens that it has.
    pub(super) fn of(
        &self,
        batch: &Batch,
        rank: u32,
    ) -> Result<(Batch, Vec<Range<u32>>), ShardError> {
        let tokens = &self.tokens[rank as usize];
        if self.tokens.len() == 1 {
            return Ok((batch.clone(), tokens.clone()));
        }
        let (mut runs, mut before) = (tokens.iter().peekable(), 0);
        let own_tokens = |&end: &u32| {
            while let Some(run) = runs.next_if(|run| run.end <= end) {
                before += run.len() as u32;
            }
            before + runs.peek().map_or(0, |run| end.saturating_sub(run.start))
        };
        let own_indptr = batch.qo_indptr.iter().map(own_tokens).collect();
        let parts = batch.parts.iter().enumerate();
        let parts = parts
            .map(|(index, part)| self.part(part, index, tokens, !batch.masks.is_empty()))
            .collect::<Result<_, _>>()?;
        let ancestors = match batch.ancestors.is_empty() {
            true => Vec::new(),
            false => tokens
                .iter()
                .flat_map(|run| &batch.ancestors[run.start as usize..run.end as usize])
                .copied()
                .collect(),
        };
        let masks = tokens.iter().flat_map(Range::clone);
        let own = Batch::composed(own_indptr, parts)
            .with_ancestors(ancestors)
            .with_masks(batch.masks.of_tokens(masks));
        Ok((own, tokens.clone()))
    }

    fn part(
        &self,
        whole: &Part,
        index: usize,
        tokens: &[Range<u32>],
        masked: bool,
    ) -> Result<Part, ShardError> {
        let (variant, rotary) = (&self.spec.variant, self.spec.rotary.is_some());
        let table = PageTable::new(whole.table.page_size, whole.table.pool_pages);
        let starts = tokens.iter().scan(0, |own, run| {
            let start = *own;
            *own += run.len() as u32;
            Some(start)
        });
        let mut part = Part::new(Vec::new(), table);
        for (run, own) in tokens.iter().zip(starts) {
            let ends = whole.q_indptr.get(1..).unwrap_or_default();
            let first = ends.partition_point(|&end| end <= run.start);
            for row_block in first..whole.row_blocks() {
                let block = whole.q_range(row_block);
                if block.start >= run.end {
                    break;
                }
                let piece = both(run, &block);
                if piece.is_empty() {
                    continue;
                }
                let begin = own + (piece.start - run.start);
                // Tokens without keys in this part.
                match part.q_indptr.last() {
                    None => part.q_indptr.push(begin),
                    Some(&end) if end < begin => part.try_push(begin - end, [], 0, begin - end)?,
                    Some(_) => {}
                }
                // Number of tokens from the end of the piece to the end of its row block.
                let cut = block.end - piece.end;
                let (kv_len, after) = (whole.kv_len(row_block), whole.after(row_block));
                if !variant.causal
                    && (variant.window_left.is_some()
                        || variant.hooks.is_some()
                        || rotary
                        || masked)
                    && cut > after
                {
                    return Err(ShardError::WindowOfQueries {
                        part: index,
                        row_block,
                    });
                }
                let hidden = match variant.causal {
                    true => cut.saturating_sub(after),
                    false => 0,
                };
                let kv_len = kv_len.saturating_sub(hidden);
                let queries = piece.len() as u32;
                let pages = whole.table.pages(row_block);
                // Without keys, the position does not matter, but it may not be negative.
                let after = match kv_len {
                    0 => queries,
                    _ => after.saturating_sub(cut),
                };
                part.try_push(queries, pages, kv_len, after)?;
            }
        }
        if part.q_indptr.is_empty() {
            part.q_indptr.push(0);
        }
        Ok(part)
    }
}

fn both(a: &Range<u32>, b: &Range<u32>) -> Range<u32> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shard::Sharding;

    /// A row block of several requests was copied for each of them.
    #[test]
    fn parts_that_requests_share_are_not_copied_for_each() {
        let mut table = PageTable::new(16, 200);
        for request in 0..20 {
            let pages = (0..50).chain([100 + request]);
            table.push(&pages.collect::<Vec<_>>(), 803);
        }
        // Some wait.
        let ends = (0..=20).map(|request| request - request / 7);
        let batch = Batch::new(ends.collect(), table).share_prefixes();
        let (spec, sharding) = (Spec::new(8, 2, 64), Sharding::one().over_queries(2));
        let shares = sharding.shares(&spec, &batch).unwrap();
        sharding.verify(&spec, &batch, &shares).unwrap();
        for share in &shares {
            assert_eq!(share.batch.parts[0].table.indices.len(), 50);
            assert_eq!(share.tokens.len(), 1, "{:?}", share.tokens);
        }
        let own = shares.iter().map(|share| share.batch.total_q());
        assert_eq!(own.sum::<u32>(), batch.total_q());
    }
}
