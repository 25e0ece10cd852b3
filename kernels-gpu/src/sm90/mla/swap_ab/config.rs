//! The table of these kernels, and their shared memory, threads and registers.

use crate::sm90::{
    mla::{
        config::{FEEDERS, QUERY_SLABS, Ring, SLAB_BYTES, TILE_ROWS},
        keys_656::{BLOCK, GROUPS, KEYS, ROW_BYTES},
    },
    unit::UNIT_BYTES,
};
#[cfg(not(target_arch = "nvptx64"))]
use crate::{registry::KernelInfo, sm90::mla::keys_656::rows};

/// The kernels: `mla_656_<rows>x<keys>_bf16`.
macro_rules! table {
    ($then:ident) => {
        $then! { 64 x 32 in 6; }
    };
}
#[cfg(target_arch = "nvptx64")]
pub(super) use table;

/// See the macro `table`.
#[cfg(not(target_arch = "nvptx64"))]
pub const ROWS: &[&[KernelInfo]] = &[table!(rows)];

/// Consumer warpgroups, which own the blocks of a unit alternately.
pub(super) const CONSUMERS: u32 = 2;
/// Stages of weights and f16 scales: one block in each consumer's P·V, and one whose weights are being computed.
pub(super) const WEIGHED: u32 = 3;
/// Threads of a CTA.
pub(super) const THREADS: u32 = FEEDERS + CONSUMERS * 128;
/// Registers of a producer thread and of a consumer thread.
#[cfg(target_arch = "nvptx64")]
pub(super) const REGISTERS: [u32; 2] = [40, 232];

/// Bytes of a block's weights: 64 rows of 16 bits per key.
pub(super) const WEIGHTS_BYTES: u32 = BLOCK * TILE_ROWS * 2;
/// Bytes of a block's f16 scales: one per key and group.
pub(super) const SCALES_BYTES: u32 = GROUPS * BLOCK * 2;

/// Places under way at most: 42 KB.
#[cfg(target_arch = "nvptx64")]
pub(super) const UNDER_WAY: u32 = 2;

/// The first mbarrier of a stage.
pub(super) const STAGE_BARRIERS: u32 = 9;

/// Offsets in shared memory.
#[cfg_attr(
    not(target_arch = "nvptx64"),
    expect(dead_code, reason = "the host wants the end")
)]
pub(super) struct Offsets {
    /// Weights of the latest [`WEIGHED`] blocks. The queries come before them: slabs of 64 columns × 64 rows, in f16,
    /// and the RoPE slab in bf16.
    pub weights: u32,
    /// Keys, unconverted.
    pub keys: u32,
    /// f16 scales of the same blocks as the weights.
    pub scales: u32,
    /// Per row: the inverse of the power of two of its query.
    pub inverses: u32,
    /// Per row: the first and the last key that it sees.
    pub seen: u32,
    /// Per row of two units: the reference of its weights.
    pub references: u32,
    /// Per consumer and row: the rescale factor, at its latest block, of earlier outputs.
    pub factors: u32,
    /// Per consumer, warp and row: the largest logit of a block; at the end of a unit the sum of weights.
    pub said: u32,
    /// Per consumer and warp: whether a weight of its latest block is too large, so that references change.
    pub grew: u32,
    /// Per place: the bits of existing keys.
    pub there: u32,
    pub ring: Ring,
    /// Dynamic shared memory.
    pub end: u32,
}

impl Offsets {
    pub const fn new(stages: u32) -> Self {
        let weights = QUERY_SLABS * SLAB_BYTES;
        let keys = weights + WEIGHED * WEIGHTS_BYTES;
        let scales = keys + stages * KEYS * ROW_BYTES;
        let rows = scales + WEIGHED * SCALES_BYTES;
        let inverses = rows + 2 * TILE_ROWS * 16;
        let seen = inverses + TILE_ROWS * 4;
        let references = seen + TILE_ROWS * 8;
        let factors = references + 2 * TILE_ROWS * 4;
        let said = factors + CONSUMERS * TILE_ROWS * 4;
        let grew = said + CONSUMERS * 4 * TILE_ROWS * 4;
        let units = grew + CONSUMERS * 16;
        let there = units + 2 * UNIT_BYTES;
        let barriers = (there + stages * 4).next_multiple_of(8);
        Self {
            weights,
            keys,
            scales,
            inverses,
            seen,
            references,
            factors,
            said,
            grew,
            there,
            ring: Ring {
                units,
                rows,
                barriers,
            },
            end: barriers + (STAGE_BARRIERS + 2 * stages) * 8,
        }
    }
}
