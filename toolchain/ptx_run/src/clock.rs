//! Vector clocks: which accesses of others each thread knows.
//!
//! Everything in a block that can access memory is numbered in *agents* of 32 *members* each: warps with their lanes,
//! and asynchronous operations (products, copies). Each agent has its own time, which advances whenever it publishes
//! what it has done. A [`Clock`] states, for each member, up to which time the holder knows its accesses.

use std::rc::Rc;

/// Number of members of an agent.
pub const MEMBERS: usize = 32;

/// What the holder knows of the members of each block. A grid may have many thousands of blocks, of which a thread knows
/// few.
#[derive(Clone, Debug, Default)]
pub struct Clock {
    /// Sorted by the number of the block.
    blocks: Vec<(u32, Rc<Vec<u32>>)>,
}

impl Clock {
    fn place(&self, block: usize) -> Result<usize, usize> {
        let of = |known: &(u32, Rc<Vec<u32>>)| known.0;
        self.blocks.binary_search_by_key(&(block as u32), of)
    }

    fn times(&self, block: usize) -> Option<&[u32]> {
        let at = self.place(block).ok()?;
        Some(&self.blocks[at].1)
    }

    /// The time up to which a member's accesses are known.
    pub fn get(&self, block: usize, member: usize) -> u32 {
        let times = self.times(block).unwrap_or_default();
        times.get(member).copied().unwrap_or(0)
    }

    /// Whether the accesses of all these members of an agent are known up to `time`.
    pub fn knows(&self, block: usize, agent: usize, members: u32, time: u32) -> bool {
        let Some(times) = self.times(block) else {
            return false;
        };
        if members == u32::MAX {
            // Compared side by side.
            let all = times.get(agent * MEMBERS..(agent + 1) * MEMBERS);
            return all
                .is_some_and(|all| all.iter().fold(true, |all, &known| all & (known >= time)));
        }
        let mut rest = members;
        while rest != 0 {
            let member = agent * MEMBERS + rest.trailing_zeros() as usize;
            if times.get(member).is_none_or(|&known| known < time) {
                return false;
            }
            rest &= rest - 1;
        }
        true
    }

    fn block(&mut self, block: usize) -> &mut Vec<u32> {
        let at = self.place(block).unwrap_or_else(|at| {
            self.blocks.insert(at, (block as u32, Rc::default()));
            at
        });
        Rc::make_mut(&mut self.blocks[at].1)
    }

    /// Learns the accesses of one member.
    pub fn learn(&mut self, block: usize, member: usize, time: u32) {
        let times = self.block(block);
        if times.len() <= member {
            times.resize(member + 1, 0);
        }
        times[member] = times[member].max(time);
    }

    /// Learns the accesses of several members of an agent.
    pub fn learn_members(&mut self, block: usize, agent: usize, members: u32, time: u32) {
        let times = self.block(block);
        let end = (agent + 1) * MEMBERS;
        if times.len() < end {
            times.resize(end, 0);
        }
        for (at, known) in times[end - MEMBERS..end].iter_mut().enumerate() {
            if members >> at & 1 != 0 {
                *known = time.max(*known);
            }
        }
    }

    /// Learns everything that another clock knows.
    pub fn join(&mut self, other: &Self) {
        if self.blocks.is_empty() {
            self.blocks.clone_from(&other.blocks);
            return;
        }
        for (block, theirs) in &other.blocks {
            let at = match self.place(*block as usize) {
                Ok(at) => at,
                Err(at) => {
                    self.blocks.insert(at, (*block, theirs.clone()));
                    continue;
                }
            };
            let mine = &mut self.blocks[at].1;
            if Rc::ptr_eq(mine, theirs) {
                continue;
            }
            let mine = Rc::make_mut(mine);
            if mine.len() < theirs.len() {
                mine.resize(theirs.len(), 0);
            }
            for (a, &b) in mine.iter_mut().zip(theirs.iter()) {
                *a = b.max(*a);
            }
        }
    }
}

/// A clock that several holders share until one of them learns more.
pub type Shared = Rc<Clock>;

/// Learns everything that another clock knows.
pub fn join(mine: &mut Shared, other: &Shared) {
    if !Rc::ptr_eq(mine, other) {
        Rc::make_mut(mine).join(other);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn joining_keeps_the_later_time_of_each_member() {
        let (mut a, mut b) = (Clock::default(), Clock::default());
        a.learn(0, 3, 7);
        a.learn(1, 0, 2);
        b.learn(0, 3, 4);
        b.learn(0, 40, 5);
        a.join(&b);
        assert_eq!(
            [a.get(0, 3), a.get(0, 40), a.get(1, 0), a.get(2, 9)],
            [7, 5, 2, 0]
        );
    }

    #[test]
    fn members_are_known_only_all_together() {
        let mut clock = Clock::default();
        clock.learn_members(0, 2, 0b110, 4);
        assert!(clock.knows(0, 2, 0b110, 4));
        assert!(!clock.knows(0, 2, 0b111, 4));
        assert!(!clock.knows(0, 2, 0b100, 5));
        assert!(!clock.knows(1, 2, 0b100, 1));
    }
}
