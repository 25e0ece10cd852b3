//! Runs launches: decides which warp runs when and which copy completes when.

use std::{
    cell::RefCell,
    collections::{HashMap, VecDeque},
    rc::Rc,
};

use crate::{
    Memory, Module, Report,
    block::{Block, Cluster, Named, Products, Resident},
    clock::{Clock, MEMBERS, Shared},
    decode::{Code, LaneMask, Special},
    exec::{Run, lane_list},
    memory::Bytes,
    report::{Fault, Waiting},
    shadow::Layout,
    timeline::{Recorder, State, Timeline, is_due, state_of},
    warp::{ALL, LANES, Wait, Warp},
};

/// Parameters of a launch, besides its entry and the entry's parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Blocks in x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block in x, y and z.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory.
    pub shared: u32,
    /// Number of blocks of a cluster, along x.
    pub cluster: u32,
    /// Number of multiprocessors of the GPU. Blocks are assigned to them in turn for `%smid`.
    pub multiprocessors: u32,
    /// Maximum number of blocks that run concurrently.
    pub resident: u32,
    /// Whether the launch may begin before the previous one on this memory has ended (programmatic dependent launch).
    pub overlaps: bool,
    /// Maximum number of warp instructions before the launch is aborted.
    pub limit: u64,
}

impl Default for Launch {
    fn default() -> Self {
        Self {
            grid: [1; 3],
            block: [32, 1, 1],
            shared: 0,
            cluster: 1,
            multiprocessors: 4,
            resident: 8,
            overlaps: false,
            limit: 2_000_000_000,
        }
    }
}

/// The order in which warps run and copies complete. Equal schedules give equal runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schedule {
    /// Warps run in turn, a few instructions each; copies complete at once.
    RoundRobin,
    /// Warps run and copies complete in random order.
    Random(u64),
    /// A warp runs as far as it can before another does. Copies complete in random order, when no warp can run.
    Late(u64),
}

/// Statistics of a launch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Number of warp instructions.
    pub instructions: u64,
    /// Number of asynchronous copies.
    pub copies: u64,
    /// Number of blocks.
    pub blocks: u64,
}

/// A small generator of random numbers (xorshift64*).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// A number in `0..limit`.
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        ((self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 32) as usize * limit) >> 32
    }
}

impl Module {
    /// Runs an entry on `memory`. `parameters` has the bytes of all its parameters, each at its offset (see
    /// [`EntryInfo`](crate::EntryInfo)).
    ///
    /// # Errors
    /// A [`Report`] of the first fault. Memory then keeps the state at that moment.
    pub fn launch(
        &self,
        entry: &str,
        launch: &Launch,
        parameters: &[u8],
        memory: &mut Memory,
        schedule: Schedule,
    ) -> Result<Stats, Box<Report>> {
        let ran = self.run(entry, launch, parameters, memory, schedule, None);
        ran.map(|(stats, _)| stats)
    }

    /// Runs an entry as [`launch`](Self::launch) does, and records what the warps of a block do. In each step, every
    /// warp that can run executes an instruction. A copy takes [`COPY_STEPS`](crate::COPY_STEPS), a product half a step
    /// for each of its columns.
    ///
    /// # Errors
    /// As [`launch`](Self::launch).
    pub fn trace(
        &self,
        entry: &str,
        launch: &Launch,
        parameters: &[u8],
        memory: &mut Memory,
        block: u32,
    ) -> Result<(Stats, Timeline), Box<Report>> {
        let order = Schedule::Late(0);
        let (stats, recorder) = self.run(entry, launch, parameters, memory, order, Some(block))?;
        let timeline = recorder.map(|recorder| recorder.timeline);
        Ok((stats, timeline.unwrap_or_default()))
    }

    fn run(
        &self,
        entry: &str,
        launch: &Launch,
        parameters: &[u8],
        memory: &mut Memory,
        schedule: Schedule,
        traced: Option<u32>,
    ) -> Result<(Stats, Option<Recorder>), Box<Report>> {
        let report = |what: String| {
            Box::new(Report {
                kernel: entry.into(),
                place: None,
                fault: Fault::Launch { what },
            })
        };
        let code = self
            .code(entry)
            .map_err(|error| report(error.to_string()))?;
        check(&code, launch, parameters).map_err(report)?;
        let number = memory.begin_launch(launch.overlaps);
        let blocks = launch.grid.iter().product::<u32>() as usize;
        // It is not recorded which blocks of the previous launch released here. An acquire counts for all of them, so a
        // read of what another block has not released goes undetected.
        let mut end = Clock::default();
        end.learn(blocks, 0, 1);
        let (end, handed_over) = (Shared::new(end), std::mem::take(&mut memory.handed_over));
        let handed_over = handed_over.into_iter().filter(|_| launch.overlaps);
        let released = handed_over.map(|address| ((u32::MAX, address), end.clone()));
        let seed = match schedule {
            Schedule::RoundRobin => 0,
            Schedule::Random(seed) | Schedule::Late(seed) => seed,
        };
        let run = Run {
            module: self,
            code: &code,
            memory,
            peers: Vec::new(),
            parameters,
            threads: launch.block,
            multiprocessors: launch.multiprocessors.max(1),
            launch: number,
            blocks,
            overlaps: launch.overlaps,
            released: released.collect(),
            random: Random::new(seed),
            stats: Stats::default(),
            progress: 0,
            pc: 0,
            eager: schedule == Schedule::RoundRobin,
            now: 0,
            recorder: traced.map(|block| {
                let threads = launch.block.iter().product::<u32>();
                Recorder::new(entry, block, threads.div_ceil(LANES as u32))
            }),
        };
        let mut grid = Grid {
            run,
            schedule,
            launch: *launch,
            next: 0,
            residents: Vec::new(),
            turn: 0,
        };
        match traced {
            None => grid.go()?,
            Some(_) => grid.go_in_step()?,
        }
        let Run {
            stats,
            recorder,
            released,
            memory,
            ..
        } = grid.run;
        let everywhere = released.into_keys().filter(|key| key.0 == u32::MAX);
        memory.handed_over = everywhere.map(|(_, address)| address).collect();
        Ok((stats, recorder))
    }
}

fn check(code: &Code, launch: &Launch, parameters: &[u8]) -> Result<(), String> {
    let threads = launch.block.iter().product::<u32>();
    if threads == 0 || threads > 1024 || launch.grid.contains(&0) {
        return Err(format!(
            "{:?} blocks of {:?} threads",
            launch.grid, launch.block
        ));
    }
    if !(1..=16).contains(&launch.cluster) || !launch.grid[0].is_multiple_of(launch.cluster) {
        return Err(format!(
            "{:?} blocks in clusters of {}",
            launch.grid, launch.cluster
        ));
    }
    if let Some(most) = code.max_threads.filter(|&most| threads > most) {
        return Err(format!(
            "blocks of {threads} threads, the entry takes {most} at most"
        ));
    }
    let shared = code.shared + launch.shared as usize;
    if shared > 227 << 10 {
        return Err(format!(
            "{shared} bytes of shared memory, a block has {} at most",
            227 << 10
        ));
    }
    if parameters.len() != code.parameter_bytes {
        return Err(format!(
            "{} bytes of parameters, the entry takes {}",
            parameters.len(),
            code.parameter_bytes
        ));
    }
    Ok(())
}

/// The running blocks of a grid.
struct Grid<'a> {
    run: Run<'a>,
    schedule: Schedule,
    launch: Launch,
    next: u32,
    residents: Vec<Resident>,
    /// The warp whose turn it is.
    turn: usize,
}

/// Instructions in a turn.
const TURN: usize = 64;
/// Instructions in a turn if a warp runs as far as it can.
const LONG_TURN: usize = 4_000;
/// After this many long turns a copy completes even if a warp still runs, because it may be polling for that copy.
const LONG_TURNS: usize = 8;

impl Grid<'_> {
    fn go(&mut self) -> Result<(), Box<Report>> {
        let mut long_turns = 0;
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
    fn go_in_step(&mut self) -> Result<(), Box<Report>> {
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

    /// A block whose warps have not started.
    fn block(&mut self, id: u32, cluster: &Rc<RefCell<Cluster>>, cluster_rank: u32) -> Resident {
        let code = self.run.code;
        let threads = self.launch.block.iter().product::<u32>();
        let warps = (threads as usize).div_ceil(MEMBERS);
        let layout = Layout { warps };
        let shared = code.shared + self.launch.shared as usize;
        let registers = registers_of(code, threads);
        let mut bytes = Bytes::new(shared);
        if let Schedule::Random(_) = self.schedule {
            let random = &mut self.run.random;
            bytes.scramble(|| random.below(256) as u8);
        }
        let block = Block {
            id: id as usize,
            layout,
            cluster: cluster.clone(),
            cluster_rank,
            threads,
            shared: bytes,
            named: vec![Named::default(); 16],
            barriers: Vec::new(),
            barrier_at: vec![0; shared.div_ceil(8)],
            pending: Vec::new(),
            lane_copies: vec![VecDeque::new(); warps * LANES],
            fences: vec![Vec::new(); warps],
            products: vec![Products::default(); warps.div_ceil(4)],
            late_reads: HashMap::new(),
            pool: 0,
            live_warps: warps as u32,
            sm: id % self.run.multiprocessors,
        };
        cluster.borrow_mut().live += warps as u32;
        let one = |index: usize| {
            let left = threads as usize - index * LANES;
            let lanes = if left >= LANES { ALL } else { (1 << left) - 1 };
            let mut warp = Warp::new(code, index, layout, lanes);
            warp.registers = registers;
            for &(row, special) in &code.specials {
                warp.constant(row, self.special(special, id, index));
            }
            warp
        };
        let warps = (0..warps).map(one).collect();
        self.run.stats.blocks += 1;
        Resident { warps, block }
    }

    fn special(&self, special: Special, block: u32, warp: usize) -> [u32; LANES] {
        let [x, y, _] = self.launch.block;
        let grid = self.launch.grid;
        let thread = |lane: usize| (warp * LANES + lane) as u32;
        let all = |value: u32| [value; LANES];
        let shared = self.run.code.shared as u32 + self.launch.shared;
        match special {
            Special::Tid(axis) => std::array::from_fn(|lane| match axis {
                0 => thread(lane) % x,
                1 => thread(lane) / x % y,
                _ => thread(lane) / (x * y),
            }),
            Special::Ntid(axis) => all(self.launch.block[axis as usize]),
            Special::Ctaid(axis) => all(match axis {
                0 => block % grid[0],
                1 => block / grid[0] % grid[1],
                _ => block / (grid[0] * grid[1]),
            }),
            Special::Nctaid(axis) => all(grid[axis as usize]),
            Special::LaneId => std::array::from_fn(|lane| lane as u32),
            Special::WarpId => all(warp as u32),
            Special::NWarpId => all(64),
            Special::NSmid => all(self.run.multiprocessors),
            Special::LaneMask(which) => std::array::from_fn(|lane| {
                let own = 1_u32 << lane;
                match which {
                    LaneMask::Eq => own,
                    LaneMask::Lt => own - 1,
                    LaneMask::Le => own | (own - 1),
                    LaneMask::Gt => !(own | (own - 1)),
                    LaneMask::Ge => !(own - 1),
                }
            }),
            Special::DynamicShared => all(self.launch.shared),
            Special::TotalShared => all(shared),
            Special::ClusterRank => all(block % self.launch.cluster),
            Special::ClusterSize => all(self.launch.cluster),
            Special::ClusterIndex => all(block % grid[0] / self.launch.cluster),
            Special::Clusters => all(grid[0] / self.launch.cluster),
            Special::Zero => all(0),
            Special::One => all(1),
        }
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
        let places: Vec<(usize, usize)> = self
            .residents
            .iter()
            .enumerate()
            .flat_map(|(at, one)| (0..one.warps.len()).map(move |warp| (at, warp)))
            .collect();
        (0..total)
            .map(|offset| (start + offset) % total)
            .find_map(|index| {
                let (at, warp) = places[index];
                let resident = &self.residents[at];
                Self::ready(&resident.block, &resident.warps[warp]).then(|| {
                    self.turn = index;
                    (at, warp)
                })
            })
    }

    /// Completes some of the copies.
    fn arrivals(&mut self) -> Result<(), Box<Report>> {
        if !matches!(self.schedule, Schedule::Random(_)) {
            return Ok(());
        }
        for at in 0..self.residents.len() {
            let block = &mut self.residents[at].block;
            let queue = self.run.random.below(block.lane_copies.len());
            if let Some(one) = block.lane_copies[queue].front() {
                let (id, who) = (
                    block.id,
                    format!("the copy of warp {} lane {}", one.warp, one.lane),
                );
                if let Err(fault) = self.run.deliver_lane(block, queue) {
                    let place = self.run.place(self.run.pc, id, who);
                    return Err(self.report(Some(place), *fault));
                }
            }
            let pending = self.residents[at].block.pending.len();
            for _ in 0..pending.div_ceil(4) {
                if self.run.random.below(2) == 0 {
                    let count = self.residents[at].block.pending.len();
                    let which = self.run.random.below(count);
                    self.deliver(at, which)?;
                }
                if self.residents[at].block.pending.is_empty() {
                    break;
                }
            }
        }
        Ok(())
    }

    fn deliver(&mut self, at: usize, which: usize) -> Result<(), Box<Report>> {
        let block = &mut self.residents[at].block;
        let pending = &block.pending[which];
        let who = format!("the copy of warp {} lane {}", pending.warp, pending.lane);
        let id = block.id;
        let result = self.run.deliver(block, which);
        result.map_err(|fault| {
            let place = self.run.place(self.run.pc, id, who);
            self.report(Some(place), *fault)
        })
    }

    /// Completes a random copy. Returns whether there was one.
    fn late_copy(&mut self) -> Result<bool, Box<Report>> {
        let with_copies: Vec<usize> = (0..self.residents.len())
            .filter(|&at| !self.residents[at].block.pending.is_empty())
            .collect();
        if with_copies.is_empty() {
            return Ok(false);
        }
        let at = with_copies[self.run.random.below(with_copies.len())];
        let count = self.residents[at].block.pending.len();
        let which = self.run.random.below(count);
        self.deliver(at, which)?;
        Ok(true)
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

    /// Executes some instructions of a warp.
    fn turn(&mut self, at: usize, index: usize, count: usize) -> Result<(), Box<Report>> {
        let lent = self.lend(at);
        let result = self.steps(at, index, count);
        for (at, rank) in lent {
            self.residents[at].block.shared = self.run.peers[rank].take().unwrap_or_default();
        }
        result?;
        if self.launch.cluster > 1 {
            self.receive(at)?;
        }
        if self.residents[at].warps[index].alive == 0 {
            self.ended(at, index)?;
        }
        Ok(())
    }

    /// Counts the bytes that a block has stored asynchronously in its cluster.
    fn receive(&mut self, at: usize) -> Result<(), Box<Report>> {
        let cluster = self.residents[at].block.cluster.clone();
        let sent = std::mem::take(&mut cluster.borrow_mut().sent);
        for one in sent {
            let to = self.residents.iter_mut().find(|to| {
                Rc::ptr_eq(&to.block.cluster, &cluster) && to.block.cluster_rank == one.rank
            });
            let block = &mut to.expect("it was written to in this turn").block;
            if let Err(fault) = self.run.received(block, &one) {
                let place = self.run.place(one.instruction, block.id, "a store".into());
                return Err(self.report(Some(place), *fault));
            }
        }
        Ok(())
    }

    /// Lends a block the shared memory of the other blocks of its cluster. Returns these blocks and their ranks.
    fn lend(&mut self, at: usize) -> Vec<(usize, usize)> {
        if self.launch.cluster == 1 {
            return Vec::new();
        }
        self.run
            .peers
            .resize_with(self.launch.cluster as usize, || None);
        let cluster = self.residents[at].block.cluster.clone();
        let others = self.residents.iter_mut().enumerate();
        others
            .filter(|(other, one)| *other != at && Rc::ptr_eq(&one.block.cluster, &cluster))
            .map(|(other, one)| {
                let rank = one.block.cluster_rank as usize;
                self.run.peers[rank] = Some(std::mem::take(&mut one.block.shared));
                (other, rank)
            })
            .collect()
    }

    fn steps(&mut self, at: usize, index: usize, count: usize) -> Result<(), Box<Report>> {
        let Resident { block, warps } = &mut self.residents[at];
        let warp = &mut warps[index];
        if let Wait::Named { id, generation } = warp.wait {
            self.run.passed(block, warp, id, generation);
        }
        warp.wait = Wait::Nothing;
        for _ in 0..count {
            warp.settle();
            if warp.alive == 0 || warp.wait != Wait::Nothing {
                break;
            }
            if let Err(mut fault) = self.run.step(block, warp) {
                if let (Fault::UninitialisedRegister { read, .. }, Some((at, lane, address))) =
                    (&mut *fault, warp.unwritten)
                {
                    let place =
                        self.run
                            .place(at, block.id, format!("warp {} lane {lane}", warp.index));
                    *read = Some(Box::new((place, crate::exec::name(address))));
                }
                let who = format!("warp {} {}", warp.index, lane_list(warp.path.mask));
                let place = self.run.place(self.run.pc, block.id, who);
                return Err(self.report(Some(place), *fault));
            }
        }
        Ok(())
    }

    /// Handles the end of a warp of a block.
    fn ended(&mut self, at: usize, index: usize) -> Result<(), Box<Report>> {
        self.run.progress += 1;
        let Resident { block, warps } = &mut self.residents[at];
        let live = warps.iter().filter(|warp| warp.alive != 0).count() as u32;
        let gone = (block.live_warps - live) * MEMBERS as u32;
        block.cluster.borrow_mut().leave(warps[index].cluster_phase);
        block.live_warps = live;
        for barrier in block
            .named
            .iter_mut()
            .filter(|barrier| barrier.everybody && barrier.expected != 0)
        {
            barrier.expected -= gone;
            if barrier.arrived == barrier.expected {
                barrier.complete();
            }
        }
        if live > 0 {
            return Ok(());
        }
        while !self.residents[at].block.pending.is_empty() {
            self.deliver(at, 0)?;
        }
        let resident = self.residents.remove(at);
        self.run
            .after_end(&resident.block)
            .map_err(|(place, fault)| self.report(Some(place), *fault))
    }

    /// All warps that have not ended, and what they wait for.
    fn waiting(&self) -> Vec<Waiting> {
        let mut waiting = Vec::new();
        for Resident { block, warps } in &self.residents {
            for warp in warps.iter().filter(|warp| warp.alive != 0) {
                let what = match warp.wait {
                    Wait::Nothing | Wait::Step(_) => "goes round".into(),
                    Wait::Named { id, .. } => {
                        let barrier = &block.named[id as usize];
                        format!(
                            "barrier {id}, {} of {} threads are there",
                            barrier.arrived, barrier.expected
                        )
                    }
                    Wait::Mbarrier { address, parity } => {
                        let index = block.barrier_at[address as usize / 8] as usize;
                        match index.checked_sub(1).map(|index| &block.barriers[index]) {
                            Some(barrier) => format!(
                                "mbarrier {address:#x} parity {parity}: phase {} lacks {} arrivals and {} bytes",
                                barrier.phase, barrier.pending, barrier.bytes
                            ),
                            None => format!("mbarrier {address:#x}"),
                        }
                    }
                    Wait::Cluster { .. } => block.cluster.borrow().describe(),
                    Wait::Registers { wanted } => {
                        format!("{wanted} registers, {} are free for it", block.pool / 32)
                    }
                };
                let who = format!("warp {} {}", warp.index, lane_list(warp.path.mask));
                waiting.push(Waiting {
                    place: self.run.place(warp.path.pc as usize, block.id, who),
                    what,
                });
            }
        }
        waiting
    }

    fn report(&self, place: Option<crate::Place>, fault: Fault) -> Box<Report> {
        Box::new(Report {
            kernel: self.run.code.name.clone(),
            place,
            fault,
        })
    }
}

/// Registers of a thread at launch: as many as the launch bounds allow, in steps of 8.
fn registers_of(code: &Code, threads: u32) -> u32 {
    if let Some(registers) = code.max_registers {
        return registers;
    }
    let most = code.max_threads.unwrap_or(threads) * code.min_blocks.unwrap_or(1);
    (65_536 / most.max(1) / 8 * 8).min(255)
}
