//! From pieces to the arrays of a plan: rows, slots, merges, items in launch order.

use kernels_gpu::abi::{DIRECT, MergeRow, NO_MERGE, QueryRow, WorkItem};

use self::joint::JointPiece;
use super::{
    data::{Plan, PlanError, PlanOptions, TileGroup},
    draft::{Draft, DraftRow, DraftRun, Drafts, INSIDE_PAGES},
    split::{Launch, MAX_PIECES, Piece, Splitter, next_first_key},
};
use crate::problem::{Spec, Variant};

mod joint;
mod merge_mode;

pub use merge_mode::merge_mode;

/// Buffers that keep their memory from plan to plan.
#[derive(Debug, Default)]
pub struct Emitter {
    tokens: Vec<Token>,
    /// For each piece in launch order, its item's place among the items.
    moved: Vec<u32>,
    /// The runs of joint items, and for each the row block that it is the tail of.
    runs: Vec<WorkItem>,
    tails: Vec<u32>,
    joint: JointPiece,
}

/// The merge of a query token.
#[derive(Clone, Copy, Debug, Default)]
struct Token {
    /// While items are counted, their number; then the index of its merge, or [`NO_MERGE`].
    merge: u32,
    /// Where the merge's next slot goes.
    next_slot: u32,
}

/// What emission reads.
pub struct Pieces<'a> {
    pub variant: Variant,
    pub drafts: &'a [Draft],
    pub draft_rows: &'a [DraftRow],
    pub draft_runs: &'a [DraftRun],
    /// With fixed splits, a patched plan must have the same pieces as a new plan.
    pub fixed_splits: bool,
    /// Whether a merge writes every row, even from a single state.
    pub merges_all: bool,
    /// Ascending by draft, then by key.
    pub pieces: &'a [Piece],
    /// In launch order.
    pub launches: &'a [Launch],
    /// The place of each piece in launch order.
    pub place: &'a [u32],
}

impl<'a> Pieces<'a> {
    /// The pieces of these drafts.
    pub fn new(
        spec: &Spec,
        options: &PlanOptions,
        merges_all: bool,
        drafts: &'a Drafts,
        splitter: &'a Splitter,
    ) -> Self {
        Self {
            variant: spec.variant,
            drafts: &drafts.items,
            draft_rows: &drafts.rows,
            draft_runs: &drafts.runs,
            fixed_splits: options.split.is_fixed(),
            merges_all,
            pieces: &splitter.pieces,
            launches: splitter.launches(),
            place: splitter.place(),
        }
    }

    /// The runs of a joint draft.
    fn runs_of(&self, draft: &Draft) -> &'a [DraftRun] {
        let first = draft.runs_begin as usize;
        &self.draft_runs[first..first + draft.runs as usize]
    }
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

/// By how many positions a query that sees keys of a piece can move until it sees none.
fn stays(variant: &Variant, position: i32, piece: &Piece) -> u32 {
    variant.window_left.map_or(u32::MAX, |window| {
        let past = i64::from(piece.kv_end) + i64::from(window) - i64::from(position);
        u32::try_from(past - 1).unwrap_or(0)
    })
}

/// By how many positions the rows of a draft can move until their window has passed the page in which its keys begin. With
/// fixed splits, until its keys [begin](crate::plan::split::first_key) further on.
fn begins_there(variant: &Variant, rows: &[DraftRow], draft: &Draft, fixed_splits: bool) -> u32 {
    let first = rows.iter().map(|row| i64::from(row.position)).min();
    let (Some(window), Some(first)) = (variant.window_left, first) else {
        return u32::MAX;
    };
    let next = match fixed_splits {
        true => next_first_key(draft.kv_begin, draft.page_size),
        false => (draft.kv_begin / draft.page_size + 1).saturating_mul(draft.page_size),
    };
    u32::try_from(i64::from(next) - 1 - (first - i64::from(window))).unwrap_or(0)
}

impl Emitter {
    /// Fills a plan whose `spec`, `total_q`, `parts` and `page_ids` are set.
    pub fn emit(&mut self, input: &Pieces<'_>, plan: &mut Plan) -> Result<(), PlanError> {
        if input.pieces.len() > MAX_PIECES {
            return Err(PlanError::TooManyPieces {
                got: input.pieces.len() as u64,
                limit: MAX_PIECES as u64,
            });
        }
        let rows = self.count(input, plan.total_q);
        let what = "rows of gathered items";
        PlanError::narrow(what, rows)?;
        plan.rows.resize(rows as usize, QueryRow::default());
        self.assign_merges(input, plan)?;
        let some_without_rows = self.write_items(input, plan);
        group_items(input, plan);
        if some_without_rows {
            self.drop_items_without_rows(plan);
        }
        self.append_runs(plan);
        if !plan.masks.is_empty() {
            tell_reach_of_masks(plan);
        }
        Ok(())
    }

    /// Counts the items of each query token. Returns the maximum number of rows of gathered items.
    fn count(&mut self, input: &Pieces<'_>, total_q: u32) -> u64 {
        let (mut gathered, mut mixed) = (0, plan_has_parts(input));
        self.tokens.clear();
        self.tokens.resize(total_q as usize, Token::default());
        for piece in input.pieces {
            let draft = &input.drafts[piece.draft as usize];
            let rows = draft.rows_begin as usize..(draft.rows_begin + draft.rows) as usize;
            if draft.is_joint() {
                gathered += u64::from(draft.rows);
                self.joint.clip(input, draft, piece);
                for row in self
                    .joint
                    .rows(draft)
                    .flat_map(|seen| &input.draft_rows[seen])
                {
                    self.tokens[row.token as usize].merge += 1;
                }
                continue;
            }
            if draft.is_gathered() {
                gathered += u64::from(draft.rows);
                let rows = &input.draft_rows[rows];
                if draft.all_see {
                    for row in rows {
                        self.tokens[row.token as usize].merge += 1;
                    }
                    continue;
                }
                for row in rows
                    .iter()
                    .filter(|row| sees(&input.variant, draft, row.position, piece))
                {
                    self.tokens[row.token as usize].merge += 1;
                }
            } else {
                mixed |= draft.flags & WorkItem::SHARED_KEYS != 0;
                for token in &mut self.tokens[draft.tokens()] {
                    token.merge += 1;
                }
            }
        }
        // A contiguous item writes all its rows to slots or all to the output: if one row leaves a partial state, all
        // do. They differ where rows have keys in other parts, and where a request ends with a prefix that prefills read.
        if mixed {
            let drafts = input.pieces.iter();
            let drafts = drafts.map(|piece| &input.drafts[piece.draft as usize]);
            for draft in drafts.filter(|draft| !draft.is_gathered()) {
                let tokens = &mut self.tokens[draft.tokens()];
                let is_alone = |token: &Token| token.merge == 1;
                if !tokens.iter().all(is_alone) {
                    for token in tokens.iter_mut().filter(|token| is_alone(token)) {
                        token.merge |= FORCED;
                    }
                }
            }
        }
        gathered
    }

    /// Assigns a merge and its slots to every token that does not have exactly one item, or (`merges_all`) to every
    /// token.
    fn assign_merges(&mut self, input: &Pieces<'_>, plan: &mut Plan) -> Result<(), PlanError> {
        plan.merges.clear();
        let mut slots = 0u32;
        for (token, entry) in self.tokens.iter_mut().enumerate() {
            if entry.merge == 1 && !input.merges_all {
                entry.merge = NO_MERGE;
                continue;
            }
            let count = entry.merge & !FORCED;
            *entry = Token {
                merge: plan.merges.len() as u32,
                next_slot: slots,
            };
            plan.merges.push(MergeRow {
                token: token as u32,
                slots_begin: slots,
                slots: count,
                reserved: 0,
            });
            slots = PlanError::narrow("partial states", u64::from(slots) + u64::from(count))?;
        }
        plan.merge_slots.clear();
        plan.merge_slots.resize(slots as usize, 0);
        plan.slots = slots;
        Ok(())
    }

    /// Writes the item of every piece to its place. Returns whether some items have no rows, because no row sees the
    /// piece.
    fn write_items(&mut self, input: &Pieces<'_>, plan: &mut Plan) -> bool {
        plan.growable = true;
        plan.fixed_splits = input.fixed_splits;
        // Large pages would let the last piece of a request grow far beyond what a new plan cuts.
        let large = plan.parts.iter().any(|part| part.page_size > INSIDE_PAGES);
        plan.grows_by = match input.variant.window_left {
            _ if large => Some(INSIDE_PAGES),
            Some(_) => Some(u32::MAX),
            None => None,
        };
        plan.items.resize(input.pieces.len(), WorkItem::default()); // all are written below
        // Resets the tails that an earlier attempt of the planner wrote.
        for block in &mut plan.row_blocks {
            block.tail = u32::MAX;
        }
        self.runs.clear();
        self.tails.clear();
        let mut some_without_rows = false;
        // Slots of items of several heads come first, so that they begin at multiples of these.
        let (mut slot_of_heads, mut slot) = (0, self.slots_of_heads(input));
        let mut written = 0;
        for (piece, &place) in input.pieces.iter().zip(input.place) {
            let draft = &input.drafts[piece.draft as usize];
            if draft.is_joint() {
                let item = self.write_joint(input, piece, written, &mut slot, plan);
                if let [run] = self.joint.runs(input, draft) {
                    let tail_of = plan.row_blocks.get_mut(run.tail_of as usize);
                    tail_of.into_iter().for_each(|block| block.tail = place);
                }
                written += item.rows;
                plan.items[place as usize] = item;
                continue;
            }
            let [mut rows_begin, mut rows] = [draft.rows_begin, draft.rows];
            let mut position = draft.position;
            let (mut item_slot, mut item_merge) = (DIRECT, NO_MERGE);
            if draft.is_gathered() {
                rows_begin = written;
                (position, rows) = self.write_rows(input, piece, rows_begin, &mut slot, plan);
                written += rows;
            } else {
                let tokens = &mut self.tokens[draft.tokens()];
                if tokens[0].merge != NO_MERGE {
                    let next = match draft.heads {
                        1 => &mut slot,
                        _ => &mut slot_of_heads,
                    };
                    (item_slot, item_merge) = (*next / draft.heads, tokens[0].merge);
                    for token in tokens {
                        token.enter(*next, &mut plan.merge_slots);
                        *next += 1;
                    }
                }
            }
            plan.growable &= draft.growable;
            some_without_rows |= rows == 0;
            if rows == draft.rows && piece.kv_end == draft.kv_end {
                let tail_of = plan.row_blocks.get_mut(draft.tail_of as usize);
                tail_of.into_iter().for_each(|block| block.tail = place);
            }
            plan.items[place as usize] = WorkItem {
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
            };
        }
        plan.rows.truncate(written as usize);
        some_without_rows
    }

    /// Slots of items of several heads.
    fn slots_of_heads(&self, input: &Pieces<'_>) -> u32 {
        let drafts = input.pieces.iter();
        let drafts = drafts.map(|piece| &input.drafts[piece.draft as usize]);
        let of_heads = drafts.filter(|draft| draft.heads > 1).map(Draft::tokens);
        let of_heads = of_heads.filter(|tokens| self.tokens[tokens.start].merge != NO_MERGE);
        of_heads.map(|tokens| tokens.len() as u32).sum()
    }

    /// Writes the rows of a gathered item that see any of its keys. Returns their smallest position and their number.
    fn write_rows(
        &mut self,
        input: &Pieces<'_>,
        piece: &Piece,
        rows_begin: u32,
        next_slot: &mut u32,
        plan: &mut Plan,
    ) -> (i32, u32) {
        let draft = &input.drafts[piece.draft as usize];
        let candidates = &input.draft_rows[draft.rows_begin as usize..][..draft.rows as usize];
        let mut out = &mut plan.rows[rows_begin as usize..][..draft.rows as usize];
        let (tokens, slots) = (&mut self.tokens[..], &mut plan.merge_slots[..]);
        if draft.all_see {
            let smallest = write_all(candidates, tokens, slots, next_slot, out);
            return (smallest, draft.rows);
        }
        if let Some(limit) = &mut plan.grows_by
            && piece.kv_begin == draft.kv_begin
        {
            *limit =
                begins_there(&input.variant, candidates, draft, input.fixed_splits).min(*limit);
        }
        let (mut smallest, mut written) = (i32::MAX, 0);
        for row in candidates.chunks(1) {
            let position = row[0].position;
            if sees(&input.variant, draft, position, piece) {
                smallest = smallest.min(write_all(row, tokens, slots, next_slot, out));
                out = &mut out[1..];
                written += 1;
                if let (true, Some(limit)) = (input.fixed_splits, &mut plan.grows_by) {
                    *limit = stays(&input.variant, position, piece).min(*limit);
                }
            } else {
                // Keys behind the window stay hidden. Keys ahead of the row become visible later, so the plan cannot
                // grow.
                plan.growable &= position >= piece.kv_begin as i32;
            }
        }
        (smallest, written)
    }

    /// Closes the gaps that items without rows leave.
    fn drop_items_without_rows(&mut self, plan: &mut Plan) {
        self.moved.clear();
        let mut kept = 0;
        for at in 0..plan.items.len() {
            self.moved.push(kept);
            plan.items[kept as usize] = plan.items[at];
            kept += u32::from(plan.items[at].rows > 0);
        }
        self.moved.push(kept);
        plan.items.truncate(kept as usize);
        let moved = |at: &mut u32| *at = self.moved.get(*at as usize).copied().unwrap_or(*at);
        for block in &mut plan.row_blocks {
            moved(&mut block.tail);
        }
        for group in &mut plan.groups {
            moved(&mut group.items.start);
            moved(&mut group.items.end);
        }
        plan.groups.retain(|group| !group.items.is_empty());
    }
}

/// Moves the positions of gathered items back by what the masks of their rows reach beyond one word.
fn tell_reach_of_masks(plan: &mut Plan) {
    for index in 0..plan.items.len() {
        let item = plan.items[index];
        if item.is_gathered() {
            let rows = plan.rows_of(&item).iter();
            let position = plan.position_of(rows.map(|row| (row.token, row.position)));
            plan.items[index].position = position.unwrap_or(item.position);
        }
    }
}

/// A group for every launch.
fn group_items(input: &Pieces<'_>, plan: &mut Plan) {
    plan.groups.clear();
    let mut begin = 0;
    for &Launch {
        kernel,
        id,
        tile,
        pack,
        heads,
        pieces,
        kv_heads_together,
        ..
    } in input.launches
    {
        let items = begin..begin + pieces;
        begin = items.end;
        if pieces > 0 {
            plan.groups.push(TileGroup {
                kernel,
                id,
                tile,
                pack,
                items,
                kv_heads_together,
                heads,
            });
        }
    }
}

/// Writes the rows of an item. Returns their smallest position.
fn write_all(
    candidates: &[DraftRow],
    tokens: &mut [Token],
    merge_slots: &mut [u32],
    next_slot: &mut u32,
    out: &mut [QueryRow],
) -> i32 {
    let (mut smallest, mut next) = (i32::MAX, *next_slot);
    for (row, out) in candidates.iter().zip(out) {
        let token = &mut tokens[row.token as usize];
        let mut slot = DIRECT;
        if token.merge != NO_MERGE {
            slot = next;
            next += 1;
            token.enter(slot, merge_slots);
        }
        smallest = smallest.min(row.position);
        *out = QueryRow {
            token: row.token,
            position: row.position,
            slot,
            merge: token.merge,
        };
    }
    *next_slot = next;
    smallest
}

impl Token {
    /// Enters a slot in the list of the token's merge.
    fn enter(&mut self, slot: u32, merge_slots: &mut [u32]) {
        merge_slots[self.next_slot as usize] = slot;
        self.next_slot += 1;
    }
}

/// Marks a token with one item that must nevertheless leave a partial state.
const FORCED: u32 = 1 << 31;

fn plan_has_parts(input: &Pieces<'_>) -> bool {
    input.drafts.last().is_some_and(|draft| draft.part > 0)
}
