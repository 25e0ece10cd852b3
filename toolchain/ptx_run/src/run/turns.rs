//! A turn of a warp, and copies that complete between turns.

use std::rc::Rc;

use super::{Schedule, grid::Grid};
use crate::{Report, block::Resident, clock::MEMBERS, exec::lane_list, report::Fault, warp::Wait};

impl Grid<'_> {
    /// Executes some instructions of a warp.
    pub(super) fn turn(
        &mut self,
        at: usize,
        index: usize,
        count: usize,
    ) -> Result<(), Box<Report>> {
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
        let id = resident.block.id as u32;
        self.run.released.retain(|key, _| key.0 != id);
        self.run
            .after_end(&resident.block)
            .map_err(|(place, fault)| self.report(Some(place), *fault))
    }

    /// Completes some of the copies.
    pub(super) fn arrivals(&mut self) -> Result<(), Box<Report>> {
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

    pub(super) fn deliver(&mut self, at: usize, which: usize) -> Result<(), Box<Report>> {
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
    pub(super) fn late_copy(&mut self) -> Result<bool, Box<Report>> {
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
}
