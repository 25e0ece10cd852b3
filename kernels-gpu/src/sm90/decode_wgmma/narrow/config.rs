//! The table of these kernels, and the shared memory, threads and registers of each row.

/// The kernels, one per row and 16-bit float type: `decode_<rows>x<keys>_d<head
/// dimension>_<element>[_e4m3]_co_resident[_stages<n>][_tok]`. `tok`: each token has scales of its own.
///
/// A block is 16 KB of keys or of values. Three stages have 96 KB in flight; two have 64 KB, and fit next to a prefill
/// that takes more shared memory. Results are bit-identical.
macro_rules! table {
    ($as:ident $then:ident) => {
        $crate::each_half! { $as $then {
            // Rows × keys, head dimension, flags, stages of keys and of values.
            8 x  64, 128, [co_resident],          3;
            8 x  64, 128, [co_resident, stages2], 2;
           16 x  64, 128, [co_resident],          2;
            8 x 128,  64, [co_resident],          3;
            8 x 128, 128, [e4m3, co_resident],      2;
            8 x 128, 128, [e4m3, co_resident, tok], 2;
        }}
    };
}
#[cfg(target_arch = "nvptx64")]
pub(super) use table;

/// The [`Shape`] of a row of the table.
macro_rules! shape {
    ($rows:literal $keys:literal $dim:literal [$($flag:ident)*] $stages:literal) => {
        $crate::sm90::decode_wgmma::narrow::config::Shape::new(
            $rows,
            $keys,
            $dim,
            $stages,
            if $crate::has(&[$(stringify!($flag)),*], "e4m3") { 1 } else { 2 },
            $crate::has(&[$(stringify!($flag)),*], "tok"),
        )
    };
}
#[cfg(target_arch = "nvptx64")]
pub(super) use shape;

#[cfg(not(target_arch = "nvptx64"))]
mod rows {
    use super::{REGISTERS, Shape, shared_bytes};
    use crate::{
        has,
        registry::{Arch, Element, Family, KernelInfo, Loads, Op},
    };

    macro_rules! rows {
        ($half:ident $element:literal { $(
            $rows:literal x $keys:literal, $dim:literal, [$($flag:ident),*], $stages:literal;
        )* }) => {
            &[$(KernelInfo {
                element: Element::$half,
                cache: match has(&[$(stringify!($flag)),*], "e4m3") {
                    true => Some(Element::E4m3),
                    false => None,
                },
                by_token: has(&[$(stringify!($flag)),*], "tok"),
                ..row(
                    concat!("decode_", $rows, "x", $keys, "_d", $dim, "_", $element $(, "_", stringify!($flag))*),
                    shape!($rows $keys $dim [$($flag)*] $stages),
                )
            }),*]
        };
    }

    /// See the macro `table`.
    pub const ROWS: &[&[KernelInfo]] = table!(list rows);

    const fn row(name: &'static str, shape: Shape) -> KernelInfo {
        KernelInfo {
            loads: Loads::PagesOrRows,
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

/// The compile-time configuration of one kernel.
#[cfg(target_arch = "nvptx64")]
pub(super) trait Config {
    /// Type of the elements.
    type Half: crate::common::half::Half;
    /// Type of the operands: 8-bit keys and values are multiplied in f16.
    type Product: crate::common::half::Half;
    /// Sizes.
    const SHAPE: Shape;
}

/// The type of the operands, by the queries' type and the bytes of an element of keys.
#[cfg(target_arch = "nvptx64")]
pub(super) trait Operand {
    /// The type.
    type Product: crate::common::half::Half;
}

#[cfg(target_arch = "nvptx64")]
impl<T: crate::common::half::Half> Operand for [T; 2] {
    type Product = T;
}

#[cfg(target_arch = "nvptx64")]
impl<T: crate::common::half::Half> Operand for [T; 1] {
    type Product = crate::common::half::F16;
}

/// Sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Rows of a tile.
    pub rows: u32,
    /// Keys in a block.
    pub keys: u32,
    /// Head dimension of queries, keys and values.
    pub head_dim: u32,
    /// Stages of keys, one block each.
    pub stages: u32,
    /// Stages of values, one block each. Values are in use longer than keys: until P·V is done.
    pub value_stages: u32,
    /// Bytes of an element of keys and values.
    pub bytes: u32,
    /// Whether each token has scales of its own.
    pub by_token: bool,
}

impl Shape {
    pub(super) const fn new(
        rows: u32,
        keys: u32,
        head_dim: u32,
        stages: u32,
        bytes: u32,
        by_token: bool,
    ) -> Self {
        assert!(
            (rows == 8 || rows == 16) && keys.is_multiple_of(64) && head_dim.is_multiple_of(64),
            "an accumulator is 64 keys or elements by 8 or 16 rows"
        );
        assert!(
            bytes == 2 || head_dim == 128 && rows == 8,
            "a lane reads 32 elements of an 8-bit key, and converts a part of one of 8 rows"
        );
        Self {
            rows,
            keys,
            head_dim,
            stages,
            value_stages: stages,
            bytes,
            by_token,
        }
    }

    /// Threads of a CTA: a consumer and a producer warpgroup.
    #[must_use]
    pub const fn threads(&self) -> u32 {
        2 * 128
    }

    /// Bytes of a key, or of its value.
    pub(super) const fn row_bytes(&self) -> u32 {
        self.head_dim * self.bytes
    }

    /// Whether keys and values have 8 bits, and scales.
    pub(super) const fn scaled(&self) -> bool {
        self.bytes == 1
    }

    pub(super) const fn block_bytes(&self) -> u32 {
        self.keys * self.row_bytes()
    }

    /// Bytes of a slab of queries, 64 columns.
    pub(super) const fn slab_bytes(&self) -> u32 {
        self.rows * 128
    }

    pub(super) const fn query_bytes(&self) -> u32 {
        self.head_dim / 64 * self.slab_bytes()
    }

    /// Order in shared memory: queries of two units, key stages, value stages, rows of the units, units, barriers.
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

    /// The other barriers, then full and free of each stage.
    pub(super) const fn barriers(&self) -> u32 {
        BARRIERS + 2 * (self.stages + self.value_stages + self.scale_stages())
    }

    /// Whether the output state takes the place of the weights, 8 rows at a time: otherwise 16 rows would leave no room for a
    /// prefill.
    pub(super) const fn state_over_weights(&self) -> bool {
        self.rows > 8
    }

    /// Bytes of the weights of two blocks.
    pub(super) const fn weights_bytes(&self) -> u32 {
        2 * self.rows * self.keys * 2
    }

    /// Bytes of the weights and of the output state.
    pub(super) const fn weights_and_state_bytes(&self) -> u32 {
        let state = 8 * state_pitch(self) * 4;
        if !self.state_over_weights() {
            self.weights_bytes() + state
        } else if state > self.weights_bytes() {
            state
        } else {
            self.weights_bytes()
        }
    }

    /// Stages of the scales of a block's keys and values.
    pub(super) const fn scale_stages(&self) -> u32 {
        if self.by_token { SCALE_STAGES } else { 0 }
    }

    /// Bytes of such a stage.
    pub(super) const fn scale_bytes(&self) -> u32 {
        self.keys * 8
    }

    /// Dynamic shared memory.
    #[must_use]
    pub const fn shared_bytes(&self) -> u32 {
        self.barriers_offset() + 8 * self.barriers()
    }
}

/// Bytes of a unit in shared memory: three vectors of four words.
pub(super) const UNIT_BYTES: u32 = 48;

/// Stages of scales of tokens: as many as blocks of which keys or values are under way or in use.
pub(super) const SCALE_STAGES: u32 = 3;

/// Barriers beside those of the stages.
pub(super) const BARRIERS: u32 = 10;

/// Registers of a thread: at launch, then of producers and of consumers.
pub const REGISTERS: [u32; 3] = [64, 48, 80];
/// The same with 8-bit keys, whose fragments are in registers.
#[cfg(target_arch = "nvptx64")]
pub const REGISTERS_8: [u32; 3] = [64, 32, 96];

/// Bytes of the weights of two blocks, the output state of 8 rows, numbers that the warps exchange, the factors of two
/// units' rows, and scales of tokens.
const fn extra_bytes(shape: &Shape) -> u32 {
    let scales = if shape.scaled() { 2 * 2 * 4 } else { 0 };
    let of_tokens = shape.scale_stages() * shape.scale_bytes();
    of_tokens + shape.weights_and_state_bytes() + shape.rows * (9 * 4 + scales)
}

/// f32 numbers between rows of the output state; the padding spreads a fragment's columns over the banks.
pub(super) const fn state_pitch(shape: &Shape) -> u32 {
    shape.head_dim + 4
}

/// Dynamic shared memory.
#[must_use]
pub const fn shared_bytes(shape: &Shape) -> u32 {
    shape.shared_bytes().next_multiple_of(16) + extra_bytes(shape)
}
