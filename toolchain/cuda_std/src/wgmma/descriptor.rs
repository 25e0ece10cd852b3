//! Descriptors of operands in shared memory. Needs no GPU.

/// How the rows of an operand are permuted in shared memory, in units of 16 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u64)]
pub enum Swizzle {
    /// No permutation: 8 × 16-byte core matrices.
    None = 0,
    /// Rows of 128 bytes: bits 4–6 of an address are XORed with bits 7–9.
    B128 = 1,
    /// Rows of 64 bytes: bits 4–5 are XORed with bits 7–8.
    B64 = 2,
    /// Rows of 32 bytes: bit 4 is XORed with bit 7.
    B32 = 3,
}

impl Swizzle {
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

    /// The permuted offset of the byte at `offset` of a tile; the tile starts at a multiple of 1024.
    #[must_use]
    pub const fn apply(self, offset: u32) -> u32 {
        let mask = self.row_bytes() / 16 - 1;
        offset ^ (((offset >> 7) & mask) << 4)
    }
}

/// Location and layout of an operand in shared memory: A and B of `wgmma`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Descriptor(pub u64);

impl Descriptor {
    /// A descriptor of the operand that starts at shared address `address`.
    ///
    /// `leading` and `stride` are distances in bytes, multiples of 16, below 2^18:
    ///
    /// | layout | `leading` | `stride` |
    /// |---|---|---|
    /// | K-major, swizzled | unused (give 16) | between groups of 8 rows (M or N) |
    /// | K-major, [`Swizzle::None`] | between core matrices along K | between core matrices along M or N |
    /// | MN-major, swizzled | between the row patterns along M or N | between groups of 8 along K |
    ///
    /// The swizzle pattern is a function of the address, so the tile must start at a multiple of its period
    /// (128 B: 1024, 64 B: 512, 32 B: 256). [`Descriptor::advance`] moves inside of the tile.
    #[inline(always)]
    #[must_use]
    pub const fn new(address: u32, leading: u32, stride: u32, swizzle: Swizzle) -> Self {
        Self(
            ((address & 0x3_FFFF) >> 4) as u64
                | (((leading & 0x3_FFFF) >> 4) as u64) << 16
                | (((stride & 0x3_FFFF) >> 4) as u64) << 32
                | (swizzle as u64) << 62,
        )
    }

    /// The operand `bytes` further on, a multiple of 16: the next k-step or the next tile.
    ///
    /// All addresses must be below 2^18, as those of shared memory are.
    #[inline(always)]
    #[must_use]
    pub const fn advance(self, bytes: u32) -> Self {
        // Only the low half changes, so this is one 32-bit addition.
        Self((self.0 & !0xFFFF_FFFF) | (self.0 as u32).wrapping_add(bytes >> 4) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Swizzle; 4] = [Swizzle::None, Swizzle::B32, Swizzle::B64, Swizzle::B128];

    #[test]
    fn descriptor_fields_lie_where_the_hardware_reads_them() {
        let descriptor = Descriptor::new(0x12340, 1024, 2048, Swizzle::B128).0;
        assert_eq!(descriptor & 0x3FFF, 0x1234);
        assert_eq!(descriptor >> 16 & 0x3FFF, 64);
        assert_eq!(descriptor >> 32 & 0x3FFF, 128);
        assert_eq!(descriptor >> 62, 1);
        let modes = ALL.map(|swizzle| Descriptor::new(0, 16, 16, swizzle).0 >> 62);
        assert_eq!(modes, [0, 3, 2, 1]);
        let rest = !(0x3FFF | 0x3FFF << 16 | 0x3FFF << 32 | 3 << 62);
        assert_eq!(
            Descriptor::new(!0, !0, !0, Swizzle::B32).0 & rest,
            0,
            "stray bits"
        );
    }

    #[test]
    fn advancing_is_starting_further_on() {
        for address in [0, 1024, 0x2_0000, 0x3_7F00] {
            for bytes in [0, 16, 32, 4096, 0x80F0] {
                let start = Descriptor::new(address, 1024, 2048, Swizzle::B64);
                let there = Descriptor::new(address + bytes, 1024, 2048, Swizzle::B64);
                assert_eq!(start.advance(bytes), there, "{address:#x} + {bytes:#x}");
            }
        }
    }

    #[test]
    fn a_swizzle_permutes_the_16_byte_units_of_its_rows() {
        for swizzle in ALL {
            let mut seen = [false; 1024];
            for offset in 0..1024 {
                let place = swizzle.apply(offset);
                assert_eq!(place / swizzle.row_bytes(), offset / swizzle.row_bytes());
                assert_eq!(place % 16, offset % 16);
                assert_eq!(swizzle.apply(place), offset, "its own inverse");
                seen[place as usize] = true;
            }
            assert!(seen.iter().all(|&hit| hit), "{swizzle:?} is no permutation");
        }
    }

    #[test]
    fn eight_rows_of_a_column_fall_into_different_banks() {
        for swizzle in [Swizzle::B32, Swizzle::B64, Swizzle::B128] {
            // Eight consecutive rows and the same 16 bytes of each: what one phase of ldmatrix reads.
            let row = swizzle.row_bytes();
            let units = (0..8).map(|r| swizzle.apply(r * row) % 128 / 16);
            let mut hits = [0; 8];
            units.for_each(|unit| hits[unit as usize] += 1);
            assert_eq!(hits, [1; 8], "{swizzle:?}");
        }
    }
}
