//! Rows whose partial states are merged from registers, by the CTA whose piece of their keys ends last.

use super::NO_MERGE;

/// What a row's merge says for such a launch: [`QueryRow::merge`](super::QueryRow::merge) as it is uploaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PieceOf {
    /// Merge of the item's first row, which gives the counters of all of the item's rows.
    pub merge: u32,
    /// Pieces of the rows' keys: 2 or 4. All have the same rows in the same order, and their slots follow each other.
    pub pieces: u32,
    /// Which of these the item is.
    pub piece: u32,
}

impl PieceOf {
    /// Pieces at most.
    pub const MOST: u32 = 4;
    /// The largest merge plus one.
    pub const MERGES: u32 = NO_MERGE >> 4;

    /// As one word, which is not [`NO_MERGE`].
    #[must_use]
    pub const fn word(self) -> u32 {
        self.merge << 4 | (self.pieces - 1) << 2 | self.piece
    }

    /// From its word; anything if that is [`NO_MERGE`].
    #[inline(always)]
    #[must_use]
    pub const fn of_word(word: u32) -> Self {
        Self {
            merge: word >> 4,
            pieces: (word >> 2 & 3) + 1,
            piece: word & 3,
        }
    }
}

/// Scratch memory of a warp's share of such a merge.
#[derive(Clone, Copy, Debug)]
pub struct PieceWords;

impl PieceWords {
    /// Warps of a CTA that write results.
    pub const WARPS: u32 = 8;
    /// Rows of a warp at most.
    pub const ROWS: u32 = 32;
    /// Bytes before what pieces say about their rows. The first word counts: in its low half the pieces that have ended, in its
    /// high half those whose states are written. It is zero before and after every run.
    pub const HEADER: u32 = 32;
    /// Bytes of a row of a piece: its LSE (base 2) and the factor that normalises its output.
    pub const ROW: u32 = 8;
    /// Bytes of a warp's share.
    pub const BYTES: u32 = Self::HEADER + PieceOf::MOST * Self::ROWS * Self::ROW;
    /// Bytes of all warps of a tile.
    pub const OF_TILE: u32 = Self::WARPS * Self::BYTES;
}
