//! Race detection: the last accesses to each four bytes of memory, and whether the next access is ordered after them.

use std::cell::Cell;

use crate::clock::{Clock, MEMBERS};

/// Number of bytes of a [`Granule`].
pub const GRANULE: usize = 4;

/// A recorded access.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// Block and agent: see [`who`].
    pub who: u32,
    /// Members of the agent; if none, there is no record.
    pub members: u32,
    /// Time of the agent at the access.
    pub time: u32,
    /// Instruction in the low 19 bits, then a flag, launch (2), bytes (4), flags (3), launch (its upper 3).
    info: u32,
}

/// Launches are numbered modulo this number. Accesses of earlier ones are forgotten before their numbers come again.
pub const LAUNCHES: u32 = 32;

/// An atomic access for threads of the same block only.
const OF_BLOCK: u32 = 1 << 19;
const ATOMIC: u32 = 1 << 26;
const ASYNC: u32 = 1 << 27;
/// The members accessed different bytes, so they do not conflict among themselves.
const MIXED: u32 = 1 << 28;

/// The most blocks of a grid that records can tell apart.
pub const MAX_BLOCKS: u32 = 1 << (32 - AGENT_BITS);

/// Bits of an agent's number: a block has fewer than 140 agents.
const AGENT_BITS: u32 = 8;

/// A block and one of its agents, in one number.
pub fn who(block: usize, agent: usize) -> u32 {
    (block as u32) << AGENT_BITS | agent as u32
}

impl Record {
    /// A record without members.
    pub fn new(block: usize, agent: usize, time: u32, instruction: usize, launch: u32) -> Self {
        Self {
            who: who(block, agent),
            members: 0,
            time,
            info: instruction as u32 & 0x7_FFFF | (launch & 3) << 20 | (launch >> 2 & 7) << 29,
        }
    }

    #[must_use]
    pub fn atomic(mut self, atomic: bool) -> Self {
        self.info |= if atomic { ATOMIC } else { 0 };
        self
    }

    #[must_use]
    pub fn of_block(mut self, of_block: bool) -> Self {
        self.info |= if of_block { OF_BLOCK } else { 0 };
        self
    }

    #[must_use]
    pub fn asynchronous(mut self) -> Self {
        self.info |= ASYNC;
        self
    }

    pub fn block(&self) -> usize {
        (self.who >> AGENT_BITS) as usize
    }

    pub fn agent(&self) -> usize {
        (self.who % (1 << AGENT_BITS)) as usize
    }

    pub fn instruction(&self) -> usize {
        (self.info & 0x7_FFFF) as usize
    }

    pub fn launch(&self) -> u32 {
        self.info >> 20 & 3 | self.info >> 29 << 2
    }

    fn bytes(&self) -> u32 {
        self.info >> 22 & 15
    }

    fn set_bytes(&mut self, bytes: u32) {
        self.info = self.info & !(15 << 22) | bytes << 22;
    }

    pub fn is_async(&self) -> bool {
        self.info & ASYNC != 0
    }

    /// Whether both are atomic, and for one another.
    fn both_atomic(&self, other: &Self) -> bool {
        let of_block = (self.info | other.info) & OF_BLOCK != 0;
        self.info & other.info & ATOMIC != 0 && (!of_block || self.block() == other.block())
    }

    fn same_moment(&self, other: &Self) -> bool {
        self.who == other.who
            && self.time == other.time
            && (self.info ^ other.info) & 0x3F_FFFF == 0
    }
}

/// What the accessing thread knows, to decide whether earlier accesses are ordered before its own.
pub struct Accessor<'a> {
    /// Clock of the thread.
    pub clock: &'a Clock,
    /// The thread: its warp's agent (and block) as in [`Record::who`], and its lane.
    pub warp: u32,
    pub lane: u32,
    /// Times up to which the thread's own copies are known to be done.
    pub own_copies: u32,
    pub own_bulk_reads: u32,
    pub own_bulk_writes: u32,
    /// Time up to which its warp's products are known to be done.
    pub own_products: u32,
    /// Layout of the block's agents.
    pub layout: Layout,
    /// Number of this launch.
    pub launch: u32,
    /// Whether the thread has waited for the previous launch.
    pub waited: bool,
    /// Whether the asynchronous proxy may read or overwrite a generic write; `None` for a generic access.
    pub fenced: Option<&'a dyn Fn(&Record) -> bool>,
    /// The last access that was found to be ordered before, of those that only read and of those that wrote. Neighbouring
    /// bytes often have the same.
    pub ordered: [Cell<Record>; 2],
}

/// Maximum number of mbarriers of a block. 8-bit decode has more than 128.
pub const MAX_BARRIERS: usize = 256;

/// Number of agents between warps and copies: those of products and mbarriers.
const BEFORE_COPIES: usize = 1 + MAX_BARRIERS / MEMBERS;

/// Numbers of a block's agents.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// Number of warps of the block; their agents come first.
    pub warps: usize,
}

impl Layout {
    /// Agent of products, with a member for each warp.
    pub fn products(self) -> usize {
        self.warps
    }

    /// First agent of copies that complete at an mbarrier, with a member for each of [`MAX_BARRIERS`] mbarriers.
    pub fn barriers(self) -> usize {
        self.warps + 1
    }

    /// Agent of `cp.async` of a warp's lanes.
    pub fn copies(self, warp: usize) -> usize {
        self.warps + BEFORE_COPIES + warp
    }

    /// Agent of the reads of the lanes' bulk groups.
    pub fn bulk_reads(self, warp: usize) -> usize {
        self.warps * 2 + BEFORE_COPIES + warp
    }

    /// Agent of the writes of the lanes' bulk groups.
    pub fn bulk_writes(self, warp: usize) -> usize {
        self.warps * 3 + BEFORE_COPIES + warp
    }
}

/// The conflict of an access.
#[derive(Clone, Copy, Debug)]
pub enum Conflict {
    /// The two accesses are not ordered.
    Race { before: Record, before_wrote: bool },
    /// The earlier access is a load that may not have read yet.
    LoadInFlight { before: Record },
    /// They are ordered, but without a proxy fence in between.
    NoProxyFence { before: Record },
    /// The thread has not waited for the previous launch.
    NoGridWait { before: Record },
}

impl Accessor<'_> {
    /// Whether the thread knows that the recorded access is complete.
    pub fn is_ordered(&self, record: &Record) -> bool {
        let (block, agent) = (record.block(), record.agent());
        let mut members = record.members;
        if record.who >> AGENT_BITS == self.warp >> AGENT_BITS {
            let warp = (self.warp % (1 << AGENT_BITS)) as usize;
            let own = 1 << self.lane;
            if agent == warp {
                members &= !own;
                if record.info & MIXED != 0 {
                    members = 0;
                }
            } else if agent == self.layout.products() {
                if record.time <= self.own_products {
                    members &= !(1 << warp);
                }
            } else if agent == self.layout.copies(warp) && record.time <= self.own_copies
                || agent == self.layout.bulk_reads(warp) && record.time <= self.own_bulk_reads
                || agent == self.layout.bulk_writes(warp) && record.time <= self.own_bulk_writes
            {
                members &= !own;
            }
        }
        members == 0 || self.clock.knows(block, agent, members, record.time)
    }

    fn check(
        &self,
        record: &Record,
        bytes: u32,
        new: &Record,
        wrote: bool,
        same_value: bool,
    ) -> Option<Conflict> {
        if record.members == 0 || record.bytes() & bytes == 0 || record.both_atomic(new) {
            return None;
        }
        let ordered = &self.ordered[usize::from(wrote)];
        if ordered.get() == *record {
            return None;
        }
        if record.launch() != self.launch % LAUNCHES {
            let previous = record.launch() == self.launch.wrapping_sub(1) % LAUNCHES;
            return (previous && !self.waited).then_some(Conflict::NoGridWait { before: *record });
        }
        if !self.is_ordered(record) {
            if same_value && record.same_moment(new) {
                return None;
            }
            return Some(Conflict::Race {
                before: *record,
                before_wrote: wrote,
            });
        }
        if let Some(fenced) = self.fenced
            && wrote
            && !record.is_async()
            && !fenced(record)
        {
            return Some(Conflict::NoProxyFence { before: *record });
        }
        ordered.set(*record);
        None
    }
}

/// The last accesses to four bytes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Granule {
    /// The last write, and the last one before it that wrote other bytes.
    writes: [Record; 2],
    reads: [Record; 3],
}

impl Granule {
    /// The last write, if there was one.
    pub fn last_write(&self) -> Option<Record> {
        Some(self.writes[0]).filter(|write| write.members != 0)
    }

    /// The last writes of these bytes.
    pub fn writes_of(&self, bytes: u32) -> impl Iterator<Item = Record> + use<> {
        let known = move |write: &Record| write.members != 0 && write.bytes() & bytes != 0;
        self.writes.into_iter().filter(known)
    }

    /// Forgets the accesses of other launches.
    pub fn keep_launch(&mut self, launch: u32) {
        for record in self.reads.iter_mut().chain(&mut self.writes) {
            if record.launch() != launch % LAUNCHES {
                *record = Record::default();
            }
        }
    }

    /// Records a read of these bytes (one bit each) by a member.
    pub fn read(
        &mut self,
        by: &Accessor<'_>,
        new: Record,
        member: u32,
        bytes: u32,
    ) -> Option<Conflict> {
        let mut writes = self.writes.iter();
        let conflict = writes.find_map(|write| by.check(write, bytes, &new, true, false));
        if conflict.is_some() {
            return conflict;
        }
        let bit = 1 << member;
        let mut free = None;
        for at in 0..3 {
            let old = &mut self.reads[at];
            if old.members == 0 {
                free = free.or(Some(at));
            } else if old.same_moment(&new) {
                if old.bytes() != bytes {
                    old.info |= MIXED;
                    old.set_bytes(old.bytes() | bytes);
                }
                old.members |= bit;
                return None;
            } else if old.who == new.who
                && old.launch() == new.launch()
                && old.bytes() & !bytes == 0
            {
                // An access that is ordered after a thread's later read is also ordered after its earlier one.
                old.members &= !bit;
                if old.members == 0 {
                    free = free.or(Some(at));
                }
            }
        }
        let at = free
            .or_else(|| (0..3).find(|&at| by.is_ordered(&self.reads[at])))
            .unwrap_or(new.time as usize % 3);
        self.reads[at] = Record {
            members: bit,
            ..new
        };
        self.reads[at].set_bytes(bytes);
        None
    }

    fn note_write(&mut self, new: Record, member: u32, bytes: u32) {
        let [last, before] = &mut self.writes;
        let together = |old: &Record| old.members != 0 && old.same_moment(&new);
        for old in [&mut *last, &mut *before] {
            if together(old) && old.bytes() == bytes {
                old.members |= member;
                return;
            }
        }
        if together(last) && before.members != 0 && together(before) {
            // More than two members wrote different bytes in one instruction.
            last.info |= MIXED;
            last.set_bytes(last.bytes() | bytes);
            last.members |= member;
            return;
        }
        for old in [&mut *last, &mut *before] {
            old.set_bytes(old.bytes() & !bytes);
            if old.bytes() == 0 {
                *old = Record::default();
            }
        }
        if last.members != 0 {
            *before = *last;
        }
        *last = Record {
            members: member,
            ..new
        };
        last.set_bytes(bytes);
    }

    /// Records a write of these bytes (one bit each) by a member. `same_value`: they already have the written value.
    pub fn write(
        &mut self,
        by: &Accessor<'_>,
        new: Record,
        member: u32,
        bytes: u32,
        same_value: bool,
    ) -> Option<Conflict> {
        let mut writes = self.writes.iter();
        let mut conflict = writes.find_map(|write| by.check(write, bytes, &new, true, same_value));
        for read in &self.reads {
            conflict = conflict.or_else(|| by.check(read, bytes, &new, false, false));
        }
        if conflict.is_some() {
            return conflict;
        }
        self.note_write(new, 1 << member, bytes);
        for read in &mut self.reads {
            if read.bytes() & !bytes == 0 {
                *read = Record::default();
            }
        }
        None
    }
}

/// The bytes of a granule that are in `first..last`, one bit each; `first` is in the granule.
#[inline]
pub fn bytes_of(granule: usize, first: usize, last: usize) -> u32 {
    let start = first.max(granule * GRANULE) - granule * GRANULE;
    let end = last.min((granule + 1) * GRANULE) - granule * GRANULE;
    (1 << end) - (1 << start)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accessor(clock: &Clock, warp: u32, lane: u32) -> Accessor<'_> {
        Accessor {
            clock,
            warp,
            lane,
            own_copies: 0,
            own_bulk_reads: 0,
            own_bulk_writes: 0,
            own_products: 0,
            layout: Layout { warps: 4 },
            launch: 0,
            waited: true,
            fenced: None,
            ordered: Default::default(),
        }
    }

    fn by(warp: usize, time: u32) -> Record {
        Record::new(0, warp, time, 5, 0)
    }

    #[test]
    fn a_write_is_ordered_by_what_the_reader_knows() {
        let mut clock = Clock::default();
        let mut granule = Granule::default();
        assert!(
            granule
                .write(&accessor(&clock, 0, 3), by(0, 1), 3, 15, false)
                .is_none()
        );
        // The same thread, then other bytes by another thread, then the same bytes.
        assert!(
            granule
                .read(&accessor(&clock, 0, 3), by(0, 1), 3, 15)
                .is_none()
        );
        let conflict = granule.read(&accessor(&clock, 1, 0), by(1, 1), 0, 15);
        assert!(matches!(
            conflict,
            Some(Conflict::Race {
                before_wrote: true,
                ..
            })
        ));
        clock.learn(0, 3, 1);
        assert!(
            granule
                .read(&accessor(&clock, 1, 0), by(1, 1), 0, 15)
                .is_none()
        );
    }

    #[test]
    fn lanes_of_a_warp_race_too() {
        let clock = Clock::default();
        let mut granule = Granule::default();
        assert!(
            granule
                .write(&accessor(&clock, 0, 0), by(0, 1), 0, 15, false)
                .is_none()
        );
        assert!(
            granule
                .read(&accessor(&clock, 0, 1), by(0, 1), 1, 15)
                .is_some()
        );
    }

    #[test]
    fn a_write_behind_reads_of_other_warps_must_know_them() {
        let mut clock = Clock::default();
        let mut granule = Granule::default();
        for warp in 0..3 {
            assert!(
                granule
                    .read(&accessor(&clock, warp, 0), by(warp as usize, 1), 0, 15)
                    .is_none()
            );
        }
        clock.learn(0, 0, 1);
        clock.learn(0, 32, 1);
        let conflict = granule.write(&accessor(&clock, 3, 0), by(3, 1), 0, 15, false);
        assert!(matches!(
            conflict,
            Some(Conflict::Race {
                before_wrote: false,
                ..
            })
        ));
        clock.learn(0, 64, 1);
        assert!(
            granule
                .write(&accessor(&clock, 3, 0), by(3, 1), 0, 15, false)
                .is_none()
        );
    }

    #[test]
    fn neighbouring_bytes_do_not_conflict() {
        let clock = Clock::default();
        let mut granule = Granule::default();
        assert!(
            granule
                .write(&accessor(&clock, 0, 0), by(0, 1), 0, 0b0011, false)
                .is_none()
        );
        assert!(
            granule
                .write(&accessor(&clock, 1, 0), by(1, 1), 0, 0b1100, false)
                .is_none()
        );
    }

    #[test]
    fn bytes_are_counted_within_their_granule() {
        assert_eq!(bytes_of(1, 6, 12), 0b1100);
        assert_eq!(bytes_of(2, 6, 12), 0b1111);
        assert_eq!(bytes_of(0, 1, 2), 0b0010);
    }
}
