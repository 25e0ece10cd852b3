//! Columns of CTAs filled to the end, one after the other.

use std::cmp::Reverse;

use super::{Splitter, launch::piece, makespan::cut_before};
use crate::plan::draft::{Draft, Piece};

impl Splitter {
    /// Tries to place everything so that it is done by `until`: fills the CTAs of one column after the other
    /// to the end and cuts what crosses over. The fewest pieces, where pieces are longer than columns.
    pub(super) fn wrap(&mut self, drafts: &[Draft], ctas: u32, units: u32, until: u64) -> bool {
        self.placed.clear();
        if self
            .sorted
            .iter()
            .any(|&(_, index)| self.kinds.load(index).units != units)
        {
            return false;
        }
        // What is left beside whole columns takes the units of an item in several rounds.
        let (full, rest) = (ctas / units, ctas % units);
        let rounds = if rest > 0 {
            u64::from(units.div_ceil(rest))
        } else {
            u64::MAX
        };
        let room_in = |column: u32| if column < full { until } else { until / rounds };
        let columns = full + u32::from(rest > 0);
        let (mut column, mut used) = (0, 0);
        self.column.clear();
        for &(_, index) in &self.sorted {
            let (draft, load) = (&drafts[index as usize], self.kinds.load(index));
            let mut begin = draft.kv_begin;
            while begin < draft.kv_end {
                if column == columns {
                    return false;
                }
                let room = room_in(column) - used;
                let rest = draft.kv_end - begin;
                let whole = begin == draft.kv_begin && load.whole() <= room;
                let fits = room.saturating_sub(load.fixed_cut) / load.key;
                let end = if whole || fits >= u64::from(rest) {
                    draft.kv_end
                } else {
                    // Leave enough for another piece.
                    let most =
                        (begin + fits as u32).min(draft.kv_end.saturating_sub(load.shortest));
                    cut_before(draft, most.max(draft.kv_begin))
                };
                if end < begin + load.shortest.min(rest) {
                    (column, used) = (column + 1, 0);
                    order_column(&mut self.column, &mut self.placed);
                    continue;
                }
                let cost = if whole {
                    load.whole()
                } else {
                    load.cut(end - begin)
                };
                self.column.push((Reverse(cost), self.placed.len() as u32));
                self.placed
                    .push(piece(index, begin..end, load.launch, 0, cost));
                used += cost;
                begin = end;
            }
        }
        order_column(&mut self.column, &mut self.placed);
        true
    }
}

/// Lets the longest pieces of a column start first: what starts late is then short, and may as well go to
/// another CTA. Empties the list.
fn order_column(column: &mut Vec<(Reverse<u64>, u32)>, placed: &mut [Piece]) {
    column.sort_unstable();
    let mut start = 0;
    for (Reverse(cost), at) in column.drain(..) {
        let Piece {
            draft,
            kv_begin,
            kv_end,
            ..
        } = placed[at as usize];
        let launch = placed[at as usize].launch();
        placed[at as usize] = piece(draft, kv_begin..kv_end, launch, start, cost);
        start += cost;
    }
}
