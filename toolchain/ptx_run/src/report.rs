//! Faults and where they happened.

use std::fmt;

use thiserror::Error;

/// PTX that is invalid or not supported.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("line {line}: {what}: {text}")]
pub struct ParseError {
    /// Line in the module's text, from 1.
    pub line: u32,
    /// What is wrong.
    pub what: String,
    /// The text at that place.
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

/// An instruction and the threads that executed it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Line in the module's text, from 1.
    pub line: u32,
    /// Text of that line.
    pub text: String,
    /// Source file and line, if the module has them.
    pub source: Option<String>,
    /// The block.
    pub block: u32,
    /// The threads in the block.
    pub who: String,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {} `{}`", self.line, shortened(&self.text))?;
        if let Some(source) = &self.source {
            write!(f, " ({source})")?;
        }
        write!(f, " by block {}, {}", self.block, self.who)
    }
}

/// Leaves out the middle of a long text: a product lists up to 128 registers.
fn shortened(text: &str) -> String {
    const ENDS: usize = 80;
    let count = text.chars().count();
    if count <= 2 * ENDS {
        return text.into();
    }
    let begin: String = text.chars().take(ENDS).collect();
    let end: String = text.chars().skip(count - ENDS).collect();
    format!("{begin} … {end}")
}

/// A warp that cannot continue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// Its position.
    pub place: Place,
    /// What it waits for.
    pub what: String,
}

/// A fault of a kernel.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Fault {
    /// A data race: two unordered accesses, at least one of them a write.
    #[error("race at {address}: {access}, {before_access} before: {before}")]
    Race {
        /// Space and address.
        address: String,
        /// The access of this instruction.
        access: &'static str,
        /// The earlier access.
        before_access: &'static str,
        /// The instruction and threads of the earlier access.
        before: Box<Place>,
    },
    /// Incorrect use of a cluster's barrier.
    #[error("barrier of the cluster: {what}")]
    ClusterBarrier {
        /// What is wrong.
        what: String,
    },
    /// Memory written by ordinary stores is accessed by an asynchronous copy or product without a proxy fence.
    #[error("no proxy fence before {access} at {address}, written by {before}")]
    NoProxyFence {
        /// Space and address.
        address: String,
        /// The access of this instruction.
        access: &'static str,
        /// The instruction and threads that wrote.
        before: Box<Place>,
    },
    /// A copy overwrites bytes that a load may not have read yet.
    #[error(
        "{access} at {address}, which may not be read yet: the thread arrived at an mbarrier before it used what it \
         loaded, without a proxy fence: {before}"
    )]
    LoadInFlight {
        /// Space and address.
        address: String,
        /// The access of this instruction.
        access: &'static str,
        /// The load.
        before: Box<Place>,
    },
    /// The previous launch may still run.
    #[error(
        "{access} at {address} without griddepcontrol.wait; the launch before touched it: {before}"
    )]
    NoGridWait {
        /// Space and address.
        address: String,
        /// The access of this instruction.
        access: &'static str,
        /// The earlier access.
        before: Box<Place>,
    },
    /// A load with `.nc` of data that is not read-only while the kernel runs.
    #[error(
        "reads {address} with .nc, which is written while the kernel runs: {before}; leave .nc out"
    )]
    ReadOnly {
        /// Space and address.
        address: String,
        /// The write.
        before: Box<Place>,
    },
    /// A copy of uninitialised memory, or a sum onto it.
    #[error("copies uninitialised bytes at {address}, or adds to them{}", put_by(.by))]
    Uninitialised {
        /// Space and address.
        address: String,
        /// The instruction that stored a value computed from such memory.
        by: Option<Box<Place>>,
    },
    /// A register without a value decides something, or its value leaves the block.
    #[error("uses a register without a value as {what}{}", from(.read))]
    UninitialisedRegister {
        /// How it is used.
        what: &'static str,
        /// Where its warp last read uninitialised bytes.
        read: Option<Box<(Place, String)>>,
    },
    /// An address outside of all memory.
    #[error("{bytes} bytes at {address} lie outside: {nearest}")]
    OutOfBounds {
        /// Space and address.
        address: String,
        /// Number of bytes.
        bytes: usize,
        /// The memory nearby.
        nearest: String,
    },
    /// An address that is not aligned as the instruction requires.
    #[error("{address} is not aligned to {align}")]
    Misaligned {
        /// Space and address.
        address: String,
        /// The required alignment.
        align: usize,
    },
    /// Incorrect use of a named barrier.
    #[error("barrier {id}: {what}")]
    Barrier {
        /// Number of the barrier.
        id: u32,
        /// What is wrong.
        what: String,
    },
    /// Incorrect use of an mbarrier.
    #[error("mbarrier at {address}: {what}")]
    Mbarrier {
        /// Shared address.
        address: String,
        /// What is wrong.
        what: String,
    },
    /// Access to a register of a product that may still run.
    #[error("{what}, the product of line {line} may still run")]
    OwnedRegister {
        /// The access.
        what: &'static str,
        /// Line of the product.
        line: u32,
    },
    /// A product reads registers that were written after the last `wgmma.fence`.
    #[error("no wgmma.fence between a write of {what} and the product")]
    NoProductFence {
        /// Accumulator or A.
        what: &'static str,
    },
    /// A product is one of all four warps of a warpgroup, but another warp issues another one, or none.
    #[error("all four warps of a warpgroup issue each product, but {what}")]
    OtherProduct {
        /// What another warp does.
        what: String,
    },
    /// Lanes that must execute an instruction together do not.
    #[error("needs lanes {expected:08x}, only {got:08x} are here")]
    Diverged {
        /// Lanes that the instruction needs.
        expected: u32,
        /// Lanes that are here.
        got: u32,
    },
    /// An operand that is invalid for the instruction.
    #[error("{what}")]
    Operand {
        /// What is wrong with it.
        what: String,
    },
    /// Code that was assumed unreachable.
    #[error("trap: {what}")]
    Trap {
        /// `trap`, or the function that panicked.
        what: String,
    },
    /// No warp can continue.
    #[error("deadlock:{}", list(.waiting))]
    Deadlock {
        /// All warps that wait.
        waiting: Vec<Waiting>,
    },
    /// A block ends before its work is finished.
    #[error("the block ends while {what}")]
    Unfinished {
        /// The unfinished work.
        what: String,
    },
    /// The launch exceeds its limit of instructions.
    #[error("more than {limit} warp instructions:{}", list(.waiting))]
    TooLong {
        /// The limit.
        limit: u64,
        /// Positions of the warps.
        waiting: Vec<Waiting>,
    },
    /// The launch parameters are invalid.
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
    /// The instruction, if one caused the fault.
    pub place: Option<Place>,
    /// The fault.
    pub fault: Fault,
}

fn at(place: &Option<Place>) -> String {
    place
        .as_ref()
        .map(|place| format!(", {place}"))
        .unwrap_or_default()
}

pub(crate) type Step<T = ()> = Result<T, Box<Fault>>;
