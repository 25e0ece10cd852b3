//! Rows of latent attention that contain their scales: the 656 bytes that DeepSeek-V3.2 caches for a token.
//!
//! | bytes | |
//! |---|---|
//! | 0 to 511 | 512 numbers in F8E4M3: the value, and the first elements of the key |
//! | 512 to 527 | four scales in f32 of the machine's order, one for each 128 of the numbers |
//! | 528 to 655 | 64 elements in bf16: the last of the key, which carry the position |
//!
//! The value of a number is its product with its scale. The CPU and the reference compute it in f32 and round it to
//! bf16. The kernel of 64 rows rounds scale and product to f16, relative to a power of two of the key. The kernel of 16
//! rows multiplies sums and weights by the scales, so it rounds nothing. If scales are powers of two, as appends write
//! them, all read the same keys. Otherwise an element of a key differs by at most 2⁻⁸ of itself. If the scales of a key
//! differ by a factor of more than 2²¹, the kernel of 64 rows rounds its small elements to 2⁻³¹ of the largest element
//! that the key can have.

use half::bf16;

use crate::tensor::{Element, F8E4M3};

/// Bytes of a token of latent attention with [scales in its row](super::KvScales::InRow).
pub const LATENT_656_BYTES: u32 = 656;

/// 8-bit numbers of a row: these are the value.
pub(crate) const NUMBERS: usize = 512;
/// Elements of a key.
pub(crate) const ELEMENTS: usize = 576;
/// Numbers that share a scale.
const TILE: usize = 128;
/// Where the scales and the elements of 16 bits begin.
const SCALES_AT: usize = NUMBERS;
const ROPE_AT: usize = SCALES_AT + NUMBERS / TILE * 4;

/// The largest finite number of F8E4M3. With its scale, no number exceeds it.
const LARGEST: f32 = 448.0;
/// The smallest scale that is computed. Its inverse is still finite.
const SMALLEST: f32 = 1.0 / (1_u128 << 100) as f32;

/// Writes the first `to.len()` elements of a key.
pub(crate) fn widen(row: &[u8], to: &mut [f32]) {
    let (numbers, rest) = to.split_at_mut(to.len().min(NUMBERS));
    for (tile, to) in numbers.chunks_mut(TILE).enumerate() {
        let scale = &row[SCALES_AT + 4 * tile..][..4];
        let scale = f32::from_ne_bytes(scale.try_into().expect("four bytes"));
        for (to, &number) in to.iter_mut().zip(&row[tile * TILE..]) {
            *to = rounded(F8E4M3(number).to_f32() * scale);
        }
    }
    for (to, element) in rest.iter_mut().zip(row[ROPE_AT..].chunks_exact(2)) {
        *to = bf16::from_bits(u16::from_ne_bytes([element[0], element[1]])).to_f32();
    }
}

/// The nearest bf16, ties to even. There is no branch, so that loops over rows vectorise.
#[inline(always)]
fn rounded(x: f32) -> f32 {
    let bits = x.to_bits();
    let nearest = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) & 0xffff_0000;
    f32::from_bits(if x.is_nan() { bits } else { nearest })
}

/// The bytes of a key of 576 elements.
///
/// A scale is the smallest power of two by which the largest finite magnitude of its numbers is at most 448, and 1 where
/// all are zero: products with it are exact. NaN stays NaN; infinities become the largest number.
pub(crate) fn narrow(elements: &[f32], row: &mut [u8]) {
    let (numbers, rope) = elements.split_at(NUMBERS);
    for (tile, numbers) in numbers.chunks_exact(TILE).enumerate() {
        let scale = scale_of(numbers);
        row[SCALES_AT + 4 * tile..][..4].copy_from_slice(&scale.to_ne_bytes());
        let inverse = 1.0 / scale;
        for (to, x) in row[tile * TILE..].iter_mut().zip(numbers) {
            *to = F8E4M3::from_f32(x * inverse).0;
        }
    }
    for (to, x) in row[ROPE_AT..].chunks_exact_mut(2).zip(rope) {
        to.copy_from_slice(&bf16::from_f32(*x).to_bits().to_ne_bytes());
    }
}

fn scale_of(numbers: &[f32]) -> f32 {
    let magnitudes = numbers.iter().map(|x| x.abs()).filter(|x| x.is_finite());
    let largest = magnitudes.fold(0.0, f32::max);
    if largest == 0.0 {
        return 1.0;
    }
    let least = (largest / LARGEST).max(SMALLEST);
    // The next power of two, by the exponent: one more if any bit of the mantissa is set.
    let (exponent, mantissa) = (least.to_bits() >> 23, least.to_bits() & 0x007f_ffff);
    f32::from_bits((exponent + u32::from(mantissa != 0)) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round_trip(elements: &[f32]) -> Vec<f32> {
        let (mut row, mut back) = ([0xff; LATENT_656_BYTES as usize], vec![0.0; ELEMENTS]);
        narrow(elements, &mut row);
        widen(&row, &mut back);
        back
    }

    #[test]
    fn the_parts_lie_where_the_format_has_them() {
        let mut row = [0; LATENT_656_BYTES as usize];
        // 1.0 in the last number of each tile, scales 1 to 4, 3.0 as the last element.
        for tile in 0..4 {
            row[tile * 128 + 127] = F8E4M3::from_f32(1.0).0;
            row[512 + 4 * tile..][..4].copy_from_slice(&(tile as f32 + 1.0).to_ne_bytes());
        }
        row[654..].copy_from_slice(&bf16::from_f32(3.0).to_bits().to_ne_bytes());
        let mut elements = [f32::NAN; ELEMENTS];
        widen(&row, &mut elements);
        let mut right = [0.0; ELEMENTS];
        for tile in 0..4 {
            right[tile * 128 + 127] = tile as f32 + 1.0;
        }
        right[575] = 3.0;
        assert_eq!(elements, right);
        let mut value = [f32::NAN; NUMBERS];
        widen(&row, &mut value);
        assert_eq!(value, right[..512]);
    }

    #[test]
    fn a_product_is_rounded_to_bf16_once_it_is_f32() {
        let mut row = [0; LATENT_656_BYTES as usize];
        let (number, scale) = (F8E4M3::from_f32(1.125), 0.3_f32);
        row[0] = number.0;
        row[512..516].copy_from_slice(&scale.to_ne_bytes());
        let mut first = [0.0];
        widen(&row, &mut first);
        assert_eq!(first, [bf16::from_f32(1.125 * 0.3_f32).to_f32()]);
        assert_ne!(first, [1.125 * 0.3]);
    }

    #[test]
    fn rounding_is_that_of_bf16() {
        for step in 0..=0xf_ffff_u32 {
            // Every exponent, and the bits around the last bit that is kept.
            let x = f32::from_bits(step << 12 | step & 0xfff);
            let (got, right) = (rounded(x), bf16::from_f32(x).to_f32());
            assert!(
                got == right || got.is_nan() && right.is_nan(),
                "{x:e} became {got:e}"
            );
        }
    }

    #[test]
    fn what_fits_comes_back_exactly_and_the_rest_as_the_nearest() {
        // Each tile has its own magnitude; four significant bits of it are kept.
        let magnitude = [448.0, 3.0e-5, 7.0e20, 0.0];
        let element = |i: usize| match i / 128 {
            4 => i as f32 - 540.0,
            tile => {
                magnitude[tile] * (i % 15) as f32 / 14.0
                    * if i.is_multiple_of(2) { 1.0 } else { -1.0 }
            }
        };
        let elements: Vec<f32> = (0..ELEMENTS).map(element).collect();
        let back = round_trip(&elements);
        for (index, (&x, &y)) in elements.iter().zip(&back).enumerate() {
            let close = match index {
                512.. => x == y,
                // Half of the last of four bits, and half of the smallest subnormal.
                _ => (x - y).abs() <= x.abs() / 16.0 + magnitude[index / 128] / 448.0 / 512.0,
            };
            assert!(close, "{x:e} became {y:e} at {index}");
        }
        // Numbers that were read back are kept exactly.
        assert_eq!(round_trip(&back), back);
    }

    #[test]
    fn what_is_not_finite_does_not_scale_the_others() {
        let mut elements = vec![1.0; ELEMENTS];
        (elements[0], elements[1], elements[2]) = (f32::NAN, f32::INFINITY, f32::NEG_INFINITY);
        let back = round_trip(&elements);
        assert!(back[0].is_nan());
        assert_eq!(back[1], -back[2]);
        assert!(back[1].is_finite() && back[1] >= 1.0);
        assert_eq!(back[3..], elements[3..]);
        // The smallest scale's inverse is finite, and zeros are zeros.
        let tiny = round_trip(&vec![1e-38; ELEMENTS]);
        assert!(tiny.iter().all(|x| x.is_finite()));
        assert_eq!(round_trip(&vec![0.0; ELEMENTS]), vec![0.0; ELEMENTS]);
    }
}
