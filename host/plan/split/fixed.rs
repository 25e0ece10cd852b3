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

/// Where a window begins inside a page, the keys of a decode begin at the last multiple of this many keys, counted from the page's
/// first.
const BEGIN: u32 = 64;

/// The first key of a decode of which `seen` is the first key that a row sees: in the same page, and not much before. So a page
/// that all windows have passed is never read: it may hold anything, also NaN. Positions alone decide, and a plan can grow for
/// some steps without another first key than a new plan.
pub const fn first_key(seen: u32, page_size: u32) -> u32 {
    let in_page = seen % page_size;
    seen - in_page % BEGIN
}

/// The smallest `seen` of which [`first_key`] comes after `key`.
pub fn next_first_key(key: u32, page_size: u32) -> u32 {
    let in_page = key % page_size;
    let begin = in_page - in_page % BEGIN;
    (key - in_page).saturating_add(begin.saturating_add(BEGIN).min(page_size))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_keys_stay_in_the_page() {
        for page_size in [1, 3, 16, 48, 64, 80, 128, 1000] {
            for seen in 0..3000 {
                let first = first_key(seen, page_size);
                assert!(first <= seen && seen - first < BEGIN);
                assert_eq!(first / page_size, seen / page_size);
                assert_eq!(first_key(first, page_size), first);
                let next = next_first_key(first, page_size);
                assert_eq!(next, next_first_key(seen, page_size));
                assert!(seen < next && first_key(next, page_size) == next);
                assert_eq!(first_key(next - 1, page_size), first);
            }
        }
    }
}
