//! Equal splits.

use std::ops::Range;

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
    let mut prompt = Prompt::default();
    for (index, draft, unit) in problem.drafts() {
        let is_prompt = draft.kernel == Kernel::Prefill;
        // Of a prompt, cuts are multiples of the size, wherever its tiles begin.
        let (size, from) = if is_prompt {
            if !prompt.tiles.contains(&(index as usize)) {
                prompt = match Prompt::of(problem, index as usize, until) {
                    Some(prompt) => prompt,
                    None => return false,
                };
            }
            (prompt.size, 0)
        } else if unit.whole() > until {
            let fits = until.saturating_sub(unit.fixed_cut) / unit.key;
            match equal_size(draft, unit.keys, fits, unit.shortest) {
                Some(size) => (size, draft.kv_begin),
                None => return false,
            }
        } else {
            (unit.keys, draft.kv_begin)
        };
        let mut begin = draft.kv_begin;
        while begin < draft.kv_end {
            let nth = (begin - from) / size;
            let mut end = (nth + 1).saturating_mul(size).saturating_add(from);
            if is_prompt && end - begin < unit.shortest {
                end = end.saturating_add(size);
            }
            if is_prompt && end.saturating_add(unit.shortest) > draft.kv_end {
                end = draft.kv_end;
            }
            let end = end.min(draft.kv_end);
            let cost = if (begin, end) == (draft.kv_begin, draft.kv_end) {
                unit.whole()
            } else {
                unit.cut(end - begin)
            };
            let start = if is_prompt {
                u64::from(nth - prompt.begin / size) * NTH
            } else {
                0
            };
            pieces.push(Piece::new(index, begin..end, unit.launch, start, cost));
            begin = end;
        }
    }
    pieces.len() > problem.order.len()
}

/// The fewest pieces of equal size with at most `fits` keys. None if they would be too short.
fn equal_size(draft: &Draft, keys: u32, fits: u64, shortest: u32) -> Option<u32> {
    if fits < u64::from(shortest) {
        return None;
    }
    let count = u64::from(keys).div_ceil(fits);
    let size = u64::from(keys).div_ceil(count) as u32;
    // Wide tiles compute with whole blocks of keys.
    let whole = if draft.tile.m > NARROW {
        draft.tile.n
    } else {
        1
    };
    let size = size.next_multiple_of(whole);
    Some(size.next_multiple_of(draft.split_alignment()))
}

/// The tiles of a prompt, and the keys of their pieces.
#[derive(Debug, Default)]
struct Prompt {
    tiles: Range<usize>,
    /// The first key that any of them sees.
    begin: u32,
    size: u32,
}

impl Prompt {
    /// The prompt of a draft. Its tiles are neighbours. None if pieces that take no longer than `until` would be too short.
    fn of(problem: &Problem<'_>, index: usize, until: u64) -> Option<Self> {
        let drafts = problem.drafts;
        let shares = |at: &usize| drafts[*at].shares_prompt(&drafts[index]);
        let before = (0..index).rev().take_while(shares).count();
        let after = (index..drafts.len()).take_while(shares).count();
        let tiles = index - before..index + after;
        let units = tiles.clone().map(|at| problem.classes.unit_cost(at as u32));
        let longest = units.clone().map(|unit| unit.whole()).max()?;
        let keys = units.clone().map(|unit| unit.keys).max()?;
        let fixed = units.clone().map(|unit| unit.fixed_cut).max()?;
        let shortest = units.clone().map(|unit| unit.shortest).max()?;
        let key = units.map(|unit| unit.key).max()?;
        let size = if longest > until {
            let fits = until.saturating_sub(fixed) / key;
            equal_size(&drafts[index], keys, fits, shortest)?
        } else {
            // None is cut.
            u32::MAX
        };
        let begin = drafts[tiles.clone()].iter().map(|draft| draft.kv_begin);
        let begin = begin.min()?;
        Some(Self { tiles, begin, size })
    }
}
