//! Executes asynchronous copies: their start and their completion.

mod bulk;
mod cp_async;
mod deliver;
mod store_async;

use super::{Flow, Run};
use crate::{
    block::{Block, Copy, Pending},
    clock::MEMBERS,
    op::Op,
    report::Step,
    warp::{Groups, Warp, members},
};

impl Run<'_> {
    pub(super) fn copy_op(
        &mut self,
        block: &mut Block,
        warp: &mut Warp,
        mask: u32,
        op: &Op,
    ) -> Step<Flow> {
        let flow = match op {
            Op::CopyAsync { .. }
            | Op::CopyAsyncCommit
            | Op::CopyAsyncWait { .. }
            | Op::CopyAsyncArrive { .. } => self.lane_copy_op(block, warp, mask, op)?,
            Op::StoreAsync {
                address,
                value,
                barrier,
            } => {
                self.store_async(block, warp, mask, address, *value, barrier)?;
                Flow::Next
            }
            _ => self.bulk_copy_op(block, warp, mask, op)?,
        };
        if matches!(flow, Flow::Wait(_)) {
            return Ok(flow);
        }
        if self.eager {
            for lane in members(mask) {
                while self.deliver_lane(block, warp.index * MEMBERS + lane)? {}
            }
            while !block.pending.is_empty() {
                self.deliver(block, 0)?;
            }
        }
        Ok(Flow::Next)
    }

    /// A copy that begins now.
    fn begun(
        &self,
        copy: Copy,
        warp: &Warp,
        lane: usize,
        group: u32,
        barrier: Option<(u32, u32)>,
    ) -> Pending {
        Pending {
            copy,
            warp: warp.index,
            lane,
            group,
            barrier,
            instruction: self.pc,
            begun: self.now,
        }
    }
}

fn close(groups: &mut Groups) {
    groups.closed.push(groups.open);
    groups.open += 1;
}

/// Marks all but the latest closed groups as done. Returns the last group that is done.
fn finish(groups: &mut Groups, pending: u32) -> Option<u32> {
    let count = groups.closed.len().checked_sub(pending as usize)?;
    let done = groups.closed.drain(..count).next_back()?;
    groups.done = groups.done.max(done);
    Some(done)
}
