//! Executes the numbered barriers of a block.

use super::uniform;
use crate::{
    block::{Arrival, Block, Named, Released},
    clock::{MEMBERS, Shared, join},
    exec::{Flow, Run, together},
    op::Op,
    report::{Fault, Step},
    warp::{Wait, Warp},
};

impl Run<'_> {
    pub(super) fn named(
        &mut self,
        block: &mut Block,
        warp: &mut Warp,
        mask: u32,
        op: &Op,
    ) -> Step<Flow> {
        let Op::Barrier {
            id,
            count,
            arrive_only,
            aligned,
            vote,
        } = op
        else {
            unreachable!()
        };
        let id = uniform(warp, *id, mask)?;
        let fail = |what: String| Box::new(Fault::Barrier { id, what });
        if *aligned || mask != warp.alive {
            together(warp, mask)?;
        }
        if id > 15 {
            return Err(fail("there are 16".into()));
        }
        let count = count.map(|row| uniform(warp, row, mask)).transpose()?;
        let expected = count.unwrap_or(block.live_warps * MEMBERS as u32);
        if count.is_some_and(|count| {
            count == 0 || !count.is_multiple_of(32) || count > block.threads.next_multiple_of(32)
        }) {
            return Err(fail(format!(
                "{expected} threads, in a block of {}",
                block.threads
            )));
        }
        let voted = match vote {
            Some((_, a)) => {
                if warp.p_valid[*a as usize] & mask != mask {
                    return Err(Box::new(Fault::UninitialisedRegister {
                        what: "a vote",
                        read: None,
                    }));
                }
                warp.p[*a as usize] & mask != 0
            }
            None => false,
        };
        let time = warp.time;
        let clock = warp.publish(block.id, mask);
        self.progress += 1;
        let barrier = &mut block.named[id as usize];
        // A warp that does not know the end of the previous phase could have arrived earlier and been counted in that
        // phase.
        let unknown = barrier.before.iter().find(|other| {
            let member = other.warp * MEMBERS;
            let times = (member..member + MEMBERS).map(|member| clock.get(block.id, member));
            other.warp != warp.index && times.max() < Some(other.time)
        });
        if let Some(other) = unknown {
            return Err(fail(format!(
                "nothing says that its last phase is over, where warp {} arrived by line {}",
                other.warp, self.code.lines[other.instruction]
            )));
        }
        if barrier.expected == 0 {
            (barrier.expected, barrier.everybody) = (expected, count.is_none());
            (barrier.clock, barrier.vote) = (Shared::default(), false);
        } else if barrier.expected != expected {
            return Err(fail(format!(
                "{expected} threads here, {} elsewhere in the same phase",
                barrier.expected
            )));
        }
        if barrier.warps >> warp.index & 1 != 0 {
            return Err(fail(format!(
                "warp {} arrives twice in one phase",
                warp.index
            )));
        }
        barrier.warps |= 1 << warp.index;
        barrier.arrivals.push(Arrival {
            warp: warp.index,
            time,
            instruction: self.pc,
        });
        barrier.last = (self.pc, warp.index);
        barrier.arrived += MEMBERS as u32;
        barrier.vote |= voted;
        join(&mut barrier.clock, &clock);
        let generation = barrier.generation;
        barrier.waiting += u32::from(!arrive_only);
        if barrier.arrived > barrier.expected {
            return Err(fail(format!(
                "{} threads arrive where {} are expected",
                barrier.arrived, barrier.expected
            )));
        }
        if barrier.arrived == barrier.expected {
            barrier.complete();
            if !arrive_only {
                self.passed(block, warp, id, generation);
                return Ok(Flow::Jump);
            }
        } else if !arrive_only {
            return Ok(Flow::Wait(Wait::Named { id, generation }));
        }
        Ok(Flow::Next)
    }

    /// Continues a warp after the phase of a named barrier that it waited for.
    pub fn passed(&mut self, block: &mut Block, warp: &mut Warp, id: u32, generation: u64) {
        let released = &mut block.named[id as usize].released;
        let at = released.iter().position(|one| one.generation == generation);
        let at = at.expect("kept until all have passed");
        released[at].waiting -= 1;
        let Released { clock, vote, .. } = match released[at].waiting {
            0 => released.remove(at),
            _ => released[at].clone(),
        };
        let lanes = warp.path.mask;
        warp.replace(lanes, &clock);
        if let Op::Barrier {
            vote: Some((d, _)), ..
        } = &self.code.instructions[warp.path.pc as usize].op
        {
            warp.set_bits(*d, lanes, if vote { u32::MAX } else { 0 }, u32::MAX);
        }
        warp.path.pc += 1;
        warp.wait = Wait::Nothing;
    }
}

impl Named {
    /// Ends the phase; the next may begin.
    pub fn complete(&mut self) {
        let clock = std::mem::take(&mut self.clock);
        let waiting = std::mem::take(&mut self.waiting);
        if waiting > 0 {
            self.released.push(Released {
                generation: self.generation,
                clock,
                vote: self.vote,
                waiting,
            });
        }
        self.generation += 1;
        (self.expected, self.arrived, self.warps) = (0, 0, 0);
        self.before = std::mem::take(&mut self.arrivals);
    }
}
