//! Whether a plan computes its batch: the property every other part of the planner is tested against.

use kernels_gpu::abi::{DIRECT, NO_MERGE, WorkItem};
use thiserror::Error;

use crate::{
    plan::data::Plan,
    problem::{Batch, Part},
};

/// What is wrong with a plan.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct Defect(String);

/// `ensure!(condition, "message", values…)`: returns the message where the condition does not hold.
macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err(Defect(format!($($message)+)));
        }
    };
}

mod arrays;

/// A query token in an item.
struct Row {
    token: u32,
    position: i32,
    slot: u32,
    merge: u32,
}

/// What an item covers of a token: its part and keys, where its state goes, and the item.
type Covered = (u32, u32, u32, u32, u32, u32);

impl Plan {
    /// Checks that the plan computes the batch: every query token meets every key it may see exactly once,
    /// every partial state has its own slot and is merged once, in key order, and every output is written
    /// once.
    ///
    /// Meant for tests and for plans from other sources. Takes time linear in the keys of all rows.
    ///
    /// ```
    /// use tandem_attn::{
    ///     plan::{DeviceDescription, PlanOptions, Planner},
    ///     problem::{Batch, PageTable, Spec},
    /// };
    ///
    /// let spec = Spec::new(8, 2, 128);
    /// let mut table = PageTable::new(16, 4);
    /// table.push(&[2, 0], 20);
    /// let batch = Batch::new(vec![0, 1], table);
    /// let device = DeviceDescription::named("h200")?;
    /// let mut plan = Planner::new().plan(&spec, &batch, &device, &PlanOptions::default())?;
    /// assert_eq!(plan.verify(&batch), Ok(()));
    ///
    /// plan.items[0].kv_end -= 1; // the last key is left out
    /// println!("{}", plan.verify(&batch).unwrap_err());
    /// # Ok::<(), tandem_attn::plan::PlanError>(())
    /// ```
    ///
    /// # Errors
    /// The first that is found, in words.
    pub fn verify(&self, batch: &Batch) -> Result<(), Defect> {
        let spec = self.spec.check();
        spec.map_err(|wrong| Defect(format!("the specification: {wrong}")))?;
        ensure!(
            self.total_q == batch.total_q(),
            "{} query tokens for {}",
            self.total_q,
            batch.total_q()
        );
        ensure!(
            self.parts.len() == batch.parts.len(),
            "{} parts for {}",
            self.parts.len(),
            batch.parts.len()
        );
        self.verify_groups()?;
        self.verify_tables(batch)?;
        // For each part, the row block of each token; and for each token what its items cover.
        let row_blocks: Vec<_> = batch
            .parts
            .iter()
            .map(|part| row_blocks(part, self.total_q))
            .collect();
        let mut covered = vec![Vec::new(); self.total_q as usize];
        let owners = self.owners()?;
        for (index, item) in self.items.iter().enumerate() {
            let part = item.part as usize;
            ensure!(part < batch.parts.len(), "item {index} is of part {part}");
            ensure!(
                (1..=self.total_q).contains(&item.rows),
                "item {index} has {} rows of {} query tokens",
                item.rows,
                self.total_q
            );
            ensure!(item.kv_begin < item.kv_end, "item {index} has no keys");
            let rows = self.expand(index, item)?;
            let positions = rows.iter().map(|row| (row.token, row.position));
            let smallest = match item.is_gathered() {
                true => self.position_of(positions),
                false => positions.map(|(_, position)| position).min(),
            };
            ensure!(
                smallest == Some(item.position),
                "item {index}: position {} of {smallest:?}",
                item.position
            );
            if item.is_joint() {
                // A joint item computes its runs, which are checked instead.
                continue;
            }
            for row in rows {
                ensure!(
                    row.token < self.total_q,
                    "item {index}: token {} of {}",
                    row.token,
                    self.total_q
                );
                let Some(row_block) = row_blocks[part][row.token as usize] else {
                    return Err(Defect(format!(
                        "item {index}: token {} is not in part {part}",
                        row.token
                    )));
                };
                self.verify_keys(index, item, &batch.parts[part], row_block, &row)?;
                covered[row.token as usize].push((
                    item.part,
                    item.kv_begin,
                    item.kv_end,
                    row.slot,
                    row.merge,
                    owners[index],
                ));
            }
        }
        let mut merge_of = vec![None; self.total_q as usize];
        for (index, merge) in self.merges.iter().enumerate() {
            ensure!(
                merge.token < self.total_q,
                "merge {index}: token {}",
                merge.token
            );
            let old = merge_of[merge.token as usize].replace(index);
            ensure!(old.is_none(), "token {} has two merges", merge.token);
        }
        let few = self.check_slots();
        few.map_err(|broken| Defect(broken.to_string()))?;
        let mut writers = vec![0u32; self.slots as usize];
        for (token, items) in covered.iter_mut().enumerate() {
            items.sort_unstable();
            self.verify_coverage(batch, &row_blocks, token, items)?;
            // All runs of a joint item leave one state together.
            items.dedup_by_key(|item| (item.3, item.4, item.5));
            self.verify_states(token, items, merge_of[token], &mut writers)?;
        }
        match writers.iter().position(|&writers| writers != 1) {
            Some(slot) => Err(Defect(format!(
                "slot {slot} is written {} times",
                writers[slot]
            ))),
            None => Ok(()),
        }
    }

    /// The keys of an item are those of the row's own table.
    fn verify_keys(
        &self,
        index: usize,
        item: &WorkItem,
        part: &Part,
        row_block: usize,
        row: &Row,
    ) -> Result<(), Defect> {
        let token = row.token;
        let kv_len = part.kv_len(row_block);
        ensure!(
            item.kv_end <= kv_len,
            "item {index}: keys up to {} of {kv_len} of token {token}",
            item.kv_end
        );
        let position = part.position_of(row_block, token);
        // Prefills of a prefix number their rows from any position behind its keys, if every such row sees all of them.
        let variant = &self.spec.variant;
        let anywhere =
            !item.is_gathered() && variant.window_left.is_none() && variant.hooks.is_none();
        let is_seen = |position: i32| position >= item.kv_end as i32 - 1;
        ensure!(
            row.position == position || anywhere && is_seen(row.position) && is_seen(position),
            "item {index}: token {token} at {}, not {position}",
            row.position
        );
        let page_size = part.table.page_size;
        ensure!(
            self.parts[item.part as usize].page_size == page_size,
            "page size of part {}",
            item.part
        );
        let pages = (item.kv_begin / page_size) as usize..item.kv_end.div_ceil(page_size) as usize;
        let own = &part.table.pages(row_block)[pages.clone()];
        let planned = self
            .page_ids
            .get(item.table as usize..)
            .and_then(|table| table.get(pages));
        ensure!(
            planned == Some(own),
            "item {index} reads other pages than those of token {token}"
        );
        // Executors read only the tables of the item's part, even if another part's tables have the same pages.
        let of_part = &self.parts[item.part as usize].pages;
        let end = u64::from(item.table) + u64::from(item.kv_end.div_ceil(page_size));
        ensure!(
            item.table >= of_part.start && end <= u64::from(of_part.end),
            "item {index} has a table outside of the pages {of_part:?} of part {}",
            item.part
        );
        Ok(())
    }

    /// The items of a token cover what it sees, without overlap.
    fn verify_coverage(
        &self,
        batch: &Batch,
        row_blocks: &[Vec<Option<usize>>],
        token: usize,
        items: &[Covered],
    ) -> Result<(), Defect> {
        for (index, part) in batch.parts.iter().enumerate() {
            let mut keys = items
                .iter()
                .filter(|item| item.0 == index as u32)
                .map(|item| (item.1, item.2));
            let visible = match row_blocks[index][token] {
                Some(row_block) => {
                    let position = part.position_of(row_block, token as u32);
                    self.spec.variant.visible(position, part.kv_len(row_block))
                }
                None => 0..0,
            };
            let mut next = visible.start;
            if visible.is_empty() {
                continue;
            }
            if let Some((begin, end)) = keys.next() {
                ensure!(
                    begin <= next,
                    "token {token}: first key {begin}, it sees {visible:?}"
                );
                next = end;
            }
            for (begin, end) in keys {
                ensure!(
                    begin == next,
                    "token {token}: keys up to {next}, then from {begin}"
                );
                next = end;
            }
            ensure!(
                next >= visible.end,
                "token {token}: keys up to {next}, it sees {visible:?}"
            );
        }
        Ok(())
    }

    /// A token with one item writes its output, any other merges the slots of its items in order.
    fn verify_states(
        &self,
        token: usize,
        items: &[Covered],
        merge: Option<usize>,
        writers: &mut [u32],
    ) -> Result<(), Defect> {
        let Some(merge) = merge else {
            let direct = matches!(items, [(.., DIRECT, NO_MERGE, _)]);
            ensure!(direct, "token {token} has no merge, and items {items:?}");
            return Ok(());
        };
        let row = &self.merges[merge];
        let end = row.slots_begin as usize + row.slots as usize;
        ensure!(
            end <= self.merge_slots.len(),
            "merge {merge}: slots up to {end} of {}",
            self.merge_slots.len()
        );
        let slots = items.iter().map(|item| item.3);
        ensure!(
            self.slots_of(row).iter().copied().eq(slots),
            "token {token} merges {:?}, its items are {items:?}",
            self.slots_of(row)
        );
        for item in items {
            ensure!(
                item.4 as usize == merge,
                "token {token}: merge {} of {merge}",
                item.4
            );
            let slot = item.3 as usize;
            ensure!(
                slot < writers.len(),
                "token {token}: slot {slot} of {}",
                writers.len()
            );
            writers[slot] += 1;
        }
        Ok(())
    }
}

/// The row block of each token.
fn row_blocks(part: &Part, total_q: u32) -> Vec<Option<usize>> {
    let mut of_token = vec![None; total_q as usize];
    for row_block in 0..part.row_blocks() {
        let tokens = part.q_range(row_block);
        for token in tokens.start * part.heads..tokens.end * part.heads {
            of_token[token as usize] = Some(row_block);
        }
    }
    of_token
}
