//! The table of these kernels, and their shared memory, threads and registers.

/// The kernels, one per row and 16-bit float type: `decode_<rows>x<keys>_d<head dimension>_<element>`.
macro_rules! table {
    ($as:ident $then:ident) => {
        $crate::each_half! { $as $then {
            // Rows × keys, head dimension.
            64 x 64, 512;
        }}
    };
}
#[cfg(target_arch = "nvptx64")]
pub(super) use table;

#[cfg(not(target_arch = "nvptx64"))]
mod rows {
    use super::{
        BLOCK_KEYS, HEAD_DIM, KEY_PIECES, KEY_STAGES, Offsets, PIECE_KEYS, PIECE_SLABS, THREADS,
        TILE_ROWS,
    };
    use crate::registry::{Arch, Element, Family, KernelInfo, Loads, Op, registers};

    macro_rules! rows {
        ($half:ident $element:literal { $(
            $rows:literal x $keys:literal, $dim:literal;
        )* }) => {
            &[$(KernelInfo {
                element: Element::$half,
                ..row(concat!("decode_", $rows, "x", $keys, "_d", $dim, "_", $element))
            }),*]
        };
    }

    /// See the macro `table`.
    pub const ROWS: &[&[KernelInfo]] = table!(list rows);

    const fn row(name: &'static str) -> KernelInfo {
        KernelInfo {
            loads: Loads::Pages,
            rows: TILE_ROWS,
            keys: BLOCK_KEYS,
            head_dim: HEAD_DIM,
            value_dim: HEAD_DIM,
            leaves_merges: true,
            takes_prompts: true,
            boxes: Some([[PIECE_SLABS, BLOCK_KEYS], [HEAD_DIM / 64, PIECE_KEYS]]),
            stages: KEY_STAGES / KEY_PIECES,
            threads: THREADS,
            registers: registers(THREADS, 1),
            shared_bytes: Offsets::new().end,
            ctas_per_sm: 1,
            ..KernelInfo::new(name, Family::DecodeWgmma, Arch::Sm90a, Op::Decode)
        }
    }
}
#[cfg(not(target_arch = "nvptx64"))]
pub use rows::ROWS;

/// Elements of queries, keys, values and outputs.
pub(super) const HEAD_DIM: u32 = 512;
/// Rows of a tile.
pub(super) const TILE_ROWS: u32 = 64;
/// Keys of a block.
pub(super) const BLOCK_KEYS: u32 = 64;
/// Threads of a CTA: the producer warpgroup, the softmax warpgroup (`weigh.rs`), and two P·V warpgroups (`add.rs`).
pub(super) const THREADS: u32 = 512;
/// Registers of a thread in these roles.
#[cfg(target_arch = "nvptx64")]
pub(super) const REGISTERS: [u32; 3] = [40, 152, 160];
#[cfg(target_arch = "nvptx64")]
const _: () = assert!(REGISTERS[0] + REGISTERS[1] + 2 * REGISTERS[2] == 65_536 / 128);

/// Pieces of a block of keys, by columns: each holds some columns of all keys.
pub(super) const KEY_PIECES: u32 = 4;
/// Slabs of 64 columns per piece of keys.
pub(super) const PIECE_SLABS: u32 = HEAD_DIM / 64 / KEY_PIECES;
/// Pieces of a block of values, by keys: each is one step of P·V, with all columns.
pub(super) const VALUE_PIECES: u32 = 4;
/// Keys per piece of values.
pub(super) const PIECE_KEYS: u32 = BLOCK_KEYS / VALUE_PIECES;
/// Bytes of a piece of keys or of values.
pub(super) const PIECE_BYTES: u32 = BLOCK_KEYS * PIECE_SLABS * 128;
const _: () = assert!(PIECE_BYTES == PIECE_KEYS * HEAD_DIM * 2);
/// Stages, one piece each. A piece of values is in use for less time: one step reads it.
pub(super) const KEY_STAGES: u32 = 6;
pub(super) const VALUE_STAGES: u32 = 4;

/// Bytes of a slab of queries, 64 columns.
pub(super) const SLAB_BYTES: u32 = TILE_ROWS * 128;
/// Slabs of the queries. The softmax warpgroup holds the last ones in registers.
pub(super) const QUERY_SLABS: u32 = HEAD_DIM / 64;
pub(super) const HELD_SLABS: u32 = 3;

/// Stages of weights, one block each.
pub(super) const WEIGHTS: u32 = 2;
/// Bytes of a block's weights, and of those for 16 keys: 16 bytes per thread. The same thread of a P·V warpgroup passes
/// them to wgmma as its A fragment.
pub(super) const WEIGHTS_BYTES: u32 = TILE_ROWS * BLOCK_KEYS * 2;
#[cfg(target_arch = "nvptx64")]
pub(super) const WEIGHTS_STEP: u32 = 128 * 16;

/// Barriers beside those of the stages.
pub(super) const BARRIERS: u32 = 14;

/// Offsets in shared memory.
#[cfg_attr(
    not(target_arch = "nvptx64"),
    expect(dead_code, reason = "the host wants the end")
)]
pub(super) struct Offsets {
    pub keys: u32,
    pub values: u32,
    pub weights: u32,
    pub rows: u32,
    pub factors: u32,
    pub inverses: u32,
    pub grew: u32,
    pub units: u32,
    pub barriers: u32,
    /// Dynamic shared memory.
    pub end: u32,
}

impl Offsets {
    pub const fn new() -> Self {
        let keys = (QUERY_SLABS - HELD_SLABS) * SLAB_BYTES;
        let values = keys + KEY_STAGES * PIECE_BYTES;
        let weights = values + VALUE_STAGES * PIECE_BYTES;
        let rows = weights + WEIGHTS * WEIGHTS_BYTES;
        let factors = rows + 2 * TILE_ROWS * 16;
        let inverses = factors + WEIGHTS * TILE_ROWS * 4;
        let grew = inverses + 2 * TILE_ROWS * 4;
        let units = grew + WEIGHTS * 4 * 4;
        let barriers = units + 2 * crate::sm90::unit::UNIT_BYTES;
        Self {
            keys,
            values,
            weights,
            rows,
            factors,
            inverses,
            grew,
            units,
            barriers,
            end: barriers + (BARRIERS + 2 * (KEY_STAGES + VALUE_STAGES)) * 8,
        }
    }
}
