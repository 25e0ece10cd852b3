//! From pieces to the arrays of a plan: rows, slots, merges, items in launch order.

use kernels_gpu::abi::{DIRECT, MergeRow, NO_MERGE, QueryRow, WorkItem};

use super::{
    Kernel, Plan, PlanError, Tile, TileGroup,
    draft::{Draft, DraftRow, Piece},
};
use crate::problem::Variant;

/// Buffers that keep their memory from plan to plan.
#[derive(Debug, Default)]
pub(super) struct Emitter {
    /// Items per query token, then the token's merge.
    tokens: Vec<u32>,
    /// Where each merge's next slot goes.
    next_slot: Vec<u32>,
    /// Items in the order of the pieces.
    items: Vec<WorkItem>,
    /// The place of each in launch order.
    order: Vec<(u64, u32)>,
}

/// What emission reads.
pub(super) struct Pieces<'a> {
    pub variant: Variant,
    pub drafts: &'a [Draft],
    pub draft_rows: &'a [DraftRow],
    /// Ascending by draft, then by key.
    pub pieces: &'a [Piece],
    /// Kernel and tile of each launch.
    pub launches: &'a [(Kernel, Tile)],
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
                for row in &input.draft_rows[rows] {
                    self.tokens[row.token as usize] +=
                        u32::from(sees(&input.variant, draft, row.position, piece));
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
        self.items.clear();
        self.order.clear();
        let mut slot = 0;
        for piece in input.pieces {
            let draft = &input.drafts[piece.draft as usize];
            let mut item = WorkItem {
                rows_begin: draft.rows_begin,
                rows: draft.rows,
                table: draft.table,
                kv_begin: piece.kv_begin,
                kv_end: piece.kv_end,
                position: draft.position,
                slot: DIRECT,
                merge: NO_MERGE,
                flags: draft.flags,
                part: draft.part,
            };
            if draft.is_gathered() {
                self.write_rows(input, draft, piece, &mut item, &mut slot, plan);
                if item.rows == 0 {
                    continue;
                }
            } else {
                let merge = self.tokens[draft.rows_begin as usize];
                if merge != NO_MERGE {
                    (item.slot, item.merge) = (slot, merge);
                    for row in 0..draft.rows {
                        self.place(plan, merge + row, slot + row);
                    }
                    slot += draft.rows;
                }
            }
            self.order.push((piece.order, self.items.len() as u32));
            self.items.push(item);
        }
        let too_large = |what| PlanError::TooLarge { what };
        u32::try_from(plan.rows.len()).map_err(|_| too_large("rows of gathered items"))?;
        u32::try_from(self.items.len()).map_err(|_| too_large("work items"))?;
        Ok(())
    }

    /// The rows of a gathered item that see any of its keys.
    fn write_rows(
        &mut self,
        input: &Pieces<'_>,
        draft: &Draft,
        piece: &Piece,
        item: &mut WorkItem,
        slot: &mut u32,
        plan: &mut Plan,
    ) {
        item.rows_begin = plan.rows.len() as u32;
        item.position = i32::MAX;
        let rows = draft.rows_begin as usize..(draft.rows_begin + draft.rows) as usize;
        for row in &input.draft_rows[rows] {
            if !sees(&input.variant, draft, row.position, piece) {
                continue;
            }
            let merge = self.tokens[row.token as usize];
            let mut query = QueryRow {
                token: row.token,
                position: row.position,
                slot: DIRECT,
                merge,
            };
            if merge != NO_MERGE {
                query.slot = *slot;
                self.place(plan, merge, *slot);
                *slot += 1;
            }
            item.position = item.position.min(row.position);
            plan.rows.push(query);
        }
        item.rows = plan.rows.len() as u32 - item.rows_begin;
    }

    /// Enters a slot in the list of its merge.
    fn place(&mut self, plan: &mut Plan, merge: u32, slot: u32) {
        let at = &mut self.next_slot[merge as usize];
        plan.merge_slots[*at as usize] = slot;
        *at += 1;
    }

    /// Puts the items into launch order.
    fn order_items(&mut self, input: &Pieces<'_>, plan: &mut Plan) {
        self.order.sort_unstable();
        plan.items.clear();
        plan.items.extend(
            self.order
                .iter()
                .map(|&(_, item)| self.items[item as usize]),
        );
        plan.groups.clear();
        let mut begin = 0;
        for (launch, &(kernel, tile)) in input.launches.iter().enumerate() {
            let items =
                self.order[begin..].partition_point(|&(order, _)| order >> 56 == launch as u64);
            if items > 0 {
                let items = begin as u32..(begin + items) as u32;
                plan.groups.push(TileGroup {
                    kernel,
                    tile,
                    items: items.clone(),
                });
                begin = items.end as usize;
            }
        }
    }
}

/// Marks a token with one item that must nevertheless leave a partial state.
const FORCED: u32 = 1 << 31;

fn plan_has_parts(input: &Pieces<'_>) -> bool {
    input.drafts.last().is_some_and(|draft| draft.part > 0)
}
