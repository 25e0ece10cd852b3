//! What kernels there are, and what one takes of an SM.

/// The kernels: for each 16-bit float `mla_<rows>x<keys>_<element>` and `mla_rows_…`, and for bf16 alone, which keys of
/// 656 bytes have a part in, `mla_656_…`. Blocks of 48 keys read the queries less often, for tokens of several tiles; those
/// of 32 are there sooner.
macro_rules! table {
    (bf16 $then:ident) => {
        $then! { Bf16 "bf16" {
            "656_" 64 x 32 in 3 Converted;
        }}
    };
    ($as:ident $then:ident) => {
        $crate::each_half! { $as $then {
            // What is in front of rows × keys in the name; stages; how keys are loaded.
            "" 64 x 32 in 4 Pages;
            "rows_" 64 x 32 in 4 Rows;
            "" 64 x 48 in 3 Pages;
            "rows_" 64 x 48 in 3 Rows;
        }}
    };
}
#[cfg(target_arch = "nvptx64")]
pub(super) use table;

#[cfg(not(target_arch = "nvptx64"))]
mod rows {
    use super::{HEAD_DIM, Keys, Offsets, TILE_ROWS, VALUE_DIM};
    use crate::registry::{Arch, Element, Family, KernelInfo, Loads, Op, registers};

    macro_rules! rows {
        ($half:ident $element:literal {
            $($kind:literal $rows:literal x $keys:literal in $stages:literal $loads:ident;)*
        }) => {
            &[$(KernelInfo {
                element: Element::$half,
                keys: $keys,
                stages: $stages,
                shared_bytes: Offsets::new($keys, $stages, Keys::$loads.are_converted()).end,
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
            head_dim: HEAD_DIM,
            value_dim: VALUE_DIM,
            latent: true,
            leaves_merges: true,
            takes_prompts: true,
            threads: keys.threads(),
            registers: registers(keys.threads(), 1),
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

impl Keys {
    pub const fn are_converted(self) -> bool {
        matches!(self, Self::Converted)
    }

    /// Threads of a CTA: producers, a warpgroup or, where keys are converted, two; and consumers.
    pub const fn threads(self) -> u32 {
        CONSUMERS + if self.are_converted() { 256 } else { 128 }
    }

    /// Warps that bring keys.
    #[cfg(target_arch = "nvptx64")]
    pub const fn loaders(self) -> u32 {
        match self {
            Self::Pages => 2,
            Self::Rows => 3,
            Self::Converted => 1,
        }
    }

    /// Registers of a producer thread and of a consumer thread.
    #[cfg(target_arch = "nvptx64")]
    pub const fn registers(self) -> [u32; 2] {
        [40, if self.are_converted() { 216 } else { 232 }]
    }
}

/// Bytes of a key that carries its scales: numbers of 8 bits, scales, elements of 16.
pub(super) const ROW_BYTES: u32 = 656;
/// Where the scales and the elements of 16 bits begin.
#[cfg(target_arch = "nvptx64")]
pub(super) const ROW_SCALES: u32 = VALUE_DIM;
#[cfg(target_arch = "nvptx64")]
pub(super) const ROW_ROPE: u32 = ROW_SCALES + VALUE_DIM / 128 * 4;
/// Keys of which a warp converts a half together.
pub(super) const GROUP: u32 = 8;
/// Warps that convert, half of them left halves and half of them right ones.
#[cfg(target_arch = "nvptx64")]
pub(super) const CONVERTERS: u32 = 6;
/// Places for rows, and the keys of one.
pub(super) const RAW_SLOTS: u32 = 4;
pub(super) const RAW_KEYS: u32 = 16;
/// Barriers at which warps wait for those rows, two for each place in turn. Copies arrive in any order: a warp may wait for
/// the second rows of a place while the first are under way, and one barrier would let it pass, for it tells phases by their
/// parity alone. Two are enough: the warp's own rows before were asked for, so those that are two before in the place have
/// been converted.
pub(super) const RAW_BARRIERS: u32 = 2 * RAW_SLOTS;
/// Threads that compute.
pub(super) const CONSUMERS: u32 = 256;

/// Slabs of 64 columns in the halves of a block: of its values, and behind the right one what only keys have.
pub(super) const SLABS: [u32; 2] = [VALUE_DIM / 128, (HEAD_DIM - VALUE_DIM / 2) / 64];
/// Bytes of 64 columns of the queries.
pub(super) const SLAB_BYTES: u32 = TILE_ROWS * 128;
/// Slabs of the queries. Consumers have the last ones in registers: blocks of 48 keys leave no room for them in shared
/// memory.
pub(super) const QUERY_SLABS: u32 = HEAD_DIM / 64;
pub(super) const HELD_SLABS: u32 = 2;

/// Those of them in shared memory.
pub(super) const fn query_slabs(keys: u32) -> u32 {
    if keys > 32 {
        QUERY_SLABS - HELD_SLABS
    } else {
        QUERY_SLABS
    }
}

/// The first mbarrier of a stage.
pub(super) const STAGE_BARRIERS: u32 = 9;

/// Bytes of a half of a block.
pub(super) const fn half_bytes(keys: u32, half: u32) -> u32 {
    keys * SLABS[half as usize] * 128
}

/// Where what stands behind the queries begins, by the keys of a block, the blocks in shared memory, and whether keys are
/// converted.
#[cfg_attr(
    not(target_arch = "nvptx64"),
    expect(dead_code, reason = "the host wants the end")
)]
pub(super) struct Offsets {
    pub keys: u32,
    /// Rows as the pool has them, where they are converted.
    pub raw: u32,
    pub rows: u32,
    pub references: u32,
    pub factors: u32,
    pub totals: u32,
    pub grew: u32,
    pub units: u32,
    /// The keys of each group of a block that are there, a word each, where keys are converted; and those of each group
    /// of rows.
    pub there: u32,
    pub raw_there: u32,
    pub barriers: u32,
    /// Dynamic shared memory.
    pub end: u32,
}

impl Offsets {
    pub const fn new(keys: u32, stages: u32, converted: bool) -> Self {
        let [raw_slots, raw_barriers, groups] = if converted {
            [RAW_SLOTS, RAW_BARRIERS, keys / GROUP]
        } else {
            [0; 3]
        };
        let blocks = query_slabs(keys) * SLAB_BYTES;
        let raw = blocks + stages * (half_bytes(keys, 0) + half_bytes(keys, 1));
        let rows = raw + raw_slots * RAW_KEYS * ROW_BYTES;
        let references = rows + 2 * TILE_ROWS * 16;
        let factors = references + 2 * TILE_ROWS * 4;
        let totals = factors + 2 * TILE_ROWS * 4;
        let grew = totals + 4 * TILE_ROWS * 4;
        let units = grew + 8 * 4;
        let there = units + 2 * crate::sm90::unit::UNIT_BYTES;
        let raw_there = there + stages * groups * 4;
        let barriers = raw_there + raw_slots * 4;
        Self {
            keys: blocks,
            raw,
            rows,
            references,
            factors,
            totals,
            grew,
            units,
            there,
            raw_there,
            barriers,
            end: barriers + (STAGE_BARRIERS + 4 * stages + raw_slots + raw_barriers) * 8,
        }
    }
}
