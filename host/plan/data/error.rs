//! Why there is no plan.

use thiserror::Error;

use super::{Kernel, Unsupported};
use crate::problem::ProblemError;

/// Why a batch was not planned.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The specification or the batch is wrong.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// No description of that name.
    #[error(
        "no device is named {got:?}; known: {known}; for any other device, give a DeviceDescription"
    )]
    UnknownDevice {
        /// The name given.
        got: String,
        /// The names there are.
        known: String,
    },
    /// A device description that makes no sense.
    #[error("the device description is wrong: {reason}")]
    Device {
        /// What is wrong.
        reason: String,
    },
    /// A device description that names a tile that no kernel has.
    #[error(
        "the device description is wrong: {field} names {got}, which no kernel has: there are {there}"
    )]
    UnknownTile {
        /// The field of the description.
        field: String,
        /// The tile.
        got: String,
        /// The tiles that there are in such a place.
        there: String,
    },
    /// The device has no kernel for what is asked.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// No tile of a kernel fits the heads.
    #[error(
        "no {kernel:?} tile on {device} holds the {group} query heads of a KV head at head dimensions \
         {head_dim_qk}/{head_dim_v} ({}): use fewer query heads per KV head, or plan for the CPU",
        match largest {
            0 => "there is none for these heads".to_owned(),
            largest => format!("the largest holds {largest}"),
        }
    )]
    NoTile {
        /// The kernel.
        kernel: Kernel,
        /// Head dimension of queries and keys.
        head_dim_qk: u32,
        /// Head dimension of values.
        head_dim_v: u32,
        /// Query heads per KV head.
        group: u32,
        /// The most query heads of a KV head that a tile holds: of all decode kernels for these heads, or of the tile that was
        /// asked for. 0 if there is no kernel.
        largest: u32,
        /// The device's name.
        device: String,
    },
    /// A fixed split that is not a positive number of pages.
    #[error(
        "a fixed split of {tokens} keys is not a positive multiple of the page size {page_size}: use a multiple of \
         the page size"
    )]
    FixedSplit {
        /// Keys per chunk, as given.
        tokens: u32,
        /// The page size of a part.
        page_size: u32,
    },
    /// The plan does not fit the bound it was to keep.
    #[error(
        "the plan needs {needed} {what}, but the bound allows {bound}: raise the BatchLimits of the bound (requests \
         and kv_len of BatchLimits::decodes, or query_tokens, from which most sizes follow), or send a smaller batch"
    )]
    Bound {
        /// What there is too much of.
        what: &'static str,
        /// How much the batch needs.
        needed: u64,
        /// How much the bound holds.
        bound: u64,
    },
    /// More work items than a plan can have.
    #[error(
        "{got} work items are needed, past {limit}, the most of a plan: use a larger fixed split, or send a smaller batch (if there is \
         none yet, give lower BatchLimits)"
    )]
    TooManyPieces {
        /// How many are needed.
        got: u64,
        /// How many there may be.
        limit: u64,
    },
    /// A count that does not fit 32 bits.
    #[error(
        "{got} {what} are needed, past {limit}, the most that 32-bit offsets reach: send a smaller batch, or give lower \
         BatchLimits"
    )]
    TooLarge {
        /// What there is too much of.
        what: &'static str,
        /// How much is needed.
        got: u64,
        /// How much there may be.
        limit: u64,
    },
}

impl PlanError {
    /// A count as 32 bits.
    pub(in crate::plan) fn narrow(what: &'static str, got: u64) -> Result<u32, Self> {
        let limit = u32::MAX.into();
        u32::try_from(got).map_err(|_| Self::TooLarge { what, got, limit })
    }
}

/// A plan that contradicts itself: it was changed after the planner made it, or read from elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error(
    "the plan is broken at {array}[{index}]: {field} is {got}, which is out of its array or taken already; make \
     a new plan (Plan::verify says more)"
)]
pub struct BrokenPlan {
    /// The plan's array.
    pub array: &'static str,
    /// Where in the array.
    pub index: usize,
    /// What is out of place.
    pub field: &'static str,
    /// Its value.
    pub got: u32,
}

impl BrokenPlan {
    pub(crate) const fn at(
        array: &'static str,
        index: usize,
        (field, got): (&'static str, u32),
    ) -> Self {
        Self {
            array,
            index,
            field,
            got,
        }
    }
}
