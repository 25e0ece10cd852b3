//! Executes mbarriers: their initialisation, arrivals of threads, tests.

use super::{phases::found, value};
use crate::{
    block::{Block, Mbarrier},
    clock::{MEMBERS, Shared},
    exec::{
        Flow, Run,
        access::{At, Touch},
        operand,
    },
    op::{Address, Op, Row, Space},
    report::{Fault, Step},
    shadow::MAX_BARRIERS,
    warp::{FENCE_BARRIER, Wait, Warp, members},
};

impl Run<'_> {
    pub(super) fn mbarrier_op(
        &mut self,
        block: &mut Block,
        warp: &mut Warp,
        mask: u32,
        op: &Op,
    ) -> Step<Flow> {
        match op {
            Op::BarrierInit { address, count } => {
                for (lane, address) in self.barrier_addresses(warp, mask, address)? {
                    let count = value(warp, *count, lane)?;
                    self.init(block, warp, lane, address, count)?;
                }
            }
            Op::BarrierInvalidate { address } => {
                for (_, address) in self.barrier_addresses(warp, mask, address)? {
                    found(block, address)?.live = false;
                }
            }
            Op::BarrierArrive {
                address,
                count,
                bytes,
                state,
            } => {
                if state.is_some() {
                    return Err(operand("the state of an mbarrier".into()));
                }
                let addresses = self.barrier_addresses(warp, mask, address)?;
                let time = warp.time;
                let mut rest = mask;
                while rest != 0 {
                    // Lanes that arrive at the same barrier do so together.
                    let first = rest.trailing_zeros() as usize;
                    let here = addresses
                        .iter()
                        .find(|&&(lane, _)| lane == first)
                        .expect("a lane of the mask")
                        .1;
                    let lanes: u32 = addresses
                        .iter()
                        .filter(|&&(lane, at)| at == here && rest >> lane & 1 != 0)
                        .map(|&(lane, _)| 1 << lane)
                        .sum();
                    rest &= !lanes;
                    let mut arrivals = 0;
                    for lane in members(lanes) {
                        self.visible(block, warp, lane, here)?;
                        arrivals += count.map_or(Ok(1), |row| value(warp, row, lane))?;
                        if let Some(bytes) = bytes {
                            let bytes = value(warp, *bytes, lane)?;
                            self.expect(block, here, bytes)?;
                        }
                    }
                    warp.time = time;
                    let clock = warp.publish(block.id, lanes);
                    self.arrive(block, here, arrivals, &clock)?;
                }
                warp.arrive_before_loads(mask);
            }
            Op::BarrierExpect { address, bytes } => {
                for (lane, address) in self.barrier_addresses(warp, mask, address)? {
                    self.visible(block, warp, lane, address)?;
                    let bytes = value(warp, *bytes, lane)?;
                    self.expect(block, address, bytes)?;
                }
            }
            Op::BarrierTest {
                p,
                address,
                parity,
                may_sleep,
            } => {
                return self.test(block, warp, mask, *p, address, *parity, *may_sleep);
            }
            _ => unreachable!(),
        }
        Ok(Flow::Next)
    }

    fn barrier_addresses(
        &self,
        warp: &mut Warp,
        mask: u32,
        address: &Address,
    ) -> Step<Vec<(usize, u32)>> {
        let places = self.addresses(warp, mask, Space::Shared, address)?;
        members(mask)
            .map(|lane| {
                Self::aligned(places[lane], 8)?;
                match places[lane] {
                    At::Shared(offset) => Ok((lane, offset)),
                    _ => unreachable!("asked for shared addresses"),
                }
            })
            .collect()
    }

    fn init(
        &mut self,
        block: &mut Block,
        warp: &mut Warp,
        lane: usize,
        address: u32,
        count: u32,
    ) -> Step {
        let record = self.record(block, warp);
        let what = "initialises a barrier";
        let at = At::Shared(address);
        let touch = Touch {
            lane,
            at,
            len: 8,
            record,
            member: lane,
            write: true,
            asynchronous: false,
            same_value: false,
            what,
        };
        self.touch(block, warp, touch)?;
        block.shared.set_written(address as usize, 8, false);
        let known = block.barrier_at[address as usize / 8] as usize;
        let fail = |what: &str| {
            Box::new(Fault::Mbarrier {
                address: format!("{address:#x}"),
                what: what.into(),
            })
        };
        if count == 0 || count >= 1 << 20 {
            return Err(fail("a count of arrivals that is not 1 to 2^20 - 1"));
        }
        let old = known.checked_sub(1).map(|index| &block.barriers[index]);
        if old.is_some_and(|old| old.live) {
            return Err(fail("initialised again"));
        }
        let (member, first_time) = match old {
            Some(old) => (old.member, old.time() + 1),
            None => (block.barriers.len(), 0),
        };
        if member >= MAX_BARRIERS {
            return Err(fail("the emulator takes 256 of a block"));
        }
        let barrier = Mbarrier {
            address,
            count,
            pending: count,
            bytes: 0,
            phase: 0,
            member,
            first_time,
            clock: Shared::default(),
            released: Shared::default(),
            by_warp: warp.index,
            by_lane: lane,
            at_time: warp.time,
            instruction: self.pc,
            live: true,
        };
        if known == 0 {
            block.barriers.push(barrier);
            block.barrier_at[address as usize / 8] = block.barriers.len() as u16;
        } else {
            block.barriers[known - 1] = barrier;
        }
        self.progress += 1;
        Ok(())
    }

    /// Checks that a thread may use a barrier, whose initialisation must be ordered before.
    pub(in crate::exec) fn visible(
        &mut self,
        block: &mut Block,
        warp: &Warp,
        lane: usize,
        address: u32,
    ) -> Step {
        let id = block.id;
        let barrier = found(block, address)?;
        let own = barrier.by_warp == warp.index && barrier.by_lane == lane;
        let known = warp.clocks[lane].get(id, barrier.by_warp * MEMBERS + barrier.by_lane)
            >= barrier.at_time;
        if own || known {
            return Ok(());
        }
        let (instruction, who) = (
            barrier.instruction,
            format!("warp {} lane {}", barrier.by_warp, barrier.by_lane),
        );
        Err(Box::new(Fault::Race {
            address: format!("mbarrier at {address:#x}"),
            access: "uses",
            before_access: "initialised",
            before: Box::new(self.place(instruction, id, who)),
        }))
    }

    /// Checks that a copy may complete at a barrier, whose initialisation must also be fenced. Returns the phase, and
    /// the record of the copy's writes.
    pub(in crate::exec) fn copy_barrier(
        &mut self,
        block: &mut Block,
        warp: &Warp,
        lane: usize,
        address: u32,
    ) -> Step<(u32, usize, u32)> {
        self.visible(block, warp, lane, address)?;
        let id = block.id;
        let barrier = found(block, address)?.clone();
        let (by_warp, by_lane) = (barrier.by_warp, barrier.by_lane);
        let own = by_warp == warp.index && by_lane == lane;
        let fenced = block.fences[by_warp].iter().any(|fence| {
            let known = own || warp.clocks[lane].get(id, by_warp * MEMBERS + by_lane) > fence.time;
            fence.kinds & FENCE_BARRIER != 0
                && fence.lanes >> by_lane & 1 != 0
                && fence.time >= barrier.at_time
                && known
        });
        if !fenced {
            let who = format!("warp {by_warp} lane {by_lane}");
            return Err(Box::new(Fault::NoProxyFence {
                address: format!("mbarrier at {address:#x}"),
                access: "a copy completes",
                before: Box::new(self.place(barrier.instruction, id, who)),
            }));
        }
        Ok((barrier.phase, barrier.member, barrier.time()))
    }

    #[allow(clippy::too_many_arguments)]
    fn test(
        &mut self,
        block: &mut Block,
        warp: &mut Warp,
        mask: u32,
        p: Row,
        address: &Address,
        parity: Row,
        may_sleep: bool,
    ) -> Step<Flow> {
        let mut done = 0;
        let addresses = self.barrier_addresses(warp, mask, address)?;
        let mut first_wait = None;
        // Lanes that test the same barrier learn together.
        let mut learned: Option<(u32, u32, Shared)> = None;
        for &(lane, address) in &addresses {
            self.visible(block, warp, lane, address)?;
            let parity = value(warp, parity, lane)?;
            if parity > 1 {
                let what = format!("waits for parity {parity}");
                return Err(Box::new(Fault::Mbarrier {
                    address: format!("{address:#x}"),
                    what,
                }));
            }
            let barrier = found(block, address)?;
            if barrier.phase & 1 != parity {
                done |= 1 << lane;
                match &mut learned {
                    Some((at, lanes, _)) if *at == address => *lanes |= 1 << lane,
                    other => {
                        let before = other.replace((address, 1 << lane, barrier.released.clone()));
                        if let Some((_, lanes, released)) = before {
                            warp.learn(lanes, &released);
                        }
                    }
                }
            } else {
                first_wait = first_wait.or(Some(Wait::Mbarrier { address, parity }));
            }
        }
        if let Some((_, lanes, released)) = learned {
            warp.learn(lanes, &released);
        }
        if let Some(wait) = first_wait
            && done == 0
            && may_sleep
            && !warp.give_up
        {
            // A failed test lets the code run on once, even if only some lanes test and others wait elsewhere. If the
            // code tests again in vain, the warp waits.
            if warp.asked == Some((self.pc, wait.clone())) {
                if warp.swap() {
                    return Ok(Flow::Jump);
                }
                return Ok(Flow::Wait(wait));
            }
            warp.asked = Some((self.pc, wait));
        } else {
            warp.asked = None;
        }
        warp.give_up = false;
        warp.set_bits(p, mask, done, u32::MAX);
        Ok(Flow::Next)
    }
}
