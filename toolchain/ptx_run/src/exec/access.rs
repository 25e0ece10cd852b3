//! Memory accesses of lanes: location, bounds and ordering.

use super::Run;
use crate::{
    block::Block,
    clock::{Clock, MEMBERS},
    decode::{CONSTANT_BASE, PARAM_BASE, SHARED_BASE},
    memory::Bytes,
    op::{Address, Row, Space},
    report::{Fault, Step},
    shadow::{Accessor, Conflict, GRANULE, LAUNCHES, Record, bytes_of, who},
    warp::{FENCE_GLOBAL, FENCE_SHARED, FenceMark, Warp, members},
};

/// The location of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum At {
    Shared(u32),
    /// Shared memory of the block with this rank in the cluster.
    Peer(u32, u32),
    Global(u64),
    Param(usize),
    Constant(usize),
}

/// Generic address at which a space begins.
pub fn base(space: Space) -> u64 {
    match space {
        Space::Shared => SHARED_BASE,
        Space::Param => PARAM_BASE,
        Space::Generic | Space::Global | Space::Cluster => 0,
    }
}

/// An access of one lane, or of a copy that it began.
#[derive(Clone, Copy)]
pub struct Touch {
    pub lane: usize,
    pub at: At,
    pub len: usize,
    pub record: Record,
    /// Member of the record's agent.
    pub member: usize,
    pub write: bool,
    pub asynchronous: bool,
    /// Whether the memory already has the value that is written.
    pub same_value: bool,
    pub what: &'static str,
}

const WINDOW: u64 = 1 << 40;
/// Start of the shared memory of rank 0 in the cluster's window, and the distance to that of each further rank.
pub const FIRST_RANK: u32 = 1 << 30;
pub const RANK_STEP: u32 = 1 << 24;

impl Run<'_> {
    /// The location of each lane's address. A register without a value is a fault.
    pub fn addresses(
        &self,
        warp: &mut Warp,
        mask: u32,
        space: Space,
        address: &Address,
    ) -> Step<[At; 32]> {
        let valid = match address.long {
            true => warp.long_valid(address.row),
            false => warp.valid(address.row, mask)?,
        };
        if valid & mask != mask {
            return Err(Box::new(Fault::UninitialisedRegister {
                what: "an address",
                read: None,
            }));
        }
        let mut places = [At::Shared(0); 32];
        for lane in members(mask) {
            let value = match address.long {
                true => warp.long(address.row)[lane],
                false => u64::from(warp.word(address.row)[lane]),
            };
            places[lane] = self.at(space, value.wrapping_add(address.offset as u64));
        }
        Ok(places)
    }

    pub fn at(&self, space: Space, address: u64) -> At {
        let in_window = |base: u64| address.checked_sub(base).filter(|&offset| offset < WINDOW);
        match space {
            Space::Shared => At::Shared(address as u32),
            // An address below all ranks is in the block's own window.
            Space::Cluster => match (address as u32).checked_sub(FIRST_RANK) {
                None => At::Shared(address as u32),
                Some(mapped) => At::Peer(mapped / RANK_STEP, mapped % RANK_STEP),
            },
            Space::Param => At::Param(address as usize),
            Space::Global | Space::Generic => {
                if let Some(offset) = in_window(CONSTANT_BASE) {
                    return At::Constant(offset as usize);
                }
                if space == Space::Generic {
                    if let Some(offset) = in_window(SHARED_BASE) {
                        return At::Shared(offset as u32);
                    }
                    if let Some(offset) = in_window(PARAM_BASE) {
                        return At::Param(offset as usize);
                    }
                }
                At::Global(address)
            }
        }
    }

    pub fn aligned(at: At, align: usize) -> Step {
        let value = match at {
            At::Shared(offset) | At::Peer(_, offset) => u64::from(offset),
            At::Global(address) => address,
            At::Param(offset) | At::Constant(offset) => offset as u64,
        };
        if value.is_multiple_of(align as u64) {
            return Ok(());
        }
        Err(Box::new(Fault::Misaligned {
            address: name(at),
            align,
        }))
    }

    /// The memory that contains an address, after a bounds check.
    pub fn bytes<'m>(
        &'m mut self,
        block: &'m mut Block,
        at: At,
        len: usize,
    ) -> Step<(&'m mut Bytes, usize)> {
        match at {
            At::Shared(offset) => {
                let (offset, size) = (offset as usize, block.shared.data.len());
                if offset.checked_add(len).is_none_or(|end| end > size) {
                    return Err(outside(
                        at,
                        len,
                        format!("the block has {size} bytes of shared memory"),
                    ));
                }
                Ok((&mut block.shared, offset))
            }
            At::Peer(rank, offset) => {
                if rank == block.cluster_rank {
                    return self.bytes(block, At::Shared(offset), len);
                }
                let began = block.cluster.borrow().generation > 0;
                let peer = self.peers.get_mut(rank as usize).and_then(Option::as_mut);
                let problem = match &peer {
                    _ if !began => "no barrier of the cluster says that the block has begun".into(),
                    None => "no block of this rank lives in the cluster".into(),
                    Some(peer) if offset as usize + len > peer.data.len() => {
                        format!("the block has {} bytes of shared memory", peer.data.len())
                    }
                    Some(_) => String::new(),
                };
                match peer {
                    Some(peer) if problem.is_empty() => Ok((peer, offset as usize)),
                    _ => Err(outside(at, len, problem)),
                }
            }
            At::Global(address) => self.memory.find(address, len),
            At::Param(_) | At::Constant(_) => Err(outside(at, len, "it cannot be written".into())),
        }
    }

    /// Notes a load of words, if it is from shared memory, with the address and lane of each read.
    pub fn note_load(
        warp: &mut Warp,
        places: impl Iterator<Item = (At, usize)>,
        len: usize,
        rows: &[Row],
    ) {
        let read = |(at, lane)| match at {
            At::Shared(offset) => Some((lane, offset, len)),
            _ => None,
        };
        let reads: Vec<_> = places.filter_map(read).collect();
        if !reads.is_empty() {
            warp.begin_load(reads, rows);
        }
    }

    /// An instruction uses what its warp loaded from shared memory. Lanes that arrived at an mbarrier in between may read only now: no
    /// copy may have overwritten the bytes since, nor may a later one that relies on that arrival.
    pub fn read_late(&mut self, block: &mut Block, warp: &mut Warp) -> Step {
        for load in std::mem::take(&mut warp.late_loads) {
            let has_arrived = |lane: usize| load.arrived >> lane & 1 != 0;
            for &(lane, offset, len) in load.reads.iter().filter(|read| has_arrived(read.0)) {
                let mut record = self.record(block, warp);
                record.members = 1 << lane;
                let offset = offset as usize;
                for granule in offset / GRANULE..(offset + len).div_ceil(GRANULE) {
                    let written = block.shared.granule(granule).last_write();
                    let is_new = |write: &Record| {
                        let (block, agent) = (write.block(), write.agent());
                        write.is_async()
                            && !load.known[lane].knows(block, agent, write.members, write.time)
                    };
                    if let Some(write) = written.filter(is_new) {
                        return Err(Box::new(Fault::Race {
                            address: name(At::Shared((granule * GRANULE) as u32)),
                            access: "uses what it loaded before it arrived at an mbarrier",
                            before_access: "written",
                            before: Box::new(self.place_of(&write)),
                        }));
                    }
                    let reads = block.late_reads.entry(granule).or_default();
                    reads.retain(|old| (old.who, old.members) != (record.who, record.members));
                    reads.push(record);
                }
            }
        }
        Ok(())
    }

    /// Checks an access for conflicts and records it.
    pub fn touch(&mut self, block: &mut Block, warp: &Warp, touch: Touch) -> Step {
        self.touch_all(block, warp, touch, &[touch.at])
    }

    /// As [`touch`](Self::touch), at each of these places, which are in one memory.
    fn touch_all(&mut self, block: &mut Block, warp: &Warp, touch: Touch, places: &[At]) -> Step {
        let conflict = self.conflict(block, warp, &touch, places)?;
        let Some((conflict, at, granule)) = conflict else {
            return Ok(());
        };
        let address = match at {
            At::Shared(_) => name(At::Shared((granule * GRANULE) as u32)),
            At::Peer(rank, _) => name(At::Peer(rank, (granule * GRANULE) as u32)),
            at => name(at),
        };
        let access = touch.what;
        Err(Box::new(match conflict {
            Conflict::Race {
                before,
                before_wrote,
            } => Fault::Race {
                address,
                access,
                before_access: if before_wrote { "written" } else { "read" },
                before: Box::new(self.place_of(&before)),
            },
            Conflict::NoProxyFence { before } => Fault::NoProxyFence {
                address,
                access,
                before: Box::new(self.place_of(&before)),
            },
            Conflict::LoadInFlight { before } => Fault::LoadInFlight {
                address,
                access,
                before: Box::new(self.place_of(&before)),
            },
            Conflict::NoGridWait { before } => Fault::NoGridWait {
                address,
                access,
                before: Box::new(self.place_of(&before)),
            },
        }))
    }

    fn conflict(
        &mut self,
        block: &mut Block,
        warp: &Warp,
        touch: &Touch,
        places: &[At],
    ) -> Step<Option<(Conflict, At, usize)>> {
        let Touch { lane, len, .. } = *touch;
        let kind = if matches!(touch.at, At::Shared(_) | At::Peer(..)) {
            FENCE_SHARED
        } else {
            FENCE_GLOBAL
        };
        let layout = block.layout;
        let (own_block, fences) = (block.id, std::mem::take(&mut block.fences));
        let clock = &warp.clocks[lane];
        let fence_clock = warp.fence_clocks[lane].as_deref();
        let fenced = |before: &Record| {
            // PTX requires a proxy fence here, too. But the hardware has written the bytes once the copy is complete,
            // and published kernels rely on that: a fence by the consumer warps takes 5 % of a prefill's time.
            if (layout.copies(0)..layout.bulk_reads(0)).contains(&before.agent()) {
                return true;
            }
            let fences = (before.block() == own_block).then_some(fences.as_slice());
            is_fenced(
                before,
                fences,
                kind,
                clock,
                fence_clock,
                (warp.index, lane),
                layout,
            )
        };
        let (launch, overlaps) = (self.launch, self.overlaps);
        let by = Accessor {
            clock,
            warp: who(own_block, warp.index),
            lane: lane as u32,
            own_copies: warp.copies[lane].done,
            own_bulk_reads: warp.bulk[lane].done,
            own_bulk_writes: warp.bulk[lane].written,
            own_products: warp.products_done,
            layout,
            launch,
            waited: !overlaps || clock.get(self.blocks, 0) != 0,
            fenced: touch.asynchronous.then_some(&fenced),
            ordered: Default::default(),
        };
        let mut found = Ok(None);
        for &place in places {
            let late = match place {
                At::Shared(offset) if touch.asynchronous && touch.write => {
                    late_read(block, &by, offset as usize, len)
                }
                _ => None,
            };
            let conflict = match late {
                Some(late) => Ok(Some(late)),
                None => {
                    let bytes = self.bytes(block, place, len);
                    bytes.map(|(bytes, at)| in_granules(bytes, at, &by, touch))
                }
            };
            found = conflict.map(|one| one.map(|(conflict, granule)| (conflict, place, granule)));
            if !matches!(found, Ok(None)) {
                break;
            }
        }
        block.fences = fences;
        found
    }

    /// Reads 16 bytes of shared memory at each offset, as a product does.
    pub fn read_units(
        &mut self,
        block: &mut Block,
        warp: &mut Warp,
        record: Record,
        offsets: impl Iterator<Item = u32>,
    ) -> Step<Vec<([u8; 16], u32)>> {
        let places: Vec<At> = offsets.map(At::Shared).collect();
        let Some(&at) = places.first() else {
            return Ok(Vec::new());
        };
        let touch = Touch {
            lane: 0,
            at,
            len: 16,
            record,
            member: warp.index,
            write: false,
            asynchronous: true,
            same_value: false,
            what: "a product reads",
        };
        self.touch_all(block, warp, touch, &places)?;
        let read = |at| {
            let mut data = [0; 16];
            let written = self.contents(block, warp, Touch { at, ..touch }, &mut data)?;
            Ok((data, written))
        };
        places.into_iter().map(read).collect()
    }

    /// Reads a lane's bytes into `out`. Returns a bit for each byte that was written before.
    pub fn read(
        &mut self,
        block: &mut Block,
        warp: &mut Warp,
        touch: Touch,
        out: &mut [u8],
    ) -> Step<u32> {
        match touch.at {
            At::Param(offset) => {
                let found = self.parameters.get(offset..offset + touch.len);
                let found = found.ok_or_else(|| {
                    outside(
                        touch.at,
                        touch.len,
                        format!("there are {} bytes of parameters", self.parameters.len()),
                    )
                })?;
                out.copy_from_slice(found);
                return Ok(u32::MAX);
            }
            At::Constant(offset) => {
                let constants = self.module.constants();
                let found = constants.get(offset..offset + touch.len);
                let found = found.ok_or_else(|| {
                    outside(
                        touch.at,
                        touch.len,
                        format!("there are {} bytes of tables", constants.len()),
                    )
                })?;
                out.copy_from_slice(found);
                return Ok(u32::MAX);
            }
            _ => {}
        }
        self.touch(block, warp, touch)?;
        self.contents(block, warp, touch, out)
    }

    /// The bytes of an access that was checked, into `out`. Returns a bit for each byte that was written before.
    fn contents(
        &mut self,
        block: &mut Block,
        warp: &mut Warp,
        touch: Touch,
        out: &mut [u8],
    ) -> Step<u32> {
        let (bytes, at) = self.bytes(block, touch.at, touch.len)?;
        out.copy_from_slice(&bytes.data[at..at + touch.len]);
        if bytes.is_written(at, touch.len) {
            return Ok(u32::MAX);
        }
        let written = (0..touch.len)
            .filter(|&byte| bytes.is_written(at + byte, 1))
            .map(|byte| 1 << byte)
            .sum();
        warp.unwritten = Some((self.pc, touch.lane, touch.at));
        Ok(written)
    }

    /// Faults if this launch, or the one before that may still run, has written data that must be read-only. No barrier
    /// makes that right: the data may come from a cache that nobody keeps up to date.
    pub fn not_written_meanwhile(&mut self, at: At, len: usize) -> Step {
        let At::Global(address) = at else {
            return Ok(());
        };
        let (launch, overlaps) = (self.launch, self.overlaps);
        let (bytes, at) = self.memory.find(address, len)?;
        let granules = at / GRANULE..(at + len).div_ceil(GRANULE);
        let mut writes = granules.flat_map(|granule| {
            let part = bytes_of(granule, at, at + len);
            bytes.granule(granule).writes_of(part)
        });
        let meanwhile = |write: &Record| {
            write.launch() == launch % LAUNCHES
                || overlaps && write.launch() == (launch - 1) % LAUNCHES
        };
        match writes.find(meanwhile) {
            None => Ok(()),
            Some(write) => Err(Box::new(Fault::ReadOnly {
                address: name(At::Global(address)),
                before: Box::new(self.place_of(&write)),
            })),
        }
    }

    /// Writes a lane's bytes. Those without a bit in `valid` have no value.
    pub fn write(
        &mut self,
        block: &mut Block,
        warp: &Warp,
        mut touch: Touch,
        values: &[u8],
        valid: u32,
    ) -> Step {
        if let At::Shared(offset) = touch.at {
            not_a_barrier(block, offset, touch.len)?;
        }
        let (bytes, at) = self.bytes(block, touch.at, touch.len)?;
        touch.same_value = bytes.data[at..at + touch.len] == *values;
        self.touch(block, warp, touch)?;
        let (bytes, at) = self.bytes(block, touch.at, touch.len)?;
        bytes.data[at..at + touch.len].copy_from_slice(values);
        bytes.set_written(at, touch.len, true);
        if valid != u32::MAX {
            (0..touch.len)
                .filter(|&byte| valid >> byte & 1 == 0)
                .for_each(|byte| bytes.set_written(at + byte, 1, false));
        }
        self.progress += u64::from(!touch.same_value);
        Ok(())
    }
}

/// Checks an access in each granule, and records it there. Returns the first conflict.
fn in_granules(
    bytes: &mut Bytes,
    at: usize,
    by: &Accessor<'_>,
    touch: &Touch,
) -> Option<(Conflict, usize)> {
    let (record, member, end) = (touch.record, touch.member as u32, at + touch.len);
    (at / GRANULE..end.div_ceil(GRANULE)).find_map(|granule| {
        let part = bytes_of(granule, at, end);
        let one = bytes.granule(granule);
        let conflict = match touch.write {
            true => one.write(by, record, member, part, touch.same_value),
            false => one.read(by, record, member, part),
        };
        conflict.map(|conflict| (conflict, granule))
    })
}

/// A read of these bytes of shared memory that a load in flight may not have done when the thread writes them. Forgets those
/// that are done.
fn late_read(
    block: &mut Block,
    by: &Accessor<'_>,
    offset: usize,
    len: usize,
) -> Option<(Conflict, usize)> {
    if block.late_reads.is_empty() {
        return None;
    }
    (offset / GRANULE..(offset + len).div_ceil(GRANULE)).find_map(|granule| {
        let reads = block.late_reads.remove(&granule)?;
        let before = reads.into_iter().find(|read| !by.is_ordered(read))?;
        Some((Conflict::LoadInFlight { before }, granule))
    })
}

/// Whether a proxy fence that the thread knows of followed a generic write.
fn is_fenced(
    before: &Record,
    fences: Option<&[Vec<FenceMark>]>,
    kind: u8,
    clock: &Clock,
    fence_clock: Option<&Clock>,
    (warp, lane): (usize, usize),
    layout: crate::shadow::Layout,
) -> bool {
    let (block, agent) = (before.block(), before.agent());
    if fence_clock.is_some_and(|clock| clock.knows(block, agent, before.members, before.time)) {
        return true;
    }
    let Some(fences) = fences else { return false };
    let is_copy = agent >= layout.copies(0) && agent < layout.bulk_reads(0);
    let writer = if is_copy {
        agent - layout.copies(0)
    } else {
        agent
    };
    let Some(fences) = fences.get(writer) else {
        return false;
    };
    members(before.members).all(|member| {
        fences.iter().rev().any(|fence| {
            let covers = match is_copy {
                true => fence.copied[member] >= before.time,
                false => fence.time >= before.time,
            };
            let known = writer == warp && member == lane
                || clock.get(block, writer * MEMBERS + member) > fence.time;
            fence.kinds & kind != 0 && fence.lanes >> member & 1 != 0 && covers && known
        })
    })
}

/// Faults if data would overwrite a live mbarrier.
pub fn not_a_barrier(block: &Block, offset: u32, len: usize) -> Step {
    let first = offset as usize / 8;
    let last = (offset as usize + len)
        .div_ceil(8)
        .min(block.barrier_at.len());
    for index in block.barrier_at.get(first..last).unwrap_or_default() {
        if let Some(barrier) = (*index as usize)
            .checked_sub(1)
            .map(|index| &block.barriers[index])
            && barrier.live
        {
            return Err(Box::new(Fault::Mbarrier {
                address: format!("{:#x}", barrier.address),
                what: "data is written over it".into(),
            }));
        }
    }
    Ok(())
}

pub fn name(at: At) -> String {
    match at {
        At::Shared(offset) => format!("shared {offset:#x}"),
        At::Peer(rank, offset) => format!("shared {offset:#x} of rank {rank}"),
        At::Global(address) => format!("global {address:#x}"),
        At::Param(offset) => format!("parameter byte {offset}"),
        At::Constant(offset) => format!("table byte {offset}"),
    }
}

fn outside(at: At, bytes: usize, nearest: String) -> Box<Fault> {
    Box::new(Fault::OutOfBounds {
        address: name(at),
        bytes,
        nearest,
    })
}
