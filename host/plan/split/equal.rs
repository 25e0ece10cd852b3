//! Equal splits.

use super::{
    piece::{NTH, Piece},
    problem::Problem,
};
use crate::plan::{data::Kernel, draft::Draft};

/// Tiles of up to this many rows compute with few keys at a time.
const NARROW: u32 = 16;

/// Cuts each draft into the fewest pieces of equal size that take no longer than `until`. The longest pieces are
/// launched first. Returns false if a piece would be too short, or if nothing is cut.
///
/// All tiles of a prompt are cut at the same keys, and launched piece after piece. So they read the same keys at about the
/// same time, and memory is read once.
pub fn equal_splits(problem: &Problem<'_>, until: u64, pieces: &mut Vec<Piece>) -> bool {
    pieces.clear();
    for (index, draft, unit) in problem.drafts() {
        let mut size = unit.keys;
        let is_prompt = draft.kernel == Kernel::Prefill;
        if unit.whole() > until {
            let fits = until.saturating_sub(unit.fixed_cut) / unit.key;
            if fits < u64::from(unit.shortest) {
                return false;
            }
            let keys = if is_prompt {
                keys_of_prompt(problem.drafts, index)
            } else {
                unit.keys
            };
            let count = u64::from(keys).div_ceil(fits);
            size = u64::from(keys).div_ceil(count) as u32;
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
        let mut nth = 0;
        while begin < draft.kv_end {
            let end = draft.kv_end.min(begin + size);
            let cost = if size >= unit.keys {
                unit.whole()
            } else {
                unit.cut(end - begin)
            };
            let start = if is_prompt { nth * NTH } else { 0 };
            pieces.push(Piece::new(index, begin..end, unit.launch, start, cost));
            begin = end;
            nth += 1;
        }
    }
    pieces.len() > problem.order.len()
}

/// Keys of the longest tile of a prompt, of which `index` is a tile. The tiles of a prompt are neighbours, the longest last.
fn keys_of_prompt(drafts: &[Draft], index: u32) -> u32 {
    let tiles = &drafts[index as usize..];
    let same = tiles
        .iter()
        .take_while(|draft| draft.shares_prompt(&tiles[0]));
    same.map(Draft::kv_len).max().unwrap_or(0)
}
