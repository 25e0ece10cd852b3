//! How the logits of a block are masked, and what tells the rows and keys that this is about.

use cuda_std::{shared, warp};

use super::super::super::uniform;

const WARP: u32 = warp::FULL_MASK;

/// The masking that a block's logits need.
#[derive(Clone, Copy)]
pub(super) struct Mode {
    /// Not all rows see all keys.
    pub masked: bool,
    /// The keys that a row sees depend on its position.
    pub positional: bool,
}

impl Mode {
    pub const NONE: Self = Self {
        masked: false,
        positional: false,
    };

    /// Stores the union over all lanes' pieces. Returns whether any is masked.
    ///
    /// # Safety
    /// A whole warp; only the caller accesses the word.
    #[inline(always)]
    pub unsafe fn store(self, at: u32) -> bool {
        // SAFETY: the caller's promise.
        unsafe {
            let masked = warp::warp_vote_any(WARP, self.masked | self.positional);
            let positional = warp::warp_vote_any(WARP, self.positional);
            if warp::lane_id() == 0 {
                shared::store_u32(at, u32::from(masked) | u32::from(positional) << 1);
            }
            masked
        }
    }

    /// # Safety
    /// A whole warp; the word was stored.
    #[inline(always)]
    pub unsafe fn load(at: u32) -> Self {
        // SAFETY: the caller's promise.
        let bits = unsafe { uniform(shared::load_u32(at)) };
        Self {
            masked: bits & 1 != 0,
            positional: bits & 2 != 0,
        }
    }
}

/// The rows that see a group of 8 keys, and which of these keys belong to the run.
#[derive(Clone, Copy)]
pub(super) struct Visible {
    bits: u32,
    /// Position of the first key.
    pub key: u32,
}

impl Visible {
    /// # Safety
    /// The words of the block were stored.
    #[inline(always)]
    pub unsafe fn load(mask: u32, group: u32) -> Self {
        // SAFETY: the caller's promise.
        let [bits, key] = unsafe { shared::load_u32x2(mask + 16 + group * 8) };
        Self { bits, key }
    }

    /// Whether a row of the tile sees the run.
    #[inline(always)]
    pub fn row(self, row: u32) -> bool {
        row >= self.bits & 0xFF && row < self.bits >> 8 & 0xFF
    }

    /// Whether key `column` of the group belongs to the run.
    #[inline(always)]
    pub fn column(self, column: u32) -> bool {
        column >= self.bits >> 16 & 0xF && column < self.bits >> 20 & 0xF
    }
}
