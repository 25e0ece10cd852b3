//! What kernels of few rows there are, and what one takes of an SM.

use crate::sm90::{
    mla::{
        config::{HEAD_DIM, Ring},
        keys_656::{BLOCK, FEEDERS, GROUPS, KEYS, PARTS, ROW_BYTES},
    },
    unit::UNIT_BYTES,
};
#[cfg(not(target_arch = "nvptx64"))]
use crate::{registry::KernelInfo, sm90::mla::keys_656::rows};

/// The kernels: `mla_656_<rows>x<keys>_bf16`.
macro_rules! table {
    ($then:ident) => {
        $then! { 16 x 32 in 8; }
    };
}
#[cfg(target_arch = "nvptx64")]
pub(super) use table;

/// See the macro `table`.
#[cfg(not(target_arch = "nvptx64"))]
pub const ROWS: &[&[KernelInfo]] = &[table!(rows)];

/// Rows of a tile, those of one product.
pub(super) const ROWS_OF_TILE: u32 = 16;

/// Warps of a team: each has 8 keys of a block for the logits, and 64 columns of the values.
pub(super) const WARPS: u32 = 8;
/// Teams, which take the blocks of a unit in turn.
pub(super) const TEAMS: u32 = 2;
/// Threads of a CTA.
pub(super) const THREADS: u32 = FEEDERS + TEAMS * WARPS * 32;
/// Registers of a thread that feeds and of one that computes.
#[cfg(target_arch = "nvptx64")]
pub(super) const REGISTERS: [u32; 2] = [32, 112];

/// Bytes of the fragments of 16 rows for one product, 16 columns: 16 of each lane.
pub(super) const FRAGMENT_BYTES: u32 = 32 * 16;
/// Fragments of the columns that a warp multiplies: two groups of columns, and half of those that only keys have.
#[cfg(target_arch = "nvptx64")]
pub(super) const FRAGMENTS_OF_HALF: usize = HEAD_DIM as usize / 32;
/// Bytes of a row's weights: 64 in 16 bits, and 16 more, so that `ldmatrix` finds 8 rows in different banks.
pub(super) const WEIGHTS_BYTES: u32 = BLOCK * 2 + 16;
/// Bytes of a team's weights of a block.
pub(super) const WEIGHTS_OF_BLOCK: u32 = GROUPS * ROWS_OF_TILE * WEIGHTS_BYTES;
/// What each warp says of a row where references are renewed: the largest log of a weight times a value's scale in each
/// group, the largest logit, whether weights outgrew f16.
pub(super) const SAID: u32 = GROUPS + 2;

/// The first mbarrier of a stage.
pub(super) const STAGE_BARRIERS: u32 = 7;

/// Where what is in shared memory begins, by the places for keys that are.
#[cfg_attr(
    not(target_arch = "nvptx64"),
    expect(dead_code, reason = "the host wants the end")
)]
pub(super) struct Offsets {
    /// Keys as the pool has them.
    pub keys: u32,
    /// As fragments of 16 columns, of each half of the columns one behind the other: in f16 of two groups, in bf16 of half of the columns that only keys have.
    pub queries: u32,
    /// Of each team and of two blocks in turn; of each group of columns.
    pub weights: u32,
    /// Of each team and row: what each warp says of it.
    pub said: u32,
    /// Of each team, row and group: the power of two that its weights are multiplied by besides, as a log.
    pub shifts: u32,
    /// Of each team, row and group: the log of the largest weight of a value.
    pub tops: u32,
    /// Of each team and row: its reference, and which keys it sees.
    pub states: u32,
    /// Of each row: what undoes the power of two of its query.
    pub inverses: u32,
    /// Of each place: which keys are there.
    pub there: u32,
    pub ring: Ring,
    /// Dynamic shared memory.
    pub end: u32,
}

impl Offsets {
    pub const fn new(stages: u32) -> Self {
        let of_rows = TEAMS * ROWS_OF_TILE;
        let keys = 0;
        let queries = keys + stages * KEYS * ROW_BYTES;
        let weights = queries + HEAD_DIM / 16 * FRAGMENT_BYTES;
        let said = weights + TEAMS * 2 * WEIGHTS_OF_BLOCK;
        let shifts = said + of_rows * SAID * WARPS * 4;
        let tops = shifts + of_rows * GROUPS * 4;
        let states = tops + of_rows * GROUPS * 4;
        let inverses = states + of_rows * 16;
        let rows = inverses + ROWS_OF_TILE * 4;
        let units = rows + 2 * ROWS_OF_TILE * 16;
        let there = units + 2 * UNIT_BYTES;
        let barriers = there + stages * 4;
        Self {
            keys,
            queries,
            weights,
            said,
            shifts,
            tops,
            states,
            inverses,
            there,
            ring: Ring {
                units,
                rows,
                barriers,
            },
            end: barriers + (STAGE_BARRIERS + stages + stages / PARTS) * 8,
        }
    }
}
