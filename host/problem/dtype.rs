//! Element types.

use serde::{Deserialize, Serialize};

/// Element types of tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Dtype {
    /// IEEE half precision.
    F16,
    /// bfloat16.
    BF16,
    /// IEEE single precision.
    F32,
    /// 8-bit float, 4 exponent bits (no infinity).
    F8E4M3,
    /// 8-bit float, 5 exponent bits.
    F8E5M2,
}

impl Dtype {
    /// Size of one element.
    #[must_use]
    pub const fn bytes(self) -> u32 {
        match self {
            Self::F8E4M3 | Self::F8E5M2 => 1,
            Self::F16 | Self::BF16 => 2,
            Self::F32 => 4,
        }
    }
}
