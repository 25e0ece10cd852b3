//! How queries and keys are turned by their positions.

use bytemuck::{Pod, Zeroable};

/// How queries and keys are turned by their positions.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub struct RotaryParams {
    /// `[pairs]` u64, and zeros up to a multiple of 8: by how much a pair is turned from a position to the next, of a turn of
    /// 2⁶⁴.
    pub turns: u64,
    /// Pairs of a head that are turned.
    pub pairs: u32,
    /// 1: pairs are neighbours. 0: of the turned part's first half and second half an element each.
    pub interleaved: u32,
    /// What turned elements of keys are multiplied by, for queries and keys together.
    pub gain: f32,
    /// Zero.
    pub reserved: [u32; 3],
}

impl RotaryParams {
    /// Of two words of two elements, those halves that are in a first word of pairs, and those in a second, as
    /// `permute_bytes` has them.
    #[must_use]
    pub const fn picks(&self) -> [u32; 2] {
        self.of_queries().picks()
    }

    /// What concerns queries alone.
    #[must_use]
    pub const fn of_queries(&self) -> QueryRotaryParams {
        QueryRotaryParams {
            turns: self.turns,
            pairs: self.pairs,
            interleaved: self.interleaved,
        }
    }
}

/// How queries alone are turned: as [`RotaryParams`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct QueryRotaryParams {
    /// See there.
    pub turns: u64,
    /// See there.
    pub pairs: u32,
    /// See there.
    pub interleaved: u32,
}

impl QueryRotaryParams {
    /// As [`RotaryParams::picks`].
    #[must_use]
    pub const fn picks(&self) -> [u32; 2] {
        if self.interleaved != 0 {
            [0x3210, 0x7654]
        } else {
            [0x5410, 0x7632]
        }
    }
}
