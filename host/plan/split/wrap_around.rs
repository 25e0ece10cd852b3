//! McNaughton's wrap-around rule: CTAs are filled to the end, one group after the other.

use std::cmp::Reverse;

use super::{
    piece::{Piece, cut_before},
    problem::Problem,
};

/// Tries to place all drafts so that they finish by `until`: fills one column of CTAs after the other to the end, and
/// cuts the drafts that cross over. This gives the fewest pieces if drafts are longer than columns. A column has as
/// many CTAs as an item has units. `columns_of` is a buffer.
pub fn wrap_around(
    problem: &Problem<'_>,
    until: u64,
    columns_of: &mut Vec<InColumn>,
    pieces: &mut Vec<Piece>,
) -> bool {
    pieces.clear();
    let (ctas, units) = (problem.load.ctas, problem.load.units);
    if problem.drafts().any(|(_, _, unit)| unit.units != units) {
        return false;
    }
    // The CTAs that remain after whole columns run the units of an item in several rounds.
    let (full, rest) = (ctas / units, ctas % units);
    let rounds = if rest > 0 {
        u64::from(units.div_ceil(rest))
    } else {
        u64::MAX
    };
    let room_in = |at: u32| if at < full { until } else { until / rounds };
    let columns = full + u32::from(rest > 0);
    let (mut at, mut used) = (0, 0);
    columns_of.clear();
    for (index, draft, unit) in problem.drafts() {
        let mut begin = draft.kv_begin;
        while begin < draft.kv_end {
            if at == columns {
                return false;
            }
            let room = room_in(at) - used;
            let rest = draft.kv_end - begin;
            let whole = begin == draft.kv_begin && unit.whole() <= room;
            let fits = room.saturating_sub(unit.fixed_cut) / unit.key;
            let end = if whole || fits >= u64::from(rest) {
                draft.kv_end
            } else {
                // Leave enough for another piece.
                let most = (begin + fits as u32).min(draft.kv_end.saturating_sub(unit.shortest));
                cut_before(draft, most.max(draft.kv_begin))
            };
            if end < begin + unit.shortest.min(rest) {
                (at, used) = (at + 1, 0);
                continue;
            }
            let cost = unit.piece(end - begin);
            columns_of.push((at, Reverse(cost), pieces.len() as u32));
            pieces.push(Piece::new(index, begin..end, unit.launch, 0, cost));
            used += cost;
            begin = end;
        }
    }
    // Ordered only here: a failed attempt needs no order.
    for column in columns_of.chunk_by_mut(|a, b| a.0 == b.0) {
        column.sort_unstable();
        order_column(column, pieces);
    }
    true
}

/// The column of a piece, its cost and its index.
pub type InColumn = (u32, Reverse<u64>, u32);

/// Starts the longest pieces of a column first. The late ones are then short, and it matters little which CTA runs
/// them.
fn order_column(column: &[InColumn], pieces: &mut [Piece]) {
    let mut start = 0;
    for &(_, Reverse(cost), at) in column {
        let piece = &mut pieces[at as usize];
        let keys = piece.kv_begin..piece.kv_end;
        *piece = Piece::new(piece.draft, keys, piece.launch(), start, cost);
        start += cost;
    }
}
