//! Updating a plan from step to step.
//!
//! A decode step appends a token to every request. Until a request needs another page, its page table does not change,
//! and neither do forest, packing and splits. The plan then only moves the queries by a position and
//! lengthens the items at the ends of the tables.

use kernels_gpu::abi::WorkItem;

use super::{
    appended::same_ends,
    data::{Plan, PlanError, PlanOptions, PlannedPart, PlannedRowBlock},
    model::DeviceDescription,
    planner::Planner,
};
use crate::problem::{Batch, PageTable, Part, Spec};

/// How a plan was updated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Update {
    /// The plan did not change.
    Kept,
    /// Positions and lengths were changed in place.
    Patched,
    /// A new plan was made.
    Planned,
}

impl Planner {
    /// Updates the plan for a batch. It keeps the plan if nothing changed, patches it if tables only grew within
    /// their last pages, and makes a new plan otherwise.
    ///
    /// A plan that was made for another specification, device or options, or that was read from a file, is made anew. All page
    /// ids are compared. If the caller knows that none of these changed, [`Plan::grow`] saves the comparisons.
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
            && plan.origin.is(device, options)
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
    /// Updates the plan for a batch that differs from the planned one only in that tables grew within their
    /// last pages. Otherwise the result is `None`, and the plan is unchanged.
    ///
    /// The caller must ensure that the page ids are those of the planned batch. The call checks, in time
    /// linear in the number of row blocks, their queries, their numbers of pages and keys, and the first and
    /// last page of each.
    pub fn grow(&mut self, batch: &Batch) -> Option<Update> {
        let appended = self.appends(batch);
        let growth = match appended {
            Some(0) => Growth::None,
            Some(by) => Growth::By(by as i32),
            None => self.growth(batch)?,
        };
        let most = match growth {
            Growth::None => return Some(Update::Kept),
            Growth::By(most) | Growth::Uneven { most } => most,
        };
        if let Some(limit) = &mut self.grows_by {
            *limit = limit.checked_sub(most.unsigned_abs())?;
        }
        match appended {
            Some(by) => self.append(by),
            None => self.lengthen(batch, growth),
        }
        self.lengthen_joint_items();
        match growth {
            Growth::By(shift) => {
                let moved = |position: &mut i32| *position = position.wrapping_add(shift);
                self.rows
                    .iter_mut()
                    .for_each(|row| moved(&mut row.position));
                self.items
                    .iter_mut()
                    .for_each(|item| moved(&mut item.position));
            }
            _ => self.move_rows(),
        }
        Some(Update::Patched)
    }

    /// Makes row blocks as long as those of a batch.
    fn lengthen(&mut self, batch: &Batch, growth: Growth) {
        let Self {
            parts,
            row_blocks,
            items,
            ..
        } = self;
        for (part, planned) in batch.parts.iter().zip(&*parts) {
            for (index, block) in row_blocks[range(planned)].iter_mut().enumerate() {
                let kv_len = match growth {
                    // No keys follow the queries, so that the queries move with the end of the keys.
                    Growth::By(shift) if part.keys_after.is_empty() && block.tokens > 0 => {
                        block.position = block.position.wrapping_add(shift);
                        block.tokens.wrapping_add_signed(block.position)
                    }
                    _ => {
                        block.position = part.first_position(index);
                        part.kv_len(index)
                    }
                };
                if kv_len > block.kv_len {
                    block.kv_len = kv_len;
                    // A row block without queries has no item.
                    if let Some(item) = items.get_mut(block.tail as usize) {
                        item.kv_end = kv_len;
                    }
                }
            }
        }
        self.keep_arrays(batch);
    }

    /// Makes joint items as long as their runs.
    fn lengthen_joint_items(&mut self) {
        let items = &mut self.items;
        let launched = self.groups.last().map_or(0, |group| group.items.end);
        // The runs of joint items follow the launched items. If nothing follows, there are no joint items.
        let joint = match launched as usize {
            launched if launched < items.len() => launched,
            _ => 0,
        };
        for index in 0..joint {
            let item = items[index];
            if item.is_joint() {
                let first = index + item.slot as usize;
                // Executors refuse plans with indices that are out of range; here these are ignored.
                let runs = items.get(first..first + item.merge as usize);
                let len = |run: &WorkItem| run.kv_end.wrapping_sub(run.kv_begin);
                items[index].kv_end = runs
                    .unwrap_or_default()
                    .iter()
                    .map(len)
                    .fold(0, u32::wrapping_add);
            }
        }
    }

    /// Moves each row to where its row block is.
    fn move_rows(&mut self) {
        let Self {
            parts,
            row_blocks,
            items,
            rows,
            ..
        } = self;
        for item in items {
            let blocks = parts.get(item.part as usize);
            let blocks = blocks.and_then(|part| row_blocks.get(range(part)));
            let first = item.rows_begin as usize;
            let Some(blocks) = blocks else {
                continue;
            };
            // Contiguous items are prefills of a prefix: their tokens see all of it at any later position.
            if !item.is_gathered() {
                continue;
            }
            let item_rows = rows.get_mut(first..first + item.rows as usize);
            let Some(item_rows) = item_rows else {
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
    }

    /// By how much the queries of a batch move, if that is all that changed.
    fn growth(&self, batch: &Batch) -> Option<Growth> {
        if !self.growable
            || self.ancestors != batch.ancestors
            // The bits of a longer request are others.
            || !self.masks.is_empty()
            || !batch.masks.is_empty()
            || self.parts.len() != batch.parts.len()
            || self.total_q != batch.total_q()
        {
            return None;
        }
        let mut moves = Moves::NONE;
        for (part, planned) in batch.parts.iter().zip(&self.parts) {
            let blocks = self.row_blocks.get(range(planned))?;
            let page_ids = self.page_ids.get(pages(planned))?;
            if !alike(part, planned, blocks.len()) || !same_ends(&part.table, page_ids) {
                return None;
            }
            moves = match &part.keys_after[..] {
                [] => moves.and(part, blocks, |_| 0),
                after => moves.and(part, blocks, |index| after[index]),
            }?;
        }
        // At earlier positions, queries may see keys again that their windows had passed.
        if moves.any < 0 {
            return None;
        }
        let shifts = batch
            .parts
            .iter()
            .zip(&self.parts)
            .flat_map(|(part, planned)| {
                let blocks = self.row_blocks[range(planned)].iter().enumerate();
                let blocks = blocks.filter(|(_, block)| block.tokens > 0);
                blocks.map(|(index, block)| part.first_position(index).wrapping_sub(block.position))
            });
        Some(match moves {
            Moves {
                any: 0, grown: 0, ..
            } => Growth::None,
            Moves { any, all, .. } if any == all => Growth::By(any),
            _ => Growth::Uneven {
                most: shifts.max().unwrap_or(0),
            },
        })
    }
}

/// By how many positions the queries of row blocks move: `any` is the bitwise OR of all shifts, `all` their bitwise
/// AND. If these are equal, all shifts are equal. If a shift is negative, `any` is negative.
struct Moves {
    any: i32,
    all: i32,
    /// Not zero if a row block with queries has more keys.
    grown: i64,
}

impl Moves {
    const NONE: Self = Self {
        any: 0,
        all: -1,
        grown: 0,
    };

    /// Adds the row blocks of a part. Returns none if more than the last page changed. Differences are collected and
    /// checked once at the end, because there are nearly never any.
    #[inline(always)]
    fn and(
        self,
        part: &Part,
        blocks: &[PlannedRowBlock],
        after: impl Fn(usize) -> u32,
    ) -> Option<Self> {
        let PageTable {
            indptr,
            last_page_len,
            page_size,
            ..
        } = &part.table;
        let Self {
            mut any,
            mut all,
            mut grown,
        } = self;
        let queries = part.q_indptr.iter().zip(&part.q_indptr[1..]);
        let tables = indptr.iter().zip(&indptr[1..]).zip(last_page_len);
        // OR of all bits that differ, and of all numbers that must not be negative.
        let (mut different, mut room) = (0, 0);
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
            let more = i64::from(kv_len) - i64::from(before);
            different |= (first ^ first_token) | (end.wrapping_sub(first) ^ tokens);
            different |= next.wrapping_sub(begin).wrapping_mul(*page_size) ^ capacity;
            room |= more | (i64::from(capacity) - i64::from(kv_len));
            if tokens > 0 {
                if tail == u32::MAX {
                    room |= -more;
                }
                grown |= more;
                let now = kv_len.wrapping_add(after(index)).wrapping_sub(tokens);
                let shift = (now as i32).wrapping_sub(position);
                (any, all) = (any | shift, all & shift);
            }
        }
        (different == 0 && room >= 0).then_some(Self { any, all, grown })
    }
}

/// How queries move: to later positions, never back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Growth {
    None,
    By(i32),
    /// By different numbers of positions, at most this many.
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

/// Whether the arrays of a part have the lengths that were planned.
fn alike(part: &Part, planned: &PlannedPart, row_blocks: usize) -> bool {
    let table = &part.table;
    table.page_size == planned.page_size
        && part.heads == planned.heads
        && part.q_indptr.len() == row_blocks + 1
        && table.indptr.len() == row_blocks + 1
        && table.last_page_len.len() == row_blocks
        && (part.keys_after.is_empty() || part.keys_after.len() == row_blocks)
        && table.indices.len() == planned.pages.len()
        && table.indptr[row_blocks] as usize == table.indices.len()
}
