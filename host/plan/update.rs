//! Keeping a plan from step to step.
//!
//! A decode step appends a token to every request. Until a request needs another page its page table stays as
//! it is, and so do forest, packing and splits: the plan only has to move the queries by a position, and to
//! lengthen the items at the ends of the tables.

use kernels_gpu::abi::WorkItem;

use super::{
    data::{Plan, PlanError, PlanOptions, PlannedPart, PlannedRowBlock},
    model::DeviceDescription,
    planner::Planner,
};
use crate::problem::{Batch, PageTable, Part, Spec};

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
            plan.page_ids.get(pages(planned)) == Some(&part.table.indices[..])
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
        let most = match growth {
            Growth::None => return Some(Update::Kept),
            Growth::By(most) | Growth::Uneven { most } => most,
        };
        if let Some(limit) = &mut self.grows_by {
            *limit = limit.checked_sub(most.unsigned_abs())?;
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
                let kv_len = match growth {
                    // As far as the queries move do the keys reach.
                    Growth::By(shift)
                        if part.keys_after.is_empty() && block.ends_with_queries() =>
                    {
                        block.position += shift;
                        block.kv_len.wrapping_add_signed(shift)
                    }
                    _ => {
                        block.position = part.first_position(index);
                        part.kv_len(index)
                    }
                };
                if kv_len > block.kv_len {
                    block.kv_len = kv_len;
                    // Without queries there is no item.
                    if let Some(item) = items.get_mut(block.tail as usize) {
                        item.kv_end = kv_len;
                    }
                }
            }
        }
        let launched = self.groups.last().map_or(0, |group| group.items.end);
        // The runs of joint items stand behind what is launched: without any there are none.
        let joint = match launched as usize {
            launched if launched < items.len() => launched,
            _ => 0,
        };
        for index in 0..joint {
            let item = items[index];
            if item.is_joint() {
                let first = index + item.slot as usize;
                // What points out of the plan is left to the run, which refuses it.
                let runs = items.get(first..first + item.merge as usize);
                let len = |run: &WorkItem| run.kv_end.wrapping_sub(run.kv_begin);
                items[index].kv_end = runs
                    .unwrap_or_default()
                    .iter()
                    .map(len)
                    .fold(0, u32::wrapping_add);
            }
        }
        if let Growth::By(shift) = growth {
            let moved = |position: &mut i32| *position = position.wrapping_add(shift);
            rows.iter_mut().for_each(|row| moved(&mut row.position));
            items.iter_mut().for_each(|item| moved(&mut item.position));
            return Some(Update::Patched);
        }
        for item in items {
            let blocks = parts.get(item.part as usize);
            let blocks = blocks.and_then(|part| row_blocks.get(range(part)));
            let first = item.rows_begin as usize;
            let item_rows = rows.get_mut(first..first + item.rows as usize);
            let (Some(blocks), Some(item_rows)) = (blocks, item_rows) else {
                continue;
            };
            item.position = i32::MAX;
            for row in item_rows {
                let at =
                    blocks.partition_point(|block| block.first_token + block.tokens <= row.token);
                let Some(block) = blocks.get(at) else {
                    continue;
                };
                let index = row.token.wrapping_sub(block.first_token);
                row.position = block.position.wrapping_add(index as i32);
                item.position = item.position.min(row.position);
            }
        }
        Some(Update::Patched)
    }

    /// By how much the queries of a batch move, if that is all that changed.
    fn growth(&self, batch: &Batch) -> Option<Growth> {
        if !self.growable
            || self.ancestors != batch.ancestors
            || self.parts.len() != batch.parts.len()
            || self.total_q != batch.total_q()
        {
            return None;
        }
        let (mut grown, mut least, mut most) = (false, i32::MAX, i32::MIN);
        for (part, planned) in batch.parts.iter().zip(&self.parts) {
            let blocks = self.row_blocks.get(range(planned))?;
            let page_ids = self.page_ids.get(pages(planned))?;
            if !alike(part, planned, blocks.len()) || !same_ends(&part.table, page_ids) {
                return None;
            }
            let PageTable {
                indptr,
                last_page_len,
                page_size,
                ..
            } = &part.table;
            let queries = part.q_indptr.iter().zip(&part.q_indptr[1..]);
            let tables = indptr.iter().zip(&indptr[1..]).zip(last_page_len);
            let mut same = true;
            for (index, ((block, (&first, &end)), ((&begin, &next), &last))) in
                blocks.iter().zip(queries).zip(tables).enumerate()
            {
                let PlannedRowBlock {
                    first_token,
                    tokens,
                    position,
                    kv_len: before,
                    capacity,
                    tail,
                } = *block;
                let kv_len = capacity.saturating_sub(*page_size).wrapping_add(last);
                same &= first == first_token && end.wrapping_sub(first) == tokens;
                same &= next.wrapping_sub(begin).wrapping_mul(*page_size) == capacity;
                same &= (before..=capacity).contains(&kv_len);
                if tokens > 0 {
                    same &= kv_len == before || tail != u32::MAX;
                    grown |= kv_len > before;
                    let now = i64::from(kv_len) + i64::from(part.after(index)) - i64::from(tokens);
                    let shift = (now as i32).wrapping_sub(position);
                    (least, most) = (least.min(shift), most.max(shift));
                }
            }
            if !same {
                return None;
            }
        }
        // Further left they may see again what their windows had passed.
        if least < 0 {
            return None;
        }
        Some(match least..=most {
            moved if moved.is_empty() || (!grown && moved == (0..=0)) => Growth::None,
            _ if least == most => Growth::By(least),
            _ => Growth::Uneven { most },
        })
    }
}

impl PlannedRowBlock {
    /// Whether it has queries, and they are the last tokens of its table.
    fn ends_with_queries(&self) -> bool {
        let end = i64::from(self.position) + i64::from(self.tokens);
        self.tokens > 0 && end == i64::from(self.kv_len)
    }
}

/// How queries move: on, never back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Growth {
    None,
    By(i32),
    /// By so many positions at most.
    Uneven {
        most: i32,
    },
}

fn range(part: &PlannedPart) -> std::ops::Range<usize> {
    part.row_blocks.start as usize..part.row_blocks.end as usize
}

fn pages(part: &PlannedPart) -> std::ops::Range<usize> {
    part.pages.start as usize..part.pages.end as usize
}

/// Whether the tables begin and end with the pages that were planned. A loop of its own, which waits for
/// several of them at a time.
fn same_ends(table: &PageTable, planned: &[u32]) -> bool {
    let same = |at: u32| table.indices.get(at as usize) == planned.get(at as usize);
    let pairs = table.indptr.iter().zip(&table.indptr[1..]);
    pairs.fold(true, |all, (&begin, &end)| {
        all & (begin >= end || same(begin) & same(end - 1))
    })
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
