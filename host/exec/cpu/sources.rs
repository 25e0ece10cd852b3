//! Where the states of each query token are in the workspace, and checks that a plan can be run.

use kernels_gpu::abi::{DIRECT, WorkItem};

use crate::plan::{BrokenPlan, Plan, PlannedPart};

/// The states of a plan. The workspace has a row for each query token of each item, in the items' order.
#[derive(Debug)]
pub(super) struct Sources {
    /// Rows of all items.
    pub(super) rows: usize,
    /// The source of each query token.
    pub(super) of_token: Vec<Source>,
    /// For each slot, its row.
    pub(super) of_slot: Vec<Row>,
}

/// The source of a query token's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    Nothing,
    /// The state of its only item.
    Row(Row),
    /// The plan's merge with this index.
    Merge(usize),
}

/// The state of one query token in one item, for all heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Row {
    /// Rows of the items before.
    pub(super) before: usize,
    /// Rows of the item.
    pub(super) of_item: usize,
    /// Index among the item's rows.
    pub(super) index: usize,
}

impl Row {
    const NONE: Self = Self {
        before: 0,
        of_item: 0,
        index: 0,
    };
}

impl Sources {
    /// Fails if running the plan would read or write out of bounds.
    pub(super) fn of(plan: &Plan) -> Result<Self, BrokenPlan> {
        plan.check_slots()?;
        plan.check_masks()?;
        let mut sources = Self {
            rows: 0,
            of_token: vec![Source::Nothing; plan.total_q as usize],
            of_slot: vec![Row::NONE; plan.slots as usize],
        };
        let past_end = |part: &PlannedPart| part.pages.end as usize > plan.page_ids.len();
        if let Some(index) = plan.parts.iter().position(past_end) {
            let got = plan.parts[index].pages.end;
            return Err(BrokenPlan::at("parts", index, ("pages", got)));
        }
        for (index, item) in plan.items.iter().enumerate() {
            let broken = |of| BrokenPlan::at("items", index, of);
            check_item(plan, item).map_err(broken)?;
            let heads = plan.parts[item.part as usize].heads;
            for row in 0..item.rows {
                for head in 0..heads {
                    // States of an item lie head by head, so those of a head are as if it had an item of its own.
                    let at = Row {
                        before: sources.rows + (head * item.rows) as usize,
                        of_item: item.rows as usize,
                        index: row as usize,
                    };
                    let states = token_and_slot(plan, item, row, [heads, head]);
                    sources.add(plan, states, at).map_err(broken)?;
                }
            }
            sources.rows += item.rows as usize * heads as usize;
        }
        for index in 0..plan.merges.len() {
            let broken = |of| BrokenPlan::at("merges", index, of);
            sources.add_merge(plan, index).map_err(broken)?;
        }
        match sources
            .of_token
            .iter()
            .position(|source| *source == Source::Nothing)
        {
            Some(index) => Err(BrokenPlan::at("tokens", index, ("number of items", 0))),
            None => Ok(sources),
        }
    }

    fn add(
        &mut self,
        plan: &Plan,
        (token, slot): (u32, u32),
        at: Row,
    ) -> Result<(), (&'static str, u32)> {
        if slot == DIRECT {
            match self.of_token.get_mut(token as usize) {
                Some(source) if *source == Source::Nothing => *source = Source::Row(at),
                _ => return Err(("token", token)),
            }
        } else {
            match self.of_slot.get_mut(slot as usize) {
                Some(taken) if *taken == Row::NONE && token < plan.total_q => *taken = at,
                _ => return Err(("slot", slot)),
            }
        }
        Ok(())
    }

    fn add_merge(&mut self, plan: &Plan, index: usize) -> Result<(), (&'static str, u32)> {
        let merge = &plan.merges[index];
        match self.of_token.get_mut(merge.token as usize) {
            Some(source) if *source == Source::Nothing => *source = Source::Merge(index),
            _ => return Err(("token", merge.token)),
        }
        let slots = merge.slots_begin as usize..merge.slots_begin as usize + merge.slots as usize;
        let slots = plan
            .merge_slots
            .get(slots)
            .ok_or(("slots_begin", merge.slots_begin))?;
        let written = |slot: u32| {
            self.of_slot
                .get(slot as usize)
                .is_some_and(|row| *row != Row::NONE)
        };
        match slots.iter().find(|slot| !written(**slot)) {
            Some(&slot) => Err(("slot", slot)),
            None => Ok(()),
        }
    }
}

fn check_item(plan: &Plan, item: &WorkItem) -> Result<(), (&'static str, u32)> {
    let part = plan
        .parts
        .get(item.part as usize)
        .ok_or(("part", item.part))?;
    let pages = item.kv_end.div_ceil(part.page_size);
    let inside = |begin: u32, len: u32, of: usize| u64::from(begin) + u64::from(len) <= of as u64;
    if item.rows == 0 {
        return Err(("rows", item.rows));
    }
    if item.kv_begin > item.kv_end {
        return Err(("kv_begin", item.kv_begin));
    }
    if item.table < part.pages.start || !inside(item.table, pages, part.pages.end as usize) {
        return Err(("table", item.table));
    }
    let listed = if item.is_gathered() {
        plan.rows.len()
    } else {
        (plan.total_q / part.heads) as usize
    };
    if item.is_gathered() && part.heads > 1 {
        return Err(("part", item.part));
    }
    if !inside(item.rows_begin, item.rows, listed) {
        return Err(("rows_begin", item.rows_begin));
    }
    Ok(())
}

/// The token and the slot of one of the heads of a row.
fn token_and_slot(plan: &Plan, item: &WorkItem, row: u32, [heads, head]: [u32; 2]) -> (u32, u32) {
    if item.is_gathered() {
        let row = plan.rows[(item.rows_begin + row) as usize];
        (row.token, row.slot)
    } else {
        (
            (item.rows_begin + row) * heads + head,
            if item.slot == DIRECT {
                DIRECT
            } else {
                let slot = item.slot.saturating_add(row);
                slot.saturating_mul(heads).saturating_add(head)
            },
        )
    }
}
