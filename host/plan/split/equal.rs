//! Equal splits.

use super::{piece::Piece, problem::Problem};

/// Tiles of up to this many rows compute with few keys at a time.
const NARROW: u32 = 16;

/// Cuts each draft into the fewest pieces of equal size that take no longer than `until`. The longest pieces are
/// launched first. Returns false if a piece would be too short, or if nothing is cut.
pub fn equal_splits(problem: &Problem<'_>, until: u64, pieces: &mut Vec<Piece>) -> bool {
    pieces.clear();
    for (index, draft, unit) in problem.drafts() {
        let mut size = unit.keys;
        if unit.whole() > until {
            let fits = until.saturating_sub(unit.fixed_cut) / unit.key;
            if fits < u64::from(unit.shortest) {
                return false;
            }
            let count = u64::from(unit.keys).div_ceil(fits);
            size = u64::from(unit.keys).div_ceil(count) as u32;
            // Wide tiles compute with whole blocks of keys.
            let whole = if draft.tile.m > NARROW {
                draft.tile.n
            } else {
                1
            };
            size = size
                .next_multiple_of(whole)
                .next_multiple_of(draft.split_alignment());
        }
        let mut begin = draft.kv_begin;
        while begin < draft.kv_end {
            let end = draft.kv_end.min(begin + size);
            let cost = if size >= unit.keys {
                unit.whole()
            } else {
                unit.cut(end - begin)
            };
            pieces.push(Piece::new(index, begin..end, unit.launch, 0, cost));
            begin = end;
        }
    }
    pieces.len() > problem.order.len()
}
