//! The table of MLA kernels, and the shared memory, threads and registers of each.

/// The kernels: for each 16-bit float type `mla_<rows>x<keys>_<element>`, `mla_rows_…`, and both with
/// `pieces_`. Blocks of 48 keys read the
/// queries less often and serve tokens of several tiles; blocks of 32 have the lower latency.
macro_rules! table {
    ($as:ident $then:ident) => {
        $crate::each_half! { $as $then {
            // Prefix in the name, rows × keys, stages, how keys are loaded, whether units may be pieces of the same rows.
            "" 64 x 32 in 4 Pages;
            "rows_" 64 x 32 in 4 Rows;
            "" 64 x 48 in 3 Pages;
            "rows_" 64 x 48 in 3 Rows;
            "pieces_" 64 x 32 in 4 Pages pieces;
            "rows_pieces_" 64 x 32 in 4 Rows pieces;
            "pieces_" 64 x 48 in 3 Pages pieces;
            "rows_pieces_" 64 x 48 in 3 Rows pieces;
        }}
    };
}
#[cfg(target_arch = "nvptx64")]
pub(super) use table;

#[cfg(not(target_arch = "nvptx64"))]
mod rows {
    use super::{HEAD_DIM, Offsets, THREADS, VALUE_DIM};
    use crate::{
        registry::{Arch, Family, KernelInfo, Op, registers},
        sm90::mla::keys_16::rows,
    };

    /// See the macro `table`.
    pub const ROWS: &[&[KernelInfo]] = table!(list rows);

    const fn own_row(name: &'static str, [_, keys, stages]: [u32; 3]) -> KernelInfo {
        KernelInfo {
            shared_bytes: Offsets::new(keys, stages).end,
            ..row(name, THREADS)
        }
    }

    /// The fields that all kernels of the family share.
    pub(in crate::sm90::mla) const fn row(name: &'static str, threads: u32) -> KernelInfo {
        KernelInfo {
            head_dim: HEAD_DIM,
            value_dim: VALUE_DIM,
            latent: true,
            leaves_merges: true,
            takes_prompts: true,
            threads,
            registers: registers(threads, 1),
            ctas_per_sm: 1,
            ..KernelInfo::new(name, Family::Mla, Arch::Sm90a, Op::Decode)
        }
    }
}
#[cfg(not(target_arch = "nvptx64"))]
pub use rows::ROWS;
#[cfg(not(target_arch = "nvptx64"))]
pub(super) use rows::row;

/// Elements of a query and of a key.
pub(super) const HEAD_DIM: u32 = 576;
/// Elements of a value, the first of its key's, and of an output.
pub(super) const VALUE_DIM: u32 = 512;
/// Rows of a tile.
pub(super) const TILE_ROWS: u32 = 64;

/// Threads of the producer warpgroup of all MLA kernels.
pub(super) const FEEDERS: u32 = 128;
/// Threads of a CTA.
pub(super) const THREADS: u32 = FEEDERS + CONSUMERS;
/// Registers of a producer thread and of a consumer thread.
#[cfg(target_arch = "nvptx64")]
pub(super) const REGISTERS: [u32; 2] = [40, 232];

/// Consumer threads.
pub(super) const CONSUMERS: u32 = 256;

/// Slabs of 64 columns in the left and right half of a block: 4 of values each, and in the right half a fifth that only
/// the keys have.
pub(super) const SLABS: [u32; 2] = [VALUE_DIM / 128, (HEAD_DIM - VALUE_DIM / 2) / 64];
/// Bytes of a slab of queries, 64 columns.
pub(super) const SLAB_BYTES: u32 = TILE_ROWS * 128;
/// Slabs of the queries. Consumers hold the last ones in registers; with blocks of 48 keys these are in registers only,
/// as shared memory has no room for them.
pub(super) const QUERY_SLABS: u32 = HEAD_DIM / 64;
pub(super) const HELD_SLABS: u32 = 2;

/// Slabs of the queries in shared memory.
pub(super) const fn query_slabs(keys: u32) -> u32 {
    if keys > 32 {
        QUERY_SLABS - HELD_SLABS
    } else {
        QUERY_SLABS
    }
}

/// Blocks under way at most, by their keys: two of 32 keys (74 KB) or one of 48 (55 KB).
#[cfg(target_arch = "nvptx64")]
pub(super) const fn under_way(keys: u32) -> u32 {
    64 / keys
}

/// The first mbarrier of a stage.
pub(super) const STAGE_BARRIERS: u32 = 9;

/// Offsets in shared memory of what all MLA kernels have: the ring of two units, and the barriers.
#[cfg_attr(
    not(target_arch = "nvptx64"),
    expect(dead_code, reason = "the host wants the end")
)]
#[derive(Clone, Copy)]
pub(super) struct Ring {
    /// The two [`Unit`](crate::sm90::unit::Unit)s.
    pub units: u32,
    /// The [`QueryRow`](crate::abi::QueryRow)s of each.
    pub rows: u32,
    /// mbarriers: first those of the ring, then those of the queries, then those of the stages.
    pub barriers: u32,
}

/// Bytes of half a block.
pub(super) const fn half_bytes(keys: u32, half: u32) -> u32 {
    keys * SLABS[half as usize] * 128
}

#[cfg(target_arch = "nvptx64")]
impl Ring {
    /// Address of a barrier; shared memory begins at `base`. Not a method of [`Units`](super::shared::Units): the
    /// compiler would then simplify it separately and add up addresses in another order.
    #[inline(always)]
    pub fn barrier(self, base: u32, index: u32) -> u32 {
        base + self.barriers + 8 * index
    }
}

/// Offsets in shared memory of everything behind the queries.
#[cfg_attr(
    not(target_arch = "nvptx64"),
    expect(dead_code, reason = "the host wants the end")
)]
pub(super) struct Offsets {
    pub keys: u32,
    pub references: u32,
    pub factors: u32,
    pub totals: u32,
    pub grew: u32,
    pub ring: Ring,
    /// Dynamic shared memory.
    pub end: u32,
}

impl Offsets {
    pub const fn new(keys: u32, stages: u32) -> Self {
        let blocks = query_slabs(keys) * SLAB_BYTES;
        let rows = blocks + stages * (half_bytes(keys, 0) + half_bytes(keys, 1));
        let references = rows + 2 * TILE_ROWS * 16;
        let factors = references + 2 * TILE_ROWS * 4;
        let totals = factors + 2 * TILE_ROWS * 4;
        let grew = totals + 4 * TILE_ROWS * 4;
        let units = grew + 8 * 4;
        let barriers = units + 2 * crate::sm90::unit::UNIT_BYTES;
        Self {
            keys: blocks,
            references,
            factors,
            totals,
            grew,
            ring: Ring {
                units,
                rows,
                barriers,
            },
            end: barriers + (STAGE_BARRIERS + 4 * stages) * 8,
        }
    }
}
