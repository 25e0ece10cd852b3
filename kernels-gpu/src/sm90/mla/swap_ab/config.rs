//! What kernels there are, and what one takes of an SM.

use crate::sm90::{
    mla::{
        config::{QUERY_SLABS, Ring, SLAB_BYTES, TILE_ROWS},
        keys_656::{BLOCK, FEEDERS, GROUPS, KEYS, ROW_BYTES},
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

/// Warpgroups that compute, which take the blocks of a unit in turn.
pub(super) const CONSUMERS: u32 = 2;
/// Blocks of which there are weights and scales in f16: one of each consumer's that is multiplied, and one that is weighed.
pub(super) const WEIGHED: u32 = 3;
/// Threads of a CTA.
pub(super) const THREADS: u32 = FEEDERS + CONSUMERS * 128;
/// Registers of a thread that feeds and of one that computes.
#[cfg(target_arch = "nvptx64")]
pub(super) const REGISTERS: [u32; 2] = [40, 232];

/// Bytes of a block's weights: of each key 64 rows in 16 bits.
pub(super) const WEIGHTS_BYTES: u32 = BLOCK * TILE_ROWS * 2;
/// Bytes of a block's scales in f16: of each group one for each key.
pub(super) const SCALES_BYTES: u32 = GROUPS * BLOCK * 2;

/// The first mbarrier of a stage.
pub(super) const STAGE_BARRIERS: u32 = 9;

/// Where what is in shared memory begins, by the places for keys that are.
#[cfg_attr(
    not(target_arch = "nvptx64"),
    expect(dead_code, reason = "the host wants the end")
)]
pub(super) struct Offsets {
    /// Of the latest [`WEIGHED`] blocks. Before them are the queries, slabs of 64 columns of 64 rows: in f16, and in bf16 those
    /// that only keys have.
    pub weights: u32,
    /// Keys as the pool has them.
    pub keys: u32,
    /// Of the same blocks.
    pub scales: u32,
    /// Of each row: what undoes the power of two of its query.
    pub inverses: u32,
    /// Of each row: the first and the last key that it sees.
    pub seen: u32,
    /// Of each row of two units: what its weights are relative to.
    pub references: u32,
    /// Of each consumer and row: what outputs before its latest block are multiplied by.
    pub factors: u32,
    /// Of each consumer, warp and row: the largest logit of a block, the sum of weights of a unit.
    pub said: u32,
    /// Of each consumer and warp: whether a weight of its latest block is too large, so that references change.
    pub grew: u32,
    /// Of each place: which keys are there.
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
