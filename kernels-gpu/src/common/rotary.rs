//! Rotary embeddings (RoPE): sine and cosine of a position, and the rotation of pairs.
//!
//! Sine and cosine are computed, not looked up. A frequency is a 64-bit fraction of a full turn per position. The low
//! 64 bits of its product with the position are the angle: whole turns drop out, and no position is too large. The
//! special function unit gets an angle between −π and π, where its error is below 2⁻²⁰.

use core::f32::consts::TAU;

use cuda_std::{math, ptr};

use super::half::Half;
use crate::abi::RotaryParams;

/// The upper 32 bits of the angle at a position, where 2⁶⁴ is a full turn. The first argument is the angle per
/// position, low half first.
#[inline(always)]
pub const fn turned([low, high]: [u32; 2], position: u32) -> u32 {
    math::mul_high_u32(low, position).wrapping_add(high.wrapping_mul(position))
}

/// As [`turned`], for a distance of either sign.
#[inline(always)]
pub const fn turned_by(turn: [u32; 2], distance: i32) -> u32 {
    let back = if distance < 0 { turn[0] } else { 0 };
    turned(turn, distance as u32).wrapping_sub(back)
}

/// Sine and cosine of an angle given by its upper 32 bits.
#[inline(always)]
pub fn sine_cosine(turned: u32) -> [f32; 2] {
    // The upper 23 bits, rounded to nearest: a fraction of a turn from −½ to ½.
    let fraction = turned.wrapping_add((1 << 31) + (1 << 8)) >> 9;
    let angle = (f32::from_bits(fraction | 0x3F80_0000) - 1.5) * TAU;
    [math::sin(angle), math::cos(angle)]
}

impl RotaryParams {
    /// The angle per position of a pair; 0 for pairs that are not rotated.
    ///
    /// # Safety
    /// The parameters describe memory as they say.
    #[inline(always)]
    pub unsafe fn turn(&self, pair: u32) -> [u32; 2] {
        if pair >= self.pairs {
            return [0; 2];
        }
        // SAFETY: `pair` is in range.
        unsafe {
            let at = self.turns + u64::from(pair) * 8;
            [at, at + 4].map(|at| ptr::load_nc_u32(at as *const u32))
        }
    }

    /// The factor of a rotated pair of keys.
    #[inline(always)]
    pub const fn gain(&self, pair: u32) -> f32 {
        if pair < self.pairs { self.gain } else { 1.0 }
    }
}

/// Rotates two pairs held in two words of two elements. Either each word is a pair, or the low elements form one pair
/// and the high elements the other; `picks` says which, see [`RotaryParams::picks`].
#[inline(always)]
pub fn turn_words<T: Half>(
    words: [u32; 2],
    [s0, c0, s1, c1]: [f32; 4],
    picks: [u32; 2],
) -> [u32; 2] {
    // This permutation puts the elements of a pair into one word. It is its own inverse.
    let pick = |[a, b]: [u32; 2]| picks.map(|pick| math::permute_bytes(a, b, pick));
    let turn = |[x, y]: [f32; 2], sine: f32, cosine: f32| {
        let (by_x, by_y) = (
            math::fma(-y, sine, x * cosine),
            math::fma(x, sine, y * cosine),
        );
        T::pack(by_x, by_y)
    };
    let [first, second] = pick(words).map(T::unpack);
    pick([turn(first, s0, c0), turn(second, s1, c1)])
}
