//! Rotary embeddings of queries and keys.

use bytemuck::{Pod, Zeroable};

/// A rotary embedding of queries and keys.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub struct RotaryParams {
    /// `[pairs]` u64, padded with zeros to a multiple of 8: the angle per position of each pair, where 2⁶⁴ is a full
    /// turn.
    pub turns: u64,
    /// Rotated pairs of a head.
    pub pairs: u32,
    /// 1: pairs are neighbouring elements. 0: a pair has one element of each half of the rotated part.
    pub interleaved: u32,
    /// Factor of the rotated elements of keys, which accounts for queries and keys.
    pub gain: f32,
    /// Zero.
    pub reserved: [u32; 3],
}

impl RotaryParams {
    /// `permute_bytes` selectors that turn two words of two elements each into two words that hold one pair each.
    #[must_use]
    pub const fn picks(&self) -> [u32; 2] {
        self.of_queries().picks()
    }

    /// The parameters for queries alone.
    #[must_use]
    pub const fn of_queries(&self) -> QueryRotaryParams {
        QueryRotaryParams {
            turns: self.turns,
            pairs: self.pairs,
            interleaved: self.interleaved,
        }
    }
}

/// The fields of [`RotaryParams`] that concern queries.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct QueryRotaryParams {
    /// As [`RotaryParams::turns`].
    pub turns: u64,
    /// As [`RotaryParams::pairs`].
    pub pairs: u32,
    /// As [`RotaryParams::interleaved`].
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
