//! Where fixed splits cut. The places depend on the query tokens and heads of a request, but not on its number of keys:
//! a chunk of a prompt is cut where the whole prompt is, if both have many rows or both have few.

use crate::problem::Spec;

/// A row block with this many query tokens times query heads has work for half of an H200: 64 tiles of 128 rows. The
/// number does not depend on the device, so that plans for CPUs with few and with many cores compute the same bits.
const MANY_ROWS: u64 = 64 * 128;

/// A row block of many rows is cut at multiples of at least this many keys. Each cut writes the states of all its rows
/// and reads them again: pieces of some hundred keys made a chunk of 1024 @ 16384 27 to 88 % slower on an H200.
const KEYS: u32 = 32_768;

/// Whether a row block has work for many CTAs without a cut along its keys.
pub fn has_many_rows(spec: &Spec, tokens: u32) -> bool {
    u64::from(tokens) * u64::from(spec.q_heads) >= MANY_ROWS
}

/// The number of keys at whose multiples a row block is cut, for fixed splits of `tokens` keys.
pub fn keys_of_piece(many_rows: bool, tokens: u32) -> u32 {
    match many_rows {
        true => KEYS.div_ceil(tokens).saturating_mul(tokens),
        false => tokens,
    }
}
