//! What kernels there are: the table, and what a row of it takes of an SM.

/// The kernels, each of them for each 16-bit float:
/// `decode_<rows>x<keys>_d<head dimension>_<element>_co_resident[_stages<n>]`.
///
/// A block is 16 KB of keys or of values. Three stages are 96 KB under way. With two, 64 KB, there is room beside a
/// prefill that takes more of the memory. Results are the same bits.
macro_rules! table {
    ($as:ident $then:ident) => {
        $crate::each_half! { $as $then {
            // Rows × keys, head dimension, flags, stages of keys and of values.
            8 x  64, 128, [co_resident],          3;
            8 x  64, 128, [co_resident, stages2], 2;
            8 x 128,  64, [co_resident],          3;
        }}
    };
}
#[cfg(target_arch = "nvptx64")]
pub(super) use table;

#[cfg(not(target_arch = "nvptx64"))]
mod rows {
    use super::{REGISTERS, Shape, shared_bytes};
    use crate::registry::{Arch, Element, Family, KernelInfo, Loads, Op};

    macro_rules! rows {
        ($half:ident $element:literal { $(
            $rows:literal x $keys:literal, $dim:literal, [$($flag:ident),*], $stages:literal;
        )* }) => {
            &[$(KernelInfo {
                element: Element::$half,
                ..row(
                    concat!("decode_", $rows, "x", $keys, "_d", $dim, "_", $element $(, "_", stringify!($flag))*),
                    Shape::new($rows, $keys, $dim, $stages),
                )
            }),*]
        };
    }

    /// See the macro `table`.
    pub const ROWS: &[&[KernelInfo]] = table!(list rows);

    const fn row(name: &'static str, shape: Shape) -> KernelInfo {
        KernelInfo {
            loads: Loads::Pages,
            rows: shape.rows,
            keys: shape.keys,
            head_dim: shape.head_dim,
            value_dim: shape.head_dim,
            co_resident: true,
            leaves_merges: true,
            stages: shape.stages,
            threads: shape.threads(),
            registers: REGISTERS[0],
            shared_bytes: shared_bytes(&shape),
            ctas_per_sm: 1,
            ..KernelInfo::new(name, Family::DecodeWgmma, Arch::Sm90a, Op::Decode)
        }
    }
}
#[cfg(not(target_arch = "nvptx64"))]
pub use rows::ROWS;

/// What one kernel is compiled for.
#[cfg(target_arch = "nvptx64")]
pub(super) trait Config {
    /// Elements.
    type Half: crate::common::half::Half;
    /// Sizes.
    const SHAPE: Shape;
}

/// Sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Warpgroups that compute.
    pub consumers: u32,
    /// Rows of a tile.
    pub rows: u32,
    /// Keys in a block.
    pub keys: u32,
    /// Head dimension of queries, keys and values.
    pub head_dim: u32,
    /// Blocks of keys in shared memory.
    pub stages: u32,
    /// Blocks of values: they stay longer, until P·V is done.
    pub value_stages: u32,
}

impl Shape {
    pub(super) const fn new(rows: u32, keys: u32, head_dim: u32, stages: u32) -> Self {
        assert!(
            rows == 8 && keys.is_multiple_of(64) && head_dim.is_multiple_of(64),
            "an accumulator is 64 keys or elements by 8 rows"
        );
        Self {
            consumers: 1,
            rows,
            keys,
            head_dim,
            stages,
            value_stages: stages,
        }
    }

    /// Threads of a CTA: the consumers and the producer warpgroup.
    #[must_use]
    pub const fn threads(&self) -> u32 {
        128 * (self.consumers + 1)
    }

    pub(super) const fn block_bytes(&self) -> u32 {
        self.keys * self.head_dim * 2
    }

    /// Bytes of 64 columns of the queries.
    pub(super) const fn slab_bytes(&self) -> u32 {
        self.rows * 128
    }

    pub(super) const fn query_bytes(&self) -> u32 {
        self.head_dim / 64 * self.slab_bytes()
    }

    /// Two units' queries, the stages, the units' rows, what is known of them, barriers.
    pub(super) const fn keys_offset(&self) -> u32 {
        2 * self.query_bytes()
    }

    pub(super) const fn values_offset(&self) -> u32 {
        self.keys_offset() + self.stages * self.block_bytes()
    }

    pub(super) const fn rows_offset(&self) -> u32 {
        self.values_offset() + self.value_stages * self.block_bytes()
    }

    pub(super) const fn units_offset(&self) -> u32 {
        self.rows_offset() + 2 * self.rows * 16
    }

    pub(super) const fn barriers_offset(&self) -> u32 {
        self.units_offset() + 2 * UNIT_BYTES
    }

    /// Full and free of each stage behind the others.
    pub(super) const fn barriers(&self) -> u32 {
        BARRIERS + 2 * (self.stages + self.value_stages)
    }

    /// Dynamic shared memory.
    #[must_use]
    pub const fn shared_bytes(&self) -> u32 {
        self.barriers_offset() + 8 * self.barriers()
    }
}

/// A unit in shared memory: three vectors of four words.
pub(super) const UNIT_BYTES: u32 = 48;

/// Barriers beside those of the stages.
pub(super) const BARRIERS: u32 = 10;

/// Registers of a thread: at launch, and then of the warps that load and of those that compute.
pub const REGISTERS: [u32; 3] = [64, 48, 80];

/// Weights of two blocks, the state of a unit, and what the warps exchange.
const fn extra_bytes(shape: &Shape) -> u32 {
    2 * shape.rows * shape.keys * 2 + shape.rows * (state_pitch(shape) * 4 + 9 * 4)
}

/// f32 of a row of a unit's state; the padding spreads the columns of a fragment over banks.
pub(super) const fn state_pitch(shape: &Shape) -> u32 {
    shape.head_dim + 4
}

/// Dynamic shared memory.
#[must_use]
pub const fn shared_bytes(shape: &Shape) -> u32 {
    shape.shared_bytes().next_multiple_of(16) + extra_bytes(shape)
}
