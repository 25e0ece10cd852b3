//! Decodes loads, stores, atomics and address operations.

use super::{Decoded, Decoder, long_written, scalar::exactly, word_written};
use crate::{
    op::{Atomic, Op, Order, Scope, Space},
    parse::{Class, Operand},
};

/// The modifiers of an access.
struct Access {
    space: Space,
    order: Order,
    scope: Scope,
    bytes: u8,
    long: bool,
    count: usize,
    hint: bool,
    read_only: bool,
}

impl Access {
    fn parse(parts: &[&str]) -> Decoded<Self> {
        let mut access = Self {
            space: Space::Generic,
            order: Order::Weak,
            scope: Scope::Gpu,
            bytes: 0,
            long: false,
            count: 1,
            hint: false,
            read_only: false,
        };
        for part in &parts[1..] {
            match *part {
                "global" => access.space = Space::Global,
                "shared" | "shared::cta" => access.space = Space::Shared,
                "shared::cluster" => access.space = Space::Cluster,
                "param" => access.space = Space::Param,
                "nc" => access.read_only = true,
                "cs" | "cg" | "ca" | "L1::no_allocate" => {}
                "L2::cache_hint" => access.hint = true,
                "relaxed" | "volatile" => access.order = Order::Relaxed,
                "acquire" => access.order = Order::Acquire,
                "release" => access.order = Order::Release,
                "acq_rel" => access.order = Order::AcqRel,
                "cta" => access.scope = Scope::Cta,
                "gpu" | "sys" => access.scope = Scope::Gpu,
                "v2" => access.count = 2,
                "v4" => access.count = 4,
                "b8" | "u8" => access.bytes = 1,
                "b16" | "u16" => access.bytes = 2,
                "b32" | "u32" | "s32" | "f32" => access.bytes = 4,
                "b64" | "u64" | "s64" => (access.bytes, access.long) = (8, true),
                _ => return Err(format!("the modifier .{part}")),
            }
        }
        Ok(access)
    }
}

impl Decoder<'_> {
    pub(super) fn memory(&mut self, parts: &[&str], operands: &[Operand]) -> Option<Decoded<Op>> {
        Some(match parts {
            ["ld", ..] => self.load(parts, operands),
            ["st", "async", ..] => return None,
            ["st", ..] => self.store(parts, operands),
            ["atom" | "red", ..] => self.atomic(parts, operands),
            ["cvta", "to", space, "u64"] => (|| {
                let [d, a] = exactly(operands)?;
                Ok(Op::FromGeneric {
                    space: window(space)?,
                    d: long_written(d)?,
                    a: self.long(a)?,
                })
            })(),
            ["cvta", space, "u64"] => (|| {
                let [d, a] = exactly(operands)?;
                Ok(Op::ToGeneric {
                    space: window(space)?,
                    d: long_written(d)?,
                    a: self.long(a)?,
                })
            })(),
            ["mapa", "shared::cluster", "u32"] => (|| {
                let [d, a, rank] = exactly(operands)?;
                Ok(Op::MapRank {
                    d: word_written(d)?,
                    a: self.word(a)?,
                    rank: self.word(rank)?,
                })
            })(),
            ["prefetch", "global", "L1" | "L2" | "L2::evict_last"] | ["prefetch", "tensormap"] => {
                Ok(Op::Prefetch)
            }
            [
                "createpolicy",
                "fractional",
                "L2::evict_first" | "L2::evict_last" | "L2::evict_unchanged",
                "b64",
            ] => (|| {
                let d = operands.first().ok_or("no operand")?;
                Ok(Op::MoveLong {
                    d: long_written(d)?,
                    a: self.long_constant(0),
                })
            })(),
            _ => return None,
        })
    }

    fn registers(
        &mut self,
        access: &Access,
        operand: &Operand,
        written: bool,
    ) -> Decoded<Box<[u32]>> {
        let list = match operand {
            Operand::List(list) => list.as_slice(),
            one => std::slice::from_ref(one),
        };
        if list.len() != access.count {
            return Err(format!(
                "{} registers where {} should be",
                list.len(),
                access.count
            ));
        }
        list.iter()
            .map(|operand| match (access.long, written) {
                (true, true) => long_written(operand),
                (true, false) => self.long(operand),
                (false, true) => word_written(operand),
                (false, false) => self.word(operand),
            })
            .collect()
    }

    fn load(&mut self, parts: &[&str], operands: &[Operand]) -> Decoded<Op> {
        let mut access = Access::parse(parts)?;
        let (d, from) = match operands {
            [d, from] => (d, from),
            [d, from, _policy] if access.hint => (d, from),
            _ => return Err("the number of operands".into()),
        };
        // A wider register takes the value zero-extended.
        access.long |= matches!(d, Operand::Register(Class::Long, _));
        let d = self.registers(&access, d, true)?;
        let address = self.address(from)?;
        let Access {
            space,
            order,
            scope,
            bytes,
            long,
            read_only,
            ..
        } = access;
        Ok(Op::Load {
            space,
            order,
            scope,
            bytes,
            long,
            read_only,
            d,
            address,
        })
    }

    fn store(&mut self, parts: &[&str], operands: &[Operand]) -> Decoded<Op> {
        let access = Access::parse(parts)?;
        let (to, values) = match operands {
            [to, values] => (to, values),
            [to, values, _policy] if access.hint => (to, values),
            _ => return Err("the number of operands".into()),
        };
        let values = self.registers(&access, values, false)?;
        let address = self.address(to)?;
        let Access {
            space,
            order,
            scope,
            bytes,
            long,
            ..
        } = access;
        Ok(Op::Store {
            space,
            order,
            scope,
            bytes,
            long,
            values,
            address,
        })
    }

    fn atomic(&mut self, parts: &[&str], operands: &[Operand]) -> Decoded<Op> {
        let at = parts
            .iter()
            .position(|part| {
                matches!(
                    *part,
                    "add" | "min" | "max" | "and" | "or" | "xor" | "exch" | "inc" | "cas"
                )
            })
            .ok_or("an atomic operation")?;
        let kind = *parts
            .get(at + 1)
            .ok_or("an atomic operation without a type")?;
        let f = match (parts[at], kind) {
            ("add", "f32") => Atomic::FAdd,
            ("add", "u32" | "s32" | "u64") => Atomic::Add,
            ("min", "u32" | "u64") => Atomic::Min,
            ("min", "s32") => Atomic::MinSigned,
            ("max", "u32" | "u64") => Atomic::Max,
            ("max", "s32") => Atomic::MaxSigned,
            ("and", "b32" | "b64") => Atomic::And,
            ("or", "b32" | "b64") => Atomic::Or,
            ("xor", "b32" | "b64") => Atomic::Xor,
            ("exch", "b32" | "b64") => Atomic::Exchange,
            ("inc", "u32") => Atomic::Increment,
            ("cas", "b32" | "b64") => Atomic::CompareExchange,
            _ => return Err("an atomic operation of this type".into()),
        };
        let rest: Vec<&str> = parts
            .iter()
            .enumerate()
            .filter(|&(i, _)| i != at)
            .map(|(_, part)| *part)
            .collect();
        let mut access = Access::parse(&rest)?;
        if access.order == Order::Weak {
            access.order = Order::Relaxed;
        }
        let (d, operands) = if parts[0] == "atom" {
            let d = operands.first().ok_or("no operand")?;
            let d = if access.long {
                long_written(d)?
            } else {
                word_written(d)?
            };
            (Some(d), &operands[1..])
        } else {
            (None, operands)
        };
        let mut value = |operand: &Operand| {
            if access.long {
                self.long(operand)
            } else {
                self.word(operand)
            }
        };
        let (to, b, c) = match operands {
            [to, b, c] if f == Atomic::CompareExchange => (to, value(b)?, value(c)?),
            [to, b] if f != Atomic::CompareExchange => (to, value(b)?, value(b)?),
            _ => return Err("the number of operands".into()),
        };
        let address = self.address(to)?;
        let Access {
            space,
            order,
            scope,
            long,
            ..
        } = access;
        Ok(Op::Atomic {
            f,
            space,
            order,
            scope,
            long,
            d,
            address,
            b,
            c,
        })
    }
}

fn window(space: &str) -> Decoded<Space> {
    match space {
        "shared" | "shared::cta" => Ok(Space::Shared),
        "param" => Ok(Space::Param),
        "global" => Ok(Space::Global),
        _ => Err(format!("the space .{space}")),
    }
}
