//! A block: its shared memory, its barriers, what goes on beside its threads.

use std::{cell::RefCell, collections::VecDeque, rc::Rc};

use crate::{
    clock::{Shared, join},
    memory::Bytes,
    shadow::Layout,
    tensor_map::TensorMap,
    warp::{FenceMark, Warp},
};

/// What the blocks of a cluster share: their barrier.
#[derive(Debug, Default)]
pub struct Cluster {
    /// Phases that are complete.
    pub generation: u64,
    /// Warps that have not ended.
    pub live: u32,
    arrived: u32,
    clock: Shared,
    pub released: Shared,
}

impl Cluster {
    /// A warp arrives; gives the phase at which it did.
    pub fn arrive(&mut self, clock: Option<Shared>) -> u64 {
        let phase = self.generation;
        self.arrived += 1;
        if let Some(clock) = clock {
            join(&mut self.clock, &clock);
        }
        self.complete();
        phase
    }

    /// A warp ends, which is no longer waited for; `phase` is the one at which it arrived last, if it has not waited.
    pub fn leave(&mut self, phase: Option<u64>) {
        self.live -= 1;
        self.arrived -= u32::from(phase == Some(self.generation));
        self.complete();
    }

    fn complete(&mut self) {
        if self.arrived >= self.live && self.arrived > 0 {
            self.generation += 1;
            self.arrived = 0;
            self.released = std::mem::take(&mut self.clock);
        }
    }

    /// For reports.
    pub fn describe(&self) -> String {
        format!(
            "barrier of the cluster, {} of {} warps are there",
            self.arrived, self.live
        )
    }
}

/// Of a warp, at a named barrier: its time then, and its instruction.
#[derive(Clone, Copy, Debug)]
pub struct Arrival {
    pub warp: usize,
    pub time: u32,
    pub instruction: usize,
}

/// A named barrier.
#[derive(Clone, Debug, Default)]
pub struct Named {
    pub generation: u64,
    /// Threads of the phase; 0: it has not begun.
    pub expected: u32,
    /// No count was given: all threads that live.
    pub everybody: bool,
    pub arrived: u32,
    pub warps: u32,
    /// Who arrived in this phase, and who in the one before.
    pub arrivals: Vec<Arrival>,
    pub before: Vec<Arrival>,
    /// Who arrived last: instruction and warp.
    pub last: (usize, usize),
    pub clock: Shared,
    pub vote: bool,
    /// What those that wait learn, by generation, and the result of the vote.
    pub released: Vec<(u64, Shared, bool)>,
}

/// A barrier in shared memory.
#[derive(Clone, Debug)]
pub struct Mbarrier {
    pub address: u32,
    pub count: u32,
    pub pending: u32,
    pub bytes: i64,
    /// Phases that are complete.
    pub phase: u32,
    /// Number among the block's, and the time of its first phase.
    pub member: usize,
    pub first_time: u32,
    pub clock: Shared,
    pub released: Shared,
    /// Who initialised it.
    pub by_warp: usize,
    pub by_lane: usize,
    pub at_time: u32,
    pub instruction: usize,
    pub live: bool,
}

impl Mbarrier {
    /// The time at which the present phase will be complete.
    pub fn time(&self) -> u32 {
        self.first_time + self.phase + 1
    }
}

/// A copy on its way.
#[derive(Clone, Debug)]
pub enum Copy {
    Bulk {
        target: u32,
        source: u64,
        bytes: u32,
    },
    Tensor {
        map: Box<TensorMap>,
        coordinates: [i64; 5],
        target: u32,
    },
    BulkOut {
        target: u64,
        source: u32,
        bytes: u32,
        add_f32: bool,
    },
    TensorOut {
        map: Box<TensorMap>,
        coordinates: [i64; 5],
        source: u32,
        add: bool,
    },
    Lane {
        target: u32,
        source: u64,
        bytes: u32,
        valid: u32,
    },
    /// The lane's copies so far arrive at a barrier.
    Arrive,
}

/// A copy on its way, and who waits for it.
#[derive(Clone, Debug)]
pub struct Pending {
    pub copy: Copy,
    pub warp: usize,
    pub lane: usize,
    /// The lane's group.
    pub group: u32,
    /// Address of the barrier that counts it, and the phase.
    pub barrier: Option<(u32, u32)>,
    pub instruction: usize,
    /// The step in which it began.
    pub begun: u64,
}

pub struct Block {
    pub id: usize,
    pub layout: Layout,
    pub cluster: Rc<RefCell<Cluster>>,
    pub cluster_rank: u32,
    pub threads: u32,
    pub shared: Bytes,
    pub named: Vec<Named>,
    pub barriers: Vec<Mbarrier>,
    /// Index into `barriers`, plus one, for each 8 bytes of shared memory.
    pub barrier_at: Vec<u16>,
    /// Copies on their way, but those of lanes.
    pub pending: Vec<Pending>,
    /// Those of each lane (`cp.async`), in the order of the code.
    pub lane_copies: Vec<VecDeque<Pending>>,
    pub fences: Vec<Vec<FenceMark>>,
    /// Registers that nobody has.
    pub pool: i64,
    pub live_warps: u32,
    /// The multiprocessor.
    pub sm: u32,
}

impl Block {
    pub fn barrier(&mut self, address: u32) -> Option<&mut Mbarrier> {
        let index = *self.barrier_at.get(address as usize / 8)?;
        let barrier = self.barriers.get_mut((index as usize).checked_sub(1)?)?;
        (barrier.address == address && barrier.live).then_some(barrier)
    }
}

/// A block with its warps.
pub struct Resident {
    pub block: Block,
    pub warps: Vec<Warp>,
}
