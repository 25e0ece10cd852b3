//! Executes barriers, fences, and `setmaxnreg`.

mod ends;
mod mbarriers;
mod named;
mod phases;

use super::{Flow, Run, operand, together};
use crate::{
    block::Block,
    clock::Shared,
    op::{Op, Row},
    report::{Fault, Step},
    warp::{FENCE_BARRIER, FENCE_GLOBAL, FENCE_SHARED, FenceMark, Wait, Warp, members},
};

fn cluster_fault(what: &str) -> Box<Fault> {
    Box::new(Fault::ClusterBarrier { what: what.into() })
}

impl Run<'_> {
    pub(super) fn barrier_op(
        &mut self,
        block: &mut Block,
        warp: &mut Warp,
        mask: u32,
        op: &Op,
    ) -> Step<Flow> {
        match op {
            Op::Barrier { .. } => return self.named(block, warp, mask, op),
            Op::ClusterArrive { releases } => {
                together(warp, mask)?;
                if warp.cluster_phase.is_some() {
                    return Err(cluster_fault("a warp arrives twice in one phase"));
                }
                let inits = warp.fenced_inits.take();
                let clock = match releases {
                    true => Some(warp.publish(block.id, mask)),
                    false => inits,
                };
                warp.cluster_phase = Some(block.cluster.borrow_mut().arrive(clock));
                self.progress += 1;
            }
            Op::ClusterWait => {
                together(warp, mask)?;
                let Some(phase) = warp.cluster_phase else {
                    return Err(cluster_fault("a warp waits that has not arrived"));
                };
                let cluster = block.cluster.borrow();
                if cluster.generation == phase {
                    return Ok(Flow::Wait(Wait::Cluster { phase }));
                }
                warp.learn(mask, &cluster.released);
                warp.cluster_phase = None;
            }
            Op::Fence => {
                warp.await_loads();
                for lane in members(mask) {
                    if let Some(found) = warp.found[lane].take() {
                        warp.learn(1 << lane, &found);
                    }
                }
                let time = warp.time;
                for lane in members(mask) {
                    warp.time = time;
                    warp.release[lane] = Some(warp.publish(block.id, 1 << lane));
                }
            }
            Op::FenceProxyAsync { shared, global } => {
                let kinds = if *shared {
                    FENCE_SHARED | FENCE_BARRIER
                } else {
                    0
                } | if *global { FENCE_GLOBAL } else { 0 };
                mark(block, warp, mask, kinds);
                if *shared {
                    warp.await_loads();
                }
            }
            Op::FenceBarrierInit => {
                // The cluster's next barrier makes the initialisation known, even if that is relaxed.
                let inits = Shared::make_mut(warp.fenced_inits.get_or_insert_default());
                inits.learn_members(block.id, warp.index, mask, warp.time);
                mark(block, warp, mask, FENCE_BARRIER);
            }
            Op::SetMaxRegisters {
                registers,
                increase,
            } => return self.registers(block, warp, mask, *registers, *increase),
            _ => return self.mbarrier_op(block, warp, mask, op),
        }
        Ok(Flow::Next)
    }

    fn registers(
        &mut self,
        block: &mut Block,
        warp: &mut Warp,
        mask: u32,
        wanted: u32,
        increase: bool,
    ) -> Step<Flow> {
        together(warp, mask)?;
        let change = i64::from(wanted) - i64::from(warp.registers);
        if increase == (change < 0) && change != 0 {
            return Err(operand(format!(
                "setmaxnreg from {} to {wanted} registers",
                warp.registers
            )));
        }
        if change * 32 > block.pool {
            return Ok(Flow::Wait(Wait::Registers { wanted }));
        }
        block.pool -= change * 32;
        warp.registers = wanted;
        self.progress += 1;
        Ok(Flow::Next)
    }
}

/// Maximum number of recorded fences of a warp, of the same kinds. A loader is four stages ahead of the reader, and each of its
/// lanes may execute each fence separately. A loader that waits for flags in global memory fences each time it reads them.
const MARKS: usize = 256;

fn mark(block: &mut Block, warp: &mut Warp, lanes: u32, kinds: u8) {
    let copied = std::array::from_fn(|lane| warp.copies[lane].done);
    let marks = &mut block.fences[warp.index];
    let same = |mark: &FenceMark| mark.kinds == kinds;
    if marks.len() >= MARKS && marks.iter().filter(|mark| same(mark)).count() >= MARKS {
        // The first may be that of the mbarriers' initialisation.
        let second = marks.iter().skip(1).position(same).map_or(1, |at| at + 1);
        marks.remove(second);
    }
    marks.push(FenceMark {
        time: warp.time,
        lanes,
        kinds,
        copied,
    });
    warp.time += 1;
    for lane in members(lanes) {
        warp.fence_clocks[lane] = Some(warp.clocks[lane].clone());
    }
}

/// The word of one lane.
pub(super) fn value(warp: &mut Warp, row: Row, lane: usize) -> Step<u32> {
    let lanes = 1 << lane;
    if warp.valid(row, lanes)? & lanes == 0 {
        return Err(Box::new(Fault::UninitialisedRegister {
            what: "an operand",
            read: None,
        }));
    }
    Ok(warp.word(row)[lane])
}

/// A word that must be equal in all lanes.
fn uniform(warp: &mut Warp, row: Row, mask: u32) -> Step<u32> {
    let first = value(warp, row, mask.trailing_zeros() as usize)?;
    if members(mask).any(|lane| warp.word(row)[lane] != first) {
        return Err(operand("an operand that differs between lanes".into()));
    }
    Ok(first)
}
