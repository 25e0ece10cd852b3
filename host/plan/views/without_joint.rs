//! A plan without joint items.

use std::{borrow::Cow, collections::HashMap, ops::Range};

use kernels_gpu::abi::{DIRECT, MergeRow, NO_MERGE, WorkItem};

use crate::plan::data::{BrokenPlan, Plan, TileGroup};

impl Plan {
    /// The same work for executors without joint items: every run becomes an item, with a partial state for each row
    /// that has several items. A plan without joint items is returned unchanged.
    ///
    /// # Errors
    /// If a joint item, or anything that it refers to, points outside the plan.
    pub fn without_joint_items(&self) -> Result<Cow<'_, Self>, BrokenPlan> {
        if !self.items.iter().any(WorkItem::is_joint) {
            return Ok(Cow::Borrowed(self));
        }
        self.check_joint()?;
        let mut plan = self.clone();
        plan.growable = false;
        for row_block in &mut plan.row_blocks {
            row_block.tail = u32::MAX;
        }
        plan.groups.clear();
        plan.items.clear();
        let mut states = States {
            slots: self.slots,
            ..States::default()
        };
        for group in &self.groups {
            let begin = plan.items.len() as u32;
            for index in group.items.clone() {
                let item = self.items[index as usize];
                if !item.is_joint() {
                    plan.items.push(item);
                    continue;
                }
                for run in self.runs_of(index as usize) {
                    plan.items.push(WorkItem {
                        rows_begin: plan.rows.len() as u32,
                        ..*run
                    });
                    for row in run.rows_begin..run.rows_begin + run.rows {
                        let mut listed = self.rows[row as usize];
                        listed.slot = states.next(row, listed.token, listed.slot);
                        plan.rows.push(listed);
                    }
                }
            }
            plan.groups.push(TileGroup {
                items: begin..plan.items.len() as u32,
                ..group.clone()
            });
        }
        states.merge(self, &mut plan);
        plan.tell_merges();
        plan.slots = states.slots;
        Ok(Cow::Owned(plan))
    }

    /// Checks the number of slots before memory is allocated for them: at most those of merges, and one unused slot for
    /// each row.
    pub(crate) fn check_slots(&self) -> Result<(), BrokenPlan> {
        let taken = self.merge_slots.len();
        match self.slots as usize <= taken + self.rows.len() {
            true => Ok(()),
            false => {
                let slots = ("number of slots", self.slots);
                Err(BrokenPlan::at("merge_slots", taken, slots))
            }
        }
    }

    /// Checks that the words of all masks are there.
    pub(crate) fn check_masks(&self) -> Result<(), BrokenPlan> {
        let (got, expected) = (self.masks.tokens(), self.total_q as usize);
        if got > 0 && !self.ancestors.is_empty() {
            let ancestors = ("ancestors beside masks", self.ancestors.len() as u32);
            return Err(BrokenPlan::at("masks", 0, ancestors));
        }
        match self.masks.broken() {
            Some(token) => {
                let first = ("first word of token", token as u32);
                Err(BrokenPlan::at("masks", token, first))
            }
            None if got > 0 && got != expected => {
                let tokens = ("number of tokens", got as u32);
                Err(BrokenPlan::at("masks", expected, tokens))
            }
            None => Ok(()),
        }
    }

    /// Checks all indices by which the runs of joint items are found.
    fn check_joint(&self) -> Result<(), BrokenPlan> {
        let broken = |array, index, field, got| BrokenPlan::at(array, index, (field, got));
        self.check_slots()?;
        for (index, group) in self.groups.iter().enumerate() {
            let Range { start, end } = group.items;
            if start > end || end as usize > self.items.len() {
                return Err(broken("groups", index, "items", end));
            }
        }
        let inside = |first: u64, count: u32, all: usize| first + u64::from(count) <= all as u64;
        for (index, item) in self.items.iter().enumerate() {
            let first_run = index as u64 + u64::from(item.slot);
            if item.is_joint() && !inside(first_run, item.merge, self.items.len()) {
                return Err(broken("items", index, "slot", item.slot));
            }
            let mut runs = (first_run as usize..).zip(self.runs_of(index));
            if let Some((run, item)) = runs.find(|(_, run)| !run.is_gathered()) {
                return Err(broken("items", run, "flags", item.flags));
            }
            let rows = u64::from(item.rows_begin);
            if item.is_gathered() && !inside(rows, item.rows, self.rows.len()) {
                return Err(broken("items", index, "rows_begin", item.rows_begin));
            }
        }
        for (index, merge) in self.merges.iter().enumerate() {
            let first = u64::from(merge.slots_begin);
            if !inside(first, merge.slots, self.merge_slots.len()) {
                return Err(broken("merges", index, "slots_begin", merge.slots_begin));
            }
        }
        Ok(())
    }

    /// Sets the merge of every row. A row has none if its state is the only one.
    fn tell_merges(&mut self) {
        let merge_of: HashMap<u32, u32> = (0..)
            .zip(&self.merges)
            .map(|(index, merge): (u32, _)| (merge.token, index))
            .collect();
        for row in &mut self.rows {
            row.merge = merge_of.get(&row.token).copied().unwrap_or(NO_MERGE);
            if row.merge == NO_MERGE {
                row.slot = DIRECT;
            }
        }
        for item in self.items.iter_mut().filter(|item| !item.is_gathered()) {
            if item.merge != NO_MERGE {
                let merge = merge_of.get(&item.rows_begin);
                item.merge = merge.copied().unwrap_or(item.merge);
            }
        }
    }
}

/// The states of rows of joint items, one for each run.
#[derive(Default)]
struct States {
    slots: u32,
    /// For each row, its states in the order of its keys.
    of_row: HashMap<u32, Vec<u32>>,
    /// Rows by their old slot, or by their token if they had no slot.
    by_slot: HashMap<u32, u32>,
    by_token: HashMap<u32, u32>,
}

impl States {
    /// A new slot for another state of a row.
    fn next(&mut self, row: u32, token: u32, slot: u32) -> u32 {
        let next = self.slots;
        self.slots += 1;
        self.of_row.entry(row).or_default().push(next);
        if slot == DIRECT {
            self.by_token.insert(token, row);
        } else {
            self.by_slot.insert(slot, row);
        }
        next
    }

    /// Writes all merges, in the order of their tokens.
    fn merge(&self, old: &Plan, plan: &mut Plan) {
        let mut merges: Vec<(u32, Vec<u32>)> = old
            .merges
            .iter()
            .map(|merge| {
                let states = old.slots_of(merge).iter().flat_map(|slot| {
                    let row = self.by_slot.get(slot);
                    row.map_or_else(|| vec![*slot], |row| self.of_row[row].clone())
                });
                (merge.token, states.collect())
            })
            .collect();
        let whole = self.by_token.iter();
        merges.extend(
            whole
                .map(|(&token, row)| (token, self.of_row[row].clone()))
                .filter(|(_, states)| states.len() > 1),
        );
        merges.sort_unstable();
        plan.merges.clear();
        plan.merge_slots.clear();
        for (token, states) in merges {
            plan.merges.push(MergeRow {
                token,
                slots_begin: plan.merge_slots.len() as u32,
                slots: states.len() as u32,
                reserved: 0,
            });
            plan.merge_slots.extend(states);
        }
    }
}
