//! Balance: cuts so that the last resident CTA finishes as early as possible.

use super::{
    attempt::{Apart, Attempt},
    classes::DraftClasses,
    equal::equal_splits,
    finish::{Done, Simulation, launch_bound, list_bound},
    guided::guided_self_scheduling,
    input::SplitInput,
    launch::Launch,
    list::list_scheduling,
    load::OpLoad,
    order::count,
    piece::Piece,
    problem::Problem,
    wrap_around::{InColumn, wrap_around},
};
use crate::plan::{
    data::Kernel,
    draft::{Draft, WORTH_CUTTING},
    model::PrefillDescription,
};

/// Rows of a tile up to which decodes beside prefills are cut by guided self-scheduling, also on SMs of their own.
pub const FEW_ROWS: u32 = 16;

/// Tiles of prefills that take less than this part of an even share are short: beside decodes they do not count as pieces.
pub const SHORT: u32 = 4;

/// The makespan that attempts aim at grows by 1/64 from attempt to attempt.
const STEP: u64 = 64;

/// A makespan of up to this many times the bound is early enough.
const EARLY_ENOUGH: f64 = 1.09;

/// If all SMs are busy, their clock is 1/40 lower than if some are idle.
const ALL_BUSY: u64 = 40;

/// Pieces of unequal size must save 1/128 of the bound.
const MARGIN: u64 = 128;

/// Times to try for pieces of equal size, in percent of the bound. CTAs of decodes are faster while others are idle: fewer
/// pieces may be better than evenly loaded CTAs. Equal pieces of the tiles of a prompt read the same keys.
const EVEN: [u32; 7] = [100, 104, 108, 112, 125, 150, 200];

/// Equal pieces are tried if there are at most this many units per CTA.
const MOST_UNITS: u64 = 4;

/// If whole drafts take at most this many times the bound, splits are not tried.
const GOOD_ENOUGH: f64 = 1.03;

/// The bits of a sort key that hold the cost.
const COST_MASK: u64 = (1 << 56) - 1;

/// A step that is to be balanced.
#[derive(Clone, Copy)]
pub struct Step<'a> {
    pub input: &'a SplitInput<'a>,
    pub drafts: &'a [Draft],
    pub classes: &'a DraftClasses,
    pub launches: &'a [Launch],
    /// Decode first.
    pub loads: &'a [OpLoad; 2],
}

/// Buffers that keep their memory from plan to plan.
#[derive(Debug, Default)]
pub struct Balancer {
    /// See [`Problem::order`].
    sorted: Vec<(u64, u32)>,
    /// Pieces of the current attempt, of the best attempt, and of all operations that are cut.
    attempt: Vec<Piece>,
    best: Vec<Piece>,
    chosen: Vec<Piece>,
    simulation: Simulation,
    /// For [`wrap_around`].
    columns_of: Vec<InColumn>,
    /// The pieces of equal size that were tried last.
    tried: Vec<Piece>,
    /// For each draft, where its next piece goes.
    next: Vec<u32>,
}

impl Balancer {
    /// Balances the drafts over the resident CTAs.
    pub fn balance(&mut self, step: &Step<'_>, pieces: &mut Vec<Piece>) {
        self.chosen.clear();
        let mut decodes_done = {
            let load = &step.loads[Kernel::Decode as usize];
            load.bound().max(load.longest)
        };
        let cut = [Kernel::Decode, Kernel::Prefill]
            .map(|kernel| self.balance_op(step, kernel, &mut decodes_done));
        for (index, (draft, unit)) in step
            .drafts
            .iter()
            .zip(step.classes.unit_costs())
            .enumerate()
        {
            if !cut[draft.kernel as usize] {
                pieces.push(whole(index as u32, draft, unit.launch, unit.whole()));
            }
        }
        if cut != [false; 2] {
            self.chosen.append(pieces);
            self.sort_by_draft(step.drafts.len(), pieces);
        }
    }

    /// Adds the pieces of an operation to the chosen ones, if cutting any of its drafts shortens the step.
    /// `decodes_done` is the time when the decodes finish; balancing the decodes updates it.
    fn balance_op(&mut self, step: &Step<'_>, kernel: Kernel, decodes_done: &mut u64) -> bool {
        let Step {
            input,
            drafts,
            classes,
            launches,
            loads,
        } = *step;
        let load = &loads[kernel as usize];
        if load.units == 0 {
            return false;
        }
        // Tiles of many rows have large states: they are cut as alone, if no prefill runs on their SMs.
        let of_few_rows = |draft: &Draft| draft.kernel != kernel || draft.tile.m <= FEW_ROWS;
        let by_rounds = kernel == Kernel::Decode
            && (input.co_resident || input.side_by_side && drafts.iter().all(of_few_rows));
        let joint = drafts.iter().any(Draft::is_joint);
        let enough = if joint { WORTH_CUTTING } else { GOOD_ENOUGH };
        let good = (load.bound() as f64 * enough) as u64;
        // In any order, a unit starts no later than when all other units are spread evenly, and no later than when all
        // launches up to its own are spread evenly.
        let even_in_any_order = || {
            (load.work / u64::from(load.ctas)).saturating_add(load.longest) <= good
                || launch_bound(launches, kernel, load.ctas) <= good
        };
        if !by_rounds && even_in_any_order() {
            return false;
        }
        let Self {
            sorted,
            attempt,
            chosen,
            simulation,
            ..
        } = self;
        sort(classes, drafts, kernel, sorted);
        let problem = Problem {
            drafts,
            classes,
            order: sorted,
            load,
        };
        if by_rounds {
            guided_self_scheduling(&problem, attempt);
            *decodes_done = simulation.run(&problem, input.cost, attempt, 0).makespan;
            chosen.append(attempt);
            return true;
        }
        if list_bound(&problem) <= good {
            return false;
        }
        attempt.clear();
        attempt.extend(
            problem
                .drafts()
                .map(|(index, draft, unit)| whole(index, draft, unit.launch, unit.whole())),
        );
        let uncut = simulation.run(&problem, input.cost, attempt, 0).makespan;
        let decodes_end = *decodes_done;
        if kernel == Kernel::Decode {
            *decodes_done = uncut;
        }
        let merge = price_of_cutting(step, kernel, joint, uncut);
        if uncut <= good + merge {
            return false;
        }
        // Cut prefills read more, which slows the decodes beside them: at most two full waves beside short tiles, and no cuts if
        // the decodes fill the device for longer anyway.
        let mut most_units = u32::MAX;
        if kernel == Kernel::Prefill && input.hybrid {
            // Prefills that leave partial states anyway may be cut.
            let cut_anyway = drafts
                .iter()
                .any(|draft| draft.kernel == kernel && draft.leaves_partial);
            let beside = (uncut as f64 * input.prefill_slower) as u64;
            if !cut_anyway && loads[Kernel::Decode as usize].fills() && decodes_end >= beside {
                return false;
            }
            let is_short = |cost: u64| cost < load.bound() / u64::from(SHORT);
            let short = problem
                .drafts()
                .map(|(_, _, unit)| match is_short(unit.whole()) {
                    true => unit.units,
                    false => 0,
                });
            most_units = short.fold(2 * load.ctas, u32::saturating_add);
        }
        let goal = Goal {
            good,
            most_units,
            uncut,
            least: uncut - merge,
        };
        let Some(done) = self.best_attempt(step, kernel, &goal) else {
            return false;
        };
        if kernel == Kernel::Decode {
            *decodes_done = done.makespan;
        }
        self.chosen.append(&mut self.best);
        true
    }

    /// Finds the attempt that merges all rows first, and leaves its pieces in `best`. Returns none if no attempt
    /// finishes before `goal.least`.
    fn best_attempt(&mut self, step: &Step<'_>, kernel: Kernel, goal: &Goal) -> Option<Done> {
        let load = &step.loads[kernel as usize];
        let Self {
            sorted,
            attempt,
            best: best_pieces,
            simulation,
            columns_of,
            tried,
            ..
        } = self;
        let Goal {
            good,
            most_units,
            uncut,
            mut least,
        } = *goal;
        let problem = Problem {
            drafts: step.drafts,
            classes: step.classes,
            order: sorted,
            load,
        };
        let bound = load.bound();
        // Among attempts that are early enough, the one that merges all rows first is best.
        let enough = (bound as f64 * EARLY_ENOUGH) as u64;
        let mut best = Done {
            makespan: uncut,
            late: uncut.saturating_sub(enough),
            merged: uncut,
        };
        let mut found = false;
        let mut keep_if_better =
            |simulation: &mut Simulation, pieces: &Vec<Piece>, margin: u64, apart: Apart| {
                let done = simulation.run(&problem, step.input.cost, pieces, enough);
                let done = done.later_by(apart.time(&problem, pieces), enough);
                let with_margin = Done {
                    merged: done.merged + margin,
                    ..done
                };
                if done.makespan < goal.least && with_margin < best {
                    (best, found) = (done, true);
                    // Copied, not swapped: several buffers would have to grow over many steps.
                    best_pieces.clone_from(pieces);
                }
                done.makespan
            };
        // Decodes: CTAs are faster while others are idle, or fewer pieces leave fewer states. Prompts: equal pieces of their tiles
        // read the same keys.
        let spread = |draft: &Draft| {
            draft.kernel == kernel && step.input.cost.spreads_states(kernel, draft.tile.m)
        };
        let slowest = match kernel {
            Kernel::Decode if step.drafts.iter().any(spread) => u32::MAX,
            Kernel::Decode => load.contention.solo_speedup / 10,
            Kernel::Prefill => u32::MAX,
        };
        let (mut margin, mut share_keys) = (0, false);
        if slowest > 100 {
            if load.count <= MOST_UNITS * u64::from(load.ctas) {
                tried.clear();
                for percent in EVEN.into_iter().filter(|&percent| percent <= slowest) {
                    let until = bound / 100 * u64::from(percent);
                    // A little more time often leaves the same pieces.
                    if equal_splits(&problem, until, attempt)
                        && *attempt != *tried
                        && units(step.classes, attempt) <= most_units
                    {
                        tried.clone_from(attempt);
                        keep_if_better(simulation, attempt, 0, Apart::None);
                    }
                }
            }
            let are_of_a_prompt = |pair: &[Draft]| pair[0].shares_prompt(&pair[1]);
            share_keys = kernel == Kernel::Prefill && step.drafts.windows(2).any(are_of_a_prompt);
            // Unequal pieces must save enough.
            margin = bound / MARGIN;
        }
        for rule in [Attempt::WrapAround, Attempt::List] {
            let mut until = bound;
            while until < least && least > good {
                let placed = match rule {
                    Attempt::WrapAround => wrap_around(&problem, until, columns_of, attempt),
                    Attempt::List => {
                        list_scheduling(&problem, until, &mut simulation.timeline, attempt)
                    }
                };
                if placed && units(step.classes, attempt) <= most_units {
                    let apart = rule.apart(share_keys);
                    least = least.min(keep_if_better(simulation, attempt, margin, apart));
                    break;
                }
                until += until / STEP + 1;
            }
        }
        found.then_some(best)
    }

    /// Sorts the chosen pieces by draft into `pieces`. The pieces of a draft are already in the order of their keys.
    fn sort_by_draft(&mut self, drafts: usize, pieces: &mut Vec<Piece>) {
        let Self { chosen, next, .. } = self;
        count(next, drafts, chosen.iter().map(|piece| piece.draft));
        pieces.resize(chosen.len(), Piece::default());
        for piece in chosen.iter() {
            let at = &mut next[piece.draft as usize];
            pieces[*at as usize] = *piece;
            *at += 1;
        }
    }
}

/// The goal of the attempts.
struct Goal {
    /// An attempt that finishes by this time ends the search.
    good: u64,
    /// Maximum number of units of all pieces together.
    most_units: u32,
    /// When whole drafts finish, and by when pieces must finish.
    uncut: u64,
    least: u64,
}

/// A draft that is not cut.
fn whole(index: u32, draft: &Draft, launch: u32, cost: u64) -> Piece {
    Piece::new(index, draft.kv_begin..draft.kv_end, launch, 0, cost)
}

/// The drafts of an operation: launch after launch, the longest first.
fn sort(classes: &DraftClasses, drafts: &[Draft], kernel: Kernel, sorted: &mut Vec<(u64, u32)>) {
    sorted.clear();
    for (index, (draft, unit)) in drafts.iter().zip(classes.unit_costs()).enumerate() {
        if draft.kernel == kernel {
            let key = u64::from(unit.launch) << 56 | (COST_MASK - unit.whole().min(COST_MASK));
            sorted.push((key, index as u32));
        }
    }
    sorted.sort_unstable();
}

/// Time that cutting adds to the step: a merge if no row is merged yet, and the states that cut prefills write and
/// read.
fn price_of_cutting(step: &Step<'_>, kernel: Kernel, joint: bool, uncut: u64) -> u64 {
    let Step { input, drafts, .. } = *step;
    let merged = drafts.iter().any(|draft| draft.leaves_partial);
    let decodes = drafts
        .iter()
        .filter(|draft| draft.kernel == Kernel::Decode && kernel == Kernel::Decode);
    let widest = decodes.map(|draft| draft.tile.m).max().unwrap_or(0);
    let merge = match (merged, joint) {
        (true, _) => 0,
        (false, true) => input.cost.cut_ps(),
        (false, false) => input.cost.merge_ps(widest),
    };
    let in_parts = |draft: &Draft| draft.kernel == kernel && draft.leaves_partial;
    if kernel == Kernel::Prefill && !drafts.iter().any(in_parts) {
        return merge + u64::from(PrefillDescription::CUT_NS) * 1000 + uncut / ALL_BUSY;
    }
    merge
}

/// Units of all pieces.
fn units(classes: &DraftClasses, pieces: &[Piece]) -> u32 {
    let units = |piece: &Piece| classes.unit_cost(piece.draft).units;
    pieces.iter().map(units).sum()
}
