//! From pieces to the arrays of a plan: rows, slots, merges, items in launch order.

use kernels_gpu::abi::{DIRECT, MergeRow, NO_MERGE, QueryRow, WorkItem};

use super::{
    Plan, PlanError, TileGroup,
    draft::{Draft, DraftRow, NO_ROW_BLOCK, Piece},
    split::{Launch, MAX_PIECES, piece_of},
};
use crate::problem::Variant;

/// Buffers that keep their memory from plan to plan.
#[derive(Debug, Default)]
pub(super) struct Emitter {
    /// Items per query token, then the token's merge.
    tokens: Vec<u32>,
    /// Where each merge's next slot goes.
    next_slot: Vec<u32>,
    /// The items of the pieces; without rows where no row sees the piece.
    items: Vec<WorkItem>,
    /// The row block whose last keys each of them has.
    tail_of: Vec<u32>,
}

/// What emission reads.
pub(super) struct Pieces<'a> {
    pub variant: Variant,
    pub drafts: &'a [Draft],
    pub draft_rows: &'a [DraftRow],
    /// Ascending by draft, then by key.
    pub pieces: &'a [Piece],
    /// In launch order.
    pub launches: &'a [Launch],
    /// The pieces in launch order.
    pub order: &'a [u64],
}

/// Whether a query at `position` sees any key of `kv_begin..kv_end`.
fn sees(variant: &Variant, draft: &Draft, position: i32, piece: &Piece) -> bool {
    if draft.all_see {
        return true;
    }
    let position = i64::from(position);
    let from_left = !variant.causal || position >= i64::from(piece.kv_begin);
    let from_right = variant
        .window_left
        .is_none_or(|window| position - i64::from(window) < i64::from(piece.kv_end));
    from_left && from_right && piece.kv_begin < piece.kv_end
}

impl Emitter {
    /// Fills a plan whose `spec`, `total_q`, `parts` and `page_ids` are set.
    pub fn emit(&mut self, input: &Pieces<'_>, plan: &mut Plan) -> Result<(), PlanError> {
        if input.pieces.len() > MAX_PIECES {
            return Err(PlanError::TooLarge { what: "work items" });
        }
        self.count(input, plan.total_q);
        self.assign_merges(plan)?;
        self.write_items(input, plan)?;
        self.order_items(input, plan);
        Ok(())
    }

    /// How many items each query token has.
    fn count(&mut self, input: &Pieces<'_>, total_q: u32) {
        self.tokens.clear();
        self.tokens.resize(total_q as usize, 0);
        for piece in input.pieces {
            let draft = &input.drafts[piece.draft as usize];
            let rows = draft.rows_begin as usize..(draft.rows_begin + draft.rows) as usize;
            if draft.is_gathered() {
                let rows = &input.draft_rows[rows];
                if draft.all_see {
                    for row in rows {
                        self.tokens[row.token as usize] += 1;
                    }
                    continue;
                }
                for row in rows
                    .iter()
                    .filter(|row| sees(&input.variant, draft, row.position, piece))
                {
                    self.tokens[row.token as usize] += 1;
                }
            } else {
                for count in &mut self.tokens[rows] {
                    *count += 1;
                }
            }
        }
        // The rows of a contiguous item share one choice between slot and output.
        let contiguous = |piece: &&Piece| !input.drafts[piece.draft as usize].is_gathered();
        let mut changed = plan_has_parts(input);
        while changed {
            changed = false;
            for piece in input.pieces.iter().filter(contiguous) {
                let draft = &input.drafts[piece.draft as usize];
                let rows = draft.rows_begin as usize..(draft.rows_begin + draft.rows) as usize;
                let counts = &mut self.tokens[rows];
                if counts.iter().any(|&count| count != 1) && counts.contains(&1) {
                    changed = true;
                    for count in counts.iter_mut().filter(|count| **count == 1) {
                        *count |= FORCED;
                    }
                }
            }
        }
    }

    /// Gives every token that has not exactly one item a merge, and room for its slots.
    fn assign_merges(&mut self, plan: &mut Plan) -> Result<(), PlanError> {
        plan.merges.clear();
        self.next_slot.clear();
        let mut slots = 0u32;
        for (token, entry) in self.tokens.iter_mut().enumerate() {
            if *entry == 1 {
                *entry = NO_MERGE;
                continue;
            }
            let count = *entry & !FORCED;
            *entry = plan.merges.len() as u32;
            plan.merges.push(MergeRow {
                token: token as u32,
                slots_begin: slots,
                slots: count,
                reserved: 0,
            });
            self.next_slot.push(slots);
            slots = slots.checked_add(count).ok_or(PlanError::TooLarge {
                what: "partial states",
            })?;
        }
        plan.merge_slots.clear();
        plan.merge_slots.resize(slots as usize, 0);
        plan.slots = slots;
        Ok(())
    }

    fn write_items(&mut self, input: &Pieces<'_>, plan: &mut Plan) -> Result<(), PlanError> {
        plan.rows.clear();
        plan.growable = true;
        self.items.clear();
        self.tail_of.clear();
        let mut slot = 0;
        for piece in input.pieces {
            let draft = &input.drafts[piece.draft as usize];
            let [mut rows_begin, mut rows] = [draft.rows_begin, draft.rows];
            let mut position = draft.position;
            let (mut item_slot, mut item_merge) = (DIRECT, NO_MERGE);
            if draft.is_gathered() {
                rows_begin = plan.rows.len() as u32;
                position = self.write_rows(input, draft, piece, &mut slot, plan);
                rows = plan.rows.len() as u32 - rows_begin;
            } else {
                let merge = self.tokens[draft.rows_begin as usize];
                if merge != NO_MERGE {
                    (item_slot, item_merge) = (slot, merge);
                    for row in 0..draft.rows {
                        enter(
                            &mut self.next_slot,
                            &mut plan.merge_slots,
                            merge + row,
                            slot + row,
                        );
                    }
                    slot += draft.rows;
                }
            }
            plan.growable &= draft.growable;
            let is_tail = rows == draft.rows && piece.kv_end == draft.kv_end;
            self.tail_of
                .push(if is_tail { draft.tail_of } else { NO_ROW_BLOCK });
            self.items.push(WorkItem {
                rows_begin,
                rows,
                table: draft.table,
                kv_begin: piece.kv_begin,
                kv_end: piece.kv_end,
                position,
                slot: item_slot,
                merge: item_merge,
                flags: draft.flags,
                part: draft.part,
            });
        }
        let too_large = |what| PlanError::TooLarge { what };
        u32::try_from(plan.rows.len()).map_err(|_| too_large("rows of gathered items"))?;
        Ok(())
    }

    /// The rows of a gathered item that see any of its keys; the smallest of their positions.
    fn write_rows(
        &mut self,
        input: &Pieces<'_>,
        draft: &Draft,
        piece: &Piece,
        next_slot: &mut u32,
        plan: &mut Plan,
    ) -> i32 {
        let Plan {
            rows,
            merge_slots,
            growable,
            ..
        } = plan;
        let (mut smallest, mut slots) = (i32::MAX, *next_slot);
        let candidates = &input.draft_rows[draft.rows_begin as usize..][..draft.rows as usize];
        let (tokens, next_of) = (&self.tokens, &mut self.next_slot);
        let mut write = |row: &DraftRow| {
            let merge = tokens[row.token as usize];
            let mut slot = DIRECT;
            if merge != NO_MERGE {
                slot = slots;
                slots += 1;
                enter(next_of, merge_slots, merge, slot);
            }
            smallest = smallest.min(row.position);
            QueryRow {
                token: row.token,
                position: row.position,
                slot,
                merge,
            }
        };
        if draft.all_see {
            rows.extend(candidates.iter().map(write));
        } else {
            for row in candidates {
                if sees(&input.variant, draft, row.position, piece) {
                    rows.push(write(row));
                } else {
                    // What the window has passed stays out of sight, what is still to come does not.
                    *growable &= row.position >= piece.kv_begin as i32;
                }
            }
        }
        *next_slot = slots;
        smallest
    }

    /// Puts the items into launch order.
    fn order_items(&mut self, input: &Pieces<'_>, plan: &mut Plan) {
        plan.items.clear();
        plan.groups.clear();
        let mut order = input.order;
        for &Launch {
            kernel,
            tile,
            pack,
            pieces,
            ..
        } in input.launches
        {
            let (of_launch, rest) = order.split_at(pieces as usize);
            order = rest;
            let begin = plan.items.len() as u32;
            for &entry in of_launch {
                let item = &self.items[piece_of(entry)];
                if item.rows > 0 {
                    if let Some(row_block) = plan
                        .row_blocks
                        .get_mut(self.tail_of[piece_of(entry)] as usize)
                    {
                        row_block.tail = plan.items.len() as u32;
                    }
                    plan.items.push(*item);
                }
            }
            let items = begin..plan.items.len() as u32;
            if !items.is_empty() {
                plan.groups.push(TileGroup {
                    kernel,
                    tile,
                    pack,
                    items,
                });
            }
        }
    }
}

/// Enters a slot in the list of its merge.
fn enter(next: &mut [u32], merge_slots: &mut [u32], merge: u32, slot: u32) {
    let at = &mut next[merge as usize];
    merge_slots[*at as usize] = slot;
    *at += 1;
}

/// Marks a token with one item that must nevertheless leave a partial state.
const FORCED: u32 = 1 << 31;

fn plan_has_parts(input: &Pieces<'_>) -> bool {
    input.drafts.last().is_some_and(|draft| draft.part > 0)
}
