//! What kernels there are, and what one takes of an SM.

/// The kernels: for each 16-bit float `mla_<rows>x<keys>_<element>` and `mla_rows_…`, and for bf16 alone, which keys of
/// 656 bytes have a part in, `mla_656_…`.
macro_rules! table {
    (bf16 $then:ident) => {
        $then! { Bf16 "bf16" {
            "656_" 64 x 32 Converted;
        }}
    };
    ($as:ident $then:ident) => {
        $crate::each_half! { $as $then {
            // What is in front of rows × keys in the name; how keys are loaded.
            "" 64 x 32 Pages;
            "rows_" 64 x 32 Rows;
        }}
    };
}
#[cfg(target_arch = "nvptx64")]
pub(super) use table;

#[cfg(not(target_arch = "nvptx64"))]
mod rows {
    use super::{
        CONVERTED_STAGES, HEAD_DIM, KEYS, Keys, SHARED_BYTES, STAGES, THREADS, TILE_ROWS, VALUE_DIM,
    };
    use crate::registry::{Arch, Element, Family, KernelInfo, Loads, Op, registers};

    macro_rules! rows {
        ($half:ident $element:literal { $($kind:literal $rows:literal x $keys:literal $loads:ident;)* }) => {
            &[$(KernelInfo {
                element: Element::$half,
                ..row(concat!("mla_", $kind, $rows, "x", $keys, "_", $element), Keys::$loads)
            }),*]
        };
    }

    /// See the macro `table`.
    pub const ROWS: &[&[KernelInfo]] = &[HALVES[0], HALVES[1], table!(bf16 rows)];
    const HALVES: &[&[KernelInfo]] = table!(list rows);

    const fn row(name: &'static str, keys: Keys) -> KernelInfo {
        let converted = matches!(keys, Keys::Converted);
        KernelInfo {
            loads: match keys {
                Keys::Pages => Loads::Pages,
                Keys::Rows | Keys::Converted => Loads::Rows,
            },
            stands_in: matches!(keys, Keys::Rows),
            cache: if converted { Some(Element::E4m3) } else { None },
            rows: TILE_ROWS,
            keys: KEYS,
            head_dim: HEAD_DIM,
            value_dim: VALUE_DIM,
            latent: true,
            stages: if converted { CONVERTED_STAGES } else { STAGES },
            threads: THREADS,
            registers: registers(THREADS, 1),
            shared_bytes: SHARED_BYTES,
            ctas_per_sm: 1,
            ..KernelInfo::new(name, Family::Mla, Arch::Sm90a, Op::Decode)
        }
    }
}
#[cfg(not(target_arch = "nvptx64"))]
pub use rows::ROWS;

/// Elements of a query and of a key.
pub(super) const HEAD_DIM: u32 = 576;
/// Elements of a value, the first of its key's, and of an output.
pub(super) const VALUE_DIM: u32 = 512;
/// Rows of a tile.
pub(super) const TILE_ROWS: u32 = 64;
/// Keys of a block.
pub(super) const KEYS: u32 = 32;
/// Blocks of keys in shared memory: every other one is one consumer's.
pub(super) const STAGES: u32 = 4;
/// The same where keys are converted; in the place of the last block are rows as the pool has them.
pub(super) const CONVERTED_STAGES: u32 = 3;

/// How keys come.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Keys {
    /// By tensor maps.
    Pages,
    /// One by one, as they are multiplied.
    Rows,
    /// One by one in [656 bytes](ROW_BYTES), converted on the way.
    Converted,
}

/// Bytes of a key that carries its scales: numbers of 8 bits, scales, elements of 16.
pub(super) const ROW_BYTES: u32 = 656;
/// Where the scales and the elements of 16 bits begin.
#[cfg(target_arch = "nvptx64")]
pub(super) const ROW_SCALES: u32 = VALUE_DIM;
#[cfg(target_arch = "nvptx64")]
pub(super) const ROW_ROPE: u32 = ROW_SCALES + VALUE_DIM / 128 * 4;
/// Keys that a warp converts together.
pub(super) const GROUP: u32 = 8;
/// Warps that convert, and groups of rows that each has in shared memory.
pub(super) const CONVERTERS: u32 = 3;
pub(super) const RAW_SLOTS: u32 = 2;
/// Threads of a CTA: the warpgroup that feeds, and two that compute.
pub(super) const THREADS: u32 = 384;
/// Registers of a thread that feeds and of one that computes.
#[cfg(target_arch = "nvptx64")]
pub(super) const REGISTERS: [u32; 2] = [40, 232];

/// Slabs of 64 columns in the halves of a block: of its values, and behind the right one what only keys have.
pub(super) const SLABS: [u32; 2] = [VALUE_DIM / 128, (HEAD_DIM - VALUE_DIM / 2) / 64];
/// Bytes of 64 columns of the queries.
pub(super) const SLAB_BYTES: u32 = TILE_ROWS * 128;
const QUERY_BYTES: u32 = HEAD_DIM / 64 * SLAB_BYTES;
/// Bytes of the halves of a block.
pub(super) const HALF_BYTES: [u32; 2] = [KEYS * SLABS[0] * 128, KEYS * SLABS[1] * 128];
pub(super) const BLOCK_BYTES: u32 = HALF_BYTES[0] + HALF_BYTES[1];

/// A unit in shared memory: three vectors of four words.
pub(super) const UNIT_BYTES: u32 = 48;
/// Barriers of the hardware that count arrivals and bytes.
pub(super) const BARRIERS: u32 = 8 + 4 * STAGES + CONVERTERS * RAW_SLOTS;

/// Where what stands behind the queries begins.
pub(super) const KEYS_OFFSET: u32 = QUERY_BYTES;
pub(super) const ROWS_OFFSET: u32 = KEYS_OFFSET + STAGES * BLOCK_BYTES;
pub(super) const REFERENCES_OFFSET: u32 = ROWS_OFFSET + 2 * TILE_ROWS * 16;
pub(super) const FACTORS_OFFSET: u32 = REFERENCES_OFFSET + 2 * TILE_ROWS * 4;
pub(super) const TOTALS_OFFSET: u32 = FACTORS_OFFSET + 2 * TILE_ROWS * 4;
pub(super) const GREW_OFFSET: u32 = TOTALS_OFFSET + 4 * TILE_ROWS * 4;
pub(super) const UNITS_OFFSET: u32 = GREW_OFFSET + 8 * 4;
pub(super) const BARRIERS_OFFSET: u32 = UNITS_OFFSET + 2 * UNIT_BYTES;
/// The keys of each group of a block that are there, a word each.
pub(super) const THERE_OFFSET: u32 = (BARRIERS_OFFSET + BARRIERS * 8).next_multiple_of(16);
/// Rows as the pool has them.
#[cfg(target_arch = "nvptx64")]
pub(super) const RAW_OFFSET: u32 = KEYS_OFFSET + CONVERTED_STAGES * BLOCK_BYTES;
const _: () = assert!(CONVERTERS * RAW_SLOTS * GROUP * ROW_BYTES <= BLOCK_BYTES);
/// Dynamic shared memory.
pub(super) const SHARED_BYTES: u32 = THERE_OFFSET + CONVERTED_STAGES * (KEYS / GROUP) * 4;
