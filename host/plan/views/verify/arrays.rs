//! The arrays of a plan by themselves: lengths, groups, joint items and their runs, rows.

use kernels_gpu::abi::{DIRECT, NO_MERGE, WorkItem};

use super::{Defect, Row};
use crate::{
    plan::data::{Kernel, Plan, PlannedRowBlock},
    problem::Batch,
};

impl Plan {
    /// Checks what the plan knows of the batch's tables: keeping and patching plans relies on it.
    pub(super) fn verify_tables(&self, batch: &Batch) -> Result<(), Defect> {
        ensure!(
            self.ancestors == batch.ancestors,
            "the ancestors of query tokens are not the batch's"
        );
        ensure!(
            self.masks == batch.masks,
            "the masks of query tokens are not the batch's"
        );
        let slice = |range: &std::ops::Range<u32>| range.start as usize..range.end as usize;
        for (index, (part, planned)) in batch.parts.iter().zip(&self.parts).enumerate() {
            let table = &part.table;
            ensure!(
                planned.page_size == table.page_size,
                "part {index} has pages of {}, not {}",
                planned.page_size,
                table.page_size
            );
            ensure!(
                planned.heads == part.heads,
                "part {index} has {} heads, not {}",
                planned.heads,
                part.heads
            );
            ensure!(
                self.page_ids.get(slice(&planned.pages)) == Some(&table.indices[..]),
                "part {index} has other page ids"
            );
            let blocks = self.row_blocks.get(slice(&planned.row_blocks));
            ensure!(
                blocks.is_some_and(|blocks| blocks.len() == part.row_blocks()),
                "part {index} has row blocks {:?}",
                planned.row_blocks
            );
            for (row_block, block) in blocks.unwrap_or_default().iter().enumerate() {
                let tokens = part.q_range(row_block);
                // A row block without queries may have keys that nothing reads.
                if tokens.is_empty() && block.tokens == 0 {
                    continue;
                }
                let right = PlannedRowBlock {
                    first_token: tokens.start,
                    tokens: tokens.end - tokens.start,
                    position: part.first_position(row_block),
                    kv_len: part.kv_len(row_block),
                    capacity: table.pages(row_block).len() as u32 * table.page_size,
                    tail: block.tail,
                };
                ensure!(
                    *block == right,
                    "row block {row_block} of part {index} is {block:?}, not {right:?}"
                );
                let ends_it = |item: &WorkItem| {
                    item.part as usize == index
                        && item.kv_end == block.kv_len
                        && item.is_gathered()
                        && self
                            .rows
                            .get(item.rows_begin as usize)
                            .is_some_and(|row| tokens.contains(&row.token))
                };
                ensure!(
                    block.tail == u32::MAX
                        || self.items.get(block.tail as usize).is_some_and(ends_it),
                    "row block {row_block} of part {index} does not end with item {}",
                    block.tail
                );
            }
        }
        Ok(())
    }

    pub(super) fn verify_groups(&self) -> Result<(), Defect> {
        let mut end = 0;
        for group in &self.groups {
            let items = &group.items;
            let whole = self.spec.group();
            ensure!(
                match group.kernel {
                    Kernel::Decode if self.spec.latent => (1..=whole).contains(&group.pack),
                    Kernel::Decode => group.pack == whole,
                    Kernel::Prefill => group.pack > 0 && whole.is_multiple_of(group.pack),
                },
                "{} of {whole} query heads in a tile of {:?}",
                group.pack,
                group.kernel
            );
            let of_parts = self.parts.iter().any(|part| part.heads == group.heads);
            ensure!(
                group.heads > 0 && of_parts,
                "a group of {} heads, which no part has",
                group.heads
            );
            let heads = u64::from(self.spec.kv_heads) * u64::from(group.heads);
            let together = u64::from(group.kv_heads_together);
            ensure!(
                together == 0 || heads.is_multiple_of(together),
                "{together} of {heads} KV heads together"
            );
            ensure!(
                items.start == end && items.end > items.start,
                "a group of items {items:?} after {end}"
            );
            end = items.end;
            ensure!(
                end as usize <= self.items.len(),
                "a group of items {items:?} of {}",
                self.items.len()
            );
            for item in self.items_of(group) {
                let gathered = group.kernel == Kernel::Decode;
                let heads = self.parts.get(item.part as usize).map(|part| part.heads);
                ensure!(
                    heads.is_none_or(|heads| heads == group.heads && (heads == 1 || !gathered)),
                    "{item:?} of a part of {heads:?} heads in a group of {} for {:?}",
                    group.heads,
                    group.kernel
                );
                ensure!(
                    item.is_gathered() == gathered,
                    "{item:?} in a group of {:?}",
                    group.kernel
                );
                let rows = u64::from(item.rows) * u64::from(group.pack);
                ensure!(
                    rows <= u64::from(group.tile.m),
                    "{rows} rows in a tile of {}",
                    group.tile
                );
            }
        }
        Ok(())
    }

    /// For each item, its own index; for each run, the joint item that it belongs to. The runs of joint items follow
    /// the items of the groups, each once.
    pub(super) fn owners(&self) -> Result<Vec<u32>, Defect> {
        let launched = self.launched();
        let mut owners: Vec<u32> = (0..launched as u32).collect();
        owners.resize(self.items.len(), u32::MAX);
        for (index, item) in self.items[..launched].iter().enumerate() {
            if !item.is_joint() {
                continue;
            }
            let first = index.saturating_add(item.slot as usize);
            let runs = first..first.saturating_add(item.merge as usize);
            ensure!(
                item.is_gathered()
                    && item.kv_begin == 0
                    && (1..=WorkItem::MAX_RUNS).contains(&item.merge)
                    && first >= launched
                    && runs.end <= self.items.len(),
                "item {index} has runs {runs:?} of {}",
                self.items.len()
            );
            let rows = item.rows_begin..item.rows_begin.saturating_add(item.rows);
            let mut keys = 0u32;
            for run in runs {
                let other = &self.items[run];
                let last = other.rows_begin.saturating_add(other.rows);
                ensure!(
                    owners[run] == u32::MAX,
                    "items {} and {index} share run {run}",
                    owners[run]
                );
                owners[run] = index as u32;
                ensure!(
                    other.is_gathered()
                        && !other.is_joint()
                        && other.part == item.part
                        && rows.start <= other.rows_begin
                        && last <= rows.end,
                    "item {index} has the rows {rows:?}, its run {run} is {other:?}"
                );
                keys = keys.saturating_add(other.kv_end.saturating_sub(other.kv_begin));
            }
            ensure!(
                keys == item.kv_end,
                "item {index} has {} keys, its runs have {keys}",
                item.kv_end
            );
        }
        match owners.iter().position(|&owner| owner == u32::MAX) {
            Some(item) => Err(Defect(format!("no group has item {item}"))),
            None => Ok(owners),
        }
    }

    pub(super) fn expand(&self, index: usize, item: &WorkItem) -> Result<Vec<Row>, Defect> {
        if item.is_gathered() {
            let end = item.rows_begin as usize + item.rows as usize;
            ensure!(
                end <= self.rows.len(),
                "item {index}: rows up to {end} of {}",
                self.rows.len()
            );
            let row = |row: &kernels_gpu::abi::QueryRow| Row {
                token: row.token,
                position: row.position,
                slot: row.slot,
                merge: row.merge,
            };
            return Ok(self.rows_of(item).iter().map(row).collect());
        }
        let direct = item.slot == DIRECT;
        ensure!(
            direct == (item.merge == NO_MERGE),
            "item {index}: slot {} but merge {}",
            item.slot,
            item.merge
        );
        // Each head of a row is a token of the batch.
        let heads = self.parts[item.part as usize].heads;
        let begin = item.rows_begin.saturating_mul(heads);
        let slot = item.slot.saturating_mul(heads);
        let row = |row: u32| Row {
            token: begin.saturating_add(row),
            position: item.position.saturating_add_unsigned(row / heads),
            slot: if direct {
                DIRECT
            } else {
                slot.saturating_add(row)
            },
            merge: if direct {
                NO_MERGE
            } else {
                item.merge.saturating_add(row)
            },
        };
        Ok((0..item.rows.saturating_mul(heads)).map(row).collect())
    }
}
