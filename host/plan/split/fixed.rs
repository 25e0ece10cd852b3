//! Where fixed splits cut. It follows from the request alone, and not from how many keys it has: so each chunk of a
//! prompt is cut where the whole prompt is.

use crate::problem::Spec;

/// Query tokens times query heads of a row block whose tiles are work for half of an H200 (64 tiles of 128 rows). A number
/// and not a part of the device: plans for CPUs with few and with many cores compute the same bits.
const MANY_ROWS: u64 = 64 * 128;

/// A row block of many rows is cut at multiples of no fewer keys. Each cut writes the states of all its rows and reads them
/// again: pieces of some hundreds of keys made a chunk of 1024 @ 16384 27 to 88 % slower on an H200.
const KEYS: u32 = 32_768;

/// Whether a row block has work for many CTAs without a cut along its keys.
pub fn has_many_rows(spec: &Spec, tokens: u32) -> bool {
    u64::from(tokens) * u64::from(spec.q_heads) >= MANY_ROWS
}

/// The keys at whose multiples a row block is cut where splits are to be multiples of `tokens`.
pub fn keys_of_piece(many_rows: bool, tokens: u32) -> u32 {
    match many_rows {
        true => KEYS.div_ceil(tokens).saturating_mul(tokens),
        false => tokens,
    }
}
