//! Where lanes that diverge at a branch reconverge: the immediate post-dominator of the branch.

use crate::op::{Instruction, Op};

/// Lanes that diverge here reconverge only at their end.
pub const NEVER: u32 = u32::MAX;

/// For each instruction at which lanes may diverge, where they reconverge; [`NEVER`] for others.
pub fn meeting_points(code: &[Instruction]) -> Vec<u32> {
    let blocks = Blocks::of(code);
    let post = blocks.immediate_post_dominators();
    let mut meet = vec![NEVER; code.len()];
    for (block, &end) in blocks.ends.iter().enumerate() {
        let parting = post[block];
        if blocks.successors[block].len() > 1 && parting < blocks.starts.len() {
            meet[end as usize - 1] = blocks.starts[parting];
        }
    }
    meet
}

struct Blocks {
    starts: Vec<u32>,
    ends: Vec<u32>,
    /// The number of blocks represents the end of the code.
    successors: Vec<Vec<usize>>,
}

impl Blocks {
    fn of(code: &[Instruction]) -> Self {
        let len = code.len();
        let mut leader = vec![false; len + 1];
        leader[0] = true;
        leader[len] = true;
        for (at, instruction) in code.iter().enumerate() {
            match &instruction.op {
                Op::Branch { target } => {
                    leader[*target as usize] = true;
                    leader[at + 1] = true;
                }
                Op::BranchTable { targets, .. } => {
                    targets
                        .iter()
                        .for_each(|&target| leader[target as usize] = true);
                    leader[at + 1] = true;
                }
                Op::Exit | Op::Trap { .. } => leader[at + 1] = true,
                _ => {}
            }
        }
        let starts: Vec<u32> = (0..len as u32).filter(|&at| leader[at as usize]).collect();
        let mut block_of = vec![starts.len(); len + 1];
        let mut ends = Vec::with_capacity(starts.len());
        for (block, &start) in starts.iter().enumerate() {
            block_of[start as usize] = block;
            ends.push(starts.get(block + 1).copied().unwrap_or(len as u32));
        }
        let exit = starts.len();
        let successors = ends
            .iter()
            .map(|&end| {
                let last = &code[end as usize - 1];
                let next = block_of[end as usize];
                let mut to = match &last.op {
                    Op::Branch { target } => vec![block_of[*target as usize]],
                    Op::BranchTable { targets, .. } => {
                        targets.iter().map(|&t| block_of[t as usize]).collect()
                    }
                    Op::Exit => vec![exit],
                    // A trap ends the launch, so lanes need not wait for those that reach it.
                    Op::Trap { .. } => vec![],
                    _ => vec![next],
                };
                if last.guard.is_some() && !to.contains(&next) {
                    to.push(next);
                }
                to.sort_unstable();
                to.dedup();
                to
            })
            .collect();
        Self {
            starts,
            ends,
            successors,
        }
    }

    /// The immediate post-dominator of each block; the number of blocks represents the end. Cooper, Harvey and
    /// Kennedy's algorithm on the reversed graph.
    fn immediate_post_dominators(&self) -> Vec<usize> {
        let count = self.starts.len();
        let exit = count;
        let mut predecessors = vec![Vec::new(); count + 1];
        for (block, successors) in self.successors.iter().enumerate() {
            successors
                .iter()
                .for_each(|&to| predecessors[to].push(block));
        }
        let order = Self::post_order_from(exit, &predecessors);
        let mut number = vec![usize::MAX; count + 1];
        order
            .iter()
            .enumerate()
            .for_each(|(at, &block)| number[block] = at);
        let mut parent = vec![usize::MAX; count + 1];
        parent[exit] = exit;
        let mut changed = true;
        while changed {
            changed = false;
            for &block in order.iter().rev().filter(|&&block| block != exit) {
                let mut found = usize::MAX;
                for &next in &self.successors[block] {
                    if parent[next] == usize::MAX {
                        continue;
                    }
                    found = if found == usize::MAX {
                        next
                    } else {
                        Self::common(&parent, &number, found, next)
                    };
                }
                if found != parent[block] {
                    parent[block] = found;
                    changed = true;
                }
            }
        }
        parent.truncate(count);
        parent
    }

    fn common(parent: &[usize], number: &[usize], mut a: usize, mut b: usize) -> usize {
        while a != b {
            while number[a] < number[b] {
                a = parent[a];
            }
            while number[b] < number[a] {
                b = parent[b];
            }
        }
        a
    }

    fn post_order_from(root: usize, edges: &[Vec<usize>]) -> Vec<usize> {
        let mut order = Vec::with_capacity(edges.len());
        let mut seen = vec![false; edges.len()];
        let mut stack = vec![(root, 0)];
        seen[root] = true;
        while let Some((block, next)) = stack.pop() {
            match edges[block].get(next) {
                Some(&to) => {
                    stack.push((block, next + 1));
                    if !seen[to] {
                        seen[to] = true;
                        stack.push((to, 0));
                    }
                }
                None => order.push(block),
            }
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn branch(target: u32, guarded: bool) -> Instruction {
        Instruction {
            op: Op::Branch { target },
            guard: guarded.then_some((0, false)),
        }
    }

    fn plain() -> Instruction {
        Instruction {
            op: Op::Prefetch,
            guard: None,
        }
    }

    fn exit() -> Instruction {
        Instruction {
            op: Op::Exit,
            guard: None,
        }
    }

    #[test]
    fn both_sides_of_a_branch_meet_behind_it() {
        // 0: if → 3; 1: else; 2: bra 4; 3: then; 4: exit
        let code = [branch(3, true), plain(), branch(4, false), plain(), exit()];
        assert_eq!(meeting_points(&code), [4, NEVER, NEVER, NEVER, NEVER]);
    }

    #[test]
    fn lanes_that_leave_a_loop_wait_behind_it() {
        // 0: body; 1: if → 0; 2: exit
        let code = [plain(), branch(0, true), exit()];
        assert_eq!(meeting_points(&code)[1], 2);
    }

    #[test]
    fn lanes_that_end_do_not_meet() {
        let code = [branch(2, true), exit(), plain(), exit()];
        assert_eq!(meeting_points(&code)[0], NEVER);
    }
}
