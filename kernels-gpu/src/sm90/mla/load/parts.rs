//! The stages of keys of 16 bits, as the loaders see them.

use super::super::{config::QUERY_SLABS, shared::Units};

/// Shared memory with a ring of `STAGES` stages for parts of blocks. A part has some slabs of 64 columns, of all keys of
/// a block: groups of 8 keys; within a group the slabs follow each other.
pub(in crate::sm90::mla) trait Parts<const STAGES: u32>: Units {
    /// Parts of a block, which take stages in turn.
    const PARTS: u32;
    /// The first slab of the first part.
    const FIRST_SLAB: u32;
    /// Slabs of a part.
    const PART_SLABS: u32;
    /// Parts under way at most, if TMA loads them. See the module's documentation.
    const UNDER_WAY: u32;
    /// The tensor map of the parts. If the last slab has a pool of its own, the last part has other maps.
    const MAP: usize;
    /// Whether the last part has the last slab of the keys, which is no part of the values.
    const HAS_ROPE: bool = Self::FIRST_SLAB + Self::PARTS * Self::PART_SLABS == QUERY_SLABS;

    /// The keys of a stage.
    fn keys(self, stage: u32) -> u32;
    /// A stage's keys have arrived.
    fn full(self, stage: u32) -> u32;
    /// The products that read a stage are done.
    fn free(self, stage: u32) -> u32;
}
