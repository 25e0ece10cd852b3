//! Decodes asynchronous copies, and the mbarriers that count them.

use super::{Decoded, Decoder, bit, long_written, scalar::exactly};
use crate::{
    op::{Op, TensorBox},
    parse::Operand,
};

const INTO_SHARED: [&str; 3] = ["shared::cluster", "global", "mbarrier::complete_tx::bytes"];

impl Decoder<'_> {
    pub(super) fn asynchronous(
        &mut self,
        parts: &[&str],
        operands: &[Operand],
    ) -> Option<Decoded<Op>> {
        Some(match parts {
            ["mbarrier", rest @ ..] => self.mbarrier(rest, operands),
            ["cp", "async", "commit_group"] => Ok(Op::CopyAsyncCommit),
            ["cp", "async", "wait_all"] => Ok(Op::CopyAsyncWait {
                pending: 0,
                all: true,
            }),
            ["cp", "async", "wait_group"] => (|| {
                let [pending] = exactly(operands)?;
                Ok(Op::CopyAsyncWait {
                    pending: Self::number(pending)?,
                    all: false,
                })
            })(),
            [
                "cp",
                "async",
                "mbarrier",
                "arrive",
                "noinc",
                "shared::cta",
                "b64",
            ] => (|| {
                let [barrier] = exactly(operands)?;
                Ok(Op::CopyAsyncArrive {
                    address: self.address(barrier)?,
                })
            })(),
            ["cp", "async", "ca" | "cg", "shared", "global", hints @ ..] => {
                self.copy_async(hints, operands)
            }
            ["cp", "async", "bulk", "commit_group"] => Ok(Op::BulkCommit),
            ["cp", "async", "bulk", "wait_group", rest @ ..]
                if rest.is_empty() || rest == ["read"] =>
            {
                (|| {
                    let [pending] = exactly(operands)?;
                    Ok(Op::BulkWait {
                        pending: Self::number(pending)?,
                        read: !rest.is_empty(),
                    })
                })()
            }
            [
                "st",
                "async",
                "shared::cluster",
                "mbarrier::complete_tx::bytes",
                "b64",
            ] => (|| {
                let [address, value, barrier] = exactly(operands)?;
                Ok(Op::StoreAsync {
                    address: self.address(address)?,
                    value: self.long(value)?,
                    barrier: self.address(barrier)?,
                })
            })(),
            ["cp", "async", "bulk", "prefetch", ..] => Ok(Op::Prefetch),
            ["cp", "async", "bulk", "tensor", rank, rest @ ..] => {
                self.tensor(rank, rest, operands, false)
            }
            [
                "cp",
                "reduce",
                "async",
                "bulk",
                "tensor",
                rank,
                "global",
                "shared::cta",
                "add",
                "bulk_group",
            ] => self.tensor(
                rank,
                &["global", "shared::cta", "bulk_group"],
                operands,
                true,
            ),
            [
                "cp",
                "async",
                "bulk",
                "global",
                "shared::cta",
                "bulk_group",
                hints @ ..,
            ] => self.bulk_store(hints, operands, false),
            [
                "cp",
                "reduce",
                "async",
                "bulk",
                "global",
                "shared::cta",
                "bulk_group",
                "add",
                "f32",
            ] => self.bulk_store(&[], operands, true),
            ["cp", "async", "bulk", rest @ ..] if rest.starts_with(&INTO_SHARED) => (|| {
                let operands = without_hint(&rest[3..], operands)?;
                let [target, source, bytes, barrier] = exactly(operands)?;
                Ok(Op::BulkLoad {
                    target: self.address(target)?,
                    source: self.address(source)?,
                    bytes: self.word(bytes)?,
                    barrier: self.address(barrier)?,
                })
            })(
            ),
            _ => return None,
        })
    }

    fn mbarrier(&mut self, rest: &[&str], operands: &[Operand]) -> Decoded<Op> {
        // Only `expect_tx` orders nothing; arrivals and tests that are relaxed are not known.
        let expects = rest.first() == Some(&"expect_tx");
        let rest: Vec<&str> =
            rest.iter()
                .copied()
                .filter(|part| match *part {
                    "shared::cta" | "shared" | "b64" | "release" | "acquire" | "cta"
                    | "cluster" => false,
                    "relaxed" => !expects,
                    _ => true,
                })
                .collect();
        match rest.as_slice() {
            ["init"] => {
                let [barrier, count] = exactly(operands)?;
                Ok(Op::BarrierInit {
                    address: self.address(barrier)?,
                    count: self.word(count)?,
                })
            }
            ["inval"] => {
                let [barrier] = exactly(operands)?;
                Ok(Op::BarrierInvalidate {
                    address: self.address(barrier)?,
                })
            }
            ["arrive"] => {
                let (state, barrier, count) = match operands {
                    [state, barrier] => (state, barrier, None),
                    [state, barrier, count] => (state, barrier, Some(self.word(count)?)),
                    _ => return Err("the number of operands".into()),
                };
                let state = state_written(state)?;
                Ok(Op::BarrierArrive {
                    address: self.address(barrier)?,
                    count,
                    bytes: None,
                    state,
                })
            }
            ["arrive", "expect_tx"] => {
                let [state, barrier, bytes] = exactly(operands)?;
                let state = state_written(state)?;
                let bytes = Some(self.word(bytes)?);
                Ok(Op::BarrierArrive {
                    address: self.address(barrier)?,
                    count: None,
                    bytes,
                    state,
                })
            }
            ["expect_tx"] => {
                let [barrier, bytes] = exactly(operands)?;
                Ok(Op::BarrierExpect {
                    address: self.address(barrier)?,
                    bytes: self.word(bytes)?,
                })
            }
            [mode @ ("test_wait" | "try_wait"), "parity"] => {
                let [p, barrier, parity] = exactly(operands)?;
                let may_sleep = *mode == "try_wait";
                Ok(Op::BarrierTest {
                    p: bit(p)?,
                    address: self.address(barrier)?,
                    parity: self.word(parity)?,
                    may_sleep,
                })
            }
            _ => Err("an mbarrier instruction of this kind".into()),
        }
    }

    fn copy_async(&mut self, hints: &[&str], operands: &[Operand]) -> Decoded<Op> {
        if hints
            .iter()
            .any(|hint| !matches!(*hint, "L2::cache_hint" | "L2::128B"))
        {
            return Err("a copy with this modifier".into());
        }
        let operands = without_hint(hints, operands)?;
        let (target, source, bytes, valid) = match operands {
            [target, source, bytes] => (target, source, bytes, None),
            [target, source, bytes, valid] => (target, source, bytes, Some(self.word(valid)?)),
            _ => return Err("the number of operands".into()),
        };
        Ok(Op::CopyAsync {
            target: self.address(target)?,
            source: self.address(source)?,
            bytes: Self::number(bytes)?,
            valid,
        })
    }

    fn tensor(
        &mut self,
        rank: &str,
        rest: &[&str],
        operands: &[Operand],
        add: bool,
    ) -> Decoded<Op> {
        let rank: usize = rank.trim_end_matches('d').parse().map_err(|_| "a rank")?;
        let mut tensor = |operand: &Operand| {
            let Operand::Memory(map, 0, coordinates) = operand else {
                return Err(format!("an operand that is no box: {operand:?}"));
            };
            if coordinates.len() != rank {
                return Err(format!(
                    "{} coordinates where {rank} should be",
                    coordinates.len()
                ));
            }
            let coordinates = coordinates
                .iter()
                .map(|coordinate| self.word(coordinate))
                .collect::<Result<_, _>>()?;
            Ok(TensorBox {
                map: self.long(map)?,
                coordinates,
            })
        };
        if rest.starts_with(&INTO_SHARED) {
            let operands = without_hint(&rest[3..], operands)?;
            let [target, map, barrier] = exactly(operands)?;
            let tensor = tensor(map)?;
            return Ok(Op::TensorLoad {
                target: self.address(target)?,
                tensor,
                barrier: self.address(barrier)?,
            });
        }
        if rest.starts_with(&["global", "shared::cta", "bulk_group"]) {
            let operands = without_hint(&rest[3..], operands)?;
            let [map, source] = exactly(operands)?;
            let tensor = tensor(map)?;
            return Ok(Op::TensorStore {
                tensor,
                source: self.address(source)?,
                add,
            });
        }
        Err("a copy of a box of this kind".into())
    }

    fn bulk_store(&mut self, hints: &[&str], operands: &[Operand], add_f32: bool) -> Decoded<Op> {
        let operands = without_hint(hints, operands)?;
        let [target, source, bytes] = exactly(operands)?;
        Ok(Op::BulkStore {
            target: self.address(target)?,
            source: self.address(source)?,
            bytes: self.word(bytes)?,
            add_f32,
        })
    }
}

fn state_written(operand: &Operand) -> Decoded<Option<u32>> {
    match operand {
        Operand::Nothing => Ok(None),
        other => long_written(other).map(Some),
    }
}

/// The operands without the cache policy, if the modifiers state that there is one.
fn without_hint<'a>(hints: &[&str], operands: &'a [Operand]) -> Decoded<&'a [Operand]> {
    match hints {
        [] | ["L2::128B"] => Ok(operands),
        ["L2::cache_hint"] | ["L2::cache_hint", "L2::128B"] => operands
            .split_last()
            .map(|(_, rest)| rest)
            .ok_or_else(|| "no operand".into()),
        _ => Err("a copy with these modifiers".into()),
    }
}
