//! What identifies a launch of a run, for all plans.

use kernels_gpu::registry::{KernelId, Op};

use crate::Error;

/// Identifies an attention launch of a run, for all plans. A captured graph has one launch for each key
/// of its [`LaunchSet`](super::LaunchSet), or for those that a plan needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LaunchKey {
    /// The kernel.
    pub kernel: KernelId,
    /// Query heads that share a tile.
    pub pack: u32,
    /// The part of the batch: parts have their own page pools.
    pub part: u32,
    /// As [`Part::heads`](crate::problem::Part::heads) of that part.
    pub heads: u32,
}

impl LaunchKey {
    /// The launch in words, for errors.
    pub(super) fn words(&self) -> String {
        let Self {
            kernel,
            pack,
            part,
            heads,
        } = self;
        let heads = match heads {
            1 => String::new(),
            _ => format!(", a part of {heads} heads,"),
        };
        format!("of {kernel} for part {part}{heads} with {pack} query heads in a tile")
    }
}

/// The pairs of a prefill and a decode of a run that one kernel can run together.
pub(super) fn pairs(keys: &[LaunchKey]) -> Vec<[usize; 2]> {
    let of = |op, part| {
        let wanted = move |key: &LaunchKey| key.kernel.info().op == op && key.part == part;
        keys.iter().position(wanted)
    };
    let parts = keys
        .iter()
        .map(|key| key.part)
        .max()
        .map_or(0, |last| last + 1);
    let pair = |part| Some([of(Op::Prefill, part)?, of(Op::Decode, part)?]);
    (0..parts).filter_map(pair).collect()
}

/// The refusal of a launch set of Ampere's prefills.
pub(super) fn no_records() -> Error {
    Error::NoInstance {
        kernel: "prefill",
        asked: "a launch set with the instructions of Ampere".into(),
        there: "the instructions of Hopper, or prefill and decode in one kernel",
    }
}
