//! Executes barriers, mbarriers, fences, and `setmaxnreg`.

use super::{
    Flow, Run,
    access::{At, Touch},
    operand, together,
};
use crate::{
    block::{Arrival, Block, Mbarrier, Sent},
    clock::{MEMBERS, Shared, join},
    op::{Address, Op, Row, Space},
    report::{Fault, Place, Step},
    shadow::MAX_BARRIERS,
    warp::{FENCE_BARRIER, FENCE_GLOBAL, FENCE_SHARED, FenceMark, Wait, Warp, members},
};

fn cluster_fault(what: &str) -> Box<Fault> {
    Box::new(Fault::ClusterBarrier { what: what.into() })
}

/// Maximum number of bytes that may be pending at an mbarrier.
const MAX_BYTES: i64 = (1 << 20) - 1;

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

    // Named barriers.

    fn named(&mut self, block: &mut Block, warp: &mut Warp, mask: u32, op: &Op) -> Step<Flow> {
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
    pub fn passed(&mut self, block: &Block, warp: &mut Warp, id: u32, generation: u64) {
        let released = &block.named[id as usize].released;
        let (_, clock, vote) = released
            .iter()
            .find(|one| one.0 == generation)
            .expect("kept until all have passed");
        let lanes = warp.path.mask;
        warp.replace(lanes, clock);
        if let Op::Barrier {
            vote: Some((d, _)), ..
        } = &self.code.instructions[warp.path.pc as usize].op
        {
            warp.set_bits(*d, lanes, if *vote { u32::MAX } else { 0 }, u32::MAX);
        }
        warp.path.pc += 1;
        warp.wait = Wait::Nothing;
    }

    // Mbarriers.

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
            return Err(fail("more of them than a block may have"));
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
    pub(super) fn visible(
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
    pub(super) fn copy_barrier(
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

    fn expect(&mut self, block: &mut Block, address: u32, bytes: u32) -> Step {
        let barrier = found(block, address)?;
        barrier.bytes += i64::from(bytes);
        self.progress += 1;
        if barrier.bytes > MAX_BYTES {
            let what = format!(
                "{} bytes are pending, at most {MAX_BYTES} may be",
                barrier.bytes
            );
            return Err(Box::new(Fault::Mbarrier {
                address: format!("{address:#x}"),
                what,
            }));
        }
        Ok(())
    }

    /// Counts the bytes of a copy that has arrived.
    pub fn arrived(&mut self, block: &mut Block, address: u32, bytes: u32) -> Step {
        found(block, address)?.bytes -= i64::from(bytes);
        self.progress += 1;
        self.maybe_complete(block, address)
    }

    /// Records arrivals of threads or copies.
    pub fn arrive(&mut self, block: &mut Block, address: u32, count: u32, clock: &Shared) -> Step {
        let barrier = found(block, address)?;
        self.progress += 1;
        if count == 0 || count > barrier.pending {
            let what = format!(
                "{count} arrivals where {} are left of {}",
                barrier.pending, barrier.count
            );
            return Err(Box::new(Fault::Mbarrier {
                address: format!("{address:#x}"),
                what,
            }));
        }
        barrier.pending -= count;
        join(&mut barrier.clock, clock);
        self.maybe_complete(block, address)
    }

    /// Counts the bytes of an asynchronous store.
    pub fn received(&mut self, block: &mut Block, sent: &Sent) -> Step {
        self.pc = sent.instruction;
        join(&mut found(block, sent.barrier)?.clock, &sent.clock);
        self.arrived(block, sent.barrier, sent.bytes)
    }

    fn maybe_complete(&mut self, block: &mut Block, address: u32) -> Step {
        let (id, layout) = (block.id, block.layout);
        let barrier = found(block, address)?;
        if barrier.pending != 0 || barrier.bytes != 0 {
            return Ok(());
        }
        let phase = barrier.phase;
        if let Some(copy) = block
            .pending
            .iter()
            .find(|one| one.barrier == Some((address, phase)))
        {
            let what = format!(
                "its phase ends while a copy is on the way: line {} `{}`",
                self.code.lines[copy.instruction],
                self.module.line(self.code.lines[copy.instruction]).trim()
            );
            return Err(Box::new(Fault::Mbarrier {
                address: format!("{address:#x}"),
                what,
            }));
        }
        let barrier = found(block, address)?;
        let (member, time) = (barrier.member, barrier.time());
        Shared::make_mut(&mut barrier.clock).learn(id, layout.barriers() * MEMBERS + member, time);
        barrier.released = std::mem::take(&mut barrier.clock);
        barrier.pending = barrier.count;
        barrier.phase += 1;
        Ok(())
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

    // Registers.

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

    /// Checks that nothing of a block is unfinished when all its threads have ended and all its copies are done.
    pub fn after_end(&self, block: &Block) -> Result<(), (Place, Box<Fault>)> {
        if let Some(id) = block.named.iter().position(|barrier| barrier.arrived != 0) {
            let barrier = &block.named[id];
            let what = format!(
                "the block ends when {} of {} threads are there",
                barrier.arrived, barrier.expected
            );
            let (instruction, warp) = barrier.last;
            let id = id as u32;
            return Err((
                self.place(instruction, block.id, format!("warp {warp}")),
                Box::new(Fault::Barrier { id, what }),
            ));
        }
        let open = block.products.iter().find_map(|of| of.open.front());
        if let Some(&(instruction, warp)) = open {
            let what = "others end without it".into();
            return Err((
                self.place(instruction, block.id, format!("warp {warp}")),
                Box::new(Fault::OtherProduct { what }),
            ));
        }
        if let Some(barrier) = block
            .barriers
            .iter()
            .find(|barrier| barrier.live && barrier.bytes != 0)
        {
            let what = format!(
                "the block ends when {} bytes are expected, less those that came",
                barrier.bytes
            );
            let who = format!("warp {} lane {}", barrier.by_warp, barrier.by_lane);
            let address = format!("{:#x}", barrier.address);
            return Err((
                self.place(barrier.instruction, block.id, who),
                Box::new(Fault::Mbarrier { address, what }),
            ));
        }
        Ok(())
    }

    /// Checks that nothing of these lanes is unfinished when they end.
    pub(super) fn before_end(&mut self, _block: &mut Block, warp: &Warp, mask: u32) -> Step {
        for lane in members(mask) {
            let bulk = &warp.bulk[lane];
            if !bulk.closed.is_empty() {
                let what = format!(
                    "bulk copies of warp {} lane {lane} may still read its shared memory",
                    warp.index
                );
                return Err(Box::new(Fault::Unfinished { what }));
            }
        }
        if warp.products_done + 1 < warp.products {
            return Err(Box::new(Fault::Unfinished {
                what: format!("products of warp {} may still run", warp.index),
            }));
        }
        Ok(())
    }
}

impl crate::block::Named {
    /// Ends the phase; the next may begin.
    pub fn complete(&mut self) {
        let clock = std::mem::take(&mut self.clock);
        self.released.push((self.generation, clock, self.vote));
        if self.released.len() > 64 {
            self.released.remove(0);
        }
        self.generation += 1;
        (self.expected, self.arrived, self.warps) = (0, 0, 0);
        self.before = std::mem::take(&mut self.arrivals);
    }
}

fn found(block: &mut Block, address: u32) -> Step<&mut Mbarrier> {
    let what = "there is no barrier, it was not initialised";
    block.barrier(address).ok_or_else(|| {
        Box::new(Fault::Mbarrier {
            address: format!("{address:#x}"),
            what: what.into(),
        })
    })
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
