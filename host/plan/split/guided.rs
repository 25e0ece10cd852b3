//! Guided self-scheduling: ever shorter pieces, for decodes that share SMs with prefills.

use super::{
    piece::{Piece, cut_before},
    problem::Problem,
};

/// Least length of a piece, in multiples of the keys that take as long as a unit's fixed cost.
const LEAST_PIECE: u32 = 14;

/// Cuts into ever shorter pieces, each at most a CTA's equal share of the remaining work. How fast a CTA is depends on
/// the other kernel on its SM. A free CTA claims the next piece, and the short last pieces even out the differences.
pub fn guided_self_scheduling(problem: &Problem<'_>, pieces: &mut Vec<Piece>) {
    pieces.clear();
    let ctas = u64::from(problem.load.ctas);
    let mut left: u64 = 0;
    for (_, _, unit) in problem.drafts() {
        left += u64::from(unit.units) * unit.whole();
    }
    for (index, draft, unit) in problem.drafts() {
        let least = unit.shortest.saturating_mul(LEAST_PIECE);
        let mut begin = draft.kv_begin;
        while begin < draft.kv_end {
            let time = left / ctas;
            let keys = (time.saturating_sub(unit.fixed_cut) / unit.key).max(least.into());
            let mut end = draft.kv_end;
            if keys.saturating_add(least.into()) < u64::from(end - begin) {
                let first = begin + draft.split_alignment();
                end = cut_before(draft, begin + keys as u32).max(first);
            }
            let cost = unit.piece(end - begin);
            pieces.push(Piece::new(index, begin..end, unit.launch, 0, cost));
            left = left.saturating_sub(u64::from(unit.units) * cost);
            begin = end;
        }
    }
}
