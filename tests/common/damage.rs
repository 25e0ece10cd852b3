//! Damage to files: bits that flip, pieces that are lost or come twice, numbers that are far too large.
// Each program uses its own part of this.
#![allow(dead_code)]

use super::numeric::Rng;

/// What a number becomes: edges of the types that are read, and what is no number of these.
const NUMBERS: [&str; 14] = [
    "0",
    "1",
    "-1",
    "127",
    "65536",
    "2147483648",
    "4294967295",
    "4294967296",
    "9223372036854775807",
    "18446744073709551615",
    "1e300",
    "1e-320",
    "0.5",
    "null",
];

/// The bytes with one to four things wrong.
pub fn damaged(bytes: &[u8], seed: u64) -> Vec<u8> {
    let (mut bytes, mut rng) = (bytes.to_vec(), Rng(seed));
    for _ in 0..1 + rng.below(4) {
        if bytes.is_empty() {
            break;
        }
        let at = rng.below(bytes.len());
        let piece = at..(at + 1 + rng.below(8)).min(bytes.len());
        match rng.below(32) {
            0 => bytes[at] = rng.bits() as u8,
            1 => bytes[at] ^= 1 << rng.below(8),
            2 => bytes[at] = b"{}[],:\"-\n\\"[rng.below(10)],
            3 => drop(bytes.drain(piece)),
            4 => {
                let piece = bytes[piece].to_vec();
                let to = rng.below(bytes.len());
                drop(bytes.splice(to..to, piece));
            }
            5 => bytes.truncate(at),
            6..18 => change_number(&mut bytes, at, NUMBERS[rng.below(NUMBERS.len())]),
            _ => {
                let digit = (at..bytes.len()).find(|&at| bytes[at].is_ascii_digit());
                if let Some(at) = digit {
                    bytes[at] = b'0' + rng.below(10) as u8;
                }
            }
        }
    }
    bytes
}

/// The first number from `at` on becomes another.
fn change_number(bytes: &mut Vec<u8>, at: usize, new: &str) {
    let is_digit = |byte: &u8| byte.is_ascii_digit();
    let Some(start) = bytes[at..].iter().position(is_digit) else {
        return;
    };
    // All of its digits, those before `at` too.
    let inside = at + start;
    let before = bytes[..inside]
        .iter()
        .rev()
        .take_while(|&byte| is_digit(byte));
    let start = inside - before.count();
    let after = bytes[inside..].iter().take_while(|&byte| is_digit(byte));
    let end = inside + after.count();
    drop(bytes.splice(start..end, new.bytes()));
}

/// A safetensors file with things wrong in its header, whose length is right, or anywhere.
pub fn damaged_tensors(bytes: &[u8], seed: u64) -> Vec<u8> {
    let len = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    if seed.is_multiple_of(4) {
        return damaged(bytes, seed);
    }
    let mut header = damaged(&bytes[8..8 + len], seed);
    let mut damaged = (header.len() as u64).to_le_bytes().to_vec();
    damaged.append(&mut header);
    damaged.extend_from_slice(&bytes[8 + len..]);
    damaged
}
