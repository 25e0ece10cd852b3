//! Conversions between f32 and the 8-bit floats by integer instructions, for GPUs before sm_89, which have no instruction
//! for them. Hopper's kernels use its instructions; both give the same bits.

/// The value of an e4m3. Exact.
#[must_use]
#[inline(always)]
pub const fn e4m3_to_f32(byte: u32) -> f32 {
    // Moved to the exponent and mantissa of an f32, the number is 2¹²⁰ times too small, subnormal numbers included.
    const UNIT: f32 = f32::from_bits((127 + 120) << 23);
    let magnitude = byte & 0x7f;
    if magnitude == 0x7f {
        return f32::NAN;
    }
    f32::from_bits((byte & 0x80) << 24 | magnitude << 20) * UNIT
}

/// The nearest e4m3, ties to even, at most the largest finite one. NaN becomes 0x7F.
#[must_use]
#[inline(always)]
pub const fn f32_to_e4m3(x: f32) -> u32 {
    narrow::<3, 7>(x, 448.0)
}

/// The nearest e5m2, likewise.
#[must_use]
#[inline(always)]
pub const fn f32_to_e5m2(x: f32) -> u32 {
    narrow::<2, 15>(x, 57_344.0)
}

#[inline(always)]
#[expect(
    clippy::neg_cmp_op_on_partial_ord,
    reason = "NaN takes the branch of numbers past the largest"
)]
const fn narrow<const MANTISSA: u32, const BIAS: u32>(x: f32, largest: f32) -> u32 {
    let sign = x.to_bits() >> 24 & 0x80;
    let magnitude = f32::from_bits(x.to_bits() & 0x7fff_ffff);
    if !(magnitude <= largest) {
        return if magnitude > largest {
            sign | (if MANTISSA == 3 { 0x7e } else { 0x7b })
        } else {
            0x7f
        };
    }
    let smallest_normal = f32::from_bits((127 + 1 - BIAS) << 23);
    if magnitude < smallest_normal {
        // Its last bit is the smallest subnormal number, so the addition rounds to a multiple of that.
        let adder = f32::from_bits((127 + 1 - BIAS - MANTISSA + 23) << 23);
        return sign | ((magnitude + adder).to_bits() - adder.to_bits());
    }
    let dropped = 23 - MANTISSA;
    let bits = magnitude.to_bits();
    let rounded = bits + (1 << (dropped - 1)) - 1 + (bits >> dropped & 1);
    sign | ((rounded >> dropped) - ((127 - BIAS) << MANTISSA))
}

#[cfg(target_arch = "nvptx64")]
pub use device::*;

#[cfg(target_arch = "nvptx64")]
mod device {
    use cuda_std::convert;

    /// Whether the GPU has instructions for these conversions.
    const BY_INSTRUCTIONS: bool = cfg!(target_feature = "sm_90a");

    /// The values of two e4m3. Exact.
    #[inline(always)]
    pub fn e4m3x2_to_f32(two: u16) -> [f32; 2] {
        if BY_INSTRUCTIONS {
            return convert::f16x2_to_f32(convert::e4m3x2_to_f16x2(two));
        }
        let two = u32::from(two);
        [super::e4m3_to_f32(two & 0xff), super::e4m3_to_f32(two >> 8)]
    }

    /// The values of two e5m2. Exact.
    #[inline(always)]
    pub fn e5m2x2_to_f32(two: u16) -> [f32; 2] {
        if BY_INSTRUCTIONS {
            return convert::f16x2_to_f32(convert::e5m2x2_to_f16x2(two));
        }
        // An e5m2 is the upper byte of the f16 of the same value.
        let two = u32::from(two);
        convert::f16x2_to_f32((two & 0xff) << 8 | (two >> 8) << 24)
    }

    /// The nearest two e4m3, ties to even, at most the largest finite one.
    #[inline(always)]
    pub fn f32x2_to_e4m3x2(first: f32, second: f32) -> u16 {
        if BY_INSTRUCTIONS {
            return convert::f32x2_to_e4m3x2(first, second);
        }
        (super::f32_to_e4m3(first) | super::f32_to_e4m3(second) << 8) as u16
    }

    /// The nearest two e5m2, likewise.
    #[inline(always)]
    pub fn f32x2_to_e5m2x2(first: f32, second: f32) -> u16 {
        if BY_INSTRUCTIONS {
            return convert::f32x2_to_e5m2x2(first, second);
        }
        (super::f32_to_e5m2(first) | super::f32_to_e5m2(second) << 8) as u16
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The value of a float with these bits of the mantissa and this bias, by its definition.
    fn value(byte: u32, mantissa: u32, bias: i32) -> f64 {
        let exponent = (byte & 0x7f) >> mantissa;
        let fraction = f64::from(byte & ((1 << mantissa) - 1)) / f64::from(1 << mantissa);
        let magnitude = match exponent {
            0 => fraction * 2.0_f64.powi(1 - bias),
            _ => (1.0 + fraction) * 2.0_f64.powi(exponent as i32 - bias),
        };
        if byte & 0x80 == 0 {
            magnitude
        } else {
            -magnitude
        }
    }

    #[test]
    fn every_e4m3_has_its_value() {
        for byte in 0..256 {
            let got = e4m3_to_f32(byte);
            match byte & 0x7f {
                0x7f => assert!(got.is_nan(), "{byte:#x}"),
                _ => {
                    assert_eq!(f64::from(got), value(byte, 3, 7), "{byte:#x}");
                    assert_eq!(got.is_sign_negative(), byte & 0x80 != 0, "{byte:#x}");
                }
            }
        }
    }

    /// Numbers between all neighbours, at and beside the middle, become the nearer one, and in the middle the even one.
    #[test]
    fn numbers_are_rounded_to_nearest_even() {
        for (narrow, mantissa, bias, last) in [
            (f32_to_e4m3 as fn(f32) -> u32, 3, 7, 0x7e),
            (f32_to_e5m2, 2, 15, 0x7b),
        ] {
            for byte in 0..last {
                let [low, high] = [byte, byte + 1].map(|byte| value(byte, mantissa, bias) as f32);
                let middle = low + (high - low) / 2.0;
                let even = byte + (byte & 1);
                let [below, above] =
                    [-1, 1].map(|by| f32::from_bits((middle.to_bits() as i32 + by) as u32));
                for (x, expected) in [
                    (low, byte),
                    (below, byte),
                    (middle, even),
                    (above, byte + 1),
                    (high, byte + 1),
                ] {
                    assert_eq!(narrow(x), expected, "{x}");
                    assert_eq!(narrow(-x), 0x80 | expected, "{x}");
                }
            }
            let largest = value(last, mantissa, bias) as f32;
            for x in [largest * 1.01, largest * 1.5, f32::MAX, f32::INFINITY] {
                assert_eq!((narrow(x), narrow(-x)), (last, 0x80 | last), "{x}");
            }
            assert_eq!([narrow(f32::NAN), narrow(-f32::NAN)], [0x7f; 2]);
        }
    }
}
