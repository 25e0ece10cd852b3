//! Distributes keys over ranks, page by page.
//!
//! A rank's keys of a row block are runs of consecutive keys. Queries that see all of them become a row block without a
//! mask. Under a causal mask, a query sees all runs before its position, and a beginning of the run that contains its
//! position. One row block therefore serves all queries from the beginning of a run to the beginning of the next: the
//! mask cuts off the end of its last run, as in any other batch.

use std::ops::Range;

use super::{Keys, ShardError};
use crate::problem::{Batch, PageTable, Part, Spec};

/// Maximum number of page ids for the cuts of one row block.
const MOST_PAGES: usize = 1 << 25;

/// Runs of pages with one owner, in order. Neighbouring runs have different owners.
pub(super) fn runs(deal: Keys, ranks: u32, pages: u32) -> Vec<(Range<u32>, u32)> {
    let mut runs: Vec<(Range<u32>, u32)> = Vec::new();
    let mut push = |run: Range<u32>, owner: u32| match runs.last_mut() {
        _ if run.is_empty() => {}
        Some((last, of)) if *of == owner => last.end = run.end,
        _ => runs.push((run, owner)),
    };
    let cut = |index: u32, of: u32| (u64::from(pages) * u64::from(index) / u64::from(of)) as u32;
    match deal {
        Keys::RoundRobin { pages: turn } => {
            let mut begin = 0;
            for owner in (0..ranks).cycle() {
                if begin >= pages {
                    break;
                }
                let end = begin.saturating_add(turn).min(pages);
                push(begin..end, owner);
                begin = end;
            }
        }
        Keys::Contiguous => {
            for owner in 0..ranks {
                push(cut(owner, ranks)..cut(owner + 1, ranks), owner);
            }
        }
        Keys::Folded => {
            for run in 0..2 * ranks {
                let owner = run.min(2 * ranks - 1 - run);
                push(cut(run, 2 * ranks)..cut(run + 1, 2 * ranks), owner);
            }
        }
    }
    runs
}

/// The batch of a rank.
pub(super) fn batch_of(
    spec: &Spec,
    batch: &Batch,
    deal: Keys,
    ranks: u32,
    rank: u32,
) -> Result<Batch, ShardError> {
    let parts = batch.parts.iter().enumerate().map(|(index, part)| {
        let mut own_part = RankPart::new(part);
        for row_block in 0..part.row_blocks() {
            let pages = part.table.pages(row_block).len() as u32;
            let own = runs(deal, ranks, pages).into_iter();
            let own: Vec<_> = own.filter(|(_, of)| *of == rank).map(|run| run.0).collect();
            let variant = &spec.variant;
            let masked = match (variant.window_left, variant.hooks, batch.has_masks()) {
                _ if spec.rotary.is_some() => Some("the rotary embedding"),
                (Some(_), ..) => Some("a window"),
                (None, Some(_), _) => Some("the variant"),
                (None, None, true) => Some("a mask"),
                (None, None, false) => None,
            };
            match (masked, own.len(), part.q_range(row_block).is_empty()) {
                (Some(what), runs @ 2.., false) => {
                    return Err(ShardError::Positions {
                        what,
                        part: index,
                        row_block,
                        runs,
                    });
                }
                (_, 0 | 1, _) => own_part.one_run(spec, row_block, own.first().cloned())?,
                _ => own_part.runs(spec, index, row_block, &own)?,
            }
        }
        Ok(own_part.part)
    });
    let parts = parts.collect::<Result<_, _>>()?;
    let own = Batch::composed(batch.qo_indptr.clone(), parts);
    Ok(own
        .with_ancestors(batch.ancestors.clone())
        .with_masks(batch.masks.clone()))
}

/// A part of a rank's batch, while it is made.
struct RankPart<'a> {
    whole: &'a Part,
    part: Part,
}

impl<'a> RankPart<'a> {
    fn new(whole: &'a Part) -> Self {
        let PageTable {
            page_size,
            pool_pages,
            ..
        } = whole.table;
        let first = whole.q_indptr[..1].to_vec();
        Self {
            whole,
            part: Part::new(first, PageTable::new(page_size, pool_pages)),
        }
    }

    /// Adds at most one run. Positions do not change, so all masks stay valid.
    fn one_run(
        &mut self,
        spec: &Spec,
        row_block: usize,
        run: Option<Range<u32>>,
    ) -> Result<(), ShardError> {
        let whole = self.whole;
        let queries = whole.q_range(row_block).len() as u32;
        let (kv_len, after) = (whole.kv_len(row_block), whole.after(row_block));
        let Some(run) = run else {
            return Ok(self.part.try_push(queries, [], 0, kv_len + after)?);
        };
        let keys = keys_of(&run, &whole.table, kv_len);
        let first = i64::from(whole.first_position(row_block));
        // Queries before the run see none of its keys.
        let blind = match spec.variant.causal {
            true => (i64::from(keys.start) - first).clamp(0, queries.into()) as u32,
            false => 0,
        };
        if blind > 0 {
            self.part.try_push(blind, [], 0, blind)?;
        }
        if blind < queries || queries == 0 {
            let pages = &whole.table.pages(row_block)[run.start as usize..run.end as usize];
            let after = kv_len + after - keys.end;
            self.part
                .try_push(queries - blind, pages, keys.len() as u32, after)?;
        }
        Ok(())
    }

    /// Adds several runs. The causal mask is the only mask.
    fn runs(
        &mut self,
        spec: &Spec,
        part: usize,
        row_block: usize,
        runs: &[Range<u32>],
    ) -> Result<(), ShardError> {
        let whole = self.whole;
        let (kv_len, pages) = (whole.kv_len(row_block), whole.table.pages(row_block));
        let queries = whole.q_range(row_block).len() as u32;
        let first = i64::from(whole.first_position(row_block));
        let keys: Vec<_> = runs
            .iter()
            .map(|run| keys_of(run, &whole.table, kv_len))
            .collect();
        let own = |runs: &'a [u32], of: &[Range<u32>]| -> Vec<&'a u32> {
            of.iter()
                .flat_map(|run| &runs[run.start as usize..run.end as usize])
                .collect()
        };
        let last = keys[keys.len() - 1].end;
        if !spec.variant.causal || first + 1 >= i64::from(last) {
            let kv_len = keys.iter().map(|run| run.len() as u32).sum();
            let pages = own(pages, runs);
            return Ok(self.part.try_push(queries, pages, kv_len, queries)?);
        }
        // The first query in or behind each run.
        let begins =
            |run: &Range<u32>| (i64::from(run.start) - first).clamp(0, queries.into()) as u32;
        let ends = keys[1..].iter().map(begins).chain([queries]);
        let begin = begins(&keys[0]);
        if begin > 0 {
            self.part.try_push(begin, [], 0, begin)?;
        }
        let cuts = keys.iter().filter(|run| begins(run) < queries).count();
        let most = runs.iter().map(|run| run.len()).sum();
        if cuts.saturating_mul(most) > MOST_PAGES {
            return Err(ShardError::ShortTurns {
                part,
                row_block,
                queries,
                cuts,
                pages: most,
            });
        }
        let (mut begin, mut before) = (begin, 0);
        for (index, (run, end)) in keys.iter().zip(ends).enumerate() {
            if end > begin {
                // The position after the last of these queries, and the end of the part of the run that it sees.
                let position = (first + i64::from(end)) as u32;
                let reach = position.min(run.end);
                let kv_len = before + (reach - run.start);
                let (queries, pages) = (end - begin, own(pages, &runs[..=index]));
                self.part
                    .try_push(queries, pages, kv_len, position - reach)?;
                begin = end;
            }
            before += run.len() as u32;
        }
        Ok(())
    }
}

/// The keys of a run of pages.
fn keys_of(run: &Range<u32>, table: &PageTable, kv_len: u32) -> Range<u32> {
    let end = run.end.saturating_mul(table.page_size).min(kv_len);
    run.start * table.page_size..end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folded_prefills_have_as_many_pairs_on_each_rank() {
        let mut table = PageTable::new(16, 64);
        table.push(&(0..64).collect::<Vec<_>>(), 1024);
        let (spec, batch) = (Spec::new(8, 2, 64), Batch::new(vec![0, 1024], table));
        for ranks in [2, 4, 8] {
            let pairs = |rank| {
                let batch = batch_of(&spec, &batch, Keys::Folded, ranks, rank).unwrap();
                let part = &batch.parts[0];
                let of = |row_block| {
                    let first = part.first_position(row_block);
                    (0..part.q_range(row_block).len() as i32)
                        .map(|query| spec.variant.visible(first + query, part.kv_len(row_block)))
                        .map(|seen| seen.len() as u64)
                        .sum::<u64>()
                };
                (0..part.row_blocks()).map(of).sum::<u64>()
            };
            let pairs: Vec<u64> = (0..ranks).map(pairs).collect();
            assert_eq!(pairs.iter().sum::<u64>(), 1024 * 1025 / 2);
            let (least, most) = (pairs.iter().min().unwrap(), pairs.iter().max().unwrap());
            assert!(most - least <= 1024, "{pairs:?}");
        }
    }

    #[test]
    fn a_turn_that_follows_itself_is_one_run() {
        assert_eq!(runs(Keys::Folded, 1, 7), [(0..7, 0)]);
        assert_eq!(runs(Keys::RoundRobin { pages: 2 }, 1, 7), [(0..7, 0)]);
        assert_eq!(runs(Keys::Folded, 2, 8), [(0..2, 0), (2..6, 1), (6..8, 0)]);
        assert_eq!(runs(Keys::Contiguous, 3, 1), [(0..1, 2)]);
    }
}
