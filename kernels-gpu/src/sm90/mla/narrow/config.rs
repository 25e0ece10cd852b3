//! What kernels of few rows there are, and what one takes of an SM.

/// The kernels: `mla_656_<rows>x<keys>_bf16`.
macro_rules! table {
    ($then:ident) => {
        $then! { Bf16 "bf16" { "656_" 16 x 32 in 8; } }
    };
}
#[cfg(target_arch = "nvptx64")]
pub(super) use table;

#[cfg(not(target_arch = "nvptx64"))]
mod rows {
    use super::{Offsets, THREADS};
    use crate::{
        registry::{Arch, Element, Family, KernelInfo, Loads, Op, registers},
        sm90::mla::config::{HEAD_DIM, VALUE_DIM},
    };

    macro_rules! rows {
        ($half:ident $element:literal {
            $($kind:literal $rows:literal x $keys:literal in $stages:literal;)*
        }) => {
            &[$(KernelInfo {
                loads: Loads::Rows,
                element: Element::$half,
                cache: Some(Element::E4m3),
                rows: $rows,
                keys: $keys,
                head_dim: HEAD_DIM,
                value_dim: VALUE_DIM,
                latent: true,
                leaves_merges: true,
                takes_prompts: true,
                stages: $stages,
                threads: THREADS,
                registers: registers(THREADS, 1),
                shared_bytes: Offsets::new($stages).end,
                ctas_per_sm: 1,
                ..KernelInfo::new(
                    concat!("mla_", $kind, $rows, "x", $keys, "_", $element),
                    Family::Mla,
                    Arch::Sm90a,
                    Op::Decode,
                )
            }),*]
        };
    }

    /// See the macro `table`.
    pub const ROWS: &[&[KernelInfo]] = &[table!(rows)];
}
#[cfg(not(target_arch = "nvptx64"))]
pub use rows::ROWS;

use crate::sm90::{mla::config::ROW_BYTES, unit::UNIT_BYTES};

/// Rows of a tile, those of one product.
pub(super) const ROWS_OF_TILE: u32 = 16;
/// Keys of a block.
pub(super) const KEYS: u32 = 32;

/// Warps of a team: each has 64 columns of the values, and 8 of those that only keys have.
pub(super) const WARPS: u32 = 8;
/// Teams, which take the blocks of a unit in turn.
pub(super) const TEAMS: u32 = 2;
/// Warps that bring keys, which take blocks in turn as well; with the one that claims units they are a warpgroup.
#[cfg(target_arch = "nvptx64")]
pub(super) const LOADERS: u32 = 3;
/// Keys of a block whose copies arrive together.
#[cfg(target_arch = "nvptx64")]
pub(super) const KEYS_AN_ARRIVAL: u32 = 8;
/// Threads that feed, and threads of a CTA.
pub(super) const FEEDERS: u32 = 128;
pub(super) const THREADS: u32 = FEEDERS + TEAMS * WARPS * 32;
/// Registers of a thread that feeds and of one that computes.
#[cfg(target_arch = "nvptx64")]
pub(super) const REGISTERS: [u32; 2] = [32, 112];

/// Bytes of what one warp has of a block's logits.
pub(super) const PARTIAL_BYTES: u32 = ROWS_OF_TILE * KEYS * 4;
/// Bytes of a row's weights: 32 in 16 bits, and 16 more, so that `ldmatrix` finds 8 rows in different banks.
pub(super) const WEIGHTS_BYTES: u32 = KEYS * 2 + 16;

/// The first mbarrier of a stage.
pub(super) const STAGE_BARRIERS: u32 = 7;

/// Where what is in shared memory begins, by the blocks of keys that are.
#[cfg_attr(
    not(target_arch = "nvptx64"),
    expect(dead_code, reason = "the host wants the end")
)]
pub(super) struct Offsets {
    /// Keys as the pool has them.
    pub keys: u32,
    /// Of each team and warp: its part of the logits.
    pub partials: u32,
    pub weights: u32,
    /// Of each team, warp and lane: queries of columns that only keys have.
    pub rope: u32,
    /// Of each team and row: what outputs before the block are multiplied by.
    pub factors: u32,
    /// Of each team and row: reference and sum.
    pub states: u32,
    pub rows: u32,
    pub units: u32,
    /// Of each block: which keys are there.
    pub there: u32,
    pub barriers: u32,
    /// Dynamic shared memory.
    pub end: u32,
}

impl Offsets {
    pub const fn new(stages: u32) -> Self {
        let keys = 0;
        let partials = keys + stages * KEYS * ROW_BYTES;
        let weights = partials + TEAMS * WARPS * PARTIAL_BYTES;
        let rope = weights + TEAMS * ROWS_OF_TILE * WEIGHTS_BYTES;
        let factors = rope + TEAMS * WARPS * 32 * 8;
        let states = factors + TEAMS * ROWS_OF_TILE * 4;
        let rows = states + TEAMS * ROWS_OF_TILE * 8;
        let units = rows + 2 * ROWS_OF_TILE * 16;
        let there = units + 2 * UNIT_BYTES;
        let barriers = there + stages * 4;
        Self {
            keys,
            partials,
            weights,
            rope,
            factors,
            states,
            rows,
            units,
            there,
            barriers,
            end: barriers + (STAGE_BARRIERS + 2 * stages) * 8,
        }
    }
}
