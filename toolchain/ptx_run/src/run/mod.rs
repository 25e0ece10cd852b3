//! Runs launches: decides which warp runs when and which copy completes when.

mod grid;
mod start;
mod turns;
mod waiting;

use crate::{
    Memory, Module, Report,
    clock::{Clock, Shared},
    decode::Code,
    exec::Run,
    report::Fault,
    shadow::MAX_BLOCKS,
    timeline::{Recorder, Timeline},
    warp::LANES,
};
use grid::Grid;

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
    let product = |sizes: [u32; 3]| {
        let mut sizes = sizes.into_iter();
        sizes.try_fold(1_u32, |product, size| product.checked_mul(size))
    };
    let Some(threads) = product(launch.block).filter(|threads| (1..=1024).contains(threads)) else {
        return Err(format!(
            "blocks of {:?} threads, a block has 1 to 1024",
            launch.block
        ));
    };
    if !product(launch.grid).is_some_and(|blocks| (1..MAX_BLOCKS).contains(&blocks)) {
        return Err(format!(
            "{:?} blocks, the emulator takes 1 to {}",
            launch.grid,
            MAX_BLOCKS - 1
        ));
    }
    if !(1..=16).contains(&launch.cluster) || !launch.grid[0].is_multiple_of(launch.cluster) {
        return Err(format!(
            "{:?} blocks in clusters of {}",
            launch.grid, launch.cluster
        ));
    }
    if let Some(cluster) = code.cluster.filter(|&cluster| cluster != launch.cluster) {
        return Err(format!(
            "clusters of {}, the entry takes {cluster}",
            launch.cluster
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
