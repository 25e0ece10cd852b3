//! The table of prefill kernels, and the shared memory, threads and registers of each row.

/// The kernels, one per row and 16-bit float type:
/// `prefill_<rows>x<keys>_d<head dimension>_<element>[_<flag>…]`.
///
/// - A tile of 192 rows reads a third fewer bytes of keys and values per row, and has three warpgroups to hide the
///   exponentials.
/// - `cap` kernels have a soft cap and the same tiles as those without. Kernels of user-defined variants are built from
///   these rows.
/// - `co_resident` leaves room on an SM for a CTA of [decodes](super::super::decode_wgmma::narrow). With head dimension
///   128, two stages of queries take more than half of an SM's shared memory. One stage takes less than half: this
///   prefill is slower, and the decodes beside it are faster.
/// - `extras` supports masks of the last keys and sinks of several tokens; without a soft cap it also applies rotary
///   embeddings to queries. It is a separate kernel because the mask code in the main loop costs 1.2 % on average at
///   head dimension 128. Like `co_resident` it supports scales of 8-bit keys. Without masks its results are
///   bit-identical.
/// - Sinks that all tokens share are added by all kernels but those with `co_resident` alone. They are in the epilogue,
///   behind a branch, and cost the main loop nothing.
/// - From head dimension 192 on, two stages of queries would take more than half of the shared memory.
/// - Head dimensions that are no multiple of 64 are stored as whole slabs of 64 columns; no product reads the surplus
///   columns. Other dimensions, and these with a soft cap, are padded and run by the kernels of the next larger one.
#[doc(hidden)]
#[macro_export]
macro_rules! prefill_table {
    ($as:ident $then:ident $($arguments:tt)?) => {
        $crate::each_half! { $as $then $($arguments)? {
            // Rows × keys, head dimension of queries and keys / of values, flags, stages of [queries, keys, values].
            128 x 128, 128 / 128, [],            [2, 2, 3];
            128 x 128, 128 / 128, [cap],         [2, 2, 3];
            192 x  80, 128 / 128, [cap],         [2, 3, 3];
            192 x  80, 128 / 128, [],            [2, 3, 3];
            128 x  80, 128 / 128, [co_resident], [2, 2, 2];
            128 x  64, 128 / 128, [co_resident], [1, 2, 2];
            128 x 112,  64 /  64, [co_resident], [2, 3, 3];
            128 x 128,  64 /  64, [],            [2, 3, 3];
            128 x 128,  64 /  64, [cap],         [2, 3, 3];
            192 x 112,  64 /  64, [cap],         [2, 3, 3];
            192 x 112,  64 /  64, [],            [2, 3, 3];
            128 x 128, 192 / 128, [],            [1, 2, 2];
            128 x  80, 256 / 256, [],            [1, 2, 2];
            128 x  80, 256 / 256, [cap],         [1, 2, 2];
            128 x 128, 128 / 128, [extras],      [2, 2, 3];
            128 x 128, 128 / 128, [cap, extras], [2, 2, 3];
            192 x  80, 128 / 128, [cap, extras], [2, 3, 3];
            192 x  80, 128 / 128, [extras],      [2, 3, 3];
            128 x 128,  64 /  64, [extras],      [2, 3, 3];
            128 x 128,  64 /  64, [cap, extras], [2, 3, 3];
            192 x 112,  64 /  64, [cap, extras], [2, 3, 3];
            192 x 112,  64 /  64, [extras],      [2, 3, 3];
            128 x 128, 192 / 128, [extras],      [1, 2, 2];
            128 x  80, 256 / 256, [extras],      [1, 2, 2];
            128 x  80, 256 / 256, [cap, extras], [1, 2, 2];
            128 x 128,  80 /  80, [],            [2, 2, 3];
            192 x  96,  80 /  80, [],            [2, 2, 3];
            128 x 128,  96 /  96, [],            [2, 2, 3];
            192 x  96,  96 /  96, [],            [2, 2, 3];
            128 x 128, 112 / 112, [],            [2, 2, 3];
            192 x  80, 112 / 112, [],            [2, 3, 3];
            128 x 128,  80 /  80, [extras],      [2, 2, 3];
            192 x  96,  80 /  80, [extras],      [2, 2, 3];
            128 x 128,  96 /  96, [extras],      [2, 2, 3];
            192 x  96,  96 /  96, [extras],      [2, 2, 3];
            128 x 128, 112 / 112, [extras],      [2, 2, 3];
            192 x  80, 112 / 112, [extras],      [2, 3, 3];
            128 x  80, 128 / 128, [co_resident, extras], [2, 2, 2];
            128 x 112,  64 /  64, [co_resident, extras], [2, 3, 3];
        }}
    };
}
#[cfg(target_arch = "nvptx64")]
use super::super::mma::Slabs;

/// The [`Shape`] of a row of the table.
#[cfg(any(not(target_arch = "nvptx64"), feature = "prefill"))]
macro_rules! shape {
    ($rows:literal $keys:literal $dim:literal $value_dim:literal [$($flag:ident)*] $stages:expr) => {
        $crate::sm90::prefill::config::Shape::new(
            $rows,
            $keys,
            [$dim, $value_dim],
            $stages,
            $crate::has(&[$(stringify!($flag)),*], "co_resident"),
        )
    };
}
#[cfg(all(target_arch = "nvptx64", feature = "prefill"))]
pub(super) use shape;

#[cfg(not(target_arch = "nvptx64"))]
mod rows {
    use super::Shape;
    use crate::{
        has,
        registry::{Arch, Element, Family, KernelInfo, Loads, Op},
    };

    macro_rules! rows {
        ($half:ident $element:literal { $(
            $rows:literal x $keys:literal, $dim:literal / $value_dim:literal, [$($flag:ident),*], $stages:expr;
        )* }) => {
            &[$(KernelInfo {
                element: Element::$half,
                cap: has(&[$(stringify!($flag)),*], "cap"),
                extras: has(&[$(stringify!($flag)),*], "extras"),
                sinks: has(&[$(stringify!($flag)),*], "extras")
                    || shape!($rows $keys $dim $value_dim [$($flag)*] $stages).adds_sinks(),
                stands_in: has(&[$(stringify!($flag)),*], "extras"),
                ..row(
                    concat!("prefill_", $rows, "x", $keys, "_d", $dim, "_", $element $(, "_", stringify!($flag))*),
                    shape!($rows $keys $dim $value_dim [$($flag)*] $stages),
                )
            }),*]
        };
    }

    /// See the macro `prefill_table`.
    pub const ROWS: &[&[KernelInfo]] = crate::prefill_table!(list rows);

    const fn row(name: &'static str, shape: Shape) -> KernelInfo {
        KernelInfo {
            loads: Loads::PagesOrRows,
            rows: shape.rows(),
            keys: shape.keys,
            head_dim: shape.head_dim,
            value_dim: shape.value_dim,
            co_resident: shape.co_resident,
            query_stages: shape.query_stages,
            stages: shape.stages,
            threads: shape.threads(),
            registers: shape.registers()[0],
            shared_bytes: shape.shared_bytes(),
            ctas_per_sm: 1,
            ..KernelInfo::new(name, Family::Prefill, Arch::Sm90a, Op::Prefill)
        }
    }
}
#[cfg(not(target_arch = "nvptx64"))]
pub use rows::ROWS;

/// The compile-time configuration of one kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Consumer warpgroups, 64 rows each.
    pub consumers: u32,
    /// Keys in a block.
    pub keys: u32,
    /// Head dimension of queries and keys.
    pub head_dim: u32,
    /// Head dimension of values and outputs.
    pub value_dim: u32,
    /// Stages of queries, one tile each. With two, the next tile's queries are loaded during the current tile. With
    /// one, each warpgroup's half is reloaded as soon as that warpgroup's last Q·Kᵀ is done, independently of the
    /// other.
    pub query_stages: u32,
    /// Stages of keys, one block each, or half a block with 8-bit products.
    pub stages: u32,
    /// Stages of values, likewise. A block of values is in use longer than one of keys: until its P·V is done.
    pub value_stages: u32,
    /// Leaves room on the SM for a CTA of another kernel.
    pub co_resident: bool,
    /// Bytes per element of keys and values in shared memory: 2, or 1 for [8-bit products](super::f8).
    /// Queries are always loaded with 2.
    pub bytes: u32,
}

impl Shape {
    /// `dims` are those of queries and keys, and of values; `stages` those of queries, keys and values.
    #[must_use]
    pub const fn new(
        rows: u32,
        keys: u32,
        dims: [u32; 2],
        stages: [u32; 3],
        co_resident: bool,
    ) -> Self {
        Self::of_bytes(rows, keys, dims, stages, co_resident, 2)
    }

    /// As [`new`](Self::new), for 8-bit products.
    #[must_use]
    pub const fn of_8_bits(rows: u32, keys: u32, dim: u32, stages: [u32; 3]) -> Self {
        Self::of_bytes(rows, keys, [dim; 2], stages, false, 1)
    }

    const fn of_bytes(
        rows: u32,
        keys: u32,
        dims: [u32; 2],
        stages: [u32; 3],
        co_resident: bool,
        bytes: u32,
    ) -> Self {
        let shape = Self {
            consumers: rows / 64,
            keys,
            head_dim: dims[0],
            value_dim: dims[1],
            query_stages: stages[0],
            stages: stages[1],
            value_stages: stages[2],
            co_resident,
            bytes,
        };
        assert!(
            shape.shared_bytes() <= 227 * 1024,
            "more than a CTA can have"
        );
        assert!(dims[1] <= dims[0], "outputs take the place of queries");
        assert!(
            stages[0] == 2 || rows == 128 && bytes == 2,
            "two warpgroups have barriers for queries of their own"
        );
        assert!(
            !shape.is_cut() || bytes == 2 && stages[0] == 2 && dims[1] <= 128,
            "cut slabs have numbers of 16 bits, outputs go through shared memory, and all but 64 columns of one are \
             moved alike"
        );
        shape
    }

    /// Rows of a tile.
    #[must_use]
    pub const fn rows(&self) -> u32 {
        64 * self.consumers
    }

    /// Threads of a CTA: the consumers and the producer warpgroup.
    #[must_use]
    pub const fn threads(&self) -> u32 {
        128 * (self.consumers + 1)
    }

    /// Registers of a thread: at launch, then of the producer warpgroup and of the consumers. `setmaxnreg`
    /// redistributes the registers with which the CTA was launched.
    #[must_use]
    pub const fn registers(&self) -> [u32; 3] {
        match (self.consumers, self.co_resident) {
            (2, false) => [168, 40, 232],
            (2, true) => [128, 32, 176],
            (3, false) => [128, 32, 160],
            _ => panic!("two or three warpgroups compute"),
        }
    }

    /// Whether a thread's registers hold the weights of two blocks: then the softmax of a block overlaps with P·V of
    /// the previous one.
    #[must_use]
    pub const fn two_weights(&self) -> bool {
        self.consumers == 2 && self.value_dim <= 128
    }

    /// Bytes of a slab of queries, 64 columns.
    pub(super) const fn slab_bytes(&self) -> u32 {
        self.rows() * 128
    }

    pub(super) const fn query_bytes(&self) -> u32 {
        self.head_dim.div_ceil(64) * self.slab_bytes()
    }

    /// Head dimension of values, or of keys.
    const fn dim(&self, values: bool) -> u32 {
        if values {
            self.value_dim
        } else {
            self.head_dim
        }
    }

    /// Whether the last slab has fewer than 64 columns. No product reads its surplus columns: boxes
    /// fill them with zeros, copies by rows may leave them as they were.
    pub(super) const fn is_cut(&self) -> bool {
        !self.head_dim.is_multiple_of(64) || !self.value_dim.is_multiple_of(64)
    }

    /// Whether launches of this shape may convert 8-bit pages.
    #[cfg(target_arch = "nvptx64")]
    pub(super) const fn converts(&self) -> bool {
        self.head_dim == self.value_dim && !self.is_cut()
    }

    /// Whether kernels without `extras` add sinks, too: those of one token, in their epilogue. Beside decodes a CTA has
    /// fewer registers.
    pub(super) const fn adds_sinks(&self) -> bool {
        !self.co_resident
    }

    /// Whether `extras` kernels of this shape without a soft cap apply rotary embeddings to queries.
    #[cfg(target_arch = "nvptx64")]
    pub(super) const fn turns(&self) -> bool {
        self.converts() && self.head_dim <= 128 && !self.co_resident
    }

    /// Whether a bias that is linear in the distance is a product of its own, before those of queries and keys. With heads
    /// of 64 an operation for each key takes longer than this product, which is an eighth of the others.
    pub(super) const fn multiplies_bias(&self) -> bool {
        self.head_dim == 64 && !self.co_resident && self.bytes == 2
    }

    /// Bytes of the [other factor](super::shared::Shared::columns) of such a product. It reads 16 for each key and for 8 more, but
    /// compute-sanitizer takes it to read twice as many. All variants have the room, because a shape does not know its variant.
    pub(super) const fn column_bytes(&self) -> u32 {
        if self.multiplies_bias() {
            32 * self.keys
        } else {
            0
        }
    }

    /// Bytes of a row of values or keys in shared memory: whole slabs.
    pub(super) const fn row_bytes(&self, values: bool) -> u32 {
        if self.is_cut() {
            128 * self.dim(values).div_ceil(64)
        } else {
            self.bytes * self.dim(values)
        }
    }

    /// Bytes of a row of values or keys in the pool.
    #[cfg(target_arch = "nvptx64")]
    pub(super) const fn pool_bytes(&self, values: bool) -> u32 {
        self.bytes * self.dim(values)
    }

    /// The layout of values or keys in their stage. With a cut slab, a TMA box has the columns of one slab only.
    #[cfg(target_arch = "nvptx64")]
    pub(super) const fn slabs(&self, values: bool) -> Slabs {
        if self.is_cut() {
            Slabs::of_all_rows(self.keys)
        } else {
            Slabs::of_eight_rows(self.dim(values))
        }
    }

    /// Keys of a stage: a block, or half a block with 8-bit products.
    pub(super) const fn stage_keys(&self) -> u32 {
        self.keys * self.bytes / 2
    }

    pub(super) const fn key_bytes(&self) -> u32 {
        self.stage_keys() * self.row_bytes(false)
    }

    pub(super) const fn value_bytes(&self) -> u32 {
        self.stage_keys() * self.row_bytes(true)
    }

    /// Order in shared memory: query stages (which later hold the outputs), key stages, value stages, barriers, tiles, columns.
    pub(super) const fn keys_offset(&self) -> u32 {
        self.query_stages * self.query_bytes()
    }

    pub(super) const fn values_offset(&self) -> u32 {
        self.keys_offset() + self.stages * self.key_bytes()
    }

    pub(super) const fn barriers_offset(&self) -> u32 {
        self.values_offset() + self.value_stages * self.value_bytes()
    }

    pub(super) const fn tiles_offset(&self) -> u32 {
        self.barriers_offset() + BARRIER_BYTES
    }

    pub(super) const fn columns_offset(&self) -> u32 {
        self.tiles_offset() + 2 * TILE_BYTES
    }

    /// Dynamic shared memory.
    #[must_use]
    pub const fn shared_bytes(&self) -> u32 {
        self.columns_offset() + self.column_bytes()
    }
}

/// Bytes of a tile's description in shared memory: four vectors of four words.
pub(super) const TILE_BYTES: u32 = 64;

/// Bytes of the barriers.
pub(super) const BARRIER_BYTES: u32 = 256;
