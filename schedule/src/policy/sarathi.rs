//! SARATHI: one chunk, and the decodes ride along.

use super::Policy;
use crate::{Draft, chunk::ChunkSize};

/// Decode-maximal batches: all decodes that fit and one prefill chunk, which shrinks so that the two
/// together are a multiple of the GEMM tile.
#[derive(Clone, Debug)]
pub struct Sarathi {
    chunk: ChunkSize,
    tile: u32,
}

impl Sarathi {
    /// With a chunk size (chunk and decodes together) and the row tile of the linear layers.
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

    /// Tokens of a chunk beside so many decodes.
    fn beside(&self, chunk: u32, decodes: u32) -> u32 {
        let together = chunk.max(decodes + 1).next_multiple_of(self.tile);
        together - decodes
    }
}

impl Policy for Sarathi {
    fn name(&self) -> &'static str {
        "sarathi"
    }

    fn compose(&mut self, draft: &mut Draft<'_>) {
        let chunk = self.chunk.tokens(draft.workload());
        // A place and a tile's worth of tokens stay for the chunk, else prompts would starve.
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
            // Whole tiles within the budget where there are any.
            let whole = (decodes + room) / self.tile * self.tile;
            tokens = whole
                .checked_sub(decodes)
                .filter(|&n| n > 0)
                .unwrap_or(room);
        }
        if draft.prefill(tokens) == 0 {
            // No prompt, or no pages for it: what was kept for the chunk is the decodes' again.
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
}
