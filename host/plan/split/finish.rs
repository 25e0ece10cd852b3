//! When pieces finish: bounds, and a simulation of the CTAs.

use super::{launch::Launch, piece::Piece, problem::Problem};
use crate::plan::{
    data::Kernel,
    model::{CostModel, CtaTimeline},
};

/// When an attempt finishes, in picoseconds. The better attempt is less.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Done {
    /// End of the last piece.
    pub makespan: u64,
    /// How much later that is than what is early enough.
    pub late: u64,
    /// End of all merges.
    pub merged: u64,
}

impl PartialOrd for Done {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some((self.late, self.merged).cmp(&(other.late, other.merged)))
    }
}

impl Done {
    /// With a delay of all pieces. A makespan of up to `enough` is early enough.
    pub fn later_by(self, delay: u64, enough: u64) -> Self {
        let makespan = self.makespan + delay;
        Self {
            makespan,
            late: makespan.saturating_sub(enough),
            merged: self.merged + delay,
        }
    }
}

/// Buffers of a simulation.
#[derive(Debug, Default)]
pub struct Simulation {
    pub timeline: CtaTimeline,
    launch_order: Vec<(u64, u32)>,
}

impl Simulation {
    /// Simulates CTAs that claim the pieces in launch order. A makespan of up to `enough` is early enough.
    pub fn run(
        &mut self,
        problem: &Problem<'_>,
        cost: &CostModel,
        pieces: &[Piece],
        enough: u64,
    ) -> Done {
        let Self {
            timeline,
            launch_order,
        } = self;
        launch_order.clear();
        launch_order.extend(
            pieces
                .iter()
                .enumerate()
                .map(|(at, piece)| (piece.order, at as u32)),
        );
        launch_order.sort_unstable();
        let load = problem.load;
        timeline.reset(load.ctas, load.units);
        let (mut last_cut, mut last_draft, mut count, mut most_pieces) = (0, u32::MAX, 0, 0);
        for piece in pieces {
            count = if piece.draft == last_draft {
                count + 1
            } else {
                1
            };
            (last_draft, most_pieces) = (piece.draft, most_pieces.max(count));
        }
        let mut states = 0;
        for &(_, at) in launch_order.iter() {
            let piece = &pieces[at as usize];
            let unit = problem.classes.unit_cost(piece.draft);
            let keys = piece.kv_end - piece.kv_begin;
            if keys == unit.keys {
                timeline.place(unit.units, unit.whole());
                states += u64::from(unit.units) * unit.states;
            } else {
                let (_, end) = timeline.place(unit.units, unit.cut(keys));
                states += u64::from(unit.units) * unit.states_cut;
                last_cut = last_cut.max(end);
            }
        }
        let states = states / u64::from(load.ctas);
        let sooner = |until| timeline.sooner(until, load.least_fixed, load.contention) + states;
        let makespan = sooner(timeline.makespan());
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

/// List scheduling of whole drafts finishes by this time, in any order within launches.
pub fn launch_bound(launches: &[Launch], kernel: Kernel, ctas: u32) -> u64 {
    let ctas = u64::from(ctas);
    let (mut before, mut done) = (0, 0);
    for launch in launches.iter().filter(|launch| launch.kernel == kernel) {
        before = launch.work.saturating_add(before);
        done = done.max(before.saturating_add(launch.longest_whole * (ctas - 1)));
    }
    done / ctas
}

/// List scheduling of whole drafts finishes by this time: a unit starts no later than when all units before it are
/// spread evenly.
pub fn list_bound(problem: &Problem<'_>) -> u64 {
    let ctas = u64::from(problem.load.ctas);
    let (mut before, mut done) = (0, 0);
    for (_, _, unit) in problem.drafts() {
        before = u64::from(unit.units)
            .saturating_mul(unit.whole())
            .saturating_add(before);
        done = done.max(before.saturating_add(unit.whole() * (ctas - 1)));
    }
    done / ctas
}
