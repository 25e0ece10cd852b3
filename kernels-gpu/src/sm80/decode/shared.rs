//! Shared-memory addresses of a warp.

use super::config::{ROWS, Shape};

/// Shared addresses of one warp.
#[derive(Clone, Copy)]
pub(in crate::sm80) struct Shared {
    /// The CTA's shared memory.
    pub base: u32,
    pub shape: Shape,
    pub warp: u32,
}

impl Shared {
    /// The addresses of another warp of the CTA.
    #[inline(always)]
    pub fn of(self, warp: u32) -> Self {
        Self { warp, ..self }
    }

    #[inline(always)]
    pub fn block(self, place: u32) -> u32 {
        self.base + self.warp * self.shape.warp_bytes() + place * self.shape.block_bytes()
    }

    /// The queries: where they stay, or the block through which they reach registers.
    #[inline(always)]
    pub fn queries(self) -> u32 {
        let ring = self.shape.ring();
        self.block(if self.shape.queries_stay() {
            ring
        } else {
            ring - 1
        })
    }

    /// The scales of a chunk: those of its keys, then those of its values.
    #[inline(always)]
    pub fn scales(self, place: u32) -> u32 {
        let all = self.shape.scaled_chunks() * self.shape.scale_bytes();
        self.token(0) - all + place * self.shape.scale_bytes()
    }

    /// The row of one of the unit's query tokens.
    #[inline(always)]
    pub fn token(self, token: u32) -> u32 {
        self.block(0) + self.shape.warp_bytes() - ROWS * 16 + token * 16
    }

    /// An f32 output row of the warp's state, which overwrites the ring at the end of a unit. The padding spreads a
    /// fragment's columns over the banks.
    #[inline(always)]
    pub fn state_row(self, row: u32) -> u32 {
        self.block(0) + row * (self.shape.head_dim + 4) * 4
    }

    /// Base-2 LSE of a row of the state.
    #[inline(always)]
    pub fn state_lse(self, row: u32) -> u32 {
        self.state_row(ROWS) + row * 4
    }

    /// Address of the next unit.
    #[inline(always)]
    pub fn next(self) -> u32 {
        self.base + self.shape.warps() * self.shape.warp_bytes() + self.warp * 4
    }
}
