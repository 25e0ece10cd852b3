//! How far a row's logits may exceed the reference of its weights, and where a new reference is set.
//!
//! # Lazy rescale
//!
//! The weight of a key is 2 to the power of its logit minus the row's *reference*. The reference is kept until logits exceed it
//! by more than a limit. Then the row gets a new one, and its sum and outputs so far are multiplied by 2 to the power of the
//! old minus the new one. In all kernels
//! - only a row's own logits decide, although a whole warp branches: so its bits do not depend on its neighbours;
//! - a row that has seen no key has no reference (−∞, or in some kernels a very small number), and its outputs become 0;
//! - NaN in a logit reaches the row's output.
//!
//! They differ in how they find out, in the limit, and in where the rows are:
//!
//! | code | kernels | how | limit |
//! |---|---|---|---|
//! | `Rows::rescale` | `decode_wgmma::wide` | maxima, before the weights | 2⁸ |
//! | `Rows::rescale_late` | `prefill`, `mla` of 64 rows, `decode_wgmma::large` | sums of the weights, then maxima | 2¹⁵; bf16: 2⁸⁸ |
//! | `decode::tile::weigh` | `decode_mma`, `sm80::decode` | maxima; rows are columns of the accumulator | 2⁸ |
//! | `narrow::softmax` | `decode_wgmma::narrow` | likewise, of four warps; weights meanwhile | 2⁸ |
//! | `f8::weights` | `prefill::f8` | weights relative to the maxima of their block, as e4m3 has a small range | 2⁴⁰ |
//! | `swapped::renew` | `mla::few_rows`, `mla::swap_ab` | the weights themselves; references in shared memory | 2¹⁴ |
//! | `narrow::renew` | `mla::narrow` | the weights times the scales of their values | the largest f16 |

use crate::common::half::Half;

/// By how much, in base 2, a row's logit may exceed its reference before the row is rescaled. Weights then stay below
/// 2⁸, which costs no precision in 16-bit floats and avoids nearly all rescaling.
pub const SLACK: f32 = 8.0;

/// The same limit where weights are computed before maxima. f16: 15, so that no weight overflows. bf16 has the range of
/// f32: 88 leaves room for the sum of a million such weights times values up to 2¹⁹.
pub(super) const fn most_growth<T: Half>() -> f32 {
    if T::WIDE { 88.0 } else { 15.0 }
}

/// How far above a row's maximum, in base 2, a new reference is set. bf16 weights have as much range below 1 as above:
/// with the largest weight at 2⁻⁸⁸, logits may grow by 176 before the row needs another reference, and values from 2⁻¹⁴
/// on keep full f32 precision.
pub(super) const fn margin<T: Half>() -> f32 {
    if T::WIDE { 88.0 } else { 0.0 }
}

/// The most, in base 2, by which a rescale may raise a row's reference. The factor for the accumulated outputs is then
/// 2⁻¹²⁵, still a normal f32 (the smallest is 2⁻¹²⁶). It must not become 0: accumulated weights may be up to 2⁸⁸
/// relative to the old reference, and then still count next to a new maximum that is hardly larger.
pub(super) const LONGEST_STEP: f32 = 125.0;

/// The largest sum of a thread's weights of one row and block for which the maximum need not be computed. A logit that
/// exceeds its reference by more than [`most_growth`] gives a larger sum, however the difference was rounded.
#[must_use]
pub const fn largest_sum<T: Half>() -> f32 {
    if T::WIDE {
        (1_u128 << 80) as f32
    } else {
        16384.0
    }
}
