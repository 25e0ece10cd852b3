//! Scales of each token on a thread's logits and weights.

use cuda_std::{math::lg2, shared, warp};

/// Multiplies a block's products by their rows' factors and their keys' scales.
///
/// # Safety
/// The block's barrier completed; `scales` is the shared address of its scales.
#[inline(always)]
pub(super) unsafe fn multiply<const S: usize>(
    logits: &mut [f32; S],
    scales: u32,
    of_rows: [f32; 2],
) {
    let mut group = 0;
    while group < S / 4 {
        // SAFETY: the caller's promise.
        let of_keys = unsafe { shared::load_f32x2(scales + column(group) * 4) };
        let mut i = 0;
        while i < 4 {
            logits[4 * group + i] *= of_rows[i / 2] * of_keys[i % 2];
            i += 1;
        }
        group += 1;
    }
}

/// Multiplies a block's products by their rows' factors.
#[inline(always)]
pub(super) fn multiply_rows<const S: usize>(logits: &mut [f32; S], of_rows: [f32; 2]) {
    let mut i = 0;
    while i < S {
        logits[i] *= of_rows[i / 2 % 2];
        i += 1;
    }
}

/// The first of this thread's two columns of each group of 8.
#[inline(always)]
fn column(group: usize) -> u32 {
    8 * group as u32 + warp::lane_id() % 4 * 2
}

/// The scales of the values of this thread's two keys in a group of 8. Smaller ones are raised so that weights divided by
/// them are finite.
///
/// # Safety
/// As [`multiply`].
#[inline(always)]
pub(super) unsafe fn value_scales(scales: u32, group: usize) -> [f32; 2] {
    // SAFETY: the caller's promise.
    unsafe { shared::load_f32x2(scales + column(group) * 4) }.map(|scale| scale.max(1e-30))
}

/// Base-2 logits plus the logarithms of the scales of values: from these the references are taken, so that weights times
/// scales are in the range of f16.
///
/// # Safety
/// As [`multiply`].
#[inline(always)]
pub(super) unsafe fn of_values<const S: usize>(
    logits: &[f32; S],
    keys: u32,
    scales: u32,
) -> [f32; S] {
    let mut shifted = *logits;
    let mut group = 0;
    while group < S / 4 {
        // SAFETY: the caller's promise.
        let of_values = unsafe { value_scales(scales + keys * 4, group) }.map(lg2);
        let mut i = 0;
        while i < 4 {
            shifted[4 * group + i] += of_values[i % 2];
            i += 1;
        }
        group += 1;
    }
    shifted
}
