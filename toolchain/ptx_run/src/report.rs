//! What went wrong, and where.

use std::fmt;

use thiserror::Error;

/// PTX that is not understood.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("line {line}: {what}: {text}")]
pub struct ParseError {
    /// In the module's text, from 1.
    pub line: u32,
    /// What is wrong.
    pub what: String,
    /// What stands there.
    pub text: String,
}

impl ParseError {
    pub(crate) fn new(line: u32, what: &str, text: &str) -> Self {
        Self {
            line,
            what: what.into(),
            text: text.into(),
        }
    }
}

/// An instruction and who executed it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Line in the module's text, from 1.
    pub line: u32,
    /// That line.
    pub text: String,
    /// Source file and line, where the module says it.
    pub source: Option<String>,
    /// The block.
    pub block: u32,
    /// Who in the block.
    pub who: String,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {} `{}`", self.line, self.text)?;
        if let Some(source) = &self.source {
            write!(f, " ({source})")?;
        }
        write!(f, " by block {}, {}", self.block, self.who)
    }
}

/// A warp that does not come further.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// Where it stands.
    pub place: Place,
    /// What it waits for.
    pub what: String,
}

/// What can go wrong.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Fault {
    /// Two accesses that nothing orders, at least one of them a write.
    #[error("race at {address}: {access}, {before_access} before: {before}")]
    Race {
        /// Space and address.
        address: String,
        /// What this instruction does there.
        access: &'static str,
        /// What the other did.
        before_access: &'static str,
        /// The other.
        before: Box<Place>,
    },
    /// The barrier of a cluster is used wrongly.
    #[error("barrier of the cluster: {what}")]
    ClusterBarrier {
        /// What is wrong.
        what: String,
    },
    /// Written by ordinary stores, then touched by an asynchronous copy or product without a proxy fence.
    #[error("no proxy fence before {access} at {address}, written by {before}")]
    NoProxyFence {
        /// Space and address.
        address: String,
        /// What this instruction does there.
        access: &'static str,
        /// Who wrote.
        before: Box<Place>,
    },
    /// The launch before may still run.
    #[error(
        "{access} at {address} without griddepcontrol.wait; the launch before touched it: {before}"
    )]
    NoGridWait {
        /// Space and address.
        address: String,
        /// What this instruction does there.
        access: &'static str,
        /// Who touched it.
        before: Box<Place>,
    },
    /// A copy out of memory that nobody has written.
    #[error("copies uninitialised bytes at {address}{}", put_by(.by))]
    Uninitialised {
        /// Space and address.
        address: String,
        /// Who put a value there that came from such memory.
        by: Option<Box<Place>>,
    },
    /// A register that holds no value decides something, or leaves the block.
    #[error("uses a register without a value as {what}{}", from(.read))]
    UninitialisedRegister {
        /// What for.
        what: &'static str,
        /// Where its warp read last from bytes that nobody had written.
        read: Option<Box<(Place, String)>>,
    },
    /// Outside of all memory.
    #[error("{bytes} bytes at {address} lie outside: {nearest}")]
    OutOfBounds {
        /// Space and address.
        address: String,
        /// How many.
        bytes: usize,
        /// The memory nearby.
        nearest: String,
    },
    /// Not at a multiple of what the instruction wants.
    #[error("{address} is not aligned to {align}")]
    Misaligned {
        /// Space and address.
        address: String,
        /// What it must be a multiple of.
        align: usize,
    },
    /// A named barrier that is used wrongly.
    #[error("barrier {id}: {what}")]
    Barrier {
        /// Its number.
        id: u32,
        /// What is wrong.
        what: String,
    },
    /// An mbarrier that is used wrongly.
    #[error("mbarrier at {address}: {what}")]
    Mbarrier {
        /// Shared address.
        address: String,
        /// What is wrong.
        what: String,
    },
    /// A register that belongs to a product that may still run.
    #[error("{what}, the product of line {line} may still run")]
    OwnedRegister {
        /// What happened to it.
        what: &'static str,
        /// The product's line.
        line: u32,
    },
    /// A product reads registers that were written since the last `wgmma.fence`.
    #[error("no wgmma.fence between a write of {what} and the product")]
    NoProductFence {
        /// Accumulator or A.
        what: &'static str,
    },
    /// Lanes that must come together do not.
    #[error("needs lanes {expected:08x}, only {got:08x} are here")]
    Diverged {
        /// Lanes that the instruction needs.
        expected: u32,
        /// Lanes that came.
        got: u32,
    },
    /// An operand that the instruction cannot take.
    #[error("{what}")]
    Operand {
        /// What is wrong with it.
        what: String,
    },
    /// The code says that this does not happen.
    #[error("trap: {what}")]
    Trap {
        /// `trap`, or the function that panicked.
        what: String,
    },
    /// Nobody comes further.
    #[error("deadlock:{}", list(.waiting))]
    Deadlock {
        /// All that wait.
        waiting: Vec<Waiting>,
    },
    /// A block ends while something of it goes on.
    #[error("the block ends while {what}")]
    Unfinished {
        /// What goes on.
        what: String,
    },
    /// More instructions than the launch may take.
    #[error("more than {limit} warp instructions:{}", list(.waiting))]
    TooLong {
        /// How many.
        limit: u64,
        /// Where the warps are.
        waiting: Vec<Waiting>,
    },
    /// The launch itself is wrong.
    #[error("launch: {what}")]
    Launch {
        /// What is wrong.
        what: String,
    },
}

fn put_by(place: &Option<Box<Place>>) -> String {
    place
        .as_ref()
        .map(|place| format!(", put there by {place}"))
        .unwrap_or_default()
}

fn from(read: &Option<Box<(Place, String)>>) -> String {
    match read.as_deref() {
        Some((place, address)) => {
            format!("; the warp read bytes that nobody wrote, {address}: {place}")
        }
        None => String::new(),
    }
}

fn list(waiting: &[Waiting]) -> String {
    waiting
        .iter()
        .map(|one| format!("\n  {}: {}", one.place, one.what))
        .collect()
}

/// A fault of a launch.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("kernel {kernel}{}: {fault}", at(.place))]
pub struct Report {
    /// The entry.
    pub kernel: String,
    /// The instruction, where one is to blame.
    pub place: Option<Place>,
    /// What happened.
    pub fault: Fault,
}

fn at(place: &Option<Place>) -> String {
    place
        .as_ref()
        .map(|place| format!(", {place}"))
        .unwrap_or_default()
}

pub(crate) type Step<T = ()> = Result<T, Box<Fault>>;
