//! How far a row's logits may grow past its reference before the row is rescaled.

use crate::common::half::Half;

/// How much larger than its reference, in base 2, a row's logit may be before the row is rescaled. Weights stay
/// below 2⁸ then, which costs no precision in 16-bit floats and saves nearly all rescaling.
pub const SLACK: f32 = 8.0;

/// How much larger than its reference, in base 2, a row's logit may be where weights are made without a look at maxima. In
/// f16 no weight overflows. Those of bf16 have the range of f32; there 2⁸⁸ leaves room for a million such weights and
/// values up to 2¹⁹.
pub(super) const fn most_growth<T: Half>() -> f32 {
    if T::WIDE { 88.0 } else { 15.0 }
}

/// How far above a row's maximum, in base 2, its reference is put then. Weights of bf16 have as much room below 1 as above:
/// with their largest at 2⁻⁸⁸, logits may grow by 176 before the row needs another reference, and values from 2⁻¹⁴ on
/// keep all bits of f32.
pub(super) const fn margin<T: Half>() -> f32 {
    if T::WIDE { 88.0 } else { 0.0 }
}

/// How far, in base 2, a row's next reference is put above the one that it has: the factor for what was accumulated is not
/// lost below 2⁻¹²⁶ then. Outputs may be 2⁸⁸ times as large as their reference says and count beside a maximum that is hardly
/// larger.
pub(super) const LONGEST_STEP: f32 = 125.0;

/// A thread's weights of one row and block, added up, that call for a look at the row's maximum. A logit that outgrew its
/// reference by more than it [may](most_growth) makes such a sum, however its difference to the reference was rounded.
#[must_use]
pub const fn largest_sum<T: Half>() -> f32 {
    if T::WIDE {
        (1_u128 << 80) as f32
    } else {
        16384.0
    }
}
