//! Composable formats: one batch as several block-sparse parts, each with its own row block.
//!
//! A shared prefix becomes a part whose row blocks span all requests that have it, so that its keys are read once. The other keys
//! of each request are in the last part. The planner also finds shared prefixes in the page tables of a single-part batch, so
//! compose a batch only if the sharing is known beforehand.

use std::ops::Range;

use crate::problem::{Batch, PageTable, Part};

impl Batch {
    /// Moves leading pages that neighbouring requests share from a single-part batch to parts of their own, level by level. The
    /// first part has the pages that most requests share, the last part the remaining pages of each request.
    ///
    /// The new keys of a request stay in its own row block, so a causal mask hides the same keys as before. Windows, rotary
    /// embedding, biases by distance and masks as bits need distances. A row block has them if one of its requests has queries and
    /// the others wait. One of several requests with queries has none; [`check`](Self::check) refuses these then.
    ///
    /// ```
    /// use tandem_attn::problem::{Batch, PageTable, Spec};
    ///
    /// let mut table = PageTable::new(16, 10);
    /// table.push(&[0, 1, 2], 40);
    /// table.push(&[0, 1, 3], 33);
    /// table.push(&[7], 5);
    /// let batch = Batch::new(vec![0, 1, 2, 3], table).share_prefixes();
    ///
    /// let [shared, own] = &batch.parts[..] else { panic!("two levels") };
    /// assert_eq!((shared.q_range(0), shared.table.pages(0)), (0..2, &[0, 1][..]));
    /// assert_eq!((own.kv_len(0), own.kv_len(1), own.kv_len(2)), (8, 1, 5));
    /// batch.check(&Spec::new(8, 2, 64))?;
    /// # Ok::<(), tandem_attn::problem::ProblemError>(())
    /// ```
    ///
    /// # Panics
    /// If the batch has not exactly one part whose row blocks are the requests. It may panic for a batch that
    /// [`check`](Self::check) refuses.
    #[must_use]
    pub fn share_prefixes(&self) -> Self {
        let [part] = &self.parts[..] else {
            panic!("a batch of one part, not of {}", self.parts.len())
        };
        assert!(
            part.q_indptr == self.qo_indptr,
            "the row blocks are the requests"
        );
        let table = &part.table;
        let page_size = table.page_size;
        // For each request: the pages that were moved so far, and the most that may be (its new keys stay).
        let mut taken = vec![0; part.row_blocks()];
        let most: Vec<usize> = (0..part.row_blocks())
            .map(|r| {
                (table.kv_len(r).saturating_sub(part.q_range(r).len() as u32) / page_size) as usize
            })
            .collect();
        let mut parts = Vec::new();
        let mut within: Vec<_> = std::iter::once(0..part.row_blocks()).collect();
        loop {
            let groups: Vec<Group> = within
                .into_iter()
                .flat_map(|requests| groups(table, requests, &taken, &most))
                .collect();
            if groups.is_empty() {
                break;
            }
            parts.push(shared_part(part, &groups, &taken));
            for Group { requests, pages } in &groups {
                taken[requests.clone()]
                    .iter_mut()
                    .for_each(|taken| *taken += pages);
            }
            within = groups.into_iter().map(|group| group.requests).collect();
        }
        let mut own = PageTable::new(page_size, table.pool_pages);
        for (r, &taken) in taken.iter().enumerate() {
            own.push(
                &table.pages(r)[taken..],
                table.kv_len(r) - taken as u32 * page_size,
            );
        }
        parts.push(Part::new(part.q_indptr.clone(), own).with_keys_after(part.keys_after.clone()));
        Self::composed(self.qo_indptr.clone(), parts)
            .with_ancestors(self.ancestors.clone())
            .with_masks(self.masks.clone())
    }
}

/// Neighbouring requests whose next pages are the same.
struct Group {
    requests: Range<usize>,
    pages: usize,
}

/// Runs of at least two neighbouring requests that all have the same next page.
fn groups(
    table: &PageTable,
    requests: Range<usize>,
    taken: &[usize],
    most: &[usize],
) -> Vec<Group> {
    let rest = |r: usize| &table.pages(r)[taken[r]..most[r].max(taken[r])];
    let mut groups = Vec::new();
    let mut start = requests.start;
    while start < requests.end {
        let first = rest(start).first();
        let run = (start..requests.end)
            .take_while(|&r| rest(r).first() == first)
            .count();
        if run > 1 && first.is_some() {
            let common = |r| {
                rest(start)
                    .iter()
                    .zip(rest(r))
                    .take_while(|(a, b)| a == b)
                    .count()
            };
            let pages = (start + 1..start + run)
                .map(common)
                .min()
                .expect("at least two");
            groups.push(Group {
                requests: start..start + run,
                pages,
            });
        }
        start += run;
    }
    groups
}

/// One row block for each group, and empty ones for the tokens between them.
fn shared_part(part: &Part, groups: &[Group], taken: &[usize]) -> Part {
    let start = |group: &Group| part.q_indptr[group.requests.start];
    let mut covered = start(&groups[0]);
    let empty = PageTable::new(part.table.page_size, part.table.pool_pages);
    let mut shared = Part::new(vec![covered], empty);
    let mut push = |end: u32, pages: &[u32], after: Option<u32>| {
        if end == covered {
            return;
        }
        shared
            .table
            .push(pages, pages.len() as u32 * part.table.page_size);
        shared.q_indptr.push(end);
        // The queries' own keys come after these keys, so the mask hides none of them.
        shared.keys_after.push(after.unwrap_or(end - covered));
        covered = end;
    };
    for group in groups {
        push(start(group), &[], None);
        let Range { start: first, end } = group.requests;
        push(
            part.q_indptr[end],
            &part.table.pages(first)[taken[first]..][..group.pages],
            keys_after(part, group, taken),
        );
    }
    shared
}

/// The keys after those of a group, if one of its requests has queries: then its row block has the distances of this request.
fn keys_after(part: &Part, group: &Group, taken: &[usize]) -> Option<u32> {
    let mut active = (group.requests.clone()).filter(|&r| !part.q_range(r).is_empty());
    let (Some(r), None) = (active.next(), active.next()) else {
        return None;
    };
    let before = (taken[r] + group.pages) as u32 * part.table.page_size;
    Some(part.kv_len(r) - before + part.after(r))
}
