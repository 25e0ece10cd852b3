//! SARATHI: one prompt chunk per step, piggybacked by decodes.

use super::Policy;
use crate::{Draft, chunk::ChunkSize};

/// Decode-maximal batches: all decodes that fit and one prompt chunk, reduced so that both together are a multiple of
/// the GEMM tile.
#[derive(Clone, Debug)]
pub struct Sarathi {
    chunk: ChunkSize,
    tile: u32,
}

impl Sarathi {
    /// A policy with a chunk size (chunk and decodes together) and the row tile of the linear layers.
    ///
    /// # Panics
    /// If the tile is 0.
    #[must_use]
    pub fn new(chunk: impl Into<ChunkSize>, tile: u32) -> Self {
        assert!(tile > 0, "a tile has at least one row");
        Self {
            chunk: chunk.into(),
            tile,
        }
    }

    /// Tokens of a chunk in a step with `decodes` decodes, at least one.
    fn beside(&self, chunk: u32, decodes: u32) -> u32 {
        let together = chunk.max(decodes.saturating_add(1));
        let whole = together.checked_next_multiple_of(self.tile);
        let whole = whole.unwrap_or(u32::MAX / self.tile * self.tile);
        whole.saturating_sub(decodes).max(1)
    }
}

impl Policy for Sarathi {
    fn name(&self) -> &'static str {
        "sarathi"
    }

    fn compose(&mut self, draft: &mut Draft<'_>) {
        let chunk = self.chunk.tokens(draft.workload());
        // One place and up to a tile of tokens are reserved for the chunk, because prompts would starve otherwise.
        let prefills = draft.next_prefill().is_some();
        let places = draft.requests_left();
        let most = if prefills && places > 1 && draft.tokens_left() > 1 {
            (places - 1).min(draft.tokens_left() - self.tile.min(draft.tokens_left() / 2).max(1))
        } else {
            places
        };
        let decodes = draft.decode(most);
        let room = draft.tokens_left();
        let mut tokens = self.beside(chunk, decodes);
        if tokens > room {
            // If possible, whole tiles within the budget.
            let whole = (decodes + room) / self.tile * self.tile;
            tokens = whole
                .checked_sub(decodes)
                .filter(|&n| n > 0)
                .unwrap_or(room);
        }
        if draft.prefill(tokens) == 0 {
            // There is no prompt, or no pages for it, so decodes get what was reserved.
            draft.decode(u32::MAX);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunk_and_decodes_fill_whole_tiles() {
        let policy = Sarathi::new(256, 128);
        // The paper's example: 256 − (B − 1).
        assert_eq!(policy.beside(256, 17), 239);
        assert_eq!(policy.beside(256, 0), 256);
        assert_eq!(policy.beside(256, 256), 128);
        assert_eq!(policy.beside(200, 3), 253);
    }

    #[test]
    fn the_largest_chunks_are_whole_tiles_below_the_limit() {
        for (tile, most) in [(1, u32::MAX), (128, u32::MAX - 127), (u32::MAX, u32::MAX)] {
            let policy = Sarathi::new(u32::MAX, tile);
            for chunk in [u32::MAX, u32::MAX - 1] {
                let together = policy.beside(chunk, 3) + 3;
                assert!(together >= most.min(chunk), "{chunk} in tiles of {tile}");
                assert!(
                    together.is_multiple_of(tile),
                    "{together} in tiles of {tile}"
                );
            }
        }
        // A tile that holds more than the chunk, or less than the decodes.
        assert_eq!(Sarathi::new(1, u32::MAX).beside(1, 7), u32::MAX - 7);
        let most = u32::MAX - 1;
        assert_eq!(Sarathi::new(1, 1 << 31).beside(1, most), 1);
    }
}
