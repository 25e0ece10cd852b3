//! Ever shorter pieces, for decodes that share SMs with prefills.

use super::{
    Splitter,
    class::Class,
    kinds::granule,
    launch::piece,
    makespan::{COST_MASK, cut_before},
};
use crate::plan::draft::Draft;

/// A piece is no shorter than so many times what it costs whatever its keys.
const LEAST_PIECE: u32 = 14;

impl Splitter {
    /// The drafts of a class: launch after launch, the longest first.
    pub(super) fn sort(&mut self, drafts: &[Draft], class: Class) {
        self.sorted.clear();
        for (index, (draft, load)) in drafts.iter().zip(self.kinds.loads()).enumerate() {
            if Class::of(draft.kernel) == class {
                let key = u64::from(load.launch) << 56 | (COST_MASK - load.whole().min(COST_MASK));
                self.sorted.push((key, index as u32));
            }
        }
        self.sorted.sort_unstable();
    }

    /// Cuts into ever shorter pieces, each at most a CTA's fair part of what is left: a CTA that shares its SM may be
    /// faster or slower than others by what the other kernel does there, and whoever is free claims the next piece.
    pub(super) fn taper(&mut self, drafts: &[Draft], ctas: u32) {
        self.placed.clear();
        let mut left: u64 = 0;
        for &(_, index) in &self.sorted {
            let load = self.kinds.load(index);
            left += u64::from(load.units) * load.whole();
        }
        for &(_, index) in &self.sorted {
            let (draft, load) = (&drafts[index as usize], self.kinds.load(index));
            let least = load.shortest.saturating_mul(LEAST_PIECE);
            let mut begin = draft.kv_begin;
            while begin < draft.kv_end {
                let time = left / u64::from(ctas);
                let keys = (time.saturating_sub(load.fixed_cut) / load.key).max(least.into());
                let mut end = draft.kv_end;
                if keys.saturating_add(least.into()) < u64::from(end - begin) {
                    end = cut_before(draft, begin + keys as u32).max(begin + granule(draft));
                }
                let cost = match end - begin == load.keys {
                    true => load.whole(),
                    false => load.cut(end - begin),
                };
                self.placed
                    .push(piece(index, begin..end, load.launch, 0, cost));
                left = left.saturating_sub(u64::from(load.units) * cost);
                begin = end;
            }
        }
    }
}
