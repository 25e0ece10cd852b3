//! How far a row's logits may grow past its reference before the row is rescaled.

use crate::common::half::Half;

/// How much larger than its reference, in base 2, a row's logit may be before the row is rescaled. Weights stay
/// below 2⁸ then, which costs no precision in 16-bit floats and saves nearly all rescaling.
pub const SLACK: f32 = 8.0;

/// How much larger than its reference, in base 2, a row's logit may be where weights are computed before maxima are
/// looked at. f16: by 2¹⁵, so that no weight overflows. bf16 has the range of f32: 2⁸⁸ leaves room for the sum of a
/// million such weights times values up to 2¹⁹.
pub(super) const fn most_growth<T: Half>() -> f32 {
    if T::WIDE { 88.0 } else { 15.0 }
}

/// How far above a row's maximum, in base 2, a new reference is put. Weights of bf16 have as much room below 1 as
/// above: with the largest weight at 2⁻⁸⁸, logits may grow by 176 before the row needs another reference, and values
/// from 2⁻¹⁴ on keep all bits of f32.
pub(super) const fn margin<T: Half>() -> f32 {
    if T::WIDE { 88.0 } else { 0.0 }
}

/// How far, in base 2, a row's next reference may be above the one that it has. The factor for what was accumulated is
/// 2⁻¹²⁵ then, still a normal f32 (the smallest is 2⁻¹²⁶). It must not become 0: accumulated outputs may be 2⁸⁸ times
/// as large as their reference says, and count beside a new maximum that is hardly larger.
pub(super) const LONGEST_STEP: f32 = 125.0;

/// The largest sum of a thread's weights of one row and block for which the row's maximum need not be looked at. A
/// logit that exceeds its reference by more than [`most_growth`] makes a larger sum, however its difference to the
/// reference was rounded.
#[must_use]
pub const fn largest_sum<T: Half>() -> f32 {
    if T::WIDE {
        (1_u128 << 80) as f32
    } else {
        16384.0
    }
}
