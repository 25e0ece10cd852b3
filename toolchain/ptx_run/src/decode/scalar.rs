//! Decodes arithmetic, moves, comparisons and branches.

use super::{Decoded, Decoder, bit, long_written, optional_word, word_written};
use crate::{
    op::{Bit2, Compare, Kind, Long2, Op, Shift, Widen, Word1, Word2, Word3},
    parse::{Class, Operand},
};

impl Decoder<'_> {
    pub(super) fn scalar(&mut self, parts: &[&str], operands: &[Operand]) -> Option<Decoded<Op>> {
        let word2 = Some::<Word2>;
        let f = match parts {
            ["add", "s32" | "u32"] => word2(Word2::Add),
            ["sub", "s32" | "u32"] => word2(Word2::Sub),
            ["mul", "lo", "s32" | "u32"] => word2(Word2::Mul),
            ["mul", "hi", "u32"] => word2(Word2::MulHi),
            ["mul", "hi", "s32"] => word2(Word2::MulHiSigned),
            ["and", "b32" | "b16"] => word2(Word2::And),
            ["or", "b32" | "b16"] => word2(Word2::Or),
            ["xor", "b32" | "b16"] => word2(Word2::Xor),
            ["shl", "b32"] => word2(Word2::Shl),
            ["shr", "u32" | "b32"] => word2(Word2::Shr),
            ["shr", "s32"] => word2(Word2::ShrSigned),
            ["shl", "b16"] => word2(Word2::Shl16),
            ["shr", "u16"] => word2(Word2::Shr16),
            ["add", "s16" | "u16"] => word2(Word2::Add16),
            ["sub", "s16" | "u16"] => word2(Word2::Sub16),
            ["mul", "lo", "s16" | "u16"] => word2(Word2::Mul16),
            ["min", "u32"] => word2(Word2::Min),
            ["min", "s32"] => word2(Word2::MinSigned),
            ["max", "u32"] => word2(Word2::Max),
            ["max", "s32"] => word2(Word2::MaxSigned),
            ["div", "u32"] => word2(Word2::Div),
            ["div", "s32"] => word2(Word2::DivSigned),
            ["rem", "u32"] => word2(Word2::Rem),
            ["rem", "s32"] => word2(Word2::RemSigned),
            ["add", "f32"] | ["add", "rn", "f32"] => word2(Word2::FAdd),
            ["sub", "f32"] | ["sub", "rn", "f32"] => word2(Word2::FSub),
            ["mul", "f32"] | ["mul", "rn", "f32"] => word2(Word2::FMul),
            ["min", "f32"] => word2(Word2::FMin),
            ["max", "f32"] => word2(Word2::FMax),
            ["max", "bf16x2"] => word2(Word2::FMaxBf16s),
            ["max", "f16x2"] => word2(Word2::FMaxF16s),
            ["mul", "rn", "f16x2"] => word2(Word2::FMulF16s),
            ["div", "rn", "f32"] => word2(Word2::FDiv),
            ["cvt", "rn", "bf16x2", "f32"] => word2(Word2::PackBf16),
            ["cvt", "rn", "satfinite", "e4m3x2", "f32"] => word2(Word2::PackE4m3),
            ["cvt", "rn", "satfinite", "e5m2x2", "f32"] => word2(Word2::PackE5m2),
            ["cvt", "rn", "f16x2", "f32"] => word2(Word2::PackF16),
            _ => None,
        };
        if let Some(f) = f {
            return Some(self.word2(f, operands));
        }
        self.one(parts, operands)
            .or_else(|| self.longs(parts, operands))
            .or_else(|| self.moves(parts, operands))
            .or_else(|| self.predicates(parts, operands))
            .or_else(|| self.control(parts, operands))
    }

    fn word2(&mut self, f: Word2, operands: &[Operand]) -> Decoded<Op> {
        let [d, a, b] = exactly(operands)?;
        Ok(Op::Word2 {
            f,
            d: word_written(d)?,
            a: self.word(a)?,
            b: self.word(b)?,
        })
    }

    fn one(&mut self, parts: &[&str], operands: &[Operand]) -> Option<Decoded<Op>> {
        let f = match parts {
            ["not", "b32"] => Word1::Not,
            ["neg", "s32"] => Word1::Neg,
            ["neg", "f32"] => Word1::FNeg,
            ["abs", "f32"] => Word1::FAbs,
            ["popc", "b32"] => Word1::Popc,
            ["clz", "b32"] => Word1::Clz,
            ["brev", "b32"] => Word1::BrevBits,
            ["ex2", "approx", "ftz", "f32"] => Word1::Ex2,
            ["lg2", "approx", "ftz", "f32"] => Word1::Lg2,
            ["rcp", "approx", "ftz", "f32"] => Word1::Rcp,
            ["rcp", "rn", "f32"] => Word1::RcpNearest,
            ["rsqrt", "approx", "ftz", "f32"] => Word1::Rsqrt,
            ["sqrt", "approx", "ftz", "f32"] => Word1::Sqrt,
            ["tanh", "approx", "f32"] => Word1::Tanh,
            ["sin", "approx", "ftz", "f32"] => Word1::Sin,
            ["cos", "approx", "ftz", "f32"] => Word1::Cos,
            ["cvt", "u16", "u32"] | ["cvt", "u32", "u16"] => Word1::Low16,
            ["cvt", "s32", "s16"] => Word1::SignExtend16,
            ["cvt", "rn", "f32", "u32"] => Word1::F32FromU32,
            ["cvt", "rn", "f32", "s32"] => Word1::F32FromI32,
            ["cvt", "rzi", "u32", "f32"] => Word1::U32FromF32,
            ["cvt", "rzi", "s32", "f32"] => Word1::I32FromF32,
            ["cvt", "f32", "f16"] => Word1::F32FromF16,
            ["cvt", "rn", "f16x2", "e4m3x2"] => Word1::UnpackE4m3,
            ["cvt", "rn", "f16x2", "e5m2x2"] => Word1::UnpackE5m2,
            _ => return None,
        };
        Some((|| {
            let [d, a] = exactly(operands)?;
            Ok(Op::Word1 {
                f,
                d: word_written(d)?,
                a: self.word(a)?,
            })
        })())
    }

    fn longs(&mut self, parts: &[&str], operands: &[Operand]) -> Option<Decoded<Op>> {
        let two = match parts {
            ["add", "s64" | "u64"] => Some(Long2::Add),
            ["sub", "s64" | "u64"] => Some(Long2::Sub),
            ["mul", "lo", "s64" | "u64"] => Some(Long2::Mul),
            ["mul", "hi", "u64"] => Some(Long2::MulHigh),
            ["and", "b64"] => Some(Long2::And),
            ["or", "b64"] => Some(Long2::Or),
            ["xor", "b64"] => Some(Long2::Xor),
            ["min", "u64"] => Some(Long2::Min),
            ["min", "s64"] => Some(Long2::MinSigned),
            ["max", "u64"] => Some(Long2::Max),
            ["max", "s64"] => Some(Long2::MaxSigned),
            ["div", "u64"] => Some(Long2::Div),
            ["div", "s64"] => Some(Long2::DivSigned),
            ["rem", "u64"] => Some(Long2::Rem),
            ["rem", "s64"] => Some(Long2::RemSigned),
            _ => None,
        };
        if let Some(f) = two {
            return Some((|| {
                let [d, a, b] = exactly(operands)?;
                Ok(Op::Long2 {
                    f,
                    d: long_written(d)?,
                    a: self.long(a)?,
                    b: self.long(b)?,
                })
            })());
        }
        let shift = match parts {
            ["shl", "b64"] => Some(Shift::Left),
            ["shr", "u64" | "b64"] => Some(Shift::Right),
            ["shr", "s64"] => Some(Shift::RightSigned),
            _ => None,
        };
        if let Some(f) = shift {
            return Some((|| {
                let [d, a, b] = exactly(operands)?;
                Ok(Op::ShiftLong {
                    f,
                    d: long_written(d)?,
                    a: self.long(a)?,
                    b: self.word(b)?,
                })
            })());
        }
        Some(match parts {
            ["mad", "lo", "s32" | "u32"] => self.word3(Word3::Mad, operands),
            ["mad", "lo", "s16" | "u16"] => self.word3(Word3::Mad16, operands),
            ["fma", "rn", "f32"] => self.word3(Word3::Fma, operands),
            ["fma", "rn", "f16x2"] => self.word3(Word3::FmaF16s, operands),
            ["bfe", "u32"] => self.word3(Word3::Bfe, operands),
            ["bfe", "s32"] => self.word3(Word3::BfeSigned, operands),
            ["prmt", "b32"] => self.word3(Word3::PermuteBytes, operands),
            ["mad", "lo", "s64" | "u64"] => (|| {
                let [d, a, b, c] = exactly(operands)?;
                Ok(Op::MadLong {
                    d: long_written(d)?,
                    a: self.long(a)?,
                    b: self.long(b)?,
                    c: self.long(c)?,
                })
            })(),
            ["bfe", "u64"] => (|| {
                let [d, a, b, c] = exactly(operands)?;
                Ok(Op::BfeLong {
                    d: long_written(d)?,
                    a: self.long(a)?,
                    b: self.word(b)?,
                    c: self.word(c)?,
                })
            })(),
            ["neg", "s64"] => (|| {
                let [d, a] = exactly(operands)?;
                Ok(Op::NegLong {
                    d: long_written(d)?,
                    a: self.long(a)?,
                })
            })(),
            ["not", "b64"] => (|| {
                let [d, a] = exactly(operands)?;
                Ok(Op::NotLong {
                    d: long_written(d)?,
                    a: self.long(a)?,
                })
            })(),
            ["mul", "wide", kind @ ("u32" | "s32")] => (|| {
                let [d, a, b] = exactly(operands)?;
                let (a, b) = (self.word(a)?, self.word(b)?);
                Ok(Op::MulWide {
                    signed: *kind == "s32",
                    d: long_written(d)?,
                    a,
                    b,
                    c: None,
                })
            })(),
            ["mad", "wide", kind @ ("u32" | "s32")] => (|| {
                let [d, a, b, c] = exactly(operands)?;
                let (a, b, c) = (self.word(a)?, self.word(b)?, Some(self.long(c)?));
                Ok(Op::MulWide {
                    signed: *kind == "s32",
                    d: long_written(d)?,
                    a,
                    b,
                    c,
                })
            })(),
            ["mul", "wide", "u16"] => (|| {
                let [d, a, b] = exactly(operands)?;
                Ok(Op::MulWide16 {
                    d: word_written(d)?,
                    a: self.word(a)?,
                    b: self.word(b)?,
                })
            })(),
            ["cvt", "u64", "u32"] => self.widened(Widen::Unsigned, operands),
            ["cvt", "s64", "s32"] => self.widened(Widen::Signed, operands),
            ["cvt", "rzi", "u64", "f32"] => self.widened(Widen::U64FromF32, operands),
            ["cvt", "rzi", "s64", "f32"] => self.widened(Widen::I64FromF32, operands),
            ["cvt", "u32", "u64"] => (|| {
                let [d, a] = exactly(operands)?;
                Ok(Op::WordFromLong {
                    d: word_written(d)?,
                    a: self.long(a)?,
                })
            })(),
            _ => return None,
        })
    }

    fn widened(&mut self, f: Widen, operands: &[Operand]) -> Decoded<Op> {
        let [d, a] = exactly(operands)?;
        Ok(Op::LongFromWord {
            f,
            d: long_written(d)?,
            a: self.word(a)?,
        })
    }

    fn word3(&mut self, f: Word3, operands: &[Operand]) -> Decoded<Op> {
        let [d, a, b, c] = exactly(operands)?;
        Ok(Op::Word3 {
            f,
            d: word_written(d)?,
            a: self.word(a)?,
            b: self.word(b)?,
            c: self.word(c)?,
        })
    }

    fn moves(&mut self, parts: &[&str], operands: &[Operand]) -> Option<Decoded<Op>> {
        let ["mov", kind] = parts else { return None };
        Some((|| {
            let [d, a] = exactly(operands)?;
            Ok(match (d, a) {
                (Operand::List(halves), a) => {
                    let [low, high] = exactly(halves)?;
                    let (low, high) = (optional_word(low)?, optional_word(high)?);
                    match *kind {
                        "b64" => Op::UnpackLong {
                            low,
                            high,
                            a: self.long(a)?,
                        },
                        "b32" => Op::UnpackWord {
                            low,
                            high,
                            a: self.word(a)?,
                        },
                        _ => return Err("a move of halves".into()),
                    }
                }
                (d, Operand::List(halves)) => {
                    let [low, high] = exactly(halves)?;
                    let (low, high) = (self.word(low)?, self.word(high)?);
                    match *kind {
                        "b64" => Op::PackLong {
                            d: long_written(d)?,
                            low,
                            high,
                        },
                        "b32" => Op::PackWord {
                            d: word_written(d)?,
                            low,
                            high,
                        },
                        _ => return Err("a move of halves".into()),
                    }
                }
                (Operand::Register(Class::Predicate, d), a) => Op::MoveBit {
                    d: *d,
                    a: self.bit(a)?,
                },
                (Operand::Register(Class::Word, d), Operand::Special(name)) if name == "%smid" => {
                    Op::Smid { d: *d }
                }
                (Operand::Register(class, d), Operand::Special(name))
                    if matches!(
                        name.as_str(),
                        "%clock" | "%clock64" | "%globaltimer" | "%globaltimer_lo"
                    ) =>
                {
                    Op::Clock {
                        d: *d,
                        long: *class == Class::Long,
                    }
                }
                (Operand::Register(Class::Word, d), a) => Op::Word1 {
                    f: Word1::Move,
                    d: *d,
                    a: self.word(a)?,
                },
                (Operand::Register(Class::Long, d), a) => Op::MoveLong {
                    d: *d,
                    a: self.long(a)?,
                },
                _ => return Err("a move of something else".into()),
            })
        })())
    }

    fn predicates(&mut self, parts: &[&str], operands: &[Operand]) -> Option<Decoded<Op>> {
        Some(match parts {
            ["setp", compare, kind] => (|| {
                let (compare, nan) = match *compare {
                    "eq" => (Compare::Eq, false),
                    "ne" => (Compare::Ne, false),
                    "lt" | "lo" => (Compare::Lt, false),
                    "le" | "ls" => (Compare::Le, false),
                    "gt" | "hi" => (Compare::Gt, false),
                    "ge" | "hs" => (Compare::Ge, false),
                    "equ" => (Compare::Eq, true),
                    "neu" => (Compare::Ne, true),
                    "ltu" => (Compare::Lt, true),
                    "leu" => (Compare::Le, true),
                    "gtu" => (Compare::Gt, true),
                    "geu" => (Compare::Ge, true),
                    "num" => (Compare::Always, false),
                    "nan" => (Compare::Never, true),
                    _ => return Err("a comparison".into()),
                };
                let [p, a, b] = exactly(operands)?;
                let p = bit(p)?;
                if matches!(*kind, "b64" | "u64" | "s64") {
                    return Ok(Op::SetLong {
                        compare,
                        signed: *kind == "s64",
                        p,
                        a: self.long(a)?,
                        b: self.long(b)?,
                    });
                }
                let kind = match *kind {
                    "b32" | "u32" | "b16" | "u16" => Kind::Unsigned,
                    "s32" => Kind::Signed,
                    "f32" if nan => Kind::FloatOrNan,
                    "f32" => Kind::Float,
                    _ => return Err("a comparison of this type".into()),
                };
                let (a, b) = (self.word(a)?, self.word(b)?);
                Ok(Op::SetWord {
                    compare,
                    kind,
                    p,
                    a,
                    b,
                })
            })(),
            ["selp", "b64" | "u64" | "s64"] => (|| {
                let [d, a, b, p] = exactly(operands)?;
                Ok(Op::SelectLong {
                    d: long_written(d)?,
                    a: self.long(a)?,
                    b: self.long(b)?,
                    p: bit(p)?,
                })
            })(),
            ["selp", "b32" | "u32" | "s32" | "f32" | "b16" | "u16"] => (|| {
                let [d, a, b, p] = exactly(operands)?;
                Ok(Op::SelectWord {
                    d: word_written(d)?,
                    a: self.word(a)?,
                    b: self.word(b)?,
                    p: bit(p)?,
                })
            })(),
            ["and" | "or" | "xor", "pred"] => (|| {
                let f = match parts[0] {
                    "and" => Bit2::And,
                    "or" => Bit2::Or,
                    _ => Bit2::Xor,
                };
                let [d, a, b] = exactly(operands)?;
                Ok(Op::Bit2 {
                    f,
                    d: bit(d)?,
                    a: self.bit(a)?,
                    b: self.bit(b)?,
                })
            })(),
            ["not", "pred"] => (|| {
                let [d, a] = exactly(operands)?;
                Ok(Op::NotBit {
                    d: bit(d)?,
                    a: bit(a)?,
                })
            })(),
            _ => return None,
        })
    }

    fn control(&mut self, parts: &[&str], operands: &[Operand]) -> Option<Decoded<Op>> {
        Some(match parts {
            ["bra"] | ["bra", "uni"] => match operands {
                [Operand::Target(target)] => Ok(Op::Branch {
                    target: *target as u32,
                }),
                _ => Err("a branch without a target".into()),
            },
            ["brx", "idx"] => (|| {
                let [index, Operand::List(list)] = operands else {
                    return Err("a branch without targets".into());
                };
                let targets = list.iter().map(|target| match target {
                    Operand::Target(target) => Ok(*target as u32),
                    _ => Err("a branch without a target".to_owned()),
                });
                Ok(Op::BranchTable {
                    index: self.word(index)?,
                    targets: targets.collect::<Result<_, _>>()?,
                })
            })(),
            ["ret"] | ["exit"] => Ok(Op::Exit),
            ["trap"] => Ok(Op::Trap {
                what: "trap".into(),
            }),
            ["call", "uni"] => match operands.first() {
                Some(Operand::Name(name)) if name.contains("panicking") => Ok(Op::Trap {
                    what: name.as_str().into(),
                }),
                _ => Err("a call".into()),
            },
            _ => return None,
        })
    }
}

/// Checks the number of operands.
pub(super) fn exactly<const N: usize>(operands: &[Operand]) -> Decoded<&[Operand; N]> {
    operands
        .try_into()
        .map_err(|_| format!("{} operands where {N} should be", operands.len()))
}
