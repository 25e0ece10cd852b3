//! Balance: cuts so that the last resident CTA finishes as early as it can.

use super::{
    SplitInput, Splitter,
    class::{Class, ClassLoad},
    kinds::granule,
    launch::{Launch, piece},
};
use crate::plan::{cost::CostModel, draft::Draft, joint::WORTH_CUTTING};

/// Attempts to split aim at a makespan that grows by one part in so many.
const STEP: u64 = 64;

/// When an attempt is done. The better one is less.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Done {
    /// Its last piece.
    makespan: u64,
    /// How much that is later than what is early enough.
    late: u64,
    /// All merges.
    merged: u64,
}

impl PartialOrd for Done {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some((self.late, self.merged).cmp(&(other.late, other.merged)))
    }
}

/// A step may take this many times the bound to be early enough.
const EARLY_ENOUGH: f64 = 1.09;

/// What cutting prefills costs a step beside the merge, in picoseconds: their states are written and read.
const PREFILL_CUT: u64 = 3_500_000;

/// A device whose SMs are all busy has a lower clock than one where some are idle: by one part in so many.
const ALL_BUSY: u64 = 40;

/// Pieces of unequal size shall save one part in so many of a step.
const MARGIN: u64 = 128;

/// Hundredths of the bound that pieces of equal size may take: where the last ones are quicker, fewer pieces are
/// better than even CTAs.
const EVEN: [u32; 7] = [100, 104, 108, 112, 125, 150, 200];

/// Equal pieces are tried where CTAs have so many units each, at most.
const MOST_UNITS: u64 = 4;

/// Splits are not looked for where they could shorten a step by less than this part.
const GOOD_ENOUGH: f64 = 1.03;

impl Splitter {
    /// Balances the drafts over the resident CTAs.
    pub(super) fn balance_all(
        &mut self,
        input: &SplitInput<'_>,
        drafts: &mut [Draft],
        classes: [ClassLoad; 2],
    ) {
        let bounds = classes.map(|class| class.bound());
        self.choose_tiles(input, drafts, |kind| {
            let bound = bounds[Class::of(kind.draft.kernel) as usize];
            let fitting = bound.saturating_sub(kind.load.fixed_cut) / kind.load.key;
            u32::try_from(fitting)
                .unwrap_or(u32::MAX)
                .max(kind.load.shortest)
        });
        self.chosen.clear();
        let mut balanced = [false; 2];
        for class in [Class::Decode, Class::Prefill] {
            balanced[class as usize] = self.balance(input, drafts, class, &classes);
        }
        for (index, (draft, load)) in drafts.iter().zip(self.kinds.loads()).enumerate() {
            if !balanced[Class::of(draft.kernel) as usize] {
                let keys = draft.kv_begin..draft.kv_end;
                self.pieces
                    .push(piece(index as u32, keys, load.launch, 0, load.whole()));
            }
        }
        if balanced != [false; 2] {
            self.chosen.append(&mut self.pieces);
            self.sort_by_draft(drafts.len());
        }
    }

    /// Adds the pieces of a class to the chosen ones, if cutting any of its drafts shortens the step.
    fn balance(
        &mut self,
        input: &SplitInput<'_>,
        drafts: &[Draft],
        class: Class,
        classes: &[ClassLoad; 2],
    ) -> bool {
        let all = &classes[class as usize];
        let ClassLoad {
            ctas,
            company,
            units,
            work,
            longest,
            ..
        } = *all;
        if class == Class::Decode && input.shared_sms && units > 0 {
            self.sort(drafts, class);
            self.taper(drafts, ctas);
            self.outcome.makespan_ps[class as usize] = self.simulate(input.cost, all, 0).makespan;
            self.chosen.append(&mut self.placed);
            return true;
        }
        let bound = all.bound();
        let joint = drafts.iter().any(Draft::is_joint);
        let enough = if joint { WORTH_CUTTING } else { GOOD_ENOUGH };
        let good = (bound as f64 * enough) as u64;
        // In any order, a unit starts no later than when all others are spread evenly; and no later than
        // when all launches up to its own are.
        if units == 0
            || work / u64::from(ctas) + longest <= good
            || self.launch_bound(class, ctas) <= good
        {
            return false;
        }
        self.sort(drafts, class);
        if self.list_bound(ctas) <= good {
            return false;
        }
        self.placed.clear();
        for &(_, index) in &self.sorted {
            let (draft, load) = (&drafts[index as usize], self.kinds.load(index));
            self.placed.push(piece(
                index,
                draft.kv_begin..draft.kv_end,
                load.launch,
                0,
                load.whole(),
            ));
        }
        let whole = self.simulate(input.cost, all, 0).makespan;
        self.outcome.makespan_ps[class as usize] = whole;
        // Where no row is merged yet, cutting costs the step a merge.
        let merged = drafts.iter().any(|draft| draft.leaves_partial);
        let mut merge = match (merged, joint) {
            (true, _) => 0,
            (false, true) => input.cost.cut_ps(),
            (false, false) => input.cost.merge_ps(),
        };
        let in_parts = |draft: &Draft| Class::of(draft.kernel) == class && draft.leaves_partial;
        if class == Class::Prefill && !drafts.iter().any(in_parts) {
            merge += PREFILL_CUT + whole / ALL_BUSY;
        }
        if whole <= good + merge {
            return false;
        }
        // Prefills that are cut read more; beside decodes that is a price. Two full waves at most, and none
        // while the decodes fill the device for longer anyway.
        let mut most_units = u32::MAX;
        if class == Class::Prefill && input.hybrid {
            let decode = &classes[Class::Decode as usize];
            if decode.fills() && self.outcome.makespan_ps[Class::Decode as usize] >= whole {
                return false;
            }
            most_units = 2 * ctas;
        }
        // Of what is early enough, that of which all rows are done first.
        let enough = (bound as f64 * EARLY_ENOUGH) as u64;
        let mut best = Done {
            makespan: whole,
            late: whole.saturating_sub(enough),
            merged: whole,
        };
        let (mut found, mut least) = (false, whole - merge);
        let mut keep_if_better = |splitter: &mut Self, margin: u64| {
            let done = splitter.simulate(input.cost, all, enough);
            let with_margin = Done {
                merged: done.merged + margin,
                ..done
            };
            if done.makespan < whole - merge && with_margin < best {
                (best, found) = (done, true);
                // Copied: buffers that change places would grow for many steps.
                splitter.best.clone_from(&splitter.placed);
            }
            done.makespan
        };
        if company.alone > 1000 && all.count <= MOST_UNITS * u64::from(ctas) {
            for hundredths in EVEN {
                let until = bound / 100 * u64::from(hundredths);
                if hundredths * 10 <= company.alone && self.even(drafts, until) {
                    keep_if_better(self, 0);
                }
            }
        }
        // Unequal pieces have to be worth it.
        let margin = if company.alone > 1000 {
            bound / MARGIN
        } else {
            0
        };
        for attempt in [Self::wrap, Self::fill] {
            let mut until = bound;
            while until < least && least > good {
                if attempt(self, drafts, ctas, units, until) && self.placed_units() <= most_units {
                    least = least.min(keep_if_better(self, margin));
                    break;
                }
                until += until / STEP + 1;
            }
        }
        if found {
            self.outcome.makespan_ps[class as usize] = best.makespan;
            self.chosen.append(&mut self.best);
        }
        found
    }

    fn placed_units(&self) -> u32 {
        self.placed
            .iter()
            .map(|piece| self.kinds.load(piece.draft).units)
            .sum()
    }

    /// List scheduling of whole drafts is done by then, whatever their order within launches.
    fn launch_bound(&self, class: Class, ctas: u32) -> u64 {
        let ctas = u64::from(ctas);
        let of_class = |launch: &&Launch| Class::of(launch.kernel) == class;
        let (mut before, mut done) = (0, 0);
        for launch in self.launches.iter().filter(of_class) {
            before += launch.work;
            done = done.max(before + launch.longest_whole * (ctas - 1));
        }
        done / ctas
    }

    /// List scheduling of whole drafts is done by then: a unit starts no later than when all before it are
    /// spread evenly.
    fn list_bound(&self, ctas: u32) -> u64 {
        let ctas = u64::from(ctas);
        let (mut before, mut done) = (0, 0);
        for &(_, index) in &self.sorted {
            let load = self.kinds.load(index);
            before += u64::from(load.units) * load.whole();
            done = done.max(before + load.whole() * (ctas - 1));
        }
        done / ctas
    }

    /// When the pieces in `self.placed` are done, claimed in launch order, where until `enough` is early enough.
    fn simulate(&mut self, cost: &CostModel, class: &ClassLoad, enough: u64) -> Done {
        let Self {
            placed,
            kinds,
            columns,
            launch_order,
            ..
        } = self;
        launch_order.clear();
        launch_order.extend(
            placed
                .iter()
                .enumerate()
                .map(|(at, piece)| (piece.order, at as u32)),
        );
        launch_order.sort_unstable();
        columns.reset(class.ctas, class.units);
        let (mut last_cut, mut last_draft, mut pieces, mut most_pieces) = (0, u32::MAX, 0, 0);
        for piece in placed.iter() {
            pieces = if piece.draft == last_draft {
                pieces + 1
            } else {
                1
            };
            (last_draft, most_pieces) = (piece.draft, most_pieces.max(pieces));
        }
        for &(_, at) in launch_order.iter() {
            let piece = &placed[at as usize];
            let load = kinds.load(piece.draft);
            let keys = piece.kv_end - piece.kv_begin;
            if keys == load.keys {
                columns.place(load.units, load.whole());
            } else {
                let (_, end) = columns.place(load.units, load.cut(keys));
                last_cut = last_cut.max(end);
            }
        }
        let sooner = |until| columns.sooner(until, class.least_fixed, class.company);
        let makespan = sooner(columns.makespan());
        let merged = if last_cut > 0 {
            sooner(last_cut) + cost.merged_after_ps(most_pieces)
        } else {
            0
        };
        Done {
            makespan,
            late: makespan.saturating_sub(enough),
            merged: merged.max(makespan),
        }
    }
}

/// The bits of a sort key that hold the cost.
pub(super) const COST_MASK: u64 = (1 << 56) - 1;

/// The last place to cut a draft at or before a key: between tiles, where that shortens the piece by a small
/// part only, else between parts of a tile.
pub(super) fn cut_before(draft: &Draft, key: u32) -> u32 {
    let granule = granule(draft);
    let mut step = draft.tile.n.next_multiple_of(granule);
    while step > granule && u64::from(step) * STEP > u64::from(key - draft.kv_begin) {
        step = (step / 2).next_multiple_of(granule);
    }
    key / step * step
}
