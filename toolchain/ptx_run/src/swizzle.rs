//! Permutations of the rows of tiles in shared memory.

/// How the 16-byte units of a tile's rows are permuted in shared memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Swizzle {
    /// No permutation.
    #[default]
    None = 0,
    /// Rows of 32 bytes: bit 4 of an address is XORed with bit 7.
    B32 = 1,
    /// Rows of 64 bytes: bits 4–5 are XORed with bits 7–8.
    B64 = 2,
    /// Rows of 128 bytes: bits 4–6 are XORed with bits 7–9.
    B128 = 3,
}

impl Swizzle {
    /// From the number used by `cuTensorMapEncodeTiled`.
    #[must_use]
    pub const fn from_number(number: u64) -> Option<Self> {
        Some(match number {
            0 => Self::None,
            1 => Self::B32,
            2 => Self::B64,
            3 => Self::B128,
            _ => return None,
        })
    }

    /// Bytes of a row of the pattern.
    #[must_use]
    pub const fn row_bytes(self) -> u32 {
        match self {
            Self::None => 16,
            Self::B32 => 32,
            Self::B64 => 64,
            Self::B128 => 128,
        }
    }

    /// The permuted address of a byte.
    #[must_use]
    pub const fn apply(self, address: u32) -> u32 {
        let mask = self.row_bytes() / 16 - 1;
        address ^ ((address >> 7 & mask) << 4)
    }
}
