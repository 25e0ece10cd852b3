//! Executes loads, stores and atomics.

use super::{
    Flow, Run,
    access::{At, Touch},
};
use crate::{
    block::Block,
    clock::{Shared, join},
    op::{Atomic, Op, Order, Scope},
    report::{Fault, Step},
    shadow::Record,
    warp::{Warp, members},
};

impl Run<'_> {
    pub(super) fn memory_op(
        &mut self,
        block: &mut Block,
        warp: &mut Warp,
        mask: u32,
        op: &Op,
    ) -> Step<Flow> {
        match op {
            Op::Load {
                space,
                order,
                scope,
                bytes,
                long,
                read_only,
                d,
                address,
            } => {
                let places = self.addresses(warp, mask, *space, address)?;
                let width = usize::from(*bytes);
                let len = width * d.len();
                let record = self.strong_record(block, warp, *order, *scope);
                let mut words = [[0_u32; 32]; 4];
                let mut longs = [[0_u64; 32]; 4];
                let mut valid = [0_u32; 4];
                let all = (1_u32 << width) - 1;
                for lane in members(mask) {
                    let at = places[lane];
                    Self::aligned(at, len)?;
                    let mut data = [0_u8; 32];
                    let what = "reads";
                    let touch = Touch {
                        lane,
                        at,
                        len,
                        record,
                        member: lane,
                        write: false,
                        asynchronous: false,
                        same_value: false,
                        what,
                    };
                    let written = self.read(block, warp, touch, &mut data[..len])?;
                    if *read_only {
                        self.not_written_meanwhile(at, len)?;
                    }
                    if *order != Order::Weak {
                        self.strong_read(block, warp, lane, at, *order, *scope);
                    }
                    for element in 0..d.len() {
                        let mut value = [0; 8];
                        value[..width].copy_from_slice(&data[element * width..][..width]);
                        let whole = written >> (element * width) & all == all;
                        valid[element] |= u32::from(whole) << lane;
                        let value = u64::from_le_bytes(value);
                        if *long {
                            longs[element][lane] = value
                        } else {
                            words[element][lane] = value as u32
                        }
                    }
                }
                for (element, &row) in d.iter().enumerate() {
                    if *long {
                        warp.set_long(row, mask, &longs[element], valid[element]);
                    } else {
                        warp.set_word(row, mask, &words[element], valid[element])?;
                    }
                }
                if !*long {
                    Self::note_load(warp, members(mask).map(|lane| (places[lane], lane)), len, d);
                }
            }
            Op::Store {
                space,
                order,
                scope,
                bytes,
                long,
                values,
                address,
            } => {
                let places = self.addresses(warp, mask, *space, address)?;
                let width = usize::from(*bytes);
                let len = width * values.len();
                let record = self.strong_record(block, warp, *order, *scope);
                let mut valid = [0; 4];
                for (element, &row) in values.iter().enumerate() {
                    valid[element] = if *long {
                        warp.long_valid(row)
                    } else {
                        warp.valid(row, mask)?
                    };
                }
                for lane in members(mask) {
                    let at = places[lane];
                    Self::aligned(at, len)?;
                    let mut data = [0_u8; 32];
                    let mut written = 0;
                    for (element, &row) in values.iter().enumerate() {
                        let value = if *long {
                            warp.long(row)[lane]
                        } else {
                            u64::from(warp.word(row)[lane])
                        };
                        data[element * width..][..width]
                            .copy_from_slice(&value.to_le_bytes()[..width]);
                        written |= (valid[element] >> lane & 1)
                            * (((1 << width) - 1) << (element * width));
                    }
                    let whole = written == ((1_u64 << len) - 1) as u32;
                    // Shared memory may hold values that are never used, but memory that others see needs valid values.
                    if !whole && !matches!(at, At::Shared(_)) {
                        return Err(Box::new(Fault::UninitialisedRegister {
                            what: "a value that is stored",
                            read: None,
                        }));
                    }
                    if *order != Order::Weak {
                        // Only atomics pass on what was released before.
                        for key in Self::keys(block, at, Scope::Gpu) {
                            self.released.remove(&key);
                        }
                        self.strong_write(block, warp, lane, at, *order, *scope);
                    }
                    let what = "writes";
                    let touch = Touch {
                        lane,
                        at,
                        len,
                        record,
                        member: lane,
                        write: true,
                        asynchronous: false,
                        same_value: false,
                        what,
                    };
                    self.write(
                        block,
                        warp,
                        touch,
                        &data[..len],
                        if whole { u32::MAX } else { written },
                    )?;
                }
                if *order != Order::Weak {
                    warp.time += 1;
                }
            }
            Op::Atomic { .. } => self.atomic(block, warp, mask, op)?,
            _ => unreachable!(),
        }
        Ok(Flow::Next)
    }

    fn atomic(&mut self, block: &mut Block, warp: &mut Warp, mask: u32, op: &Op) -> Step {
        let Op::Atomic {
            f,
            space,
            order,
            scope,
            long,
            d,
            address,
            b,
            c,
        } = op
        else {
            unreachable!()
        };
        let places = self.addresses(warp, mask, *space, address)?;
        let len = if *long { 8 } else { 4 };
        let record = self.strong_record(block, warp, *order, *scope);
        for row in [*b, *c] {
            let valid = if *long {
                warp.long_valid(row)
            } else {
                warp.valid(row, mask)?
            };
            if valid & mask != mask {
                return Err(Box::new(Fault::UninitialisedRegister {
                    what: "an atomic's operand",
                    read: None,
                }));
            }
        }
        let (mut words, mut longs) = ([0; 32], [0; 32]);
        for lane in members(mask) {
            let at = places[lane];
            Self::aligned(at, len)?;
            let mut data = [0; 8];
            let what = "changes";
            let touch = Touch {
                lane,
                at,
                len,
                record,
                member: lane,
                write: true,
                asynchronous: false,
                same_value: false,
                what,
            };
            let reading = Touch {
                write: false,
                ..touch
            };
            if self.read(block, warp, reading, &mut data[..len])? != u32::MAX {
                return Err(Box::new(Fault::UninitialisedRegister {
                    what: "what an atomic changes",
                    read: None,
                }));
            }
            let before = u64::from_le_bytes(data);
            let value = |row: u32| {
                if *long {
                    warp.long(row)[lane]
                } else {
                    u64::from(warp.word(row)[lane])
                }
            };
            let after = apply(*f, *long, before, value(*b), value(*c));
            let writes = *f != Atomic::CompareExchange || before == value(*b);
            self.strong_read(block, warp, lane, at, *order, *scope);
            // A comparison that fails writes nothing.
            if writes {
                self.strong_write(block, warp, lane, at, *order, *scope);
                self.write(block, warp, touch, &after.to_le_bytes()[..len], u32::MAX)?;
            }
            (words[lane], longs[lane]) = (before as u32, before);
        }
        warp.time += 1;
        match d {
            Some(d) if *long => warp.set_long(*d, mask, &longs, u32::MAX),
            Some(d) => warp.set_word(*d, mask, &words, u32::MAX)?,
            None => {}
        }
        Ok(())
    }

    /// A record of an access of this order, with this scope.
    fn strong_record(&self, block: &Block, warp: &Warp, order: Order, scope: Scope) -> Record {
        let record = self.record(block, warp);
        match order {
            Order::Weak => record,
            _ => record.atomic(true).of_block(scope == Scope::Cta),
        }
    }

    /// Under which keys a release is kept, and an acquire looks for it: that of the block, and for global memory with the
    /// scope of the GPU also that of all blocks. A release for the block only is not visible to other blocks. Addresses of
    /// shared and of global memory differ.
    fn keys(block: &Block, at: At, scope: Scope) -> impl Iterator<Item = (u32, u64)> + use<> {
        let id = block.id as u32;
        let (own, everywhere) = match at {
            At::Shared(offset) => ((id, u64::from(offset)), None),
            At::Peer(rank, offset) => ((id - block.cluster_rank + rank, u64::from(offset)), None),
            At::Global(address) => {
                let everywhere = (scope == Scope::Gpu).then_some((u32::MAX, address));
                ((id, address), everywhere)
            }
            At::Param(offset) | At::Constant(offset) => ((u32::MAX, offset as u64), None),
        };
        std::iter::once(own).chain(everywhere)
    }

    fn strong_read(
        &mut self,
        block: &Block,
        warp: &mut Warp,
        lane: usize,
        at: At,
        order: Order,
        scope: Scope,
    ) {
        for key in Self::keys(block, at, scope) {
            let Some(found) = self.released.get(&key) else {
                continue;
            };
            if matches!(order, Order::Acquire | Order::AcqRel) {
                warp.learn(1 << lane, found);
            } else {
                let known = warp.found[lane].get_or_insert_default();
                join(known, found);
            }
        }
    }

    fn strong_write(
        &mut self,
        block: &Block,
        warp: &mut Warp,
        lane: usize,
        at: At,
        order: Order,
        scope: Scope,
    ) {
        let released = if matches!(order, Order::Release | Order::AcqRel) {
            let time = warp.time;
            let released = warp.publish(block.id, 1 << lane);
            // All lanes of the instruction release at the same time.
            warp.time = time;
            Some(released)
        } else {
            warp.release[lane].clone()
        };
        let Some(released) = released else { return };
        for key in Self::keys(block, at, scope) {
            let place: &mut Shared = self.released.entry(key).or_default();
            join(place, &released);
        }
    }
}

fn apply(f: Atomic, long: bool, before: u64, b: u64, c: u64) -> u64 {
    let float = |bits: u64| f32::from_bits(bits as u32);
    let after = match f {
        Atomic::Add => before.wrapping_add(b),
        Atomic::FAdd => u64::from((float(before) + float(b)).to_bits()),
        Atomic::Min => before.min(b),
        Atomic::MinSigned => (before as i32).min(b as i32) as u32 as u64,
        Atomic::Max => before.max(b),
        Atomic::MaxSigned => (before as i32).max(b as i32) as u32 as u64,
        Atomic::And => before & b,
        Atomic::Or => before | b,
        Atomic::Xor => before ^ b,
        Atomic::Exchange => b,
        Atomic::Increment if before >= b => 0,
        Atomic::Increment => before + 1,
        Atomic::CompareExchange if before == b => c,
        Atomic::CompareExchange => before,
    };
    if long { after } else { u64::from(after as u32) }
}
