//! Positions in the rings of stages and slots.

/// A position in a ring.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Index.
    pub index: u32,
    /// Parity of the round, to wait with.
    pub parity: u32,
}

impl Place {
    /// `index` in the first round.
    #[inline(always)]
    #[must_use]
    pub const fn first(index: u32) -> Self {
        Self { index, parity: 0 }
    }

    /// Moves `steps` forward in a ring of `length`, at most once around.
    #[inline(always)]
    pub fn advance(&mut self, steps: u32, length: u32) {
        self.index += steps;
        if self.index >= length {
            self.index -= length;
            self.parity ^= 1;
        }
    }
}
