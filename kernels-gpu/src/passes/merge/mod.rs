//! `merge_states`: ⊕ over any number of partial states per output row.
//!
//! Memory-bound: per slot a thread reads 32 bytes of output and a log that its whole head shares, and
//! it computes about one exp2 and eight multiply-adds for them. So the layout decides. A thread owns a
//! *chunk* of 8 elements, two 16-byte loads per slot and one 16-byte store of a 16-bit output. Chunks are
//! counted through rows and heads without a gap: a warp covers 256 neighbouring elements, whether those
//! are two heads of one row or four rows of a single small head. Slots go by fours, all of whose loads are under
//! way before the first is looked at. The first ids are there before the kernel that writes the states has ended.
//!
//! There are three kernels that compute the same bits. Where much is to be merged, threads are what hides latency:
//! [`MANY`] and [`LONG`] have five blocks on an SM. Where it is little, and stands at the end of a step, waiting decides: a thread of
//! [`FEW`] has sixteen slots under way, and as many warps as the device has room for share the slots of a row.
//!
//! The order of ⊕ is that of the slots. Sixteen of them are a *section*: their states are merged one after the other, and
//! then those of the sections. So the result depends neither on timing nor on how many warps share a row.

/// Elements that a thread computes.
pub const CHUNK: usize = 8;

/// Threads of a block.
pub const THREADS: u32 = 256;

/// Slots that are merged together.
#[cfg(target_arch = "nvptx64")]
const GROUP: usize = 4;

/// The kernels, each of them for each element of outputs: `merge_<how many>_<element>`.
macro_rules! table {
    ($as:ident $then:ident) => {
        $crate::each_half! { $as $then {
            states: MANY;
            long: LONG;
            few: FEW;
        }}
    };
}

/// Also for outputs in single precision.
macro_rules! f32_table {
    ($then:ident) => {
        $then! { F32 "f32" {
            states: MANY;
            long: LONG;
            few: FEW;
        }}
    };
}

/// A kernel for so much: groups of slots that it loads together, and its blocks on an SM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Groups of four slots.
    pub groups: usize,
    /// Blocks that an SM holds.
    pub blocks: u32,
    /// Rows may have more than a section.
    pub long: bool,
}

/// Chunks of a block where there are few rows, a lane each; it has up to [`THREADS`] threads.
pub const FEW_CHUNKS: u32 = 32;

/// Slots that are merged before they meet the others of their row.
pub const SECTION: u32 = 16;

/// Dynamic shared memory of a thread.
pub const SHARED_BYTES: u32 = (CHUNK as u32 + 2) * 4;

/// For many rows, none of them of more than [`SECTION`] slots.
pub const MANY: Shape = Shape {
    groups: 1,
    blocks: 5,
    long: false,
};

/// For many rows.
pub const LONG: Shape = Shape { long: true, ..MANY };

/// For few rows, by blocks of [`FEW_CHUNKS`]: the SMs hold all of them, and none has more than its share to read.
pub const FEW: Shape = Shape {
    groups: 4,
    blocks: 1,
    long: true,
};

#[cfg(not(target_arch = "nvptx64"))]
mod rows {
    use super::{FEW, LONG, MANY, Shape, THREADS};
    use crate::registry::{Arch, Element, Family, KernelInfo, Op, registers};

    macro_rules! rows {
        ($output:ident $element:literal { $($what:ident: $shape:ident;)* }) => {
            &[$(KernelInfo {
                element: Element::$output,
                ..row(concat!("merge_", stringify!($what), "_", $element), $shape)
            }),*]
        };
    }

    /// See the macro `table`.
    pub const ROWS: &[&[KernelInfo]] = table!(list rows);
    /// See the macro `f32_table`.
    pub const F32_ROWS: &[KernelInfo] = f32_table!(rows);

    const fn row(name: &'static str, shape: Shape) -> KernelInfo {
        KernelInfo {
            threads: THREADS,
            registers: registers(THREADS, shape.blocks),
            ..KernelInfo::new(name, Family::Passes, Arch::Sm80, Op::Merge(shape))
        }
    }
}
#[cfg(not(target_arch = "nvptx64"))]
pub use rows::{F32_ROWS, ROWS};

#[cfg(target_arch = "nvptx64")]
mod kernels;
#[cfg(target_arch = "nvptx64")]
mod slots;
