//! Pieces for whatever columns of CTAs are free first.

use super::{Splitter, launch::piece, makespan::cut_before};
use crate::plan::draft::Draft;

impl Splitter {
    /// Tries to place everything so that it is done by `until`: a draft goes to the columns that are free
    /// first, and is cut where it would end too late there.
    pub(super) fn fill(&mut self, drafts: &[Draft], ctas: u32, units: u32, until: u64) -> bool {
        self.columns.reset(ctas, units);
        self.placed.clear();
        for &(_, index) in &self.sorted {
            let (draft, load) = (&drafts[index as usize], self.kinds.load(index));
            let mut begin = draft.kv_begin;
            while begin < draft.kv_end {
                let room = self.columns.room(load.units, until);
                let rest = draft.kv_end - begin;
                let whole = begin == draft.kv_begin && load.whole() <= room;
                let fits = room.saturating_sub(load.fixed_cut) / load.key;
                let end = if whole || fits >= u64::from(rest) {
                    draft.kv_end
                } else {
                    cut_before(draft, begin + fits as u32)
                };
                if end < begin + load.shortest.min(rest) {
                    return false;
                }
                let cost = if whole {
                    load.whole()
                } else {
                    load.cut(end - begin)
                };
                let (start, _) = self.columns.place(load.units, cost);
                self.placed
                    .push(piece(index, begin..end, load.launch, start, cost));
                begin = end;
            }
        }
        true
    }
}
