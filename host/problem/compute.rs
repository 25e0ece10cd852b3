//! The arithmetic of prefills on a GPU.

use serde::{Deserialize, Serialize};

/// The arithmetic of prefills on a GPU.
///
/// This chooses among prefill kernels and does not change other kernels:
/// - Query tokens that the planner gives to a decode kernel (one or a few per request) are computed as with
///   [`F16`](Self::F16), since decodes are limited by memory, not by arithmetic. A batch of decodes has the same plan with both.
/// - In a hybrid batch, prefills use the chosen arithmetic, and decodes run as without this choice.
///
/// [`Plan::groups`](crate::plan::Plan::groups) says which kernel computes which tokens. Planning fails
/// ([`Unsupported::Compute`](crate::plan::Unsupported::Compute)) for devices without such kernels for the heads, the type of
/// keys and values and the variant, and for the CPU. The CPU computes plans for a GPU exactly.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Compute {
    /// Products of 16 bits, to which keys and values of 8 bits are converted. That is exact.
    #[default]
    F16,
    /// Products of e4m3, on keys and values of that type. A query is rounded to e4m3 after its row was multiplied by a
    /// power of two; so are softmax weights, relative to the largest of the row in a block of keys. That makes each of
    /// these up to 1/16 of itself wrong. The tensor cores add up one block with 13 bits behind the largest term; all
    /// further sums are f32. On Hopper, for heads of 128 and 256.
    F8,
}

impl Compute {
    pub(super) fn is_default(&self) -> bool {
        *self == Self::default()
    }
}
