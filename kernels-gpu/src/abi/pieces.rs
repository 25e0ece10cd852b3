//! Rows that two items share, each with a part of their keys, whose states the kernel merges from registers.

use super::NO_MERGE;

/// What [`QueryRow::merge`](super::QueryRow::merge) says of such a row when it is uploaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PieceOf {
    /// The merge of the first of the item's rows. It gives the counters for all of them.
    pub merge: u32,
    /// Which piece the item is: 0, or 1 for the one whose slots follow those of the other.
    pub piece: u32,
}

impl PieceOf {
    /// One more than the largest merge.
    pub const MERGES: u32 = NO_MERGE >> 1;
    /// Counters of a merge and tile: one for each warp that writes results.
    pub const COUNTERS: u32 = 8;

    /// As one word, which is not [`NO_MERGE`].
    #[must_use]
    pub const fn word(self) -> u32 {
        self.merge << 1 | self.piece
    }

    /// From its word; anything if that is [`NO_MERGE`].
    #[inline(always)]
    #[must_use]
    pub const fn of_word(word: u32) -> Self {
        Self {
            merge: word >> 1,
            piece: word & 1,
        }
    }
}
