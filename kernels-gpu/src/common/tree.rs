//! Trees of draft tokens (speculative decoding): masks of the last 64 keys of each query.
//!
//! A query token's *ancestors* are 64 bits: bit `d` says whether it sees the key `d` positions before its own (bit 0:
//! its own). For keys further back the causal mask and the window apply. Bits are by distance, so they are the same for
//! every page table with keys of the token's request.

#[cfg(target_arch = "nvptx64")]
use crate::abi::AttentionParams;

/// The number of keys that the bits describe.
pub const REACH: u32 = u64::BITS;

/// Whether a query with these ancestors, at this position, sees a key that is not after it.
#[inline(always)]
#[must_use]
pub const fn descends(ancestors: u64, position: i32, key: i32) -> bool {
    let distance = position.wrapping_sub(key) as u32;
    distance >= REACH || ancestors >> distance & 1 != 0
}

#[cfg(target_arch = "nvptx64")]
impl AttentionParams {
    /// The last key that all rows are known to see; without trees it would be `last`.
    #[inline(always)]
    #[must_use]
    pub const fn seen_by_all(&self, last: i32) -> i32 {
        if self.ancestors == 0 {
            last
        } else {
            last.saturating_sub(REACH as i32)
        }
    }

    /// A query token's ancestors.
    ///
    /// # Safety
    /// `ancestors` is not 0, and the token has an entry there.
    #[inline(always)]
    #[must_use]
    pub unsafe fn ancestors_of(&self, token: u32) -> u64 {
        // SAFETY: the caller's promise.
        unsafe { load(self.ancestors, token) }
    }
}

/// The ancestors of a query token, from the array at `ancestors`.
///
/// # Safety
/// The array has an entry for the token.
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
}
