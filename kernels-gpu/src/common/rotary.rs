//! Rotary embedding: sine and cosine of a position, and pairs that are turned by them.
//!
//! Sine and cosine are computed, not looked up: a frequency is a share of a turn in 64 bits, so the angle is the low half of
//! its product with the position. Whole turns vanish, and no position is too large. The special function unit gets an angle
//! between −π and π, where it is exact to 2⁻²⁰.

use core::f32::consts::TAU;

use cuda_std::{math, ptr};

use super::half::Half;
use crate::abi::RotaryParams;

/// The upper half of the angle at a position, of a turn of 2⁶⁴; `turn` is that from a position to the next, low half first.
#[inline(always)]
pub const fn turned([low, high]: [u32; 2], position: u32) -> u32 {
    math::mul_high_u32(low, position).wrapping_add(high.wrapping_mul(position))
}

/// The same at a distance of either sign.
#[inline(always)]
pub const fn turned_by(turn: [u32; 2], distance: i32) -> u32 {
    let back = if distance < 0 { turn[0] } else { 0 };
    turned(turn, distance as u32).wrapping_sub(back)
}

/// Sine and cosine of an angle, by its upper half.
#[inline(always)]
pub fn sine_cosine(turned: u32) -> [f32; 2] {
    // The upper 23 bits of the turn, from −½ to ½, to the nearest.
    let fraction = turned.wrapping_add((1 << 31) + (1 << 8)) >> 9;
    let angle = (f32::from_bits(fraction | 0x3F80_0000) - 1.5) * TAU;
    [math::sin(angle), math::cos(angle)]
}

impl RotaryParams {
    /// The turn of a pair; of elements that are not turned 0.
    ///
    /// # Safety
    /// The parameters describe memory as they say.
    #[inline(always)]
    pub unsafe fn turn(&self, pair: u32) -> [u32; 2] {
        if pair >= self.pairs {
            return [0; 2];
        }
        // SAFETY: one of the pairs.
        unsafe {
            let at = self.turns + u64::from(pair) * 8;
            [at, at + 4].map(|at| ptr::load_nc_u32(at as *const u32))
        }
    }

    /// What a turned pair of keys is multiplied by.
    #[inline(always)]
    pub const fn gain(&self, pair: u32) -> f32 {
        if pair < self.pairs { self.gain } else { 1.0 }
    }
}

/// Turns two pairs by the sines and cosines of both: of words of two elements each, either the first elements are a pair and
/// the second are, or each word is. `picks` says which, see [`RotaryParams::picks`].
#[inline(always)]
pub fn turn_words<T: Half>(
    words: [u32; 2],
    [s0, c0, s1, c1]: [f32; 4],
    picks: [u32; 2],
) -> [u32; 2] {
    // A permutation of halves puts the elements of a pair into one word, and is its own inverse.
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
