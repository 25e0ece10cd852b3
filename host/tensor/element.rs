//! Element types of tensors.

use bytemuck::{Pod, Zeroable};
use half::{bf16, f16};

use crate::problem::Dtype;

pub(crate) use sealed::{Slice, SliceMut};

/// Reachable within this crate only, so that nobody else implements [`Element`].
mod sealed {
    use half::{bf16, f16};

    use super::{F8E4M3, F8E5M2};
    use crate::problem::Dtype;

    pub trait Sealed: Sized {
        fn erase(slice: &[Self]) -> Slice<'_>;
        fn erase_mut(slice: &mut [Self]) -> SliceMut<'_>;
    }

    macro_rules! elements {
        ($($element:ty => $variant:ident),+) => {
            /// Elements whose type is known only at run time. Code for them is compiled once, in this crate, and not in
            /// each program that uses it.
            #[derive(Clone, Copy, Debug)]
            pub enum Slice<'a> {
                $($variant(&'a [$element]),)+
            }

            /// As [`Slice`], with write access.
            #[derive(Debug)]
            pub enum SliceMut<'a> {
                $($variant(&'a mut [$element]),)+
            }

            impl<'a> Slice<'a> {
                pub fn dtype(&self) -> Dtype {
                    match self {
                        $(Self::$variant(_) => Dtype::$variant,)+
                    }
                }

                pub fn bytes(&self) -> &'a [u8] {
                    match self {
                        $(Self::$variant(elements) => bytemuck::cast_slice(elements),)+
                    }
                }

                /// None if the bytes are not aligned, or not whole elements.
                pub fn from_bytes(dtype: Dtype, bytes: &'a [u8]) -> Option<Self> {
                    match dtype {
                        $(Dtype::$variant => bytemuck::try_cast_slice(bytes).ok().map(Self::$variant),)+
                    }
                }
            }

            impl<'a> SliceMut<'a> {
                pub fn as_slice(&self) -> Slice<'_> {
                    match self {
                        $(Self::$variant(elements) => Slice::$variant(elements),)+
                    }
                }

                pub fn into_bytes(self) -> &'a mut [u8] {
                    match self {
                        $(Self::$variant(elements) => bytemuck::cast_slice_mut(elements),)+
                    }
                }

                pub fn from_bytes(dtype: Dtype, bytes: &'a mut [u8]) -> Option<Self> {
                    match dtype {
                        $(Dtype::$variant => bytemuck::try_cast_slice_mut(bytes).ok().map(Self::$variant),)+
                    }
                }
            }

            $(impl Sealed for $element {
                fn erase(slice: &[Self]) -> Slice<'_> {
                    Slice::$variant(slice)
                }

                fn erase_mut(slice: &mut [Self]) -> SliceMut<'_> {
                    SliceMut::$variant(slice)
                }
            })+
        };
    }

    elements!(f16 => F16, bf16 => BF16, f32 => F32, F8E4M3 => F8E4M3, F8E5M2 => F8E5M2);
}

/// Evaluates an expression with a slice of whatever type it is.
macro_rules! with_elements {
    ($kind:ident($erased:expr), $slice:ident => $body:expr) => {
        match $erased {
            $crate::tensor::$kind::F16($slice) => $body,
            $crate::tensor::$kind::BF16($slice) => $body,
            $crate::tensor::$kind::F32($slice) => $body,
            $crate::tensor::$kind::F8E4M3($slice) => $body,
            $crate::tensor::$kind::F8E5M2($slice) => $body,
        }
    };
}
pub(crate) use with_elements;

/// An element of a tensor. There is one type for each [`Dtype`]; this trait is sealed.
pub trait Element: Pod + Send + Sync + std::fmt::Debug + sealed::Sealed {
    /// The same as a value.
    const DTYPE: Dtype;

    /// Exact. Straight-line code, so that loops over slices vectorise.
    fn to_f32(self) -> f32;

    /// To the nearest, ties to even. The 8-bit types saturate at their largest finite value, as GPUs do.
    fn from_f32(x: f32) -> Self;
}

/// 8-bit float with 4 exponent bits: up to ±448, no infinity (the "fn" flavour of GPUs).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct F8E4M3(
    /// The bits.
    pub u8,
);

/// 8-bit float with 5 exponent bits: up to ±57344, the upper half of an `f16`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct F8E5M2(
    /// The bits.
    pub u8,
);

impl Element for f32 {
    const DTYPE: Dtype = Dtype::F32;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }

    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        x
    }
}

impl Element for bf16 {
    const DTYPE: Dtype = Dtype::BF16;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        Self::from_f32(x)
    }
}

impl Element for f16 {
    const DTYPE: Dtype = Dtype::F16;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        let bits = u32::from(self.to_bits());
        widen::<5, 10>(bits >> 15, bits & 0x7fff, 0x7c00)
    }

    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        Self::from_f32(x)
    }
}

impl Element for F8E4M3 {
    const DTYPE: Dtype = Dtype::F8E4M3;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        let bits = u32::from(self.0);
        // Only the all-ones pattern is special (NaN): patterns of infinity in other formats are numbers here.
        widen::<4, 3>(bits >> 7, bits & 0x7f, 0x7f)
    }

    #[inline]
    fn from_f32(x: f32) -> Self {
        Self(narrow::<4, 3>(x, 0x7e, 0x7f))
    }
}

impl Element for F8E5M2 {
    const DTYPE: Dtype = Dtype::F8E5M2;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        let bits = u32::from(self.0);
        widen::<5, 2>(bits >> 7, bits & 0x7f, 0x7c)
    }

    #[inline]
    fn from_f32(x: f32) -> Self {
        Self(narrow::<5, 2>(x, 0x7b, 0x7f))
    }
}

/// A float of `E` exponent and `M` mantissa bits as f32. Patterns from `special` on are infinity and NaN.
#[inline(always)]
fn widen<const E: u32, const M: u32>(sign: u32, magnitude: u32, special: u32) -> f32 {
    let rebias = 127 - ((1 << (E - 1)) - 1);
    let aligned = magnitude << (23 - M);
    let normal = f32::from_bits(aligned + (rebias << 23));
    // With 1 added to the exponent, the mantissa follows a hidden one, which the subtraction removes again. No denormal
    // is involved.
    let smallest_normal = f32::from_bits((rebias + 1) << 23);
    let subnormal = f32::from_bits(aligned + ((rebias + 1) << 23)) - smallest_normal;
    let mut bits = if magnitude >> M == 0 {
        subnormal
    } else {
        normal
    }
    .to_bits();
    bits = if magnitude >= special {
        0x7f80_0000 | aligned & 0x007f_ffff
    } else {
        bits
    };
    f32::from_bits(bits | sign << 31)
}

/// The nearest float of `E` exponent and `M` mantissa bits, at most `max`.
fn narrow<const E: u32, const M: u32>(x: f32, max: u8, nan: u8) -> u8 {
    let sign = ((x.to_bits() >> 31) as u8) << 7;
    if x.is_nan() {
        return sign | nan;
    }
    let bias = (1 << (E - 1)) - 1;
    // Below the smallest normal number, the steps stay as wide as at this number.
    let exponent = ((x.to_bits() >> 23 & 0xff) as i32 - 127).max(1 - bias);
    let step = f64::from(exponent - M as i32).exp2();
    let steps = (f64::from(x.abs()) / step).round_ties_even();
    let unbiased = (exponent + bias - 1) as u64;
    // In `steps`, the hidden one of a normal number is in bit M, and so is a carry into the next exponent.
    let bits = steps.min(f64::from(1 << (M + 1))) as u64 + (unbiased << M);
    sign | bits.min(max.into()) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By the definition of the format, in exact arithmetic.
    fn decode(bits: u8, mantissa_bits: i32, bias: i32) -> f32 {
        let (sign, exponent) = (bits >> 7, i32::from((bits & 0x7f) >> mantissa_bits));
        let mantissa = f32::from(bits & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits) as f32;
        let magnitude = match exponent {
            0 => mantissa * 2f32.powi(1 - bias),
            _ => (1.0 + mantissa) * 2f32.powi(exponent - bias),
        };
        if sign == 1 { -magnitude } else { magnitude }
    }

    #[test]
    fn every_8_bit_pattern_widens_right() {
        for bits in 0..=255u8 {
            let (got, magnitude) = (F8E4M3(bits).to_f32(), bits & 0x7f);
            if magnitude == 0x7f {
                assert!(got.is_nan());
            } else {
                assert_eq!(
                    got.to_bits(),
                    decode(bits, 3, 7).to_bits(),
                    "e4m3 {bits:#x}"
                );
            }
            let got = F8E5M2(bits).to_f32();
            match magnitude {
                0..=0x7b => assert_eq!(
                    got.to_bits(),
                    decode(bits, 2, 15).to_bits(),
                    "e5m2 {bits:#x}"
                ),
                0x7c => assert_eq!(got.abs(), f32::INFINITY),
                _ => assert!(got.is_nan()),
            }
        }
        assert_eq!(F8E4M3(0x7e).to_f32(), 448.0);
        assert_eq!(F8E5M2(0x7b).to_f32(), 57344.0);
    }

    #[test]
    fn every_16_bit_pattern_widens_right() {
        for bits in 0..=u16::MAX {
            let (x, y) = (f16::from_bits(bits), bf16::from_bits(bits));
            for (got, right) in [
                (Element::to_f32(x), x.to_f32()),
                (Element::to_f32(y), y.to_f32()),
            ] {
                assert!(
                    got.to_bits() == right.to_bits() || got.is_nan() && right.is_nan(),
                    "{bits:#x}"
                );
            }
        }
    }

    fn narrows_to_nearest<T: Element>(max: f32) {
        let all: Vec<f32> = (0..=255u8)
            .map(|bits| bytemuck::cast::<_, T>(bits).to_f32())
            .filter(|x| x.is_finite())
            .collect();
        for step in 0..400_000u32 {
            // All magnitudes, densely: the mantissa's upper bits and every exponent.
            let x = f32::from_bits((step << 13) % 0x7f80_0000);
            let got = T::from_f32(x).to_f32();
            if x >= max {
                assert_eq!(got, max, "{x:e} saturates");
                continue;
            }
            let best = all
                .iter()
                .map(|y| (x - y).abs())
                .fold(f32::INFINITY, f32::min);
            assert_eq!((got - x).abs(), best, "{x:e} became {got:e}");
            assert_eq!(T::from_f32(-x).to_f32(), -got);
        }
        assert!(T::from_f32(f32::NAN).to_f32().is_nan());
        assert_eq!(T::from_f32(f32::NEG_INFINITY).to_f32(), -max);
        for x in all {
            assert_eq!(T::from_f32(x).to_f32(), x);
        }
    }

    #[test]
    fn narrowing_takes_the_nearest() {
        narrows_to_nearest::<F8E4M3>(448.0);
        narrows_to_nearest::<F8E5M2>(57344.0);
        // Ties go to the even pattern: 17 lies between 16 and 18, 19 between 18 and 20.
        assert_eq!(F8E4M3::from_f32(17.0).to_f32(), 16.0);
        assert_eq!(F8E4M3::from_f32(19.0).to_f32(), 20.0);
    }
}
