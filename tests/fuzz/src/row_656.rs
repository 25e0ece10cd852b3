//! Latent keys in rows of 656 bytes: 512 numbers of 8 bits, a scale for each 128 of them, 64 elements of 16 bits.

use half::bf16;
use tandem_attn::tensor::{Element, F8E4M3};

const NUMBERS: usize = 512;
const TILE: usize = 128;
const ROPE_AT: usize = NUMBERS + NUMBERS / TILE * 4;

/// The row of a key: each scale is the smallest power of two with which all numbers are at most 448.
pub fn bytes(key: &[f32]) -> Vec<u8> {
    let mut row = vec![0; ROPE_AT];
    for (tile, numbers) in key[..NUMBERS].chunks(TILE).enumerate() {
        let most = numbers.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
        let mut scale = 1.0_f32;
        if most > 0.0 {
            while most > 448.0 * scale {
                scale *= 2.0;
            }
            while most <= 448.0 * (scale / 2.0) {
                scale /= 2.0;
            }
        }
        row[NUMBERS + 4 * tile..][..4].copy_from_slice(&scale.to_ne_bytes());
        for (at, x) in numbers.iter().enumerate() {
            row[tile * TILE + at] = F8E4M3::from_f32(x / scale).0;
        }
    }
    let rope = key[NUMBERS..].iter();
    row.extend(rope.flat_map(|&x| bf16::from_f32(x).to_bits().to_ne_bytes()));
    row
}

/// The key that a row means.
pub fn key(row: &[u8]) -> Vec<f32> {
    let scale = |tile: usize| {
        let bytes = &row[NUMBERS + 4 * tile..][..4];
        f32::from_ne_bytes(bytes.try_into().expect("four bytes"))
    };
    let numbers = row[..NUMBERS].iter().enumerate();
    let numbers = numbers.map(|(at, &number)| Element::to_f32(F8E4M3(number)) * scale(at / TILE));
    let rope = row[ROPE_AT..].chunks_exact(2);
    let rope = rope.map(|x| bf16::from_bits(u16::from_ne_bytes([x[0], x[1]])).to_f32());
    numbers.chain(rope).collect()
}
