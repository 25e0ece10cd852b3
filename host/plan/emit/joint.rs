//! Joint items and their runs.

use std::ops::Range;

use kernels_gpu::abi::{DIRECT, NO_MERGE, WorkItem};

use super::{Emitter, Pieces, write_all};
use crate::plan::{
    data::Plan,
    draft::{Draft, DraftRun, NO_ROW_BLOCK},
    split::Piece,
};

/// The runs and rows of a joint draft in a piece.
#[derive(Debug, Default)]
pub struct JointPiece {
    /// Whether the piece has all runs, and every row sees one of its keys.
    all: bool,
    /// Otherwise: the runs of the piece.
    runs: Vec<DraftRun>,
    /// Otherwise: for each row of the draft, its place among the rows that see a key of the piece, or [`NOWHERE`].
    places: Vec<u32>,
}

const NOWHERE: u32 = u32::MAX;

impl JointPiece {
    pub fn clip(&mut self, input: &Pieces<'_>, draft: &Draft, piece: &Piece) {
        self.runs.clear();
        self.places.clear();
        let runs = input.runs_of(draft);
        let is_whole = (piece.kv_begin, piece.kv_end) == (draft.kv_begin, draft.kv_end);
        self.all = is_whole && runs.iter().any(|run| run.rows == draft.rows);
        if self.all {
            return; // most pieces
        }
        self.places.resize(draft.rows as usize, NOWHERE);
        for run in runs {
            let at = |key: u32| run.kv_begin + key.saturating_sub(run.start);
            let (begin, end) = (at(piece.kv_begin), at(piece.kv_end).min(run.kv_end));
            if begin < end {
                let ends = end == run.kv_end;
                self.runs.push(DraftRun {
                    kv_begin: begin,
                    kv_end: end,
                    tail_of: if ends { run.tail_of } else { NO_ROW_BLOCK },
                    ..*run
                });
                let first = (run.rows_begin - draft.rows_begin) as usize;
                self.places[first..first + run.rows as usize].fill(0);
            }
        }
        let seen = self.places.iter_mut().filter(|at| **at != NOWHERE);
        for (place, at) in (0..).zip(seen) {
            *at = place;
        }
    }

    /// The runs of the piece.
    pub fn runs<'a>(&'a self, input: &Pieces<'a>, draft: &Draft) -> &'a [DraftRun] {
        match self.all {
            true => input.runs_of(draft),
            false => &self.runs,
        }
    }

    /// The rows that see any of the keys, as ranges of draft rows.
    pub fn rows(&self, draft: &Draft) -> impl Iterator<Item = Range<usize>> {
        let first = draft.rows_begin as usize;
        let all = self.all.then(|| first..first + draft.rows as usize);
        let places = self.places.iter().enumerate();
        let seen = places.filter(|(_, place)| **place != NOWHERE);
        let one = move |(row, _)| first + row..first + row + 1;
        all.into_iter().chain(seen.map(one))
    }

    /// The place of a draft's row among the rows of the piece.
    fn place(&self, row: u32) -> u32 {
        match self.all {
            true => row,
            false => self.places[row as usize],
        }
    }
}

impl Emitter {
    /// Writes a joint item; [`append_runs`](Self::append_runs) writes its runs. A piece with a single run becomes an
    /// ordinary item.
    #[inline(always)]
    pub fn write_joint(
        &mut self,
        input: &Pieces<'_>,
        piece: &Piece,
        rows_begin: u32,
        next_slot: &mut u32,
        plan: &mut Plan,
    ) -> WorkItem {
        let draft = &input.drafts[piece.draft as usize];
        self.joint.clip(input, draft, piece);
        let out = &mut plan.rows[rows_begin as usize..];
        let (mut smallest, mut rows) = (i32::MAX, 0);
        for seen in self.joint.rows(draft) {
            let candidates = &input.draft_rows[seen];
            let (tokens, slots) = (&mut self.tokens[..], &mut plan.merge_slots[..]);
            let position = write_all(candidates, tokens, slots, next_slot, &mut out[rows..]);
            smallest = smallest.min(position);
            rows += candidates.len();
        }
        let first_run = self.runs.len() as u32;
        let mut keys = 0;
        let runs = self.joint.runs(input, draft);
        for run in runs {
            let place = self.joint.place(run.rows_begin - draft.rows_begin);
            let of_run = &out[place as usize..(place + run.rows) as usize];
            let position = of_run.iter().map(|row| row.position).min();
            let shared = if run.is_shared {
                WorkItem::SHARED_KEYS
            } else {
                0
            };
            let item = WorkItem {
                rows_begin: rows_begin + place,
                rows: run.rows,
                table: run.table,
                kv_begin: run.kv_begin,
                kv_end: run.kv_end,
                position: position.unwrap_or(0),
                slot: DIRECT,
                merge: NO_MERGE,
                flags: WorkItem::GATHERED | shared,
                part: draft.part,
            };
            keys += item.kv_len();
            if runs.len() == 1 {
                return item;
            }
            self.runs.push(item);
            self.tails.push(run.tail_of);
        }
        WorkItem {
            rows_begin,
            rows: rows as u32,
            table: runs.first().map_or(draft.table, |run| run.table),
            kv_begin: 0,
            kv_end: keys,
            position: smallest,
            // Index among the runs; `append_runs` makes it relative to the item when the order of all items is known.
            slot: first_run,
            merge: runs.len() as u32,
            flags: WorkItem::GATHERED | WorkItem::JOINT,
            part: draft.part,
        }
    }

    /// Puts the runs of joint items behind all items.
    pub fn append_runs(&self, plan: &mut Plan) {
        if self.runs.is_empty() {
            return;
        }
        let first = plan.items.len() as u32;
        for (index, item) in (0..).zip(&mut plan.items) {
            if item.is_joint() {
                item.slot += first - index;
            }
        }
        plan.items.extend_from_slice(&self.runs);
        for (place, &tail_of) in (first..).zip(&self.tails) {
            if let Some(row_block) = plan.row_blocks.get_mut(tail_of as usize) {
                row_block.tail = place;
            }
        }
    }
}
