//! List scheduling: the next piece goes to the CTAs that are free first.

use super::{
    piece::{Piece, cut_before},
    problem::Problem,
};
use crate::plan::model::CtaTimeline;

/// Tries to place all drafts so that they finish by `until`: a draft goes to the CTAs that are free first, and is cut
/// if it would end too late. Returns false if a piece would be too short.
pub fn list_scheduling(
    problem: &Problem<'_>,
    until: u64,
    timeline: &mut CtaTimeline,
    pieces: &mut Vec<Piece>,
) -> bool {
    timeline.reset(problem.load.ctas, problem.load.units);
    pieces.clear();
    for (index, draft, unit) in problem.drafts() {
        let mut begin = draft.kv_begin;
        while begin < draft.kv_end {
            let room = timeline.room(unit.units, until);
            let rest = draft.kv_end - begin;
            let whole = begin == draft.kv_begin && unit.whole() <= room;
            let fits = room.saturating_sub(unit.fixed_cut) / unit.key;
            let end = if whole || fits >= u64::from(rest) {
                draft.kv_end
            } else {
                cut_before(draft, begin + fits as u32)
            };
            if end < begin + unit.shortest.min(rest) {
                return false;
            }
            let cost = unit.piece(end - begin);
            let (start, _) = timeline.place(unit.units, cost);
            pieces.push(Piece::new(index, begin..end, unit.launch, start, cost));
            begin = end;
        }
    }
    true
}
