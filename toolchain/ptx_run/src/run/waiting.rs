//! Reports of a grid: a fault, and what each warp waits for.

use super::grid::Grid;
use crate::{
    Place, Report,
    block::Resident,
    exec::lane_list,
    report::{Fault, Waiting},
    warp::Wait,
};

impl Grid<'_> {
    /// All warps that have not ended, and what they wait for.
    pub(super) fn waiting(&self) -> Vec<Waiting> {
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

    pub(super) fn report(&self, place: Option<Place>, fault: Fault) -> Box<Report> {
        Box::new(Report {
            kernel: self.run.code.name.clone(),
            place,
            fault,
        })
    }
}
