//! Conversions between `f32` and the 16- and 8-bit floats, two at a time.
//!
//! A pair of 16-bit floats is a `u32` with the first element in the low half, as in memory and in
//! fragments of tensor cores.

/// The first bf16 of a pair: exact, a shift.
#[inline(always)]
#[must_use]
pub const fn bf16x2_low(pair: u32) -> f32 {
    f32::from_bits(pair << 16)
}

/// The second bf16 of a pair: exact, a mask.
#[inline(always)]
#[must_use]
pub const fn bf16x2_high(pair: u32) -> f32 {
    f32::from_bits(pair & 0xFFFF_0000)
}

/// Both bf16 of a pair. Exact.
#[inline(always)]
#[must_use]
pub const fn bf16x2_to_f32(pair: u32) -> [f32; 2] {
    [bf16x2_low(pair), bf16x2_high(pair)]
}

#[cfg(target_arch = "nvptx64")]
pub use device::*;

#[cfg(target_arch = "nvptx64")]
mod device {
    use core::arch::asm;

    macro_rules! packs {
        ($($name:ident, $ptx:literal, $arch:literal, $what:literal;)*) => {$(
            #[doc = $what]
            ///
            /// # PTX
            #[doc = concat!("`", $ptx, " d, second, first`", $arch)]
            #[inline(always)]
            #[must_use]
            pub fn $name(first: f32, second: f32) -> u32 {
                let pair;
                // SAFETY: arithmetic.
                unsafe {
                    asm!(
                        concat!($ptx, " {}, {}, {};"),
                        out(reg32) pair,
                        in(reg32) second,
                        in(reg32) first,
                        options(pure, nomem, nostack),
                    );
                }
                pair
            }
        )*};
    }

    packs! {
        f32x2_to_bf16x2, "cvt.rn.bf16x2.f32", " (sm_80)", "Two bf16, rounded to nearest even.";
        f32x2_to_f16x2, "cvt.rn.f16x2.f32", " (sm_80)", "Two f16, rounded to nearest even; beyond 65504 infinite.";
        f32x2_to_bf16x2_relu, "cvt.rn.relu.bf16x2.f32", " (sm_80)", "[`f32x2_to_bf16x2`] with negative values as 0.";
    }

    /// Both f16 of a pair. Exact.
    ///
    /// # PTX
    /// `cvt.f32.f16 d, a` twice
    #[inline(always)]
    #[must_use]
    pub fn f16x2_to_f32(pair: u32) -> [f32; 2] {
        let (first, second);
        // SAFETY: arithmetic.
        unsafe {
            asm!(
                "{{ .reg .b16 low, high; mov.b32 {{low, high}}, {}; cvt.f32.f16 {}, low; cvt.f32.f16 {}, high; }}",
                in(reg32) pair,
                out(reg32) first,
                out(reg32) second,
                options(pure, nomem, nostack),
            );
        }
        [first, second]
    }

    macro_rules! singles {
        ($($name:ident, $ptx:literal, $arch:literal, $what:literal;)*) => {$(
            #[doc = $what]
            ///
            /// # PTX
            #[doc = concat!("`", $ptx, " d, a`", $arch)]
            #[inline(always)]
            #[must_use]
            pub fn $name(value: f32) -> u16 {
                let bits;
                // SAFETY: arithmetic.
                unsafe {
                    asm!(concat!($ptx, " {}, {};"), out(reg16) bits, in(reg32) value, options(pure, nomem, nostack));
                }
                bits
            }
        )*};
    }

    singles! {
        f32_to_bf16, "cvt.rn.bf16.f32", " (sm_80)", "The bits of the nearest bf16.";
        f32_to_f16, "cvt.rn.f16.f32", "", "The bits of the nearest f16.";
    }

    /// The value of a bf16. Exact.
    #[inline(always)]
    #[must_use]
    pub fn bf16_to_f32(bits: u16) -> f32 {
        f32::from_bits(u32::from(bits) << 16)
    }

    /// The value of an f16. Exact.
    ///
    /// # PTX
    /// `cvt.f32.f16 d, a`
    #[inline(always)]
    #[must_use]
    pub fn f16_to_f32(bits: u16) -> f32 {
        let value;
        // SAFETY: arithmetic.
        unsafe {
            asm!("cvt.f32.f16 {}, {};", out(reg32) value, in(reg16) bits, options(pure, nomem, nostack));
        }
        value
    }

    /// A word of two halves. By shifts and ors ptxas uses one instruction more for results of conversions.
    ///
    /// # PTX
    /// `mov.b32 d, {low, high}`
    #[inline(always)]
    #[must_use]
    pub fn join_u16x2(low: u16, high: u16) -> u32 {
        let word;
        // SAFETY: moves registers.
        unsafe {
            asm!(
                "mov.b32 {}, {{{}, {}}};",
                out(reg32) word,
                in(reg16) low,
                in(reg16) high,
                options(pure, nomem, nostack),
            );
        }
        word
    }

    macro_rules! fp8 {
        ($($pack:ident, $unpack:ident, $format:literal;)*) => {$(
            #[doc = concat!("Two ", $format, ", rounded to nearest even, at most the largest finite value.")]
            ///
            /// # PTX
            #[doc = concat!("`cvt.rn.satfinite.", $format, "x2.f32 d, second, first` (sm_89)")]
            #[inline(always)]
            #[must_use]
            pub fn $pack(first: f32, second: f32) -> u16 {
                let pair;
                // SAFETY: arithmetic.
                unsafe {
                    asm!(
                        concat!("cvt.rn.satfinite.", $format, "x2.f32 {}, {}, {};"),
                        out(reg16) pair,
                        in(reg32) second,
                        in(reg32) first,
                        options(pure, nomem, nostack),
                    );
                }
                pair
            }

            #[doc = concat!("Two ", $format, " as a pair of f16. Exact.")]
            ///
            /// # PTX
            #[doc = concat!("`cvt.rn.f16x2.", $format, "x2 d, a` (sm_89)")]
            #[inline(always)]
            #[must_use]
            pub fn $unpack(pair: u16) -> u32 {
                let values;
                // SAFETY: arithmetic.
                unsafe {
                    asm!(
                        concat!("cvt.rn.f16x2.", $format, "x2 {}, {};"),
                        out(reg32) values,
                        in(reg16) pair,
                        options(pure, nomem, nostack),
                    );
                }
                values
            }
        )*};
    }

    fp8! {
        f32x2_to_e4m3x2, e4m3x2_to_f16x2, "e4m3";
        f32x2_to_e5m2x2, e5m2x2_to_f16x2, "e5m2";
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_pairs_come_apart_low_half_first() {
        let pair = 0xC020_3F80; // -2.5, 1.0
        assert_eq!(bf16x2_to_f32(pair), [1.0, -2.5]);
        assert_eq!(bf16x2_low(0x0000_7F80), f32::INFINITY);
        assert!(bf16x2_high(0x7FC0_0000).is_nan());
        assert_eq!(bf16x2_low(0xFFFF_0001), f32::from_bits(0x0001_0000));
    }
}
