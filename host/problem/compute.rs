//! In what prefills compute on a GPU.

use serde::{Deserialize, Serialize};

/// In what prefills compute on a GPU.
///
/// It chooses among prefill kernels, and says nothing of others:
/// - Query tokens that the planner gives to a decode kernel, one or a few of a request, are computed as with
///   [`F16`](Self::F16): memory is their limit, not arithmetic. A batch of decodes alone has the same plan with both.
/// - In a hybrid batch prefills are computed in what was chosen, and the decodes beside them as without this choice.
/// - Keys and values of 8 bits on pages whose size is no multiple of 8 have no decode kernel. All requests on them are
///   prefills, those of one token too.
///
/// [`Plan::groups`](crate::plan::Plan::groups) says which kernel has which tokens. A device without such kernels for the
/// heads, the type of keys and values and the variant refuses to plan
/// ([`Unsupported::Compute`](crate::plan::Unsupported::Compute)); so does the CPU. A plan for a GPU that is run on the CPU
/// is computed exactly, and `reference` is what all of them are measured by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Compute {
    /// Products of 16 bits, to which keys and values of 8 bits are converted. That is exact.
    #[default]
    F16,
    /// Products of e4m3, on keys and values of that type. A query is rounded to e4m3 after its row was multiplied by a
    /// power of two; so are softmax weights, relative to the largest of the row in a block of keys. That makes each of
    /// these up to 1/16 of itself wrong. The tensor cores add up one block with 13 bits behind the largest term; all
    /// further sums are f32. On Hopper, for heads of 128.
    F8,
}

impl Compute {
    pub(super) fn is_default(&self) -> bool {
        *self == Self::default()
    }
}
