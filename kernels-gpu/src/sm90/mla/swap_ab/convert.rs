//! Conversion of e4m3 numbers to f16 A fragments, times their scales.
//!
//! One instruction converts two numbers to f16 exactly, another multiplies them by their scales. f16 lacks the range of
//! the scales, so a key's scales are divided by a power of two 2ᵉ. The logits are multiplied by it again. For the
//! values it is folded into the weights: 2 to the power of logit + e − reference.

use cuda_std::{convert, math, shared};

use crate::{
    common::cache::transpose_bytes,
    sm90::mla::keys_656::{BLOCK, GROUPS, ROW_BYTES, ROW_SCALES},
};

/// The power of two 2ᵉ of a key, as a biased f32 exponent.
#[derive(Clone, Copy)]
pub(super) struct Power {
    exponent: u32,
}

/// The biased exponent of the smallest power, 2⁻⁶⁰, which keys of zeros have.
const LEAST_EXPONENT: u32 = 127 - 60;

impl Power {
    /// Chosen so that the largest scale divided by it is in [64, 128): no product then exceeds 128 · 448 = 57,344, and
    /// f16 ends at 65,504. With power-of-two scales down to 2⁻²¹ times the largest, products are exact: they are
    /// multiples of 2⁶⁻²¹⁻⁹ = 2⁻²⁴, the smallest f16.
    ///
    /// # Safety
    /// The key has arrived.
    #[inline(always)]
    pub unsafe fn of(row: u32) -> Self {
        // SAFETY: the caller's promise.
        let scales = unsafe { shared::load_u32x4(row + ROW_SCALES) };
        let [a, b, c, d] = scales.map(|scale| scale << 1 >> 24);
        Self {
            exponent: a.max(b).max(c.max(d)).max(LEAST_EXPONENT + 6) - 6,
        }
    }

    #[inline(always)]
    pub fn value(self) -> f32 {
        f32::from_bits(self.exponent << 23)
    }
    /// 2⁻ᵉ.
    #[inline(always)]
    pub fn inverse(self) -> f32 {
        f32::from_bits((254 - self.exponent) << 23)
    }
    /// e.
    #[inline(always)]
    pub fn log(self) -> f32 {
        self.exponent as f32 - 127.0
    }

    /// A scale of the key divided by this power, in both halves of an f16 pair.
    ///
    /// # Safety
    /// The key has arrived.
    #[inline(always)]
    pub unsafe fn scale(self, row: u32, group: u32) -> u32 {
        // SAFETY: the caller's promise.
        let scale = unsafe { shared::load_f32(row + ROW_SCALES + group * 4) } * self.inverse();
        convert::f32x2_to_f16x2(scale, scale)
    }
}

/// The A fragment of two keys × four columns, from one word of each key.
#[inline(always)]
pub(super) fn of_keys(words: [u32; 2], scales: [u32; 2]) -> [u32; 4] {
    [
        scaled(words[0], scales[0]),
        scaled(words[1], scales[1]),
        scaled(words[0] >> 16, scales[0]),
        scaled(words[1] >> 16, scales[1]),
    ]
}

/// The A fragment of two columns × four keys, from two words as a transposing `ldmatrix` returns them; each of `scales`
/// holds those of two keys. Even columns are the fragment's upper row, odd columns the lower one.
#[inline(always)]
pub(super) fn of_values(words: [u32; 2], scales: [u32; 2]) -> [u32; 4] {
    let words = words.map(transpose_bytes);
    [
        scaled(words[0], scales[0]),
        scaled(words[0] >> 16, scales[0]),
        scaled(words[1], scales[1]),
        scaled(words[1] >> 16, scales[1]),
    ]
}

#[inline(always)]
fn scaled(numbers: u32, scale: u32) -> u32 {
    math::mul_f16x2(convert::e4m3x2_to_f16x2(numbers as u16), scale)
}

/// Offset, among a block's scales, of a key's scale for a group. The eight pairs of a lane, two per step of 16 keys,
/// are 32 contiguous bytes.
#[inline(always)]
pub(super) const fn scale_at(group: u32, key: u32) -> u32 {
    let (step, half, lane) = (key / 16, key / 8 % 2, key / 2 % 4);
    group * (BLOCK * 2) + lane * 32 + step * 8 + half * 4 + key % 2 * 2
}

const _: () = assert!(BLOCK == 64 && GROUPS == 4 && ROW_BYTES % 128 == 16);
