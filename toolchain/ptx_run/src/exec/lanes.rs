//! Executes operations across the lanes of a warp.

use super::{Flow, Run};
use crate::{
    block::Block,
    op::{Op, Reduce, Row, Shuffle, Vote},
    report::{Fault, Step},
    warp::{Warp, members},
};

impl Run<'_> {
    pub(super) fn lanes_op(
        &mut self,
        block: &mut Block,
        warp: &mut Warp,
        mask: u32,
        op: &Op,
    ) -> Step<Flow> {
        match *op {
            Op::Shuffle {
                f,
                d,
                valid,
                a,
                b,
                c,
                mask: with,
            } => {
                gathered(warp, mask, with)?;
                let known = warp.valid(a, mask)?;
                if warp.valid(b, mask)? & warp.valid(c, mask)? & mask != mask {
                    return Err(Box::new(Fault::UninitialisedRegister {
                        what: "a shuffle's lane",
                        read: None,
                    }));
                }
                let (values, b, c) = (*warp.word(a), warp.word(b), warp.word(c));
                let (mut out, mut have, mut inside) = (values, 0_u32, 0_u32);
                for lane in members(mask) {
                    let (from, is_inside) = source(f, lane as u32, b[lane], c[lane]);
                    let from = if is_inside { from as usize } else { lane };
                    out[lane] = values[from];
                    // From a lane that is not there, the result has no value.
                    have |= ((known & mask) >> from & 1) << lane;
                    inside |= u32::from(is_inside) << lane;
                }
                warp.set_word(d, mask, &out, have)?;
                if let Some(p) = valid {
                    warp.set_bits(p, mask, inside, u32::MAX);
                }
            }
            Op::Vote {
                f,
                d,
                a,
                negated,
                mask: with,
            } => {
                let with = gathered(warp, mask, with)?;
                let bits = bits_of(warp, a, negated);
                let result = match f {
                    Vote::Any => bits & with != 0,
                    Vote::All => bits & with == with,
                    Vote::Uniform => bits & with == 0 || bits & with == with,
                };
                warp.set_bits(d, mask, if result { u32::MAX } else { 0 }, u32::MAX);
            }
            Op::Ballot {
                d,
                a,
                negated,
                mask: with,
            } => {
                let with = gathered(warp, mask, with)?;
                let bits = bits_of(warp, a, negated);
                warp.set_word(d, mask, &[bits & with; 32], u32::MAX)?;
            }
            Op::Reduce {
                f,
                d,
                a,
                mask: with,
            } => {
                let with = gathered(warp, mask, with)?;
                if warp.valid(a, with)? & with != with {
                    return Err(Box::new(Fault::UninitialisedRegister {
                        what: "a reduced value",
                        read: None,
                    }));
                }
                let values = *warp.word(a);
                let result = members(with)
                    .map(|lane| values[lane])
                    .reduce(|x, y| match f {
                        Reduce::Add => x.wrapping_add(y),
                        Reduce::Min => x.min(y),
                        Reduce::MinSigned => (x as i32).min(y as i32) as u32,
                        Reduce::Max => x.max(y),
                        Reduce::MaxSigned => (x as i32).max(y as i32) as u32,
                        Reduce::And => x & y,
                        Reduce::Or => x | y,
                        Reduce::Xor => x ^ y,
                    })
                    .unwrap_or(0);
                warp.set_word(d, mask, &[result; 32], u32::MAX)?;
            }
            Op::Elect { d, p, mask: with } => {
                let with = gathered(warp, mask, with)?;
                let leader = with.trailing_zeros();
                if let Some(d) = d {
                    warp.set_word(d, mask, &[leader; 32], u32::MAX)?;
                }
                warp.set_bits(p, mask, 1 << leader, u32::MAX);
            }
            Op::ActiveMask { d } => warp.set_word(d, mask, &[mask; 32], u32::MAX)?,
            Op::MatchAny { d, a, mask: with } => {
                let with = gathered(warp, mask, with)?;
                let valid = warp.valid(a, with)?;
                let values = *warp.word(a);
                let out = std::array::from_fn(|lane| {
                    members(with)
                        .filter(|&other| values[other] == values[lane])
                        .map(|other| 1 << other)
                        .sum()
                });
                warp.set_word(d, mask, &out, valid)?;
            }
            Op::SyncWarp { mask: with } => {
                let with = gathered(warp, mask, with)?;
                let all = warp.publish(block.id, with);
                warp.replace(with, &all);
            }
            _ => unreachable!(),
        }
        Ok(Flow::Next)
    }
}

/// The lanes that an instruction names. All of them that are alive must be here.
fn gathered(warp: &mut Warp, mask: u32, row: Row) -> Step<u32> {
    let first = mask.trailing_zeros() as usize;
    let named = warp.word(row)[first] & warp.alive;
    if members(mask).any(|lane| warp.word(row)[lane] != warp.word(row)[first]) || named != mask {
        return Err(Box::new(Fault::Diverged {
            expected: named,
            got: mask,
        }));
    }
    Ok(named)
}

/// The lanes' votes. A lane without a value votes with the arbitrary contents of memory: code may ask whether any lane
/// has work, including lanes whose results are not used.
fn bits_of(warp: &Warp, row: Row, negated: bool) -> u32 {
    let bits = warp.p[row as usize];
    if negated { !bits } else { bits }
}

/// The source lane of a shuffle, and whether it is in range.
fn source(f: Shuffle, lane: u32, b: u32, c: u32) -> (u32, bool) {
    let (clamp, segment) = (c & 0x1F, c >> 8 & 0x1F);
    let max = lane & segment | clamp & !segment;
    let min = lane & segment;
    let b = b & 0x1F;
    match f {
        Shuffle::Up => (lane.wrapping_sub(b), lane as i32 - b as i32 >= max as i32),
        Shuffle::Down => (lane + b, lane + b <= max),
        Shuffle::Bfly => (lane ^ b, lane ^ b <= max),
        Shuffle::Idx => {
            let from = min | b & !segment;
            (from, from <= max)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shuffles_stay_in_their_segment() {
        // Whole warp.
        assert_eq!(source(Shuffle::Idx, 5, 9, 31), (9, true));
        assert_eq!(source(Shuffle::Bfly, 5, 1, 31), (4, true));
        assert_eq!(source(Shuffle::Down, 20, 8, 31), (28, true));
        assert!(!source(Shuffle::Down, 28, 8, 31).1);
        assert_eq!(source(Shuffle::Up, 20, 8, 0), (12, true));
        assert!(!source(Shuffle::Up, 4, 8, 0).1);
        // Segments of four: 0x1C1F is 7199.
        assert_eq!(source(Shuffle::Idx, 22, 1, 0x1C1F), (21, true));
        assert_eq!(source(Shuffle::Idx, 22, 7, 0x1C1F), (23, true));
    }
}
