//! Masks of keys as bits, in addition to the causal mask and the window.
//!
//! A query token's mask is a row of 64-bit words. Bit `b` says whether the token sees the key `b - after` positions before its own;
//! `after` is a number of the token's. All keys further back are seen. Bits are by distance, so they are the same for every page
//! table with keys of the token's request.
//!
//! There are two forms. *Ancestors* (trees of draft tokens) are one word for each token, with `after` 0. Masks of any length
//! have a [`TokenMask`](crate::abi::TokenMask) for each token.

#[cfg(target_arch = "nvptx64")]
use cuda_std::ptr::{load_nc_u32, load_nc_u32x2, load_nc_u64};

#[cfg(target_arch = "nvptx64")]
use crate::abi::AttentionParams;

/// The number of keys that a word describes.
pub const REACH: u32 = u64::BITS;

/// Whether a query at this position with these words sees a key, apart from the causal mask and the window.
#[inline(always)]
#[must_use]
pub fn sees(words: &[u64], after: u32, position: i32, key: i32) -> bool {
    let bit = position.wrapping_sub(key).wrapping_add_unsigned(after);
    // A negative bit has no word either: nothing is known of keys behind all bits.
    let word = words.get((bit >> 6) as usize);
    word.is_none_or(|word| word >> (bit & 63) & 1 != 0)
}

/// Where the masks of a launch are.
#[cfg(target_arch = "nvptx64")]
#[derive(Clone, Copy)]
pub struct Masks {
    /// As [`AttentionParams::ancestors`].
    ancestors: u64,
    /// As [`AttentionParams::masks`].
    masks: u64,
}

#[cfg(target_arch = "nvptx64")]
impl AttentionParams {
    /// Where the launch's masks are.
    #[inline(always)]
    #[must_use]
    pub const fn key_masks(&self) -> Masks {
        Masks {
            ancestors: self.ancestors,
            masks: self.masks,
        }
    }

    /// The last key that some rows are known to see, all of them. Without masks it would be `last`. `limit` is the position of their
    /// gathered item, or the [limit of their tokens](Self::limit_of_tokens): what longer masks reach beyond one word is in it.
    #[inline(always)]
    #[must_use]
    pub const fn seen_by_all(&self, last: i32, limit: i32) -> i32 {
        if self.key_masks().any() {
            let least = if limit < last { limit } else { last };
            least.saturating_sub(REACH as i32)
        } else {
            last
        }
    }

    /// The limit of consecutive tokens of a request, of which `token` is one, at `position`.
    ///
    /// # Safety
    /// The token is one of the launch's.
    #[inline(always)]
    #[must_use]
    pub unsafe fn limit_of_tokens(&self, token: u32, position: i32) -> i32 {
        if self.masks == 0 {
            return i32::MAX;
        }
        // SAFETY: as in `Masks::of`.
        let [words, after] =
            unsafe { load_nc_u32x2((self.masks + u64::from(token) * 16) as *const u32) };
        // The bits of all tokens of a request begin at the same key.
        if words > 0 {
            let beyond = ((words - 1) * REACH).wrapping_sub(after);
            position.wrapping_sub(beyond as i32)
        } else {
            i32::MAX
        }
    }
}

#[cfg(target_arch = "nvptx64")]
impl Masks {
    /// Whether there are masks.
    #[inline(always)]
    #[must_use]
    pub const fn any(self) -> bool {
        self.ancestors | self.masks != 0
    }

    /// The same, in a way that nothing derived from it stays in registers.
    #[inline(always)]
    #[must_use]
    pub fn any_here(self) -> bool {
        cuda_std::misc::opaque_u64(self.ancestors | self.masks) != 0
    }

    /// A query token's mask.
    ///
    /// # Safety
    /// There are masks, and the token is one of the launch's.
    #[inline(always)]
    #[must_use]
    pub unsafe fn of(self, token: u32) -> KeyMask {
        let token = u64::from(token);
        if self.masks == 0 {
            return KeyMask {
                address: self.ancestors + token * 8,
                words: 1,
                after: 0,
            };
        }
        let entry = (self.masks + token * 16) as *const u32;
        // SAFETY: the array begins with an entry for each token; nobody writes it while a kernel runs.
        let ([words, after], first) = unsafe { (load_nc_u32x2(entry), load_nc_u32(entry.add(2))) };
        KeyMask {
            address: self.masks + u64::from(first) * 8,
            words,
            after,
        }
    }
}

/// A query token's mask.
#[cfg(target_arch = "nvptx64")]
#[derive(Clone, Copy)]
pub struct KeyMask {
    address: u64,
    words: u32,
    after: u32,
}

#[cfg(target_arch = "nvptx64")]
impl KeyMask {
    /// The bits of 64 consecutive keys: bit `i` is the key `distance + i` positions before the token's own. Keys that the mask
    /// does not describe have ones.
    ///
    /// # Safety
    /// The mask comes from [`Masks::of`].
    #[inline(always)]
    #[must_use]
    pub unsafe fn bits(self, distance: i32) -> u64 {
        let bit = distance.wrapping_add_unsigned(self.after);
        let (word, shift) = (bit >> 6, bit as u32 & 63);
        // SAFETY: the caller's promise.
        let (low, high) = unsafe { (self.word(word), self.word(word + 1)) };
        // The high word is shifted by 1 and the rest, because a shift by 64 has no meaning.
        high << 1 << (shift ^ 63) | low >> shift
    }

    #[inline(always)]
    unsafe fn word(self, index: i32) -> u64 {
        let index = index as u32;
        if index < self.words {
            let at = (self.address + u64::from(index) * 8) as *const u64;
            // SAFETY: one of the mask's words; nobody writes them while a kernel runs.
            unsafe { load_nc_u64(at) }
        } else {
            u64::MAX
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_count_from_the_query_back() {
        let sees_one = |key| sees(&[0b101], 0, 70, key);
        assert!(sees_one(70) && !sees_one(69) && sees_one(68) && !sees_one(67) && !sees_one(7));
        assert!(sees_one(6) && sees_one(0));
        assert!(sees(&[1 << 63], 0, 63, 0) && !sees(&[1 << 63], 0, 62, 0));
    }

    #[test]
    fn bits_may_begin_behind_the_query() {
        // The query is the third last: bits 0 and 1 are keys after it.
        let mask = |key| sees(&[0b1010, 1], 2, 100, key);
        assert!(!mask(102) && mask(101) && !mask(100) && mask(99) && !mask(98));
        assert!(!mask(39) && mask(38) && !mask(37));
        // Keys that the words do not describe are seen.
        assert!(mask(103) && mask(-26) && !mask(-25));
        assert!(sees(&[], 0, 3, 3));
    }
}
