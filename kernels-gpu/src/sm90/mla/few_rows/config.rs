//! The table of these kernels, and their shared memory and threads.

use crate::sm90::{
    mla::config::{FEEDERS, HEAD_DIM, Ring},
    unit::UNIT_BYTES,
};

/// The kernels: for each 16-bit float type `mla_<rows>x<keys>_<element>`, `mla_rows_…`, and for 16 rows both with `pieces_`.
macro_rules! table {
    ($as:ident $then:ident) => {
        $crate::each_half! { $as $then {
            // Prefix in the name, rows × keys, stages, how keys are loaded, whether units may be pieces of the same rows.
            "" 16 x 64 in 8 Pages;
            "rows_" 16 x 64 in 8 Rows;
            "" 32 x 64 in 7 Pages;
            "rows_" 32 x 64 in 7 Rows;
            "pieces_" 16 x 64 in 8 Pages pieces;
            "rows_pieces_" 16 x 64 in 8 Rows pieces;
        }}
    };
}
#[cfg(target_arch = "nvptx64")]
pub(super) use table;

#[cfg(not(target_arch = "nvptx64"))]
mod rows {
    use super::{Offsets, PART_SLABS, THREADS};
    use crate::{
        registry::KernelInfo,
        sm90::mla::{config::row, keys_16::rows},
    };

    /// See the macro `table`.
    pub const ROWS: &[&[KernelInfo]] = table!(list rows);

    const fn own_row(name: &'static str, [row_count, keys, stages]: [u32; 3]) -> KernelInfo {
        KernelInfo {
            boxes: Some([[PART_SLABS, keys]; 2]),
            shared_bytes: Offsets::new(row_count, stages).end,
            ..row(name, THREADS)
        }
    }
}
#[cfg(not(target_arch = "nvptx64"))]
pub use rows::ROWS;

/// Keys of a block: the rows of one wgmma tile.
pub(super) const KEYS: u32 = 64;
/// Slabs of 64 columns of all keys.
pub(super) const SLABS: u32 = HEAD_DIM / 64;
/// Parts of a block, which arrive and are released one by one, and the slabs of each.
pub(super) const PARTS: u32 = 3;
pub(super) const PART_SLABS: u32 = SLABS / PARTS;
/// Bytes of a part: groups of 8 keys; within a group the slabs follow each other.
pub(super) const PART_BYTES: u32 = KEYS * PART_SLABS * 128;
/// Parts under way at most: 74 KB.
#[cfg(target_arch = "nvptx64")]
pub(super) const UNDER_WAY: u32 = 3;
/// Bytes between groups of 8 keys.
#[cfg(target_arch = "nvptx64")]
pub(super) const GROUP_BYTES: u32 = PART_SLABS * 1024;
/// Consumer warpgroups, which own the blocks of a unit alternately.
pub(super) const CONSUMERS: u32 = 2;
/// Blocks whose weights are kept: one in each consumer's P·V, and one whose weights are being computed.
pub(super) const WEIGHED: u32 = 3;
/// Threads of a CTA.
pub(super) const THREADS: u32 = FEEDERS + CONSUMERS * 128;

/// The first mbarrier of a stage.
pub(super) const STAGE_BARRIERS: u32 = 9;

/// Offsets in shared memory.
#[cfg_attr(
    not(target_arch = "nvptx64"),
    expect(dead_code, reason = "the host wants the end")
)]
pub(super) struct Offsets {
    /// Slabs of 64 columns × all rows. The stages of keys come before them.
    pub queries: u32,
    /// Weights of the latest [`WEIGHED`] blocks: 128 bytes per row, swizzled.
    pub weights: u32,
    /// Per row of two units: the first and the last key that it sees.
    pub seen: u32,
    /// Per row of two units: the reference of its weights.
    pub references: u32,
    /// Per consumer and row: the rescale factor, at its latest block, of earlier outputs.
    pub factors: u32,
    /// Per unit of two, consumer, warp and row: the largest logit of a block; at the end of a unit the sum of weights.
    pub said: u32,
    /// Per consumer and warp: whether a weight of its latest block is too large, so that references change.
    pub grew: u32,
    pub ring: Ring,
    /// Dynamic shared memory.
    pub end: u32,
}

impl Offsets {
    pub const fn new(row_count: u32, stages: u32) -> Self {
        let queries = stages * PART_BYTES;
        let weights = queries + SLABS * row_count * 128;
        let rows = weights + WEIGHED * row_count * 128;
        let seen = rows + 2 * row_count * 16;
        let references = seen + 2 * row_count * 8;
        let factors = references + 2 * row_count * 4;
        let said = factors + CONSUMERS * row_count * 4;
        let grew = said + 2 * CONSUMERS * 4 * row_count * 4;
        let units = grew + CONSUMERS * 16;
        let barriers = units + 2 * UNIT_BYTES;
        Self {
            queries,
            weights,
            seen,
            references,
            factors,
            said,
            grew,
            ring: Ring {
                units,
                rows,
                barriers,
            },
            end: barriers + (STAGE_BARRIERS + 2 * stages) * 8,
        }
    }
}
