//! The table of these kernels, and their shared memory, threads and registers.

use crate::sm90::{
    mla::{
        config::{FEEDERS, HEAD_DIM, Ring},
        keys_656::{BLOCK, GROUPS, KEYS, PARTS, ROW_BYTES},
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

/// Rows of a tile: those of one `m16n8k16`.
pub(super) const ROWS_OF_TILE: u32 = 16;

/// Warps of a team: each takes 8 keys of a block for the logits, and 64 columns of the values.
pub(super) const WARPS: u32 = 8;
/// Teams, which take the blocks of a unit in turn.
pub(super) const TEAMS: u32 = 2;
/// Threads of a CTA.
pub(super) const THREADS: u32 = FEEDERS + TEAMS * WARPS * 32;
/// Registers of a producer thread and of a consumer thread.
#[cfg(target_arch = "nvptx64")]
pub(super) const REGISTERS: [u32; 2] = [32, 112];

/// Bytes of a fragment of 16 rows × 16 columns: 16 per lane.
pub(super) const FRAGMENT_BYTES: u32 = 32 * 16;
/// Fragments that a warp multiplies: two groups of columns, and half of the RoPE columns.
#[cfg(target_arch = "nvptx64")]
pub(super) const FRAGMENTS_OF_HALF: usize = HEAD_DIM as usize / 32;
/// Bytes of a row's weights: 64 of 16 bits, padded by 16 bytes so that `ldmatrix` reads 8 rows from different banks.
pub(super) const WEIGHTS_BYTES: u32 = BLOCK * 2 + 16;
/// Bytes of a team's weights for a block.
pub(super) const WEIGHTS_OF_BLOCK: u32 = GROUPS * ROWS_OF_TILE * WEIGHTS_BYTES;
/// Words that each warp stores per row when references are renewed: per group the largest log of weight times scale,
/// then the largest logit, and whether weights overflow f16.
pub(super) const SAID: u32 = GROUPS + 2;

/// Places under way at most: 84 KB.
#[cfg(target_arch = "nvptx64")]
pub(super) const UNDER_WAY: u32 = 4;

/// The first mbarrier of a stage.
pub(super) const STAGE_BARRIERS: u32 = 7;

/// Offsets in shared memory.
#[cfg_attr(
    not(target_arch = "nvptx64"),
    expect(dead_code, reason = "the host wants the end")
)]
pub(super) struct Offsets {
    /// Keys, unconverted.
    pub keys: u32,
    /// Queries as fragments of 16 columns, first those of one half of the columns, then of the other. Each half: f16
    /// fragments of two groups, then bf16 fragments of half of the RoPE columns.
    pub queries: u32,
    /// Weights of each team, of two blocks alternately, and of each group of columns.
    pub weights: u32,
    /// Per team and row: the [`SAID`] words of each warp.
    pub said: u32,
    /// Per team, row and group: the log of an extra power of two in the weights.
    pub shifts: u32,
    /// Per team, row and group: the largest log of weight times scale.
    pub tops: u32,
    /// Per team and row: its reference, and the range of keys that it sees.
    pub states: u32,
    /// Per row: the inverse of the power of two of its query.
    pub inverses: u32,
    /// Per place: the bits of existing keys.
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
