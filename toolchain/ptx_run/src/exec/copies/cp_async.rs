//! Starts the copies of lanes (`cp.async`), and waits for them.

use super::{close, finish};
use crate::{
    block::{Block, Copy},
    clock::MEMBERS,
    exec::{
        Flow, Run,
        access::{At, Touch, not_a_barrier},
        barriers::value,
        operand,
    },
    op::{Op, Space},
    report::Step,
    shadow::Record,
    timeline::COPY_STEPS,
    warp::{Wait, Warp, members},
};

impl Run<'_> {
    pub(super) fn lane_copy_op(
        &mut self,
        block: &mut Block,
        warp: &mut Warp,
        mask: u32,
        op: &Op,
    ) -> Step<Flow> {
        match op {
            Op::CopyAsync {
                target,
                source,
                bytes,
                valid,
            } => {
                let targets = self.addresses(warp, mask, Space::Shared, target)?;
                let sources = self.addresses(warp, mask, Space::Global, source)?;
                for lane in members(mask) {
                    let valid = valid.map_or(Ok(*bytes), |row| value(warp, row, lane))?;
                    if valid > *bytes {
                        return Err(operand(format!("cp.async of {valid} of {bytes} bytes")));
                    }
                    self.copy_lane(
                        block,
                        warp,
                        lane,
                        (targets[lane], sources[lane]),
                        *bytes,
                        valid,
                    )?;
                }
            }
            Op::CopyAsyncCommit => {
                for lane in members(mask) {
                    close(&mut warp.copies[lane]);
                }
            }
            Op::CopyAsyncWait { pending, all } => {
                if self.recorder.is_some()
                    && let Some(step) = copied_at(block, warp, mask, *pending, *all)
                    && step > self.now
                {
                    return Ok(Flow::Wait(Wait::Step(step)));
                }
                for lane in members(mask) {
                    let groups = &mut warp.copies[lane];
                    if *all {
                        close(groups);
                    }
                    if let Some(done) = finish(groups, if *all { 0 } else { *pending }) {
                        self.deliver_groups(block, warp.index, lane, false, done)?;
                    }
                }
            }
            Op::CopyAsyncArrive { address } => {
                let places = self.addresses(warp, mask, Space::Shared, address)?;
                for lane in members(mask) {
                    Self::aligned(places[lane], 8)?;
                    let At::Shared(barrier) = places[lane] else {
                        unreachable!()
                    };
                    // This goes through the generic proxy, so the initialisation needs no proxy fence.
                    self.visible(block, warp, lane, barrier)?;
                    let group = warp.copies[lane].open;
                    warp.copies[lane].open += 1;
                    let barrier = Some((barrier, u32::MAX));
                    let one = self.begun(Copy::Arrive, warp, lane, group, barrier);
                    block.pending.push(one);
                }
            }
            _ => unreachable!(),
        }
        Ok(Flow::Next)
    }

    fn copy_lane(
        &mut self,
        block: &mut Block,
        warp: &Warp,
        lane: usize,
        (target, source): (At, At),
        bytes: u32,
        valid: u32,
    ) -> Step {
        Self::aligned(target, bytes as usize)?;
        let (At::Shared(to), At::Global(from)) = (target, source) else {
            return Err(operand("cp.async from elsewhere than global memory".into()));
        };
        not_a_barrier(block, to, bytes as usize)?;
        let group = warp.copies[lane].open;
        let agent = warp.layout.copies(warp.index);
        let record = Record::new(block.id, agent, group, self.pc, self.launch);
        let touch = Touch {
            lane,
            at: target,
            len: bytes as usize,
            record,
            member: lane,
            write: true,
            asynchronous: false,
            same_value: false,
            what: "cp.async writes",
        };
        self.touch(block, warp, touch)?;
        block.shared.set_written(to as usize, bytes as usize, false);
        if valid > 0 {
            Self::aligned(source, bytes as usize)?;
            let reading = Touch {
                at: source,
                len: valid as usize,
                write: false,
                what: "cp.async reads",
                ..touch
            };
            self.touch(block, warp, reading)?;
        }
        let copy = Copy::Lane {
            target: to,
            source: from,
            bytes,
            valid,
        };
        let one = self.begun(copy, warp, lane, group, None);
        block.lane_copies[warp.index * MEMBERS + lane].push_back(one);
        self.progress += 1;
        Ok(())
    }
}

/// The step in which the lanes' copies are done, except those of the latest `pending` groups.
fn copied_at(block: &Block, warp: &Warp, mask: u32, pending: u32, all: bool) -> Option<u64> {
    let of_lane = |lane: usize| {
        let groups = &warp.copies[lane];
        let last = match all {
            true => Some(groups.open),
            false => {
                let waited = groups.closed.len().checked_sub(pending as usize)?;
                groups.closed[..waited].last().copied()
            }
        }?;
        let copies = &block.lane_copies[warp.index * MEMBERS + lane];
        let due = copies.iter().filter(|one| one.group <= last);
        due.map(|one| one.begun + COPY_STEPS).max()
    };
    members(mask).filter_map(of_lane).max()
}
