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
    let mut cuts = Cuts::default();
    for (index, draft, unit) in problem.drafts() {
        if !cuts.tiles.contains(&(index as usize)) {
            cuts = match Cuts::of(problem, index as usize, until) {
                Some(cuts) => cuts,
                None => return false,
            };
        }
        let is_prompt = draft.kernel == Kernel::Prefill;
        let mut begin = draft.kv_begin;
        while begin < draft.kv_end {
            let mut end = cuts.after(begin);
            // No tile of a prompt is cut into a piece and a few keys.
            if is_prompt && end - begin < unit.shortest {
                end = end.saturating_add(cuts.size);
            }
            if is_prompt && end.saturating_add(unit.shortest) > draft.kv_end {
                end = draft.kv_end;
            }
            let end = end.min(draft.kv_end);
            let cost = unit.piece(end - begin);
            let start = if is_prompt {
                u64::from(cuts.nth(begin) - cuts.nth(cuts.begin)) * NTH
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

/// Where drafts are cut: the tiles of a prompt, or one decode.
#[derive(Debug, Default)]
struct Cuts {
    tiles: Range<usize>,
    /// The first key that any of them sees.
    begin: u32,
    /// Cuts are multiples of the size from here: of a prompt from key 0, wherever its tiles begin.
    origin: u32,
    size: u32,
}

impl Cuts {
    /// The cuts of a draft. The tiles of a prompt are neighbours. None if pieces that take no longer than `until` would be
    /// too short.
    fn of(problem: &Problem<'_>, index: usize, until: u64) -> Option<Self> {
        let drafts = problem.drafts;
        let shares = |at: &usize| drafts[*at].shares_prompt(&drafts[index]);
        let before = (0..index).rev().take_while(shares).count();
        let after = (index + 1..drafts.len()).take_while(shares).count();
        let tiles = index - before..index + after + 1;
        let (mut longest, mut keys, mut fixed, mut shortest, mut key) = (0, 0, 0, 0, 0);
        for at in tiles.clone() {
            let unit = problem.classes.unit_cost(at as u32);
            longest = longest.max(unit.whole());
            keys = keys.max(unit.keys);
            fixed = fixed.max(unit.fixed_cut);
            shortest = shortest.max(unit.shortest);
            key = key.max(unit.key);
        }
        let size = if longest > until {
            let fits = until.saturating_sub(fixed) / key;
            equal_size(&drafts[index], keys, fits, shortest)?
        } else {
            // None is cut.
            u32::MAX
        };
        let begins = drafts[tiles.clone()].iter().map(|draft| draft.kv_begin);
        let begin = begins.min()?;
        let origin = match drafts[index].kernel {
            Kernel::Prefill => 0,
            Kernel::Decode => begin,
        };
        Some(Self {
            tiles,
            begin,
            origin,
            size,
        })
    }

    /// The number of the piece that has a key.
    const fn nth(&self, key: u32) -> u32 {
        (key - self.origin) / self.size
    }

    /// The first cut after a key.
    const fn after(&self, key: u32) -> u32 {
        let cut = (self.nth(key) + 1).saturating_mul(self.size);
        cut.saturating_add(self.origin)
    }
}
