//! Pieces of equal size.

use super::{Splitter, kinds::granule, launch::piece};
use crate::plan::draft::Draft;

/// Rows of a tile that computes with few keys at a time.
const NARROW: u32 = 16;

impl Splitter {
    /// Cuts each draft into the fewest pieces of equal size that take no longer than `until`, the longest to be
    /// launched first. Not if a piece would be too short, or nothing is cut.
    pub(super) fn even(&mut self, drafts: &[Draft], until: u64) -> bool {
        self.placed.clear();
        for &(_, index) in &self.sorted {
            let (draft, load) = (&drafts[index as usize], self.kinds.load(index));
            let mut size = load.keys;
            if load.whole() > until {
                let fits = until.saturating_sub(load.fixed_cut) / load.key;
                if fits < u64::from(load.shortest) {
                    return false;
                }
                let pieces = u64::from(load.keys).div_ceil(fits);
                size = u64::from(load.keys).div_ceil(pieces) as u32;
                // Wide tiles compute with whole blocks of keys.
                let whole = if draft.tile.m > NARROW {
                    draft.tile.n
                } else {
                    1
                };
                size = size
                    .next_multiple_of(whole)
                    .next_multiple_of(granule(draft));
            }
            let mut begin = draft.kv_begin;
            while begin < draft.kv_end {
                let end = draft.kv_end.min(begin + size);
                let cost = if size >= load.keys {
                    load.whole()
                } else {
                    load.cut(end - begin)
                };
                self.placed
                    .push(piece(index, begin..end, load.launch, 0, cost));
                begin = end;
            }
        }
        self.placed.len() > self.sorted.len()
    }
}
