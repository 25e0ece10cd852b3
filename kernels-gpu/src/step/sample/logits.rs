//! Loads of logits, and their conversion to keys.

use cuda_std::prelude::*;

use crate::{
    common::half::Half,
    step::{Vector, unpack},
};

/// A type of logits.
pub trait Logits {
    const BYTES: u64;
    /// Rounds that stay in registers; later rounds are reread, from L1.
    const HELD: usize;
    /// Eight logits in memory format.
    type Eight: Copy;
    /// Eight NaNs.
    const NONE: Self::Eight;
    /// # Safety
    /// Eight logits are at `from`, a multiple of 16 bytes.
    unsafe fn load(from: u64) -> Self::Eight;
    /// Loads the first `count` of eight; the others are NaN.
    ///
    /// # Safety
    /// `count` logits are at `from`.
    unsafe fn load_some(from: u64, count: u32) -> Self::Eight;
    /// The elementwise maximum; of a number and NaN, the number.
    fn larger(a: Self::Eight, b: Self::Eight) -> Self::Eight;
    /// The largest of eight; NaN if all are NaN.
    fn largest(eight: Self::Eight) -> f32;
    /// Converts to f32. Opaque: the compiler does not keep earlier conversions of the same logits in registers.
    fn unpack(eight: Self::Eight) -> Vector;
}

impl<T: Half> Logits for T {
    const BYTES: u64 = 2;
    const HELD: usize = 4;
    type Eight = [u32; 4];
    const NONE: [u32; 4] = [0x7FFF_7FFF; 4];
    #[inline(always)]
    unsafe fn load(from: u64) -> [u32; 4] {
        // SAFETY: the caller's promise.
        unsafe { ptr::load_u32x4(from as *const u32) }
    }
    #[inline(always)]
    unsafe fn load_some(from: u64, count: u32) -> [u32; 4] {
        let one = |i: u32| {
            if i >= count {
                return 0x7FFF;
            }
            // SAFETY: the caller's promise.
            u32::from(unsafe { ptr::load_u16((from + u64::from(i) * 2) as *const u16) })
        };
        let pair = |i: u32| one(i) | one(i + 1) << 16;
        [pair(0), pair(2), pair(4), pair(6)]
    }
    #[inline(always)]
    fn larger(a: [u32; 4], b: [u32; 4]) -> [u32; 4] {
        let one = |i: usize| <T as Half>::larger(a[i], b[i]);
        [one(0), one(1), one(2), one(3)]
    }
    #[inline(always)]
    fn largest([a, b, c, d]: [u32; 4]) -> f32 {
        let pair = <T as Half>::larger(<T as Half>::larger(a, b), <T as Half>::larger(c, d));
        let [first, second] = <T as Half>::unpack(pair);
        first.max(second)
    }
    #[inline(always)]
    fn unpack(eight: [u32; 4]) -> Vector {
        unpack::<T>(eight.map(misc::opaque))
    }
}

pub struct F32;

impl Logits for F32 {
    const BYTES: u64 = 4;
    const HELD: usize = 2;
    type Eight = Vector;
    const NONE: Vector = [f32::NAN; 8];
    #[inline(always)]
    unsafe fn load(from: u64) -> Vector {
        let from = from as *const f32;
        // SAFETY: the caller's promise.
        unsafe {
            let [a, b, c, d] = ptr::load_f32x4(from);
            let [e, f, g, h] = ptr::load_f32x4(from.add(4));
            [a, b, c, d, e, f, g, h]
        }
    }
    #[inline(always)]
    unsafe fn load_some(from: u64, count: u32) -> Vector {
        let mut eight = Self::NONE;
        let mut i = 0;
        while i < 8 {
            if (i as u32) < count {
                // SAFETY: the caller's promise.
                eight[i] = unsafe { ptr::load_f32((from + i as u64 * 4) as *const f32) };
            }
            i += 1;
        }
        eight
    }
    #[inline(always)]
    fn larger(a: Vector, b: Vector) -> Vector {
        let one = |i: usize| a[i].max(b[i]);
        [
            one(0),
            one(1),
            one(2),
            one(3),
            one(4),
            one(5),
            one(6),
            one(7),
        ]
    }
    #[inline(always)]
    fn largest(eight: Vector) -> f32 {
        let [a, b, c, d, e, f, g, h] = eight;
        a.max(b).max(c.max(d)).max(e.max(f).max(g.max(h)))
    }
    #[inline(always)]
    fn unpack(eight: Vector) -> Vector {
        eight.map(|x| f32::from_bits(misc::opaque(x.to_bits())))
    }
}

/// The logit of a key; −∞ for keys that no logit has.
#[inline(always)]
pub fn logit_of(key: u32) -> f32 {
    if key >> 31 != 0 {
        f32::from_bits(key & 0x7FFF_FFFF)
    } else if key > 0x007F_FFFF {
        f32::from_bits(!key)
    } else {
        f32::NEG_INFINITY
    }
}
