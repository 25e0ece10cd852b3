//! Blocks whose warps have not started.

use std::{
    cell::RefCell,
    collections::{HashMap, VecDeque},
    rc::Rc,
};

use super::{Schedule, grid::Grid};
use crate::{
    block::{Block, Cluster, Named, Products, Resident},
    clock::MEMBERS,
    decode::{Code, LaneMask, Special},
    memory::Bytes,
    shadow::Layout,
    warp::{ALL, LANES, Warp},
};

impl Grid<'_> {
    /// A block whose warps have not started.
    pub(super) fn block(
        &mut self,
        id: u32,
        cluster: &Rc<RefCell<Cluster>>,
        cluster_rank: u32,
    ) -> Resident {
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
}

/// Registers of a thread at launch: as many as the launch bounds allow, in steps of 8.
fn registers_of(code: &Code, threads: u32) -> u32 {
    if let Some(registers) = code.max_registers {
        return registers;
    }
    let most = code.max_threads.unwrap_or(threads) * code.min_blocks.unwrap_or(1);
    (65_536 / most.max(1) / 8 * 8).min(255)
}
