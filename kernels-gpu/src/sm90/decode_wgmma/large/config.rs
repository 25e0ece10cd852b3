//! The table of these kernels, and their shared memory, threads and registers.

/// The kernels, one per row and 16-bit float type: `decode_<rows>x<keys>_d<elements of a key>[x512]_<element>`.
macro_rules! table {
    ($as:ident $then:ident) => {
        $crate::each_half! { $as $then {
            // Rows × keys, elements of a key, and in the name those of a value if they differ.
            64 x 64, 512, "";
            64 x 64,  64, "x512";
        }}
    };
}
#[cfg(target_arch = "nvptx64")]
pub(super) use table;

#[cfg(not(target_arch = "nvptx64"))]
mod rows {
    use super::{BLOCK_KEYS, Keys, PIECE_KEYS, THREADS, TILE_ROWS, VALUE_DIM, VALUE_SLABS};
    use crate::registry::{Arch, Element, Family, KernelInfo, Loads, Op, registers};

    macro_rules! rows {
        ($half:ident $element:literal { $(
            $rows:literal x $keys:literal, $dim:literal, $values:literal;
        )* }) => {
            &[$(KernelInfo {
                element: Element::$half,
                ..row::<$dim>(concat!("decode_", $rows, "x", $keys, "_d", $dim, $values, "_", $element))
            }),*]
        };
    }

    /// See the macro `table`.
    pub const ROWS: &[&[KernelInfo]] = table!(list rows);

    const fn row<const DIM: u32>(name: &'static str) -> KernelInfo {
        KernelInfo {
            loads: Loads::Pages,
            rows: TILE_ROWS,
            keys: BLOCK_KEYS,
            head_dim: DIM,
            value_dim: VALUE_DIM,
            leaves_merges: true,
            takes_prompts: true,
            boxes: Some([
                [Keys::<DIM>::PIECE_SLABS, BLOCK_KEYS],
                [VALUE_SLABS, PIECE_KEYS],
            ]),
            stages: Keys::<DIM>::STAGES / Keys::<DIM>::PIECES,
            threads: THREADS,
            registers: registers(THREADS, 1),
            shared_bytes: Keys::<DIM>::AT.end,
            ctas_per_sm: 1,
            ..KernelInfo::new(name, Family::DecodeWgmma, Arch::Sm90a, Op::Decode)
        }
    }
}
#[cfg(not(target_arch = "nvptx64"))]
pub use rows::ROWS;

/// Elements of values and outputs.
pub(super) const VALUE_DIM: u32 = 512;
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

/// Pieces of a block of values, by keys: each is one step of P·V, with all columns.
pub(super) const VALUE_PIECES: u32 = 4;
/// Keys per piece of values.
pub(super) const PIECE_KEYS: u32 = BLOCK_KEYS / VALUE_PIECES;
/// Slabs of 64 columns of a value.
pub(super) const VALUE_SLABS: u32 = VALUE_DIM / 64;
/// Bytes of a piece of values.
pub(super) const VALUE_BYTES: u32 = PIECE_KEYS * VALUE_DIM * 2;

/// Bytes of a slab of queries, 64 columns.
pub(super) const SLAB_BYTES: u32 = TILE_ROWS * 128;

/// What depends on the elements of queries and keys.
pub(super) struct Keys<const DIM: u32>;

impl<const DIM: u32> Keys<DIM> {
    /// Slabs of 64 columns of a key, and of the queries.
    pub const SLABS: u32 = DIM / 64;
    /// Slabs of the queries, the last ones, that the softmax warpgroup holds in registers. The others are in shared memory.
    pub const HELD_SLABS: u32 = if Self::SLABS < 3 { Self::SLABS } else { 3 };
    /// Pieces of a block of keys, by columns: each holds some columns of all keys.
    pub const PIECES: u32 = if Self::SLABS < 4 { 1 } else { 4 };
    /// Slabs per piece of keys.
    pub const PIECE_SLABS: u32 = Self::SLABS / Self::PIECES;
    /// Bytes of a piece of keys.
    pub const PIECE_BYTES: u32 = BLOCK_KEYS * Self::PIECE_SLABS * 128;
    /// Stages of keys, one piece each.
    pub const STAGES: u32 = if Self::PIECES == 1 { 4 } else { 6 };
    /// Stages of values, one piece each. A piece of values is in use for less time: one step reads it. Small keys leave room for
    /// two blocks.
    pub const VALUE_STAGES: u32 = if Self::PIECES == 1 { 8 } else { 4 };
    /// Offsets in shared memory.
    pub const AT: Offsets = {
        assert!(DIM.is_multiple_of(64) && Self::SLABS == Self::PIECES * Self::PIECE_SLABS);
        let keys = (Self::SLABS - Self::HELD_SLABS) * SLAB_BYTES;
        let values = keys + Self::STAGES * Self::PIECE_BYTES;
        let weights = values + Self::VALUE_STAGES * VALUE_BYTES;
        let rows = weights + WEIGHTS * WEIGHTS_BYTES;
        let factors = rows + 2 * TILE_ROWS * 16;
        let inverses = factors + WEIGHTS * TILE_ROWS * 4;
        let grew = inverses + 2 * TILE_ROWS * 4;
        let units = grew + WEIGHTS * 4 * 4;
        let barriers = units + 2 * crate::sm90::unit::UNIT_BYTES;
        Offsets {
            keys,
            values,
            weights,
            rows,
            factors,
            inverses,
            grew,
            units,
            barriers,
            end: barriers + (BARRIERS + 2 * (Self::STAGES + Self::VALUE_STAGES)) * 8,
        }
    };
}

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
