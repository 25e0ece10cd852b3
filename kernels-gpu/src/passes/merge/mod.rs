//! `merge_states`: ⊕ over any number of partial states per output row.
//!
//! Memory-bound: per slot a thread reads 32 bytes of output and an LSE that its whole head shares, and computes about
//! one exp2 and eight multiply-adds. A thread owns a *chunk* of 8 elements: two 16-byte loads per slot, and one 16-byte
//! store of a 16-bit output. Chunks are numbered continuously over rows and heads, so a warp covers 256 neighbouring
//! elements, whether these are two heads of a row or four rows of a small head. Slots are loaded in groups of four,
//! with all loads in flight before the first result is used. The first slot ids are loaded before the kernel that
//! writes the states ends.
//!
//! Three kernels compute bit-identical results. For large merges, occupancy hides the latency: [`MANY`] and [`LONG`]
//! run five blocks per SM. Small merges, at the end of a step, are latency-bound: a thread of [`FEW`] has sixteen slots
//! in flight, and as many warps as fit on the device share the slots of a row.
//!
//! ⊕ is applied in the order of the slots. Sixteen slots are a *section*: the states of a section are merged in order,
//! and then the sections. So the result depends neither on timing nor on the number of warps per row.

/// Elements per thread.
pub const CHUNK: usize = 8;

/// Threads of a block.
pub const THREADS: u32 = 256;

/// Slots that are loaded and merged together.
#[cfg(target_arch = "nvptx64")]
const GROUP: usize = 4;

/// The kernels, one per row and type of outputs: `merge_<states|long|few>_<element>`.
macro_rules! table {
    ($as:ident $then:ident) => {
        $crate::each_half! { $as $then {
            states: MANY;
            long: LONG;
            few: FEW;
        }}
    };
}

/// The same for f32 outputs.
macro_rules! f32_table {
    ($then:ident) => {
        $then! { F32 "f32" {
            states: MANY;
            long: LONG;
            few: FEW;
        }}
    };
}

/// The compile-time configuration of a merge kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Groups of four slots that a thread loads together.
    pub groups: usize,
    /// Resident blocks per SM.
    pub blocks: u32,
    /// Rows may have more than one section.
    pub long: bool,
}

/// Chunks per block of [`FEW`], one per lane; the block has up to [`THREADS`] threads.
pub const FEW_CHUNKS: u32 = 32;

/// Slots of a section: they are merged with each other before the sections of a row are merged.
pub const SECTION: u32 = 16;

/// Dynamic shared memory per thread.
pub const SHARED_BYTES: u32 = (CHUNK as u32 + 2) * 4;

/// For many rows of at most [`SECTION`] slots.
pub const MANY: Shape = Shape {
    groups: 1,
    blocks: 5,
    long: false,
};

/// For many rows of any number of slots.
pub const LONG: Shape = Shape { long: true, ..MANY };

/// For few rows, in blocks of [`FEW_CHUNKS`] chunks: all blocks are resident, and the SMs share the reads evenly.
pub const FEW: Shape = Shape {
    groups: 4,
    blocks: 1,
    long: true,
};

#[cfg(not(target_arch = "nvptx64"))]
pub use rows::{F32_ROWS, ROWS};

#[cfg(target_arch = "nvptx64")]
pub use slots::{F32, Output};

#[cfg(target_arch = "nvptx64")]
mod kernels;
#[cfg(not(target_arch = "nvptx64"))]
mod rows;
#[cfg(target_arch = "nvptx64")]
mod slots;
