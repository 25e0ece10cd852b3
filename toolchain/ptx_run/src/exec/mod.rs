//! Executes one instruction of one warp.

mod access;
mod barriers;
mod copies;
mod lanes;
mod matrix;
mod memory;
mod scalar;

pub use access::{At, name};

use std::collections::HashMap;

use crate::{
    Module, Random, Stats,
    block::Block,
    clock::{Clock, MEMBERS, Shared},
    decode::Code,
    memory::{Bytes, Memory},
    op::Op,
    report::{Fault, Place, Step},
    shadow::Record,
    timeline::Recorder,
    warp::{Wait, Warp},
};

/// How a warp continues after an instruction.
pub enum Flow {
    /// At the next instruction.
    Next,
    /// At the position in its path.
    Jump,
    /// After an event.
    Wait(Wait),
}

/// A running launch.
pub struct Run<'a> {
    pub module: &'a Module,
    pub code: &'a Code,
    pub memory: &'a mut Memory,
    /// Shared memory of the other blocks in the cluster of the running block, by rank. Its own is in the block.
    pub peers: Vec<Option<Bytes>>,
    pub parameters: &'a [u8],
    pub threads: [u32; 3],
    pub multiprocessors: u32,
    /// Number of the launch; only its last bits are stored in records.
    pub launch: u32,
    /// Number of blocks of the grid. Clocks also use it as the index of the end of the previous launch.
    pub blocks: usize,
    /// Whether it may overlap with the previous launch.
    pub overlaps: bool,
    /// What was released at an address of global memory, or of a block's shared memory.
    pub released: HashMap<(u32, u64), Shared>,
    pub random: Random,
    pub stats: Stats,
    /// Increases whenever something happens that a warp may wait for.
    pub progress: u64,
    /// The instruction being executed.
    pub pc: usize,
    /// Whether copies complete as soon as they begin.
    pub eager: bool,
    /// The current step, and the recorder of a traced launch.
    pub now: u64,
    pub recorder: Option<Recorder>,
}

impl Run<'_> {
    /// Executes the instruction at the warp's path.
    pub fn step(&mut self, block: &mut Block, warp: &mut Warp) -> Step<()> {
        let pc = warp.path.pc as usize;
        self.pc = pc;
        self.stats.instructions += 1;
        let code = self.code;
        let instruction = &code.instructions[pc];
        let mut mask = warp.path.mask;
        if let Some((row, negated)) = instruction.guard {
            // Uninitialised memory may decide the path of lanes whose results are not used. But a warp that never read
            // such memory has forgotten to set a register.
            if warp.p_valid[row as usize] & mask != mask && warp.unwritten.is_none() {
                return Err(Box::new(Fault::UninitialisedRegister {
                    what: "a guard",
                    read: None,
                }));
            }
            let bits = warp.p[row as usize];
            mask &= if negated { !bits } else { bits };
        }
        if mask == 0 {
            warp.path.pc += 1;
            return Ok(());
        }
        let flow = self.execute(block, warp, mask, &instruction.op)?;
        if !warp.late_loads.is_empty() {
            self.read_late(block, warp)?;
        }
        match flow {
            Flow::Next => warp.path.pc += 1,
            Flow::Jump => {}
            Flow::Wait(wait) => warp.wait = wait,
        }
        Ok(())
    }

    fn execute(&mut self, block: &mut Block, warp: &mut Warp, mask: u32, op: &Op) -> Step<Flow> {
        match op {
            Op::Load { .. } | Op::Store { .. } | Op::Atomic { .. } => {
                self.memory_op(block, warp, mask, op)
            }
            Op::Branch { target } => {
                let meet = self.meet(warp);
                let next = warp.path.pc + 1;
                warp.part(mask, *target, meet, next);
                Ok(Flow::Jump)
            }
            Op::BranchTable { index, targets } => {
                if warp.valid(*index, mask)? & mask != mask {
                    return Err(Box::new(Fault::UninitialisedRegister {
                        what: "the index of a branch",
                        read: None,
                    }));
                }
                let meet = self.meet(warp);
                let first = warp.word(*index)[mask.trailing_zeros() as usize];
                let same = lanes_where(mask, |lane| warp.word(*index)[lane] == first);
                let Some(&target) = targets.get(first as usize) else {
                    return Err(operand(format!(
                        "branch index {first} of {} targets",
                        targets.len()
                    )));
                };
                // The other lanes return to this instruction.
                let here = warp.path.pc;
                warp.part(same, target, meet, here);
                Ok(Flow::Jump)
            }
            Op::Exit => {
                self.before_end(block, warp, mask)?;
                warp.end(mask);
                if warp.path.mask != 0 {
                    warp.path.pc += 1;
                }
                Ok(Flow::Jump)
            }
            Op::Trap { what } => Err(Box::new(Fault::Trap {
                what: what.to_string(),
            })),
            Op::Shuffle { .. }
            | Op::Vote { .. }
            | Op::Ballot { .. }
            | Op::Reduce { .. }
            | Op::Elect { .. }
            | Op::ActiveMask { .. }
            | Op::MatchAny { .. }
            | Op::SyncWarp { .. } => self.lanes_op(block, warp, mask, op),
            Op::Mma { .. }
            | Op::Mma8 { .. }
            | Op::LoadMatrix { .. }
            | Op::StoreMatrix { .. }
            | Op::MoveMatrix { .. }
            | Op::Wgmma(_)
            | Op::WgmmaFence
            | Op::WgmmaCommit
            | Op::WgmmaWait { .. } => self.matrix_op(block, warp, mask, op),
            Op::Barrier { .. }
            | Op::ClusterArrive { .. }
            | Op::ClusterWait
            | Op::Fence
            | Op::FenceProxyAsync { .. }
            | Op::FenceBarrierInit
            | Op::SetMaxRegisters { .. }
            | Op::BarrierInit { .. }
            | Op::BarrierInvalidate { .. }
            | Op::BarrierArrive { .. }
            | Op::BarrierExpect { .. }
            | Op::BarrierTest { .. } => self.barrier_op(block, warp, mask, op),
            Op::CopyAsync { .. }
            | Op::CopyAsyncCommit
            | Op::CopyAsyncWait { .. }
            | Op::CopyAsyncArrive { .. }
            | Op::StoreAsync { .. }
            | Op::BulkLoad { .. }
            | Op::BulkStore { .. }
            | Op::TensorLoad { .. }
            | Op::TensorStore { .. }
            | Op::BulkCommit
            | Op::BulkWait { .. } => self.copy_op(block, warp, mask, op),
            Op::GridWait => {
                // From here on, the warp knows all accesses of earlier grids, and passes this knowledge on like that of
                // other blocks.
                let mut ended = Clock::default();
                ended.learn(self.blocks, 0, 1);
                warp.learn(mask, &Shared::new(ended));
                Ok(Flow::Next)
            }
            Op::GridLaunch | Op::Nanosleep | Op::Prefetch => Ok(Flow::Next),
            Op::MapRank { d, a, rank } => {
                let valid = warp.valid(*a, mask)? & warp.valid(*rank, mask)?;
                let (a, rank) = (*warp.word(*a), *warp.word(*rank));
                let mapped = |lane: usize| {
                    let from = rank[lane].wrapping_mul(access::RANK_STEP);
                    access::FIRST_RANK.wrapping_add(from).wrapping_add(a[lane])
                };
                warp.set_word(*d, mask, &std::array::from_fn(mapped), valid)?;
                Ok(Flow::Next)
            }
            Op::Clock { d, long } => {
                let now = self.stats.instructions;
                if *long {
                    warp.set_long(*d, mask, &[now; 32], u32::MAX);
                } else {
                    warp.set_word(*d, mask, &[now as u32; 32], u32::MAX)?;
                }
                Ok(Flow::Next)
            }
            Op::Smid { d } => {
                warp.set_word(*d, mask, &[block.sm; 32], u32::MAX)?;
                Ok(Flow::Next)
            }
            _ => {
                scalar::execute(warp, mask, op)?;
                Ok(Flow::Next)
            }
        }
    }

    fn meet(&self, warp: &Warp) -> u32 {
        match self.code.meet[self.pc] {
            crate::flow::NEVER => warp.path.meet,
            meet => meet,
        }
    }

    /// A record of an access by a warp's lanes at the current time.
    fn record(&self, block: &Block, warp: &Warp) -> Record {
        Record::new(block.id, warp.index, warp.time, self.pc, self.launch)
    }

    /// The position of an instruction, and the threads that executed it.
    pub fn place(&self, instruction: usize, block: usize, who: String) -> Place {
        let line = self.code.lines.get(instruction).copied().unwrap_or(0);
        let source = self.code.sources.get(instruction).copied().flatten();
        Place {
            line,
            text: self.module.line(line).trim().to_owned(),
            source: source.map(|(file, line)| {
                let name = self.module.file(file).unwrap_or("?");
                format!("{name}:{line}")
            }),
            block: block as u32,
            who,
        }
    }

    /// The instruction and threads of a record.
    fn place_of(&self, record: &Record) -> Place {
        if self.overlaps && record.launch() != self.launch % crate::shadow::LAUNCHES {
            return Place {
                line: 0,
                text: "the launch before".into(),
                source: None,
                block: record.block() as u32,
                who: "some thread".into(),
            };
        }
        let warps = (self.threads.iter().product::<u32>() as usize).div_ceil(MEMBERS);
        let layout = crate::shadow::Layout { warps };
        let agent = record.agent();
        let lanes = lane_list(record.members);
        let who = if agent < warps {
            format!("warp {agent} {lanes}")
        } else if agent == layout.products() {
            format!(
                "a product of warps {:?}",
                crate::warp::members(record.members).collect::<Vec<_>>()
            )
        } else if agent < layout.copies(0) {
            "a copy that completes at an mbarrier".into()
        } else if agent < layout.bulk_reads(0) {
            format!("cp.async of warp {} {lanes}", agent - layout.copies(0))
        } else if agent < layout.bulk_writes(0) {
            format!(
                "the read of a bulk copy of warp {} {lanes}",
                agent - layout.bulk_reads(0)
            )
        } else {
            format!(
                "the write of a bulk copy of warp {} {lanes}",
                agent - layout.bulk_writes(0)
            )
        };
        self.place(record.instruction(), record.block(), who)
    }
}

/// `lane 3`, `lanes 0-31`, `lanes 000000ff`.
pub fn lane_list(mask: u32) -> String {
    match mask.count_ones() {
        1 => format!("lane {}", mask.trailing_zeros()),
        32 => "lanes 0-31".into(),
        _ => format!("lanes {mask:08x}"),
    }
}

fn lanes_where(mask: u32, holds: impl Fn(usize) -> bool) -> u32 {
    crate::warp::members(mask)
        .filter(|&lane| holds(lane))
        .map(|lane| 1 << lane)
        .sum()
}

fn operand(what: String) -> Box<Fault> {
    Box::new(Fault::Operand { what })
}

/// Checks that all live lanes are here.
fn together(warp: &Warp, mask: u32) -> Step {
    if mask == warp.alive {
        return Ok(());
    }
    Err(Box::new(Fault::Diverged {
        expected: warp.alive,
        got: mask,
    }))
}
