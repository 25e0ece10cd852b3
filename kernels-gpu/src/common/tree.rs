//! Trees of draft tokens: which of the last keys before itself a query sees.
//!
//! A query token's *ancestors* are 64 bits: bit `d` says whether it sees the key `d` positions before its own
//! (bit 0: its own). Keys further back are seen as the causal mask and the window say. Only distances count, so
//! the bits hold in every table that the token's request has keys in.

#[cfg(target_arch = "nvptx64")]
use crate::abi::AttentionParams;

/// Keys that the bits tell of.
pub const REACH: u32 = u64::BITS;

/// Whether a query with these ancestors, at this position, sees a key that is not after it.
#[inline(always)]
#[must_use]
pub const fn descends(ancestors: u64, position: i32, key: i32) -> bool {
    let distance = position.wrapping_sub(key) as u32;
    distance >= REACH || ancestors >> distance & 1 != 0
}

/// Which of 64 neighbouring keys a query sees, of those that are not after it: bit `i` is the key `distance − i`
/// positions before its own.
#[inline(always)]
#[must_use]
pub const fn seen_from(ancestors: u64, distance: i32) -> u64 {
    // Bit 63 − d is now the key at distance d.
    let nearest_last = ancestors.reverse_bits();
    let shift = 63 - distance;
    if shift >= 0 {
        let shift = shift as u32;
        if shift < REACH {
            nearest_last >> shift
        } else {
            0
        }
    } else {
        // Keys further back than the bits tell of are seen.
        let far = shift.unsigned_abs();
        if far < REACH {
            nearest_last << far | ((1 << far) - 1)
        } else {
            u64::MAX
        }
    }
}

/// Of each 8 bits the first two, side by side.
#[inline(always)]
#[must_use]
pub const fn every_eighth_pair(bits: u64) -> u32 {
    let pairs = bits & 0x0303_0303_0303_0303;
    let fours = (pairs | pairs >> 6) & 0x000F_000F_000F_000F;
    let eights = (fours | fours >> 12) & 0x0000_00FF_0000_00FF;
    (eights | eights >> 24) as u32 & 0xFFFF
}

#[cfg(target_arch = "nvptx64")]
impl AttentionParams {
    /// The last key that all rows see for sure, where it would be `last` without trees.
    #[inline(always)]
    #[must_use]
    pub const fn seen_by_all(&self, last: i32) -> i32 {
        if self.ancestors == 0 {
            last
        } else {
            last.saturating_sub(REACH as i32)
        }
    }

    /// A number, in a way that the compiler does not know it, and unrolls no loop by it.
    #[inline(always)]
    #[must_use]
    pub const fn unknown(&self, number: u32) -> u32 {
        // Units are fewer than 2³¹.
        number + (self.units >> 31) * self.units
    }

    /// A query token's ancestors.
    ///
    /// # Safety
    /// There are ancestors, and the token is one of theirs.
    #[inline(always)]
    #[must_use]
    pub unsafe fn ancestors_of(&self, token: u32) -> u64 {
        // SAFETY: the caller's promise.
        unsafe { load(self.ancestors, token) }
    }
}

/// A query token's ancestors, of those at an address.
///
/// # Safety
/// They are there.
#[cfg(target_arch = "nvptx64")]
#[inline(always)]
#[must_use]
pub unsafe fn load(ancestors: u64, token: u32) -> u64 {
    let at = (ancestors + u64::from(token) * 8) as *const u64;
    // SAFETY: the caller's promise; nobody writes ancestors while a kernel runs.
    unsafe { cuda_std::ptr::load_nc_u64(at) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_count_from_the_query_back() {
        let sees = |key| descends(0b101, 70, key);
        assert!(sees(70) && !sees(69) && sees(68) && !sees(67) && !sees(7));
        assert!(sees(6) && sees(0));
        assert!(descends(1 << 63, 63, 0) && !descends(1 << 63, 62, 0));
    }
    #[test]
    fn words_of_columns_are_the_bits_one_by_one() {
        let ancestors = 0xF0A5_3C96_1234_8765_u64;
        for distance in -70..200 {
            let seen = seen_from(ancestors, distance);
            for i in 0..64 {
                // What is after the query is hidden by others.
                if i <= distance {
                    let right = descends(ancestors, distance, i);
                    assert_eq!(seen >> i & 1 != 0, right, "{distance} {i}");
                }
            }
            let pairs = every_eighth_pair(seen);
            for i in 0..16 {
                assert_eq!(pairs >> i & 1, (seen >> (i / 2 * 8 + i % 2)) as u32 & 1);
            }
            assert_eq!(pairs >> 16, 0);
        }
    }
}
