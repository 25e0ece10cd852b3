//! Decodes operations of whole warps and warpgroups, barriers and fences.

use super::{Decoded, Decoder, bit, maybe_not, optional_word, scalar::exactly, word_written};
use crate::{
    op::{Add, Element, Op, OperandA, Reduce, Shuffle, Vote, Wgmma},
    parse::{Class, Operand},
};

impl Decoder<'_> {
    pub(super) fn warp(&mut self, parts: &[&str], operands: &[Operand]) -> Option<Decoded<Op>> {
        Some(match parts {
            ["shfl", "sync", mode, "b32"] => self.shuffle(mode, operands),
            ["vote", "sync", mode @ ("any" | "all" | "uni"), "pred"] => (|| {
                let f = match *mode {
                    "any" => Vote::Any,
                    "all" => Vote::All,
                    _ => Vote::Uniform,
                };
                let [d, a, mask] = exactly(operands)?;
                let (a, negated) = maybe_not(a)?;
                Ok(Op::Vote {
                    f,
                    d: bit(d)?,
                    a,
                    negated,
                    mask: self.word(mask)?,
                })
            })(),
            ["vote", "sync", "ballot", "b32"] => (|| {
                let [d, a, mask] = exactly(operands)?;
                let (a, negated) = maybe_not(a)?;
                Ok(Op::Ballot {
                    d: word_written(d)?,
                    a,
                    negated,
                    mask: self.word(mask)?,
                })
            })(),
            ["redux", "sync", f, kind] => (|| {
                let f = match (*f, *kind) {
                    ("add", _) => Reduce::Add,
                    ("min", "u32") => Reduce::Min,
                    ("min", "s32") => Reduce::MinSigned,
                    ("max", "u32") => Reduce::Max,
                    ("max", "s32") => Reduce::MaxSigned,
                    ("and", _) => Reduce::And,
                    ("or", _) => Reduce::Or,
                    ("xor", _) => Reduce::Xor,
                    _ => return Err("a reduction".into()),
                };
                let [d, a, mask] = exactly(operands)?;
                Ok(Op::Reduce {
                    f,
                    d: word_written(d)?,
                    a: self.word(a)?,
                    mask: self.word(mask)?,
                })
            })(),
            ["elect", "sync"] => (|| {
                let [d, mask] = exactly(operands)?;
                let (d, p) = match d {
                    Operand::Pair(d, p) => (optional_word(d)?, bit(p)?),
                    p => (None, bit(p)?),
                };
                Ok(Op::Elect {
                    d,
                    p,
                    mask: self.word(mask)?,
                })
            })(),
            ["activemask", "b32"] => (|| {
                let [d] = exactly(operands)?;
                Ok(Op::ActiveMask {
                    d: word_written(d)?,
                })
            })(),
            ["match", "any", "sync", "b32"] => (|| {
                let [d, a, mask] = exactly(operands)?;
                Ok(Op::MatchAny {
                    d: word_written(d)?,
                    a: self.word(a)?,
                    mask: self.word(mask)?,
                })
            })(),
            ["bar", "warp", "sync"] => (|| {
                let [mask] = exactly(operands)?;
                Ok(Op::SyncWarp {
                    mask: self.word(mask)?,
                })
            })(),
            ["nanosleep", "u32"] => Ok(Op::Nanosleep),
            [
                "barrier",
                "cluster",
                "arrive",
                rest @ ("release" | "relaxed" | "aligned"),
                ..,
            ] => Ok(Op::ClusterArrive {
                releases: *rest != "relaxed",
            }),
            ["barrier", "cluster", "wait", ..] => Ok(Op::ClusterWait),
            ["bar" | "barrier", rest @ ..] => self.barrier(rest, parts[0] == "bar", operands),
            // Every fence is treated as one for the whole GPU. So a fence that is only for the block may hide a race
            // between blocks.
            ["membar", _] | ["fence", "acq_rel" | "sc", _] => Ok(Op::Fence),
            ["fence", "proxy", "async"] => Ok(Op::FenceProxyAsync {
                shared: true,
                global: true,
            }),
            ["fence", "proxy", "async", "shared::cta"] => Ok(Op::FenceProxyAsync {
                shared: true,
                global: false,
            }),
            ["fence", "proxy", "async", "global"] => Ok(Op::FenceProxyAsync {
                shared: false,
                global: true,
            }),
            ["fence", "mbarrier_init", "release", "cluster"] => Ok(Op::FenceBarrierInit),
            [
                "setmaxnreg",
                mode @ ("inc" | "dec"),
                "sync",
                "aligned",
                "u32",
            ] => (|| {
                let [registers] = exactly(operands)?;
                Ok(Op::SetMaxRegisters {
                    registers: Self::number(registers)?,
                    increase: *mode == "inc",
                })
            })(),
            ["griddepcontrol", "wait"] => Ok(Op::GridWait),
            ["griddepcontrol", "launch_dependents"] => Ok(Op::GridLaunch),
            [
                "mma",
                "sync",
                "aligned",
                "m16n8k16",
                "row",
                "col",
                "f32",
                a,
                b,
                "f32",
            ] if a == b => (|| {
                let [d, x, y, c] = exactly(operands)?;
                let (d, a4, b, c) = (
                    self.fixed(d)?,
                    self.fixed(x)?,
                    self.fixed(y)?,
                    self.fixed(c)?,
                );
                Ok(Op::Mma {
                    element: element(a)?,
                    d,
                    a: a4,
                    b,
                    c,
                })
            })(),
            [
                "mma",
                "sync",
                "aligned",
                "m16n8k8",
                "row",
                "col",
                "f32",
                a,
                b,
                "f32",
            ] if a == b => (|| {
                let [d, x, y, c] = exactly(operands)?;
                let (d, a2, [b], c) = (
                    self.fixed(d)?,
                    self.fixed(x)?,
                    self.fixed(y)?,
                    self.fixed(c)?,
                );
                Ok(Op::Mma8 {
                    element: element(a)?,
                    d,
                    a: a2,
                    b,
                    c,
                })
            })(),
            [
                "ldmatrix",
                "sync",
                "aligned",
                "m8n8",
                rest @ ..,
                "shared",
                "b16",
            ] => (|| {
                let (count, transposed) = matrices(rest)?;
                let [d, from] = exactly(operands)?;
                let d = self.words(d)?;
                check(d.len(), count)?;
                Ok(Op::LoadMatrix {
                    transposed,
                    d,
                    address: self.address(from)?,
                })
            })(),
            [
                "stmatrix",
                "sync",
                "aligned",
                "m8n8",
                rest @ ..,
                "shared",
                "b16",
            ] => (|| {
                let (count, transposed) = matrices(rest)?;
                let [to, values] = exactly(operands)?;
                let values = self.words(values)?;
                check(values.len(), count)?;
                Ok(Op::StoreMatrix {
                    transposed,
                    values,
                    address: self.address(to)?,
                })
            })(),
            ["movmatrix", "sync", "aligned", "m8n8", "trans", "b16"] => (|| {
                let [d, a] = exactly(operands)?;
                Ok(Op::MoveMatrix {
                    d: word_written(d)?,
                    a: self.word(a)?,
                })
            })(),
            ["wgmma", "fence", "sync", "aligned"] => Ok(Op::WgmmaFence),
            ["wgmma", "commit_group", "sync", "aligned"] => Ok(Op::WgmmaCommit),
            ["wgmma", "wait_group", "sync", "aligned"] => (|| {
                let [pending] = exactly(operands)?;
                Ok(Op::WgmmaWait {
                    pending: Self::number(pending)?,
                })
            })(),
            ["wgmma", "mma_async", "sync", "aligned", shape, "f32", a, b] if a == b => {
                self.wgmma(shape, a, operands)
            }
            _ => return None,
        })
    }

    fn shuffle(&mut self, mode: &str, operands: &[Operand]) -> Decoded<Op> {
        let f = match mode {
            "idx" => Shuffle::Idx,
            "up" => Shuffle::Up,
            "down" => Shuffle::Down,
            "bfly" => Shuffle::Bfly,
            _ => return Err("a shuffle".into()),
        };
        let [d, a, b, c, mask] = exactly(operands)?;
        let (d, valid) = match d {
            Operand::Pair(d, p) => (word_written(d)?, Some(bit(p)?)),
            d => (word_written(d)?, None),
        };
        let (a, b, c, mask) = (
            self.word(a)?,
            self.word(b)?,
            self.word(c)?,
            self.word(mask)?,
        );
        Ok(Op::Shuffle {
            f,
            d,
            valid,
            a,
            b,
            c,
            mask,
        })
    }

    fn barrier(&mut self, rest: &[&str], is_bar: bool, operands: &[Operand]) -> Decoded<Op> {
        let rest: Vec<&str> = rest
            .iter()
            .filter(|part| !matches!(**part, "cta"))
            .copied()
            .collect();
        let aligned = is_bar || rest.contains(&"aligned");
        match rest.first() {
            Some(&"red") => {
                if rest[1..] != ["or", "pred"] && rest[1..] != ["or", "pred", "aligned"] {
                    return Err("a barrier with this reduction".into());
                }
                let [d, id, count, a] = exactly(operands)?;
                let vote = Some((bit(d)?, bit(a)?));
                Ok(Op::Barrier {
                    id: self.word(id)?,
                    count: Some(self.word(count)?),
                    arrive_only: false,
                    aligned,
                    vote,
                })
            }
            Some(&("sync" | "arrive")) => {
                let (id, count) = match operands {
                    [id] => (self.word(id)?, None),
                    [id, count] => (self.word(id)?, Some(self.word(count)?)),
                    _ => return Err("the number of operands".into()),
                };
                let arrive_only = rest[0] == "arrive";
                Ok(Op::Barrier {
                    id,
                    count,
                    arrive_only,
                    aligned,
                    vote: None,
                })
            }
            _ => Err("a barrier of this kind".into()),
        }
    }

    fn wgmma(&mut self, shape: &str, element_name: &str, operands: &[Operand]) -> Decoded<Op> {
        let element = match element_name {
            "e4m3" => Element::E4m3,
            name => element(name)?,
        };
        let depth = match element {
            Element::E4m3 => "k32",
            Element::F16 | Element::Bf16 => "k16",
        };
        let n: u32 = shape
            .strip_prefix("m64n")
            .and_then(|rest| rest.strip_suffix(depth))
            .and_then(|n| n.parse().ok())
            .ok_or("a product of this shape")?;
        let [d, a, b, add, rest @ ..] = operands else {
            return Err("the number of operands".into());
        };
        let d = self.words(d)?;
        check(d.len(), n as usize / 2)?;
        let mut flags = rest
            .iter()
            .map(Self::number)
            .collect::<Result<Vec<_>, _>>()?;
        if flags.len() < 2 || flags[..2] != [1, 1] {
            return Err("a product with negated operands".into());
        }
        flags.drain(..2);
        let (a, transposed_b) = match (a, flags.as_slice()) {
            // 8-bit operands are always K-major and have no such modifier.
            (Operand::List(_), []) if element.bytes() == 1 => {
                (OperandA::Registers(self.fixed(a)?), false)
            }
            (a, []) if element.bytes() == 1 => (OperandA::Shared(self.long(a)?, false), false),
            _ if element.bytes() == 1 => return Err("the number of operands".into()),
            (Operand::List(_), &[b]) => (OperandA::Registers(self.fixed(a)?), b == 1),
            (a, &[ta, tb]) => (OperandA::Shared(self.long(a)?, ta == 1), tb == 1),
            _ => return Err("the number of operands".into()),
        };
        let add = match add {
            Operand::Immediate(0) => Add::Never,
            Operand::Immediate(_) => Add::Always,
            Operand::Register(Class::Predicate, row) => Add::If(*row),
            _ => return Err("scale-d".into()),
        };
        let b = self.long(b)?;
        Ok(Op::Wgmma(Box::new(Wgmma {
            element,
            n,
            d,
            a,
            b,
            transposed_b,
            add,
        })))
    }
}

fn element(name: &str) -> Decoded<Element> {
    match name {
        "f16" => Ok(Element::F16),
        "bf16" => Ok(Element::Bf16),
        _ => Err(format!("products of {name}")),
    }
}

fn matrices(rest: &[&str]) -> Decoded<(usize, bool)> {
    match rest {
        ["x1"] => Ok((1, false)),
        ["x2"] => Ok((2, false)),
        ["x4"] => Ok((4, false)),
        ["x1", "trans"] => Ok((1, true)),
        ["x2", "trans"] => Ok((2, true)),
        ["x4", "trans"] => Ok((4, true)),
        _ => Err("matrices of this kind".into()),
    }
}

fn check(got: usize, expected: usize) -> Decoded<()> {
    if got == expected {
        return Ok(());
    }
    Err(format!("{got} registers where {expected} should be"))
}
