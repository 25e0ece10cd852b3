//! From bytes to fragments: numbers of e4m3 to f16, times their scales.
//!
//! Two numbers become f16 by one instruction, exactly, and are multiplied by their scales by another. f16 has not the range of
//! scales, so a key's are divided by a power of two 2ᵉ. It goes into the logits; and for the values into the weights, which
//! are 2 to the power of logit + e − reference.

use cuda_std::{convert, math, shared};

use crate::{
    common::cache::transpose_bytes,
    sm90::mla::keys_656::{BLOCK, GROUPS, ROW_BYTES, ROW_SCALES},
};

/// The power of two 2ᵉ of a key, by its exponent as f32 has it.
#[derive(Clone, Copy)]
pub(super) struct Power {
    exponent: u32,
}

/// The exponent of the smallest: 2⁻⁶⁰. A key of zeros has that one.
const LEAST_EXPONENT: u32 = 127 - 60;

impl Power {
    /// The largest scale over it becomes 64 or more and less than 128, so that no product exceeds 128 · 448 = 57,344: f16 ends
    /// at 65,504. Of scales down to 2⁻²¹ times the largest, products of powers of two are exact: they are multiples of
    /// 2⁶⁻²¹⁻⁹, and f16 has those of 2⁻²⁴.
    ///
    /// # Safety
    /// The key is there.
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

    /// A scale of the key over it, twice in f16.
    ///
    /// # Safety
    /// The key is there.
    #[inline(always)]
    pub unsafe fn scale(self, row: u32, group: u32) -> u32 {
        // SAFETY: the caller's promise.
        let scale = unsafe { shared::load_f32(row + ROW_SCALES + group * 4) } * self.inverse();
        convert::f32x2_to_f16x2(scale, scale)
    }
}

/// The fragment of four columns of two keys, of a word of each.
#[inline(always)]
pub(super) fn of_keys(words: [u32; 2], scales: [u32; 2]) -> [u32; 4] {
    [
        scaled(words[0], scales[0]),
        scaled(words[1], scales[1]),
        scaled(words[0] >> 16, scales[0]),
        scaled(words[1] >> 16, scales[1]),
    ]
}

/// The fragment of two columns of four keys: two words as a transposing `ldmatrix` brings them, the scales of two keys in each.
/// Columns of even numbers are the fragment's upper row, odd ones the lower.
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

/// Where the scale of a key for a group of values lies among a block's: a lane's eight pairs, two for each step of 16 keys, are
/// 32 bytes.
#[inline(always)]
pub(super) const fn scale_at(group: u32, key: u32) -> u32 {
    let (step, half, lane) = (key / 16, key / 8 % 2, key / 2 % 4);
    group * (BLOCK * 2) + lane * 32 + step * 8 + half * 4 + key % 2 * 2
}

const _: () = assert!(BLOCK == 64 && GROUPS == 4 && ROW_BYTES % 128 == 16);
