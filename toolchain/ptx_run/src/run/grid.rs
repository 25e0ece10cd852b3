//! Decides which warp of a grid runs next.

use std::rc::Rc;

use super::{Launch, Schedule};
use crate::{
    Report,
    block::{Block, Resident},
    exec::Run,
    report::Fault,
    timeline::{State, is_due, state_of},
    warp::{Wait, Warp},
};

/// The running blocks of a grid.
pub(super) struct Grid<'a> {
    pub(super) run: Run<'a>,
    pub(super) schedule: Schedule,
    pub(super) launch: Launch,
    pub(super) next: u32,
    pub(super) residents: Vec<Resident>,
    /// The warp whose turn it is.
    pub(super) turn: usize,
}

/// Instructions in a turn.
const TURN: usize = 64;
/// Instructions in a turn if a warp runs as far as it can.
const LONG_TURN: usize = 4_000;
/// After this many long turns a copy completes even if a warp still runs, because it may be polling for that copy.
const LONG_TURNS: usize = 8;

/// After so many long turns of each warp without progress, lanes may wait for other lanes of their warp.
const IDLE_TURNS: usize = 2;

impl Grid<'_> {
    pub(super) fn go(&mut self) -> Result<(), Box<Report>> {
        let mut long_turns = 0;
        // When something last happened that a warp may wait for: the count, and the instructions executed until then.
        let (mut progress, mut since) = (0, 0);
        loop {
            let blocks = self.launch.grid.iter().product::<u32>();
            self.fill(blocks);
            if self.residents.is_empty() {
                return Ok(());
            }
            self.arrivals()?;
            let Some((at, warp)) = self.choose() else {
                self.nobody()?;
                continue;
            };
            let turn = match self.schedule {
                Schedule::RoundRobin => TURN,
                Schedule::Random(_) => 1 + self.run.random.below(4 * TURN),
                Schedule::Late(_) => LONG_TURN,
            };
            let before = self.run.stats.instructions;
            if self.run.progress != progress {
                (progress, since) = (self.run.progress, before);
            }
            let warps: usize = self.residents.iter().map(|one| one.warps.len()).sum();
            let one = &mut self.residents[at].warps[warp];
            if before - since > (IDLE_TURNS * LONG_TURN * warps) as u64
                && one.wait == Wait::Nothing
                && one.let_others_go_on()
            {
                since = before;
            }
            self.turn(at, warp, turn)?;
            if matches!(self.schedule, Schedule::Late(_))
                && self.run.stats.instructions - before == turn as u64
            {
                // The warp may be polling for the work of other warps or for a copy.
                self.turn += 1;
                long_turns += 1;
                if long_turns % LONG_TURNS == 0 {
                    self.late_copy()?;
                }
            }
            if self.run.stats.instructions > self.launch.limit {
                let limit = self.launch.limit;
                let waiting = self.waiting();
                return Err(self.report(None, Fault::TooLong { limit, waiting }));
            }
        }
    }

    /// Starts blocks while there is room.
    fn fill(&mut self, blocks: u32) {
        let size = self.launch.cluster;
        let room = (self.launch.resident.max(size) / size * size) as usize;
        while self.next < blocks && self.residents.len() + size as usize <= room {
            let cluster = Rc::default();
            for rank in 0..size {
                let resident = self.block(self.next + rank, &cluster, rank);
                self.residents.push(resident);
            }
            self.next += size;
        }
    }

    /// Runs all warps in parallel, one instruction per step.
    pub(super) fn go_in_step(&mut self) -> Result<(), Box<Report>> {
        let blocks = self.launch.grid.iter().product::<u32>();
        loop {
            self.fill(blocks);
            if self.residents.is_empty() {
                return Ok(());
            }
            self.run.now += 1;
            let now = self.run.now;
            let ids: Vec<usize> = self.residents.iter().map(|one| one.block.id).collect();
            let (mut moved, mut awaited) = (false, false);
            for id in ids {
                let find = |grid: &Self| grid.residents.iter().position(|one| one.block.id == id);
                let Some(at) = find(self) else { continue };
                while let Some(which) = is_due(&self.residents[at].block, now) {
                    self.deliver(at, which)?;
                }
                for index in 0..self.residents[at].warps.len() {
                    let Some(at) = find(self) else { break };
                    let Resident { block, warps } = &self.residents[at];
                    if Self::ready(block, &warps[index])
                        && !matches!(warps[index].wait, Wait::Step(step) if step > now)
                    {
                        self.note(at, index, true);
                        self.turn(at, index, 1)?;
                        moved = true;
                    } else {
                        awaited |= matches!(warps[index].wait, Wait::Step(_));
                        self.note(at, index, false);
                    }
                }
                if let Some(at) = find(self) {
                    awaited |= !self.residents[at].block.pending.is_empty();
                } else if let Some(recorder) = &mut self.run.recorder
                    && recorder.timeline.block as usize == id
                {
                    (0..recorder.timeline.warps as usize)
                        .for_each(|warp| recorder.state(warp, now, None));
                }
            }
            if !moved && !awaited {
                self.nobody()?;
            }
            if self.run.stats.instructions > self.launch.limit {
                let limit = self.launch.limit;
                let waiting = self.waiting();
                return Err(self.report(None, Fault::TooLong { limit, waiting }));
            }
        }
    }

    /// Records what a warp does in this step.
    fn note(&mut self, at: usize, index: usize, issues: bool) {
        let Resident { block, warps } = &self.residents[at];
        let (warp, code, now) = (&warps[index], self.run.code, self.run.now);
        let Some(recorder) = &mut self.run.recorder else {
            return;
        };
        if recorder.timeline.block as usize != block.id {
            return;
        }
        let state = match issues {
            true => Some(State::Issues),
            false => state_of(warp, &code.instructions),
        };
        let line = code.lines.get(warp.path.pc as usize).copied();
        recorder.state(index, now, state.map(|state| (state, line.unwrap_or(0))));
    }

    /// Whether the condition that a warp waits for is met.
    fn ready(block: &Block, warp: &Warp) -> bool {
        if warp.alive == 0 {
            return false;
        }
        match warp.wait {
            Wait::Nothing | Wait::Step(_) => true,
            Wait::Named { id, generation } => block.named[id as usize].generation > generation,
            Wait::Mbarrier { address, parity } => {
                let index = block.barrier_at[address as usize / 8] as usize;
                index
                    .checked_sub(1)
                    .is_none_or(|index| block.barriers[index].phase & 1 != parity)
            }
            Wait::Cluster { phase } => block.cluster.borrow().generation > phase,
            Wait::Registers { wanted } => {
                (i64::from(wanted) - i64::from(warp.registers)) * 32 <= block.pool
            }
        }
    }

    /// Chooses the next warp: block and warp.
    fn choose(&mut self) -> Option<(usize, usize)> {
        let total: usize = self.residents.iter().map(|one| one.warps.len()).sum();
        let start = match self.schedule {
            Schedule::RoundRobin => self.turn + 1,
            Schedule::Random(_) => self.run.random.below(total),
            // The last warp continues while it can, but occasionally loses its turn.
            Schedule::Late(_) if self.run.random.below(16) == 0 => self.run.random.below(total),
            Schedule::Late(_) => self.turn,
        };
        // All blocks of a grid have as many warps.
        let warps = self.residents[0].warps.len();
        let found = (start..total + start)
            .map(|index| index % total)
            .find(|index| {
                let resident = &self.residents[index / warps];
                Self::ready(&resident.block, &resident.warps[index % warps])
            })?;
        self.turn = found;
        Some((found / warps, found % warps))
    }

    /// No warp can run: complete a copy, else let tests of mbarriers fail, else report a deadlock.
    fn nobody(&mut self) -> Result<(), Box<Report>> {
        if self.late_copy()? {
            return Ok(());
        }
        // Code may do something else while a barrier is not ready, so let all these tests fail once.
        let before = self.run.progress;
        for _ in 0..3 {
            for at in 0..self.residents.len() {
                for warp in 0..self.residents[at].warps.len() {
                    let one = &mut self.residents[at].warps[warp];
                    if matches!(one.wait, Wait::Mbarrier { .. }) {
                        one.give_up = true;
                        one.wait = Wait::Nothing;
                        self.turn(at, warp, TURN)?;
                        if self.run.progress != before || at >= self.residents.len() {
                            return Ok(());
                        }
                    }
                }
            }
        }
        let still = self
            .residents
            .iter()
            .any(|one| one.warps.iter().any(|warp| Self::ready(&one.block, warp)));
        if still {
            return Ok(());
        }
        let waiting = self.waiting();
        Err(self.report(None, Fault::Deadlock { waiting }))
    }
}
