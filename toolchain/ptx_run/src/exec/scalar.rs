//! Executes arithmetic, for each lane separately.

use half::{bf16, f16};

use crate::{
    op::{Bit2, Compare, Kind, Long2, Op, Row, Shift, Widen, Word1, Word2, Word3},
    report::Step,
    warp::{LANES, Warp},
};

type Words = [u32; LANES];
type Longs = [u64; LANES];

#[inline(always)]
fn map1(a: &Words, f: impl Fn(u32) -> u32) -> Words {
    std::array::from_fn(|lane| f(a[lane]))
}

#[inline(always)]
fn map2(a: &Words, b: &Words, f: impl Fn(u32, u32) -> u32) -> Words {
    std::array::from_fn(|lane| f(a[lane], b[lane]))
}

/// The smaller of two values, or the larger. As on the hardware, −0 is less than 0 (which Rust leaves open), and a
/// number is preferred to NaN.
fn lesser(a: f32, b: f32, greater: bool) -> f32 {
    if a.is_nan() || b.is_nan() {
        return if a.is_nan() { b } else { a };
    }
    if a.total_cmp(&b).is_gt() == greater {
        a
    } else {
        b
    }
}

#[inline(always)]
fn floats2(a: &Words, b: &Words, f: impl Fn(f32, f32) -> f32) -> Words {
    map2(a, b, |a, b| {
        f(f32::from_bits(a), f32::from_bits(b)).to_bits()
    })
}

/// Applies a function to both halves of words.
#[inline(always)]
fn halves2(a: &Words, b: &Words, f: impl Fn(u16, u16) -> u16) -> Words {
    map2(a, b, |a, b| {
        let [low, high] = [f(a as u16, b as u16), f((a >> 16) as u16, (b >> 16) as u16)];
        u32::from(high) << 16 | u32::from(low)
    })
}

#[inline(always)]
fn floats1(a: &Words, f: impl Fn(f32) -> f32) -> Words {
    map1(a, |a| f(f32::from_bits(a)).to_bits())
}

#[inline(always)]
fn long2(a: &Longs, b: &Longs, f: impl Fn(u64, u64) -> u64) -> Longs {
    std::array::from_fn(|lane| f(a[lane], b[lane]))
}

/// Flushes subnormal numbers to zero, as the special function unit does.
fn flush(x: f32) -> f32 {
    if x.is_subnormal() {
        0.0_f32.copysign(x)
    } else {
        x
    }
}

/// The hyperbolic tangent with a relative error of 2⁻¹¹, which PTX allows; its sign depends on the bits. The hardware's
/// error is not documented. A kernel that is correct here tolerates any error within the bound.
fn tanh_approx(x: f32) -> f32 {
    let exact = x.tanh();
    let up = exact.to_bits().wrapping_mul(0x9E37_79B9) >> 31 == 0;
    let error = if up {
        2.0_f32.powi(-11)
    } else {
        -2.0_f32.powi(-11)
    };
    (exact * (1.0 + error)).clamp(-1.0, 1.0)
}

#[inline]
fn widen(f: Widen, a: u32) -> u64 {
    let float = f32::from_bits(a);
    match f {
        Widen::Unsigned => a.into(),
        Widen::Signed => i64::from(a as i32) as u64,
        // The result for NaN, where the one of 32 bits is 0.
        Widen::U64FromF32 | Widen::I64FromF32 if float.is_nan() => 1 << 63,
        Widen::U64FromF32 => float as u64,
        Widen::I64FromF32 => float as i64 as u64,
    }
}

#[inline]
fn word1(f: Word1, a: &Words) -> Words {
    match f {
        Word1::Move => *a,
        Word1::Not => map1(a, |a| !a),
        Word1::Neg => map1(a, u32::wrapping_neg),
        Word1::FNeg => map1(a, |a| a ^ 0x8000_0000),
        Word1::FAbs => map1(a, |a| a & 0x7FFF_FFFF),
        Word1::Popc => map1(a, u32::count_ones),
        Word1::Clz => map1(a, u32::leading_zeros),
        Word1::BrevBits => map1(a, u32::reverse_bits),
        Word1::Ex2 => floats1(a, |a| flush(flush(a).exp2())),
        Word1::Lg2 => floats1(a, |a| flush(flush(a).log2())),
        Word1::Rcp => floats1(a, |a| flush(flush(a).recip())),
        Word1::RcpNearest => floats1(a, f32::recip),
        Word1::Rsqrt => floats1(a, |a| flush(flush(a).sqrt().recip())),
        Word1::Sqrt => floats1(a, |a| flush(flush(a).sqrt())),
        Word1::Tanh => floats1(a, tanh_approx),
        Word1::Sin => floats1(a, |a| flush(flush(a).sin())),
        Word1::Cos => floats1(a, |a| flush(flush(a).cos())),
        Word1::Low16 => map1(a, |a| a & 0xFFFF),
        Word1::SignExtend16 => map1(a, |a| i32::from(a as u16 as i16) as u32),
        Word1::F32FromU32 => map1(a, |a| (a as f32).to_bits()),
        Word1::F32FromI32 => map1(a, |a| (a as i32 as f32).to_bits()),
        Word1::U32FromF32 => map1(a, |a| f32::from_bits(a) as u32),
        Word1::I32FromF32 => map1(a, |a| f32::from_bits(a) as i32 as u32),
        Word1::UnpackE4m3 => map1(a, |a| {
            u32::from(wide(a as u8)) | u32::from(wide((a >> 8) as u8)) << 16
        }),
        // The first half of an f16; each NaN is normalised.
        Word1::UnpackE5m2 => map1(a, |a| {
            let half = |bits: u32| {
                if bits & 0x7F > 0x7C {
                    0x7FFF
                } else {
                    bits << 8
                }
            };
            half(a & 0xFF) | half(a >> 8 & 0xFF) << 16
        }),
        Word1::F32FromF16 => map1(a, |a| f16::from_bits(a as u16).to_f32().to_bits()),
    }
}

#[inline]
fn word2(f: Word2, a: &Words, b: &Words) -> Words {
    let signed = |f: fn(i32, i32) -> i32| map2(a, b, move |a, b| f(a as i32, b as i32) as u32);
    match f {
        Word2::Add => map2(a, b, u32::wrapping_add),
        Word2::Sub => map2(a, b, u32::wrapping_sub),
        Word2::Mul => map2(a, b, u32::wrapping_mul),
        Word2::MulHi => map2(a, b, |a, b| ((u64::from(a) * u64::from(b)) >> 32) as u32),
        Word2::MulHiSigned => signed(|a, b| ((i64::from(a) * i64::from(b)) >> 32) as i32),
        Word2::And => map2(a, b, |a, b| a & b),
        Word2::Or => map2(a, b, |a, b| a | b),
        Word2::Xor => map2(a, b, |a, b| a ^ b),
        Word2::Shl => map2(a, b, |a, b| if b > 31 { 0 } else { a << b }),
        Word2::Shr => map2(a, b, |a, b| if b > 31 { 0 } else { a >> b }),
        Word2::ShrSigned => map2(a, b, |a, b| (a as i32 >> b.min(31)) as u32),
        Word2::Shl16 => map2(a, b, |a, b| if b > 15 { 0 } else { (a << b) & 0xFFFF }),
        Word2::Shr16 => map2(a, b, |a, b| if b > 15 { 0 } else { (a & 0xFFFF) >> b }),
        Word2::Add16 => map2(a, b, |a, b| a.wrapping_add(b) & 0xFFFF),
        Word2::Sub16 => map2(a, b, |a, b| a.wrapping_sub(b) & 0xFFFF),
        Word2::Mul16 => map2(a, b, |a, b| a.wrapping_mul(b) & 0xFFFF),
        Word2::Min => map2(a, b, u32::min),
        Word2::MinSigned => signed(i32::min),
        Word2::Max => map2(a, b, u32::max),
        Word2::MaxSigned => signed(i32::max),
        Word2::Div => map2(a, b, |a, b| a.checked_div(b).unwrap_or(u32::MAX)),
        Word2::DivSigned => signed(|a, b| if b == 0 { -1 } else { a.wrapping_div(b) }),
        Word2::Rem => map2(a, b, |a, b| a.checked_rem(b).unwrap_or(a)),
        Word2::RemSigned => signed(|a, b| if b == 0 { a } else { a.wrapping_rem(b) }),
        Word2::FAdd => floats2(a, b, |a, b| a + b),
        Word2::FSub => floats2(a, b, |a, b| a - b),
        Word2::FMul => floats2(a, b, |a, b| a * b),
        Word2::FMin => floats2(a, b, |a, b| lesser(a, b, false)),
        Word2::FMax => floats2(a, b, |a, b| lesser(a, b, true)),
        Word2::FMaxBf16s => halves2(a, b, |a, b| {
            let [a, b] = [a, b].map(|x| bf16::from_bits(x).to_f32());
            bf16::from_f32(lesser(a, b, true)).to_bits()
        }),
        Word2::FMaxF16s => halves2(a, b, |a, b| {
            let [a, b] = [a, b].map(|x| f16::from_bits(x).to_f32());
            f16::from_f32(lesser(a, b, true)).to_bits()
        }),
        Word2::FMulF16s => halves2(a, b, |a, b| {
            // The product is exact in f32, so it is rounded only once.
            let [a, b] = [a, b].map(|x| f16::from_bits(x).to_f32());
            f16::from_f32(a * b).to_bits()
        }),
        Word2::FDiv => floats2(a, b, |a, b| a / b),
        Word2::PackE4m3 => map2(a, b, |a, b| {
            let quarter = |bits| u32::from(narrow::<4>(f32::from_bits(bits)));
            quarter(a) << 8 | quarter(b)
        }),
        Word2::PackE5m2 => map2(a, b, |a, b| {
            let quarter = |bits| u32::from(narrow::<5>(f32::from_bits(bits)));
            quarter(a) << 8 | quarter(b)
        }),
        Word2::PackBf16 => map2(a, b, |a, b| {
            let half = |bits| u32::from(bf16::from_f32(f32::from_bits(bits)).to_bits());
            half(a) << 16 | half(b)
        }),
        Word2::PackF16 => map2(a, b, |a, b| {
            let half = |bits| u32::from(f16::from_f32(f32::from_bits(bits)).to_bits());
            half(a) << 16 | half(b)
        }),
    }
}

/// Rounded once, by way of [`odd_sum`]. A call of the C library's `fmaf` for each lane would take longer.
fn fma(a: f32, b: f32, c: f32) -> f32 {
    odd_sum(a, b, c) as f32
}

/// As [`fma`], of f16. Of an f64 that is rounded to odd, the upper bits with one for the others are rounded to odd, too.
fn fma_f16(a: u16, b: u16, c: u16) -> u16 {
    const LOWER: u64 = (1 << 29) - 1;
    let [a, b, c] = [a, b, c].map(|x| f16::from_bits(x).to_f32());
    let sum = odd_sum(a, b, c);
    let bits = sum.to_bits();
    let odd = match sum.is_finite() && bits & LOWER != 0 {
        true => f64::from_bits(bits & !LOWER | (LOWER + 1)),
        false => sum,
    };
    f16::from_f32(odd as f32).to_bits()
}

/// a·b + c: the product is exact in f64, and the sum there is rounded to odd, so that what it lost shows in its last bit.
fn odd_sum(a: f32, b: f32, c: f32) -> f64 {
    let (product, c) = (f64::from(a) * f64::from(b), f64::from(c));
    let sum = product + c;
    let of_c = sum - product;
    let lost = (product - (sum - of_c)) + (c - of_c);
    let bits = sum.to_bits();
    if !sum.is_finite() || lost == 0.0 || bits & 1 == 1 {
        return sum;
    }
    let away = (lost > 0.0) == (sum > 0.0);
    f64::from_bits(if away { bits + 1 } else { bits - 1 })
}

fn word3(f: Word3, a: &Words, b: &Words, c: &Words) -> Words {
    match f {
        Word3::Mad => {
            std::array::from_fn(|lane| a[lane].wrapping_mul(b[lane]).wrapping_add(c[lane]))
        }
        Word3::Mad16 => {
            std::array::from_fn(|lane| a[lane].wrapping_mul(b[lane]).wrapping_add(c[lane]) & 0xFFFF)
        }
        Word3::Fma => std::array::from_fn(|lane| {
            fma(
                f32::from_bits(a[lane]),
                f32::from_bits(b[lane]),
                f32::from_bits(c[lane]),
            )
            .to_bits()
        }),
        Word3::FmaF16s => std::array::from_fn(|lane| {
            let of = |shift: u32| {
                let [a, b, c] = [a, b, c].map(|words| (words[lane] >> shift) as u16);
                u32::from(fma_f16(a, b, c))
            };
            of(16) << 16 | of(0)
        }),
        Word3::Bfe => {
            std::array::from_fn(|lane| field(u64::from(a[lane]), b[lane], c[lane]) as u32)
        }
        Word3::BfeSigned => std::array::from_fn(|lane| {
            let (at, len) = (b[lane] & 0xFF, c[lane] & 0xFF);
            let value = i64::from(a[lane] as i32) >> at.min(63);
            if len == 0 {
                0
            } else {
                (value << (64 - len.min(64)) >> (64 - len.min(64))) as u32
            }
        }),
        Word3::PermuteBytes => std::array::from_fn(|lane| permuted(a[lane], b[lane], c[lane])),
    }
}

/// Selects four of eight bytes, with `b` above `a`, one per digit of the selector. If a digit's top bit is set, its
/// byte becomes eight copies of the sign bit.
fn permuted(a: u32, b: u32, selector: u32) -> u32 {
    let bytes = u64::from(b) << 32 | u64::from(a);
    (0..4).fold(0, |word, i| {
        let digit = selector >> (4 * i) & 0xF;
        let byte = (bytes >> (8 * (digit & 7))) as u8;
        let byte = match digit & 8 {
            0 => byte,
            _ => ((byte as i8) >> 7) as u8,
        };
        word | u32::from(byte) << (8 * i)
    })
}

/// The nearest 8-bit float with 4 or 5 exponent bits, saturated to the largest.
fn narrow<const EXPONENT_BITS: i32>(x: f32) -> u8 {
    let sign = ((x.to_bits() >> 31) as u8) << 7;
    if x.is_nan() {
        return sign | 0x7F;
    }
    // Numbers of equal exponent, and subnormal ones, have equal steps; a carry increments the exponent.
    let (mantissa_bits, least) = (7 - EXPONENT_BITS, 2 - (1 << (EXPONENT_BITS - 1)));
    let exponent = ((x.to_bits() >> 23 & 0xFF) as i32 - 127).clamp(least, 3 - least);
    let steps = (f64::from(x.abs()) * f64::from(mantissa_bits - exponent).exp2()).round_ties_even();
    let bits = steps.min(256.0) as u32 + ((exponent - least) << mantissa_bits) as u32;
    let largest = if EXPONENT_BITS == 4 { 0x7E } else { 0x7B };
    sign | bits.min(largest) as u8
}

/// Converts an 8-bit float with 4 exponent bits to a half, exactly.
pub(super) fn wide(bits: u8) -> u16 {
    let (exponent, steps) = (i32::from(bits >> 3 & 0xF), f32::from(bits & 7));
    let magnitude = match (exponent, bits & 7) {
        (15, 7) => return 0x7FFF,
        (0, _) => steps * (-9_f32).exp2(),
        _ => (8.0 + steps) * ((exponent - 10) as f32).exp2(),
    };
    f16::from_f32(magnitude).to_bits() | u16::from(bits >> 7) << 15
}

/// Extracts `len` bits from bit `at` on.
fn field(a: u64, at: u32, len: u32) -> u64 {
    let (at, len) = (at & 0xFF, len & 0xFF);
    let value = a.checked_shr(at).unwrap_or(0);
    if len > 63 {
        value
    } else {
        value & ((1 << len) - 1)
    }
}

fn bits(holds: impl Fn(usize) -> bool) -> u32 {
    (0..LANES).fold(0, |bits, lane| bits | u32::from(holds(lane)) << lane)
}

fn compare<T: PartialOrd + Copy>(
    how: Compare,
    a: impl Fn(usize) -> T,
    b: impl Fn(usize) -> T,
) -> u32 {
    match how {
        Compare::Eq => bits(|lane| a(lane) == b(lane)),
        Compare::Ne => bits(|lane| a(lane) != b(lane)),
        Compare::Lt => bits(|lane| a(lane) < b(lane)),
        Compare::Le => bits(|lane| a(lane) <= b(lane)),
        Compare::Gt => bits(|lane| a(lane) > b(lane)),
        Compare::Ge => bits(|lane| a(lane) >= b(lane)),
        Compare::Always => bits(|lane| a(lane).partial_cmp(&b(lane)).is_some()),
        Compare::Never => 0,
    }
}

fn compare_words(how: Compare, kind: Kind, a: &Words, b: &Words) -> u32 {
    match kind {
        Kind::Unsigned => compare(how, |lane| a[lane], |lane| b[lane]),
        Kind::Signed => compare(how, |lane| a[lane] as i32, |lane| b[lane] as i32),
        Kind::Float | Kind::FloatOrNan => {
            let float = |bits: u32| f32::from_bits(bits);
            let nan = bits(|lane| float(a[lane]).is_nan() || float(b[lane]).is_nan());
            let holds = compare(how, |lane| float(a[lane]), |lane| float(b[lane]));
            if kind == Kind::Float {
                holds & !nan
            } else {
                holds | nan
            }
        }
    }
}

/// Executes an instruction that accesses only registers.
pub fn execute(warp: &mut Warp, mask: u32, op: &Op) -> Step {
    let long_valid = |warp: &Warp, row: Row| warp.long_valid(row);
    let halves = |warp: &Warp, row: Row| warp.l_valid[row as usize];
    match *op {
        Op::Word1 {
            f: Word1::Move,
            d,
            a,
        } => warp.move_word(d, a, mask),
        Op::Word1 { f, d, a } => {
            let valid = warp.valid(a, mask)?;
            let out = word1(f, warp.word(a));
            warp.set_word(d, mask, &out, valid)
        }
        Op::Word2 { f, d, a, b } => {
            let (x, y) = (warp.valid(a, mask)?, warp.valid(b, mask)?);
            // The halves of a pair are not tracked separately: a value in one counts for both.
            let valid = if matches!(f, Word2::PackBf16 | Word2::PackF16) {
                x | y
            } else {
                x & y
            };
            let out = word2(f, warp.word(a), warp.word(b));
            warp.set_word(d, mask, &out, valid)
        }
        Op::Word3 { f, d, a, b, c } => {
            let valid = warp.valid(a, mask)? & warp.valid(b, mask)? & warp.valid(c, mask)?;
            let out = word3(f, warp.word(a), warp.word(b), warp.word(c));
            warp.set_word(d, mask, &out, valid)
        }
        Op::MoveLong { d, a } => {
            let (values, valid) = (*warp.long(a), halves(warp, a));
            warp.set_halves(d, mask, &values, valid);
            Ok(())
        }
        Op::Long2 { f, d, a, b } => {
            let (x, y) = (halves(warp, a), halves(warp, b));
            let valid = match f {
                Long2::And | Long2::Or | Long2::Xor => [x[0] & y[0], x[1] & y[1]],
                _ => [x[0] & y[0] & x[1] & y[1]; 2],
            };
            let (a, b) = (warp.long(a), warp.long(b));
            let out = match f {
                Long2::Add => long2(a, b, u64::wrapping_add),
                Long2::Sub => long2(a, b, u64::wrapping_sub),
                Long2::Mul => long2(a, b, u64::wrapping_mul),
                Long2::MulHigh => {
                    long2(a, b, |a, b| ((u128::from(a) * u128::from(b)) >> 64) as u64)
                }
                Long2::And => long2(a, b, |a, b| a & b),
                Long2::Or => long2(a, b, |a, b| a | b),
                Long2::Xor => long2(a, b, |a, b| a ^ b),
                Long2::Min => long2(a, b, u64::min),
                Long2::MinSigned => long2(a, b, |a, b| (a as i64).min(b as i64) as u64),
                Long2::Max => long2(a, b, u64::max),
                Long2::MaxSigned => long2(a, b, |a, b| (a as i64).max(b as i64) as u64),
                Long2::Div => long2(a, b, |a, b| a.checked_div(b).unwrap_or(u64::MAX)),
                Long2::DivSigned => long2(a, b, |a, b| match b {
                    0 => u64::MAX,
                    _ => (a as i64).wrapping_div(b as i64) as u64,
                }),
                Long2::Rem => long2(a, b, |a, b| a.checked_rem(b).unwrap_or(a)),
                Long2::RemSigned => long2(a, b, |a, b| match b {
                    0 => a,
                    _ => (a as i64).wrapping_rem(b as i64) as u64,
                }),
            };
            warp.set_halves(d, mask, &out, valid);
            Ok(())
        }
        Op::ShiftLong { f, d, a, b } => {
            let [low, high] = halves(warp, a);
            let by = warp.valid(b, mask)?;
            let (a, b) = (warp.long(a), warp.word(b));
            let valid = match f {
                Shift::Left if b == &[32; LANES] => [by, low & by],
                Shift::Right if b == &[32; LANES] => [high & by, by],
                _ => [low & high & by; 2],
            };
            let out: Longs = std::array::from_fn(|lane| match f {
                Shift::Left => a[lane].checked_shl(b[lane]).unwrap_or(0),
                Shift::Right => a[lane].checked_shr(b[lane]).unwrap_or(0),
                Shift::RightSigned => (a[lane] as i64 >> b[lane].min(63)) as u64,
            });
            warp.set_halves(d, mask, &out, valid);
            Ok(())
        }
        Op::MadLong { d, a, b, c } => {
            let valid = long_valid(warp, a) & long_valid(warp, b) & long_valid(warp, c);
            let (a, b, c) = (warp.long(a), warp.long(b), warp.long(c));
            let out =
                std::array::from_fn(|lane| a[lane].wrapping_mul(b[lane]).wrapping_add(c[lane]));
            warp.set_long(d, mask, &out, valid);
            Ok(())
        }
        Op::BfeLong { d, a, b, c } => {
            let valid = long_valid(warp, a) & warp.valid(b, mask)? & warp.valid(c, mask)?;
            let (a, b, c) = (warp.long(a), warp.word(b), warp.word(c));
            let out = std::array::from_fn(|lane| field(a[lane], b[lane], c[lane]));
            warp.set_long(d, mask, &out, valid);
            Ok(())
        }
        Op::NegLong { d, a } | Op::NotLong { d, a } => {
            let negate = matches!(op, Op::NegLong { .. });
            let valid = long_valid(warp, a);
            let a = warp.long(a);
            let out = std::array::from_fn(|lane| {
                if negate {
                    a[lane].wrapping_neg()
                } else {
                    !a[lane]
                }
            });
            warp.set_long(d, mask, &out, valid);
            Ok(())
        }
        Op::MulWide { signed, d, a, b, c } => {
            let mut valid = warp.valid(a, mask)? & warp.valid(b, mask)?;
            let (a, b) = (warp.word(a), warp.word(b));
            let mut out: Longs = std::array::from_fn(|lane| match signed {
                true => (i64::from(a[lane] as i32) * i64::from(b[lane] as i32)) as u64,
                false => u64::from(a[lane]) * u64::from(b[lane]),
            });
            if let Some(c) = c {
                valid &= long_valid(warp, c);
                out = long2(&out, warp.long(c), u64::wrapping_add);
            }
            warp.set_long(d, mask, &out, valid);
            Ok(())
        }
        Op::MulWide16 { d, a, b } => {
            let valid = warp.valid(a, mask)? & warp.valid(b, mask)?;
            let out = map2(warp.word(a), warp.word(b), |a, b| {
                (a & 0xFFFF) * (b & 0xFFFF)
            });
            warp.set_word(d, mask, &out, valid)
        }
        Op::LongFromWord { f, d, a } => {
            let valid = warp.valid(a, mask)?;
            let a = warp.word(a);
            let out = std::array::from_fn(|lane| widen(f, a[lane]));
            warp.set_halves(
                d,
                mask,
                &out,
                [
                    valid,
                    if f == Widen::Unsigned {
                        u32::MAX
                    } else {
                        valid
                    },
                ],
            );
            Ok(())
        }
        Op::WordFromLong { d, a } => unpack(warp, mask, a, Some(d), None),
        Op::UnpackLong { low, high, a } => unpack(warp, mask, a, low, high),
        Op::PackLong { d, low, high } => {
            let valid = [warp.valid(low, mask)?, warp.valid(high, mask)?];
            let (low, high) = (warp.word(low), warp.word(high));
            let out =
                std::array::from_fn(|lane| u64::from(high[lane]) << 32 | u64::from(low[lane]));
            warp.set_halves(d, mask, &out, valid);
            Ok(())
        }
        Op::UnpackWord { low, high, a } => {
            let valid = warp.valid(a, mask)?;
            let a = *warp.word(a);
            if let Some(low) = low {
                warp.set_word(low, mask, &map1(&a, |a| a & 0xFFFF), valid)?;
            }
            if let Some(high) = high {
                warp.set_word(high, mask, &map1(&a, |a| a >> 16), valid)?;
            }
            Ok(())
        }
        Op::PackWord { d, low, high } => {
            let valid = warp.valid(low, mask)? & warp.valid(high, mask)?;
            let out = map2(warp.word(low), warp.word(high), |low, high| {
                high << 16 | low & 0xFFFF
            });
            warp.set_word(d, mask, &out, valid)
        }
        Op::SetWord {
            compare,
            kind,
            p,
            a,
            b,
        } => {
            let valid = warp.valid(a, mask)? & warp.valid(b, mask)?;
            let out = compare_words(compare, kind, warp.word(a), warp.word(b));
            warp.set_bits(p, mask, out, valid);
            Ok(())
        }
        Op::SetLong {
            compare: how,
            signed,
            p,
            a,
            b,
        } => {
            let valid = long_valid(warp, a) & long_valid(warp, b);
            let (a, b) = (warp.long(a), warp.long(b));
            let out = match signed {
                true => compare(how, |lane| a[lane] as i64, |lane| b[lane] as i64),
                false => compare(how, |lane| a[lane], |lane| b[lane]),
            };
            warp.set_bits(p, mask, out, valid);
            Ok(())
        }
        Op::SelectWord { d, a, b, p } => {
            let (bits, known) = (warp.p[p as usize], warp.p_valid[p as usize]);
            let valid =
                (warp.valid(a, mask & bits)? & bits | warp.valid(b, mask & !bits)? & !bits) & known;
            let (a, b) = (warp.word(a), warp.word(b));
            let out = std::array::from_fn(|lane| {
                if bits >> lane & 1 != 0 {
                    a[lane]
                } else {
                    b[lane]
                }
            });
            warp.set_word(d, mask, &out, valid)
        }
        Op::SelectLong { d, a, b, p } => {
            let (bits, known) = (warp.p[p as usize], warp.p_valid[p as usize]);
            let (x, y) = (halves(warp, a), halves(warp, b));
            let valid = [0, 1].map(|half| (x[half] & bits | y[half] & !bits) & known);
            let (a, b) = (warp.long(a), warp.long(b));
            let out = std::array::from_fn(|lane| {
                if bits >> lane & 1 != 0 {
                    a[lane]
                } else {
                    b[lane]
                }
            });
            warp.set_halves(d, mask, &out, valid);
            Ok(())
        }
        Op::MoveBit { d, a } | Op::NotBit { d, a } => {
            let (bits, known) = (warp.p[a as usize], warp.p_valid[a as usize]);
            let bits = if matches!(op, Op::NotBit { .. }) {
                !bits
            } else {
                bits
            };
            warp.set_bits(d, mask, bits, known);
            Ok(())
        }
        Op::Bit2 { f, d, a, b } => {
            let (x, y) = (warp.p[a as usize], warp.p[b as usize]);
            let (known_x, known_y) = (warp.p_valid[a as usize], warp.p_valid[b as usize]);
            // If one operand alone decides the result, the other need not have a value.
            let (bits, known) = match f {
                Bit2::And => (x & y, known_x & known_y | known_x & !x | known_y & !y),
                Bit2::Or => (x | y, known_x & known_y | known_x & x | known_y & y),
                Bit2::Xor => (x ^ y, known_x & known_y),
            };
            warp.set_bits(d, mask, bits, known);
            Ok(())
        }
        Op::ToGeneric { space, d, a } | Op::FromGeneric { space, d, a } => {
            let base = super::access::base(space);
            let valid = long_valid(warp, a);
            let to = matches!(op, Op::ToGeneric { .. });
            let a = warp.long(a);
            let out = std::array::from_fn(|lane| match to {
                true => a[lane].wrapping_add(base),
                false => a[lane].wrapping_sub(base),
            });
            warp.set_long(d, mask, &out, valid);
            Ok(())
        }
        _ => unreachable!("dispatched elsewhere: {op:?}"),
    }
}

fn unpack(warp: &mut Warp, mask: u32, a: Row, low: Option<Row>, high: Option<Row>) -> Step {
    let valid = warp.l_valid[a as usize];
    let a = *warp.long(a);
    if let Some(low) = low {
        warp.set_word(
            low,
            mask,
            &std::array::from_fn(|lane| a[lane] as u32),
            valid[0],
        )?;
    }
    if let Some(high) = high {
        warp.set_word(
            high,
            mask,
            &std::array::from_fn(|lane| (a[lane] >> 32) as u32),
            valid[1],
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fused_products_are_rounded_once() {
        // Their product lies halfway between two floats, and the last number says which is nearer.
        let halfway = |b: f32| [(1.0 + 2_f32.powi(-12)) * b, 1.0 + 2_f32.powi(-12)];
        for exponent in -90..90 {
            for sign in [1.0, -1.0] {
                let [a, b] = halfway(sign * 2_f32.powi(exponent / 3));
                let lost = 2_f32.powi(exponent - 30);
                for c in [lost, -lost, 0.0, a] {
                    assert_eq!(fma(a, b, c), a.mul_add(b, c), "{a:e} {b:e} {c:e}");
                }
            }
        }
        let [a, b] = halfway(1.0);
        assert_eq!(fma(a, b, 1e-20), 1.0 + 2_f32.powi(-11) + f32::EPSILON);
        assert_eq!(fma(f32::MIN_POSITIVE, f32::MIN_POSITIVE, 1.0), 1.0);
        assert!(fma(f32::INFINITY, 0.0, 1.0).is_nan());
        assert_eq!(fma(f32::MAX, 2.0, 0.0), f32::INFINITY);
    }
}
