//! Records what the warps of a block do in each step.

use crate::{
    block::{Block, Copy, Pending},
    op::Op,
    warp::{Wait, Warp},
};

/// Steps that a copy takes in a [traced](crate::Module::trace) launch.
pub const COPY_STEPS: u64 = 400;

/// Steps that a product with this number of columns takes; one with 128 takes as long as 64 instructions.
pub(crate) const fn product_steps(columns: u32) -> u64 {
    columns as u64 / 2
}

/// State of a warp in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    /// Executes an instruction.
    Issues,
    /// Waits at a named barrier.
    Barrier(u32),
    /// Waits at the barrier of its cluster.
    Cluster,
    /// Waits for a phase of the mbarrier at this shared address.
    Mbarrier(u32),
    /// Waits for matrix products (`wgmma.wait_group`).
    Products,
    /// Waits for its own copies (`cp.async.wait_group`).
    Copies,
    /// Waits for registers (`setmaxnreg`).
    Registers,
}

/// Consecutive steps in which a warp has the same state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interval {
    /// The warp.
    pub warp: u32,
    /// The first step.
    pub begin: u64,
    /// One past the last step.
    pub end: u64,
    /// The state.
    pub state: State,
    /// Line of the module at which it waits or at which the interval began.
    pub line: u32,
}

/// Kind of an asynchronous operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Beside {
    /// Copies into shared memory.
    Loads,
    /// Copies out of shared memory.
    Stores,
    /// Matrix products of warpgroups.
    Products,
}

/// An asynchronous operation that a warp began.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flight {
    /// The warp.
    pub warp: u32,
    /// The step in which it began.
    pub begin: u64,
    /// The step in which it ended.
    pub end: u64,
    /// The kind.
    pub what: Beside,
    /// Bytes of a copy, columns of a product.
    pub amount: u64,
    /// Line of the instruction.
    pub line: u32,
}

/// The warps of a block over the steps of a launch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Timeline {
    /// The entry.
    pub kernel: String,
    /// The block.
    pub block: u32,
    /// Number of warps of the block.
    pub warps: u32,
    /// Number of steps until the block ended.
    pub steps: u64,
    /// States of the warps, in order for each warp.
    pub intervals: Vec<Interval>,
    /// Asynchronous operations.
    pub flights: Vec<Flight>,
}

/// A timeline that is being recorded.
pub(crate) struct Recorder {
    pub timeline: Timeline,
    /// The open interval of each warp: first step, state, line.
    open: Vec<Option<(u64, State, u32)>>,
}

impl Recorder {
    pub fn new(kernel: &str, block: u32, warps: u32) -> Self {
        Self {
            timeline: Timeline {
                kernel: kernel.to_owned(),
                block,
                warps,
                ..Timeline::default()
            },
            open: vec![None; warps as usize],
        }
    }

    /// Records a warp's state in a step; none if it has ended.
    pub fn state(&mut self, warp: usize, now: u64, state: Option<(State, u32)>) {
        let open = &mut self.open[warp];
        if open.map(|(_, before, _)| before) == state.map(|(state, _)| state) {
            return;
        }
        if let Some((begin, state, line)) = *open {
            self.timeline.intervals.push(Interval {
                warp: warp as u32,
                begin,
                end: now,
                state,
                line,
            });
        }
        *open = state.map(|(state, line)| (now, state, line));
        self.timeline.steps = self.timeline.steps.max(now);
    }

    pub fn copy(&mut self, pending: &Pending, now: u64, line: u32) {
        let (what, amount) = match &pending.copy {
            Copy::Bulk { bytes, .. } | Copy::Lane { bytes, .. } => (Beside::Loads, *bytes),
            Copy::Tensor { map, .. } => (Beside::Loads, map.box_bytes()),
            Copy::BulkOut { bytes, .. } => (Beside::Stores, *bytes),
            Copy::TensorOut { map, .. } => (Beside::Stores, map.box_bytes()),
            Copy::Arrive => return,
        };
        let flight = Flight {
            warp: pending.warp as u32,
            begin: pending.begun,
            end: now,
            what,
            amount: u64::from(amount),
            line,
        };
        self.flight(flight);
    }

    /// Operations of a warp's lanes that begin and end together are merged.
    pub fn flight(&mut self, flight: Flight) {
        let same = |other: &&mut Flight| {
            let key = |one: &Flight| (one.warp, one.begin, one.end, one.what);
            key(other) == key(&flight)
        };
        match self.timeline.flights.iter_mut().rev().take(64).find(same) {
            Some(other) => other.amount += flight.amount,
            None => self.timeline.flights.push(flight),
        }
    }
}

/// The state of a warp; none if it has ended.
pub(crate) fn state_of(warp: &Warp, code: &[crate::op::Instruction]) -> Option<State> {
    if warp.alive == 0 {
        return None;
    }
    Some(match warp.wait {
        Wait::Nothing => State::Issues,
        Wait::Named { id, .. } => State::Barrier(id),
        Wait::Mbarrier { address, .. } => State::Mbarrier(address),
        Wait::Registers { .. } => State::Registers,
        Wait::Cluster { .. } => State::Cluster,
        Wait::Step(_) => match code[warp.path.pc as usize].op {
            Op::WgmmaWait { .. } => State::Products,
            _ => State::Copies,
        },
    })
}

/// The first of a block's copies that is due.
pub(crate) fn is_due(block: &Block, now: u64) -> Option<usize> {
    let due = |one: &Pending| one.begun + COPY_STEPS <= now || matches!(one.copy, Copy::Arrive);
    block.pending.iter().position(due)
}
