//! A block: its shared memory, barriers, and asynchronous operations.

use std::{
    cell::RefCell,
    collections::{HashMap, VecDeque},
    rc::Rc,
};

use crate::{
    clock::{Shared, join},
    memory::Bytes,
    shadow::{Layout, Record},
    tensor_map::TensorMap,
    warp::{FenceMark, Warp},
};

/// State that the blocks of a cluster share: their barrier.
#[derive(Debug, Default)]
pub struct Cluster {
    /// Number of complete phases.
    pub generation: u64,
    /// Number of warps that have not ended.
    pub live: u32,
    arrived: u32,
    clock: Shared,
    pub released: Shared,
    /// Bytes that have arrived at mbarriers, not counted yet.
    pub sent: Vec<Sent>,
}

/// Bytes of asynchronous stores that have arrived at an mbarrier.
#[derive(Debug)]
pub struct Sent {
    /// Rank of the block.
    pub rank: u32,
    pub barrier: u32,
    pub bytes: u32,
    /// What threads learn that wait for the barrier.
    pub clock: Shared,
    pub instruction: usize,
}

impl Cluster {
    /// Records the arrival of a warp. Returns the phase in which it arrived.
    pub fn arrive(&mut self, clock: Option<Shared>) -> u64 {
        let phase = self.generation;
        self.arrived += 1;
        if let Some(clock) = clock {
            join(&mut self.clock, &clock);
        }
        self.complete();
        phase
    }

    /// Records the end of a warp, which later phases do not wait for. `phase` is its last arrival if it has not waited.
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

    /// State for reports.
    pub fn describe(&self) -> String {
        format!(
            "barrier of the cluster, {} of {} warps are there",
            self.arrived, self.live
        )
    }
}

/// Arrival of a warp at a named barrier: its time then, and its instruction.
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
    /// Number of threads of the phase; 0 if it has not begun.
    pub expected: u32,
    /// Whether no count was given, so that all live threads take part.
    pub everybody: bool,
    pub arrived: u32,
    pub warps: u32,
    /// Arrivals in this phase, and in the previous one.
    pub arrivals: Vec<Arrival>,
    pub before: Vec<Arrival>,
    /// The last arrival: instruction and warp.
    pub last: (usize, usize),
    pub clock: Shared,
    pub vote: bool,
    /// Number of warps that wait for the end of this phase.
    pub waiting: u32,
    /// Complete phases that not all warps have passed.
    pub released: Vec<Released>,
}

/// A complete phase of a named barrier.
#[derive(Clone, Debug)]
pub struct Released {
    pub generation: u64,
    /// What warps learn that pass it, and the result of the vote.
    pub clock: Shared,
    pub vote: bool,
    /// Number of warps that have not passed it.
    pub waiting: u32,
}

/// The products of a warpgroup that not all of its warps have issued yet, in order.
#[derive(Clone, Debug, Default)]
pub struct Products {
    /// The instruction of each, and the first warp that issued it.
    pub open: VecDeque<(usize, usize)>,
    /// How many came before these, and how many each warp has issued.
    complete: u64,
    issued: [u64; 4],
}

impl Products {
    /// A warp issues a product. `Err` with the instruction and the warp that were first, if these differ.
    pub fn issue(&mut self, warp: usize, instruction: usize) -> Result<(), (usize, usize)> {
        let issued = &mut self.issued[warp % 4];
        let at = (*issued - self.complete) as usize;
        *issued += 1;
        match self.open.get(at) {
            Some(&first) if first.0 != instruction => return Err(first),
            Some(_) => {}
            None => self.open.push_back((instruction, warp)),
        }
        if self.issued.iter().all(|&issued| issued > self.complete) {
            self.open.pop_front();
            self.complete += 1;
        }
        Ok(())
    }
}

/// An mbarrier.
#[derive(Clone, Debug)]
pub struct Mbarrier {
    pub address: u32,
    pub count: u32,
    pub pending: u32,
    pub bytes: i64,
    /// Number of complete phases.
    pub phase: u32,
    /// Index among the block's mbarriers, and the time of its first phase.
    pub member: usize,
    pub first_time: u32,
    pub clock: Shared,
    pub released: Shared,
    /// The warp and the lane that initialised it.
    pub by_warp: usize,
    pub by_lane: usize,
    pub at_time: u32,
    pub instruction: usize,
    pub live: bool,
}

impl Mbarrier {
    /// The time at which the current phase will be complete.
    pub fn time(&self) -> u32 {
        self.first_time + self.phase + 1
    }
}

/// A copy under way.
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
    /// Not a copy: an arrival at a barrier, due when the lane's earlier copies are done.
    Arrive,
}

/// A copy under way, and what waits for it.
#[derive(Clone, Debug)]
pub struct Pending {
    pub copy: Copy,
    pub warp: usize,
    pub lane: usize,
    /// The lane's group that contains it.
    pub group: u32,
    /// Address of the mbarrier that counts its bytes, and the phase.
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
    /// Copies under way, except those of `cp.async`.
    pub pending: Vec<Pending>,
    /// `cp.async` copies of each lane, in program order.
    pub lane_copies: Vec<VecDeque<Pending>>,
    pub fences: Vec<Vec<FenceMark>>,
    /// Of each warpgroup.
    pub products: Vec<Products>,
    /// For each four bytes of shared memory, reads by loads whose threads arrived at an mbarrier before they used the data.
    pub late_reads: HashMap<usize, Vec<Record>>,
    /// Registers that no warp holds.
    pub pool: i64,
    pub live_warps: u32,
    /// Index of the multiprocessor.
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
