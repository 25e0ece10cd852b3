//! Keeping a plan from step to step.
//!
//! A decode step appends a token to every request. Until a request needs another page its page table stays as
//! it is, and so do forest, packing and splits: the plan only has to move the queries by a position, and to
//! lengthen the items at the ends of the tables.

use super::{DeviceDescription, Plan, PlanError, PlanOptions, PlannedPart, Planner};
use crate::problem::{Batch, Part, Spec};

/// What became of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Update {
    /// It serves as it is.
    Kept,
    /// Positions and lengths were changed in place.
    Patched,
    /// A new plan was made.
    Planned,
}

impl Planner {
    /// Makes the plan serve a batch: keeps it where nothing changed, patches it where tables only grew within
    /// their last pages, and plans anew otherwise.
    ///
    /// `plan` is to come from this specification, device and options. All page ids are compared; a caller
    /// that knows them unchanged saves that with [`Plan::grow`].
    ///
    /// # Errors
    /// As [`plan_into`](Self::plan_into).
    pub fn update(
        &mut self,
        spec: &Spec,
        batch: &Batch,
        device: &DeviceDescription,
        options: &PlanOptions,
        plan: &mut Plan,
    ) -> Result<Update, PlanError> {
        let same_pages = |(part, planned): (&Part, &PlannedPart)| {
            let pages = planned.pages.start as usize..planned.pages.end as usize;
            plan.page_ids.get(pages) == Some(&part.table.indices[..])
        };
        let same = plan.spec == *spec
            && plan.parts.len() == batch.parts.len()
            && batch.parts.iter().zip(&plan.parts).all(same_pages);
        if same {
            batch.check(spec)?;
            if let Some(update) = plan.grow(batch) {
                return Ok(update);
            }
        }
        self.plan_into(spec, batch, device, options, plan)?;
        Ok(Update::Planned)
    }
}

impl Plan {
    /// Makes the plan serve a batch that differs from the planned one only in that tables grew within their
    /// last pages, or says that it cannot (`None`, the plan is as before).
    ///
    /// The caller answers for the page ids: that they are those of the planned batch. What is checked takes
    /// time linear in the row blocks: their queries, their numbers of pages and keys, and the first and
    /// last page of each.
    pub fn grow(&mut self, batch: &Batch) -> Option<Update> {
        let growth = self.growth(batch)?;
        if growth == Growth::None {
            return Some(Update::Kept);
        }
        let Self {
            parts,
            row_blocks,
            items,
            rows,
            ..
        } = self;
        for (part, planned) in batch.parts.iter().zip(&*parts) {
            for (index, block) in row_blocks[range(planned)].iter_mut().enumerate() {
                block.position = part.first_position(index);
                let kv_len = part.kv_len(index);
                if kv_len > block.kv_len {
                    block.kv_len = kv_len;
                    // Without queries there is no item.
                    if let Some(item) = items.get_mut(block.tail as usize) {
                        item.kv_end = kv_len;
                    }
                }
            }
        }
        if let Growth::By(shift) = growth {
            rows.iter_mut().for_each(|row| row.position += shift);
            items.iter_mut().for_each(|item| item.position += shift);
            return Some(Update::Patched);
        }
        for item in items {
            let blocks = &row_blocks[range(&parts[item.part as usize])];
            let item_rows =
                &mut rows[item.rows_begin as usize..(item.rows_begin + item.rows) as usize];
            item.position = i32::MAX;
            for row in item_rows {
                let block = &blocks
                    [blocks.partition_point(|block| block.first_token + block.tokens <= row.token)];
                row.position = block.position + (row.token - block.first_token) as i32;
                item.position = item.position.min(row.position);
            }
        }
        Some(Update::Patched)
    }

    /// By how much the queries of a batch move, if that is all that changed.
    fn growth(&self, batch: &Batch) -> Option<Growth> {
        if !self.growable
            || self.parts.len() != batch.parts.len()
            || self.total_q != batch.total_q()
        {
            return None;
        }
        let mut growth = None;
        let mut grown = false;
        for (part, planned) in batch.parts.iter().zip(&self.parts) {
            let blocks = self.row_blocks.get(range(planned))?;
            if !alike(part, planned, blocks.len()) {
                return None;
            }
            for (index, block) in blocks.iter().enumerate() {
                let tokens = part.q_range(index);
                if tokens != (block.first_token..block.first_token + block.tokens) {
                    return None;
                }
                let pages = part.table.pages(index);
                let kv_len = part.kv_len(index);
                let same_pages = pages.len() as u32 * planned.page_size == block.capacity;
                if !same_pages || kv_len < block.kv_len || kv_len > block.capacity {
                    return None;
                }
                let first = (planned.pages.start + part.table.indptr[index]) as usize;
                if let [.., last] = pages
                    && (self.page_ids[first] != pages[0]
                        || self.page_ids[first + pages.len() - 1] != *last)
                {
                    return None;
                }
                if block.tokens == 0 {
                    continue;
                }
                if kv_len > block.kv_len && block.tail == u32::MAX {
                    return None;
                }
                grown |= kv_len > block.kv_len;
                let shift = part.first_position(index) - block.position;
                growth = match growth {
                    None => Some(Growth::By(shift)),
                    Some(Growth::By(other)) if other == shift => growth,
                    _ => Some(Growth::Uneven),
                };
            }
        }
        match growth {
            Some(Growth::By(0)) | None if !grown => Some(Growth::None),
            Some(growth) => Some(growth),
            None => Some(Growth::None),
        }
    }
}

/// How queries move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Growth {
    None,
    By(i32),
    Uneven,
}

fn range(part: &PlannedPart) -> std::ops::Range<usize> {
    part.row_blocks.start as usize..part.row_blocks.end as usize
}

/// Whether the arrays of a part have the lengths that were planned.
fn alike(part: &Part, planned: &PlannedPart, row_blocks: usize) -> bool {
    let table = &part.table;
    table.page_size == planned.page_size
        && part.q_indptr.len() == row_blocks + 1
        && table.indptr.len() == row_blocks + 1
        && table.last_page_len.len() == row_blocks
        && (part.keys_after.is_empty() || part.keys_after.len() == row_blocks)
        && table.indices.len() == planned.pages.len()
        && table.indptr[row_blocks] as usize == table.indices.len()
}
