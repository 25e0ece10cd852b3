//! The element types of the cache, and their conversion to operands of the tensor cores.
//!
//! sm_90 converts e4m3 only to f16: one instruction for two elements, exact. An element of e5m2 is the upper byte of an
//! f16. So 8-bit keys and values are multiplied in f16, whatever the type of the queries.
//!
//! Kernels with Ampere's instructions convert e4m3 by integer instructions: its exponent and mantissa, moved to those of an
//! f16, are the number times 2⁻⁸, subnormal numbers included. That factor stays in the operands
//! (`Cache::UNIT`). All bits set are NaN, and would become 1.875: this times 36,864 is infinite, the largest number
//! of e4m3, 1.75, times 36,864 is not. So a product by 0 of that product, added to the operand, makes it NaN or leaves it.
//!
//! Queries in bf16 are converted to f16: each row is scaled by a power of two that brings its largest magnitude to 2¹⁴,
//! and the logits are divided by it. Elements more than 2³² times smaller than the largest lose bits, which are below the
//! resolution of the f32 sum.

/// 16-bit floats of the queries' type.
pub const BITS16: u32 = 0;
/// 8-bit floats with 4 exponent bits.
pub const E4M3: u32 = 1;
/// The same with scales per token and KV head.
pub const E4M3_BY_TOKEN: u32 = 2;
/// 8-bit floats with 5 exponent bits.
pub const E5M2: u32 = 3;
/// As [`E4M3`], with two neighbouring KV heads read at a time: with head dimension 64 a row has 64 bytes, for which L2
/// takes as long as for 128.
pub const E4M3_PAIRS: u32 = 4;
/// As [`BITS16`], with rotary embeddings: keys are rotated when they are read, queries once per chunk.
pub const BITS16_TURNED: u32 = 5;
/// As [`E4M3_PAIRS`], with scales as in [`E4M3_BY_TOKEN`].
pub const E4M3_PAIRS_BY_TOKEN: u32 = 6;
/// As [`BITS16`], with two neighbouring KV heads read at a time: a row of head dimension 80 or 96 ends inside a line of
/// 128 bytes, and L2 takes as long for a part of a line as for all of it.
pub const BITS16_PAIRS: u32 = 7;

/// Where each token has scales, smaller ones of values are raised to this, so that the inverse is finite. Scales of a row's values
/// may differ by 2¹²⁰: beyond that, a sum loses the keys with the largest.
const SMALLEST_SCALE: f32 = 1e-30;

/// The scale of a value as kernels use it. NaN stays NaN: then the rows that see the value are NaN.
#[must_use]
#[inline(always)]
pub const fn scale_of_value(scale: f32) -> f32 {
    at_least(scale, SMALLEST_SCALE)
}

/// The factor of a row's products as kernels use it: not 0, because −∞ · 0 is NaN, and a hidden key's logit is −∞. NaN
/// stays NaN.
#[must_use]
#[inline(always)]
pub const fn factor_of_products(factor: f32) -> f32 {
    at_least(factor, f32::MIN_POSITIVE)
}

/// The larger of both, and NaN for NaN, for which `f32::max` gives the other number.
#[inline(always)]
const fn at_least(number: f32, least: f32) -> f32 {
    if number < least { least } else { number }
}

/// Whether elements have 16 bits.
#[must_use]
pub const fn is_16_bits(cache: u32) -> bool {
    matches!(cache, BITS16 | BITS16_TURNED | BITS16_PAIRS)
}

/// KV heads that are read together.
#[must_use]
pub const fn kv_heads(cache: u32) -> u32 {
    if matches!(cache, E4M3_PAIRS | E4M3_PAIRS_BY_TOKEN | BITS16_PAIRS) {
        2
    } else {
        1
    }
}

/// Whether there are scales per token.
#[must_use]
pub const fn by_token(cache: u32) -> bool {
    matches!(cache, E4M3_BY_TOKEN | E4M3_PAIRS_BY_TOKEN)
}

/// Bytes per element.
#[must_use]
pub const fn bytes(cache: u32) -> u32 {
    if is_16_bits(cache) { 2 } else { 1 }
}

/// The element type in the registry; `None` if it is that of the queries.
#[cfg(not(target_arch = "nvptx64"))]
#[must_use]
pub const fn element(cache: u32) -> Option<crate::registry::Element> {
    use crate::registry::Element;
    match cache {
        BITS16 | BITS16_TURNED | BITS16_PAIRS => None,
        E5M2 => Some(Element::E5m2),
        _ => Some(Element::E4m3),
    }
}

#[cfg(target_arch = "nvptx64")]
pub use device::*;

#[cfg(target_arch = "nvptx64")]
mod device {
    use core::marker::PhantomData;

    use cuda_std::{convert, math, ptr};

    use super::{
        BITS16, BITS16_PAIRS, BITS16_TURNED, E4M3, E4M3_BY_TOKEN, E4M3_PAIRS, E4M3_PAIRS_BY_TOKEN,
        E5M2, by_token, is_16_bits, kv_heads,
    };
    use crate::{
        abi::{KvStrides, ScaleParams},
        common::half::{F16, Half},
    };

    /// The cache `CACHE`, with queries of type `T`.
    pub struct Stored<T, const CACHE: u32>(PhantomData<T>);

    /// How keys and values become operands.
    pub trait Cache {
        /// Which cache it is.
        const CACHE: u32;
        /// The type of the operands.
        type Product: Half;
        /// The type of the queries.
        type Query: Half;

        /// Whether keys and values have 8 bits, and scales.
        const SCALED: bool = !is_16_bits(Self::CACHE);
        /// Whether there are scales per token.
        const BY_TOKEN: bool = by_token(Self::CACHE);
        /// Whether a row of keys has two KV heads. Then the first half of a tile's rows is of one, the second half of
        /// the other.
        const PAIRS: bool = kv_heads(Self::CACHE) == 2;
        /// Whether rotary embeddings are applied to keys and queries.
        const TURNS: bool = Self::CACHE == BITS16_TURNED;
        /// Whether e4m3 is converted by integer instructions.
        const BY_INTEGERS: bool =
            Self::SCALED && Self::CACHE != E5M2 && !cfg!(target_feature = "sm_90");
        /// An element divided by its operand.
        const UNIT: f32 = if Self::BY_INTEGERS { 256.0 } else { 1.0 };
        /// Whether rows of queries in shared memory are of one warp alone, as those of Ampere's kernels. It may replace
        /// them by what it multiplies.
        const OWN_QUERIES: bool = Self::SCALED && !cfg!(target_feature = "sm_90");

        /// Converts four elements of 8 bits to two pairs of operands: the first two and the last two elements or, by
        /// integer instructions, the even and the odd ones.
        #[inline(always)]
        fn widen(four: u32) -> [u32; 2] {
            if Self::BY_INTEGERS {
                return [widen_upper(four << 8), widen_upper(four)];
            }
            if Self::CACHE == E5M2 {
                // An element is the upper byte of the f16 of the same value.
                [
                    math::permute_bytes(four, 0, 0x1404),
                    math::permute_bytes(four, 0, 0x3424),
                ]
            } else if Self::SCALED {
                [
                    convert::e4m3x2_to_f16x2(four as u16),
                    convert::e4m3x2_to_f16x2((four >> 16) as u16),
                ]
            } else {
                unreachable!()
            }
        }

        /// Converts two elements of each of two values to the first elements of both, and the second ones.
        #[inline(always)]
        fn widen_transposed(four: u32) -> [u32; 2] {
            match Self::BY_INTEGERS {
                true => Self::widen(four),
                false => Self::widen(transpose_bytes(four)),
            }
        }

        /// Of two pairs of a query's elements, those that belong to the pairs of [`widen`](Self::widen).
        #[inline(always)]
        fn in_order(pairs: [u32; 2]) -> [u32; 2] {
            match Self::BY_INTEGERS {
                true => [0x5410, 0x7632].map(|of| math::permute_bytes(pairs[0], pairs[1], of)),
                false => pairs,
            }
        }
    }

    /// Converts bytes 1 and 3 of a word from e4m3 to f16 times 2⁻⁸. NaN stays NaN.
    #[inline(always)]
    fn widen_upper(word: u32) -> u32 {
        let pair = word & 0x8000_8000 | (word & 0x7F00_7F00) >> 1;
        // 36,864 twice.
        let infinite = math::mul_f16x2(pair, 0x7880_7880);
        math::fma_f16x2(infinite, 0, pair)
    }

    macro_rules! stored {
        ($product:ident: $($cache:ident),*) => {$(
            impl<T: Half> Cache for Stored<T, $cache> {
                const CACHE: u32 = $cache;
                type Product = $product;
                type Query = T;
            }
        )*};
    }

    stored! { T: BITS16, BITS16_PAIRS, BITS16_TURNED }
    stored! { F16: E4M3, E4M3_BY_TOKEN, E4M3_PAIRS, E4M3_PAIRS_BY_TOKEN, E5M2 }

    /// Bytes 0, 2, 1, 3 of a word. A word with two elements of each of two values becomes the first elements of both,
    /// then the second elements of both.
    #[inline(always)]
    pub fn transpose_bytes(word: u32) -> u32 {
        math::permute_bytes(word, 0, 0x3120)
    }

    /// The power of two that scales a row of bf16 into the range of f16, and its inverse. `largest` has the bits of the
    /// row's largest magnitude.
    #[inline(always)]
    pub fn fit_f16(largest: u32) -> [f32; 2] {
        let exponent = 268 - (largest >> 23);
        let exponent = if exponent < 253 { exponent } else { 253 };
        [
            f32::from_bits(exponent << 23),
            f32::from_bits((254 - exponent) << 23),
        ]
    }

    /// Updates `largest`, the bits of the largest magnitude of a row of bf16, with two more elements.
    #[inline(always)]
    pub fn larger(largest: u32, pair: u32) -> u32 {
        largest.max((pair & 0x7FFF_0000).max(pair << 16 & 0x7FFF_0000))
    }

    /// Converts two elements of bf16 to f16, scaled by `fit` from [`fit_f16`].
    #[inline(always)]
    pub fn fitted(pair: u32, fit: f32) -> u32 {
        let [first, second] = convert::bf16x2_to_f32(pair);
        convert::f32x2_to_f16x2(first * fit, second * fit)
    }

    impl ScaleParams {
        /// The addresses of the scales of a key and of its value, if each token has its own: of a token of a page and a KV
        /// head.
        #[inline(always)]
        pub fn places(&self, page: u32, token: u32, head: u32) -> [u64; 2] {
            let place = |of: u64, strides: &KvStrides| {
                let in_page = token * strides.token + head * strides.head;
                of + (u64::from(page) * u64::from(strides.page) + u64::from(in_page)) * 4
            };
            [
                place(self.k, &self.k_strides),
                place(self.v, &self.v_strides),
            ]
        }

        /// The scales of keys and values for a query token and a KV head. The launch before may have written them and end
        /// while this one runs, so these are no loads of memory that nobody writes.
        ///
        /// # Safety
        /// The parameters describe memory as they say.
        #[inline(always)]
        pub unsafe fn of(&self, token: u32, head: u32) -> [f32; 2] {
            // SAFETY: the caller's promise.
            unsafe {
                let load = |address: u64, index: u32| {
                    f32::from_bits(ptr::load_u32(
                        (address + u64::from(index) * 4) as *const u32,
                    ))
                };
                let request = if self.of_token != 0 {
                    ptr::load_u32((self.of_token + u64::from(token) * 4) as *const u32)
                } else {
                    0
                };
                let mut scales = [1.0; 2];
                if self.k != 0 {
                    scales[0] = load(
                        self.k,
                        request * self.k_strides.page + head * self.k_strides.head,
                    );
                    scales[1] = load(
                        self.v,
                        request * self.v_strides.page + head * self.v_strides.head,
                    );
                }
                scales
            }
        }
    }
}
