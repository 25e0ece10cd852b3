//! Prefill with Ampere instructions: contiguous queries against keys in pages of any size.
//!
//! A CTA works through tiles: 128 rows of an item for one query head, or for `pack` query heads of one KV head
//! (pack_gqa). Each of its four warps computes 32 rows, so every fragment of keys or values that it reads from shared
//! memory serves two products. Two CTAs share an SM: the products of one overlap with the exponentials, waits and
//! epilogues of the other.
//!
//! Keys and values share a ring of three blocks, in the order of use: a block that was just used is refilled with what
//! is needed two steps later. All warps copy (`cp.async`, 16 bytes per thread); each lane has looked up the page of one
//! row a block ahead.
//!
//! `docs/notes/prefill.md` has the roofline and the experiments.

#[cfg(target_arch = "nvptx64")]
mod epilogue;
#[cfg(target_arch = "nvptx64")]
mod load;
#[cfg(target_arch = "nvptx64")]
pub(super) mod mainloop;
#[cfg(target_arch = "nvptx64")]
mod products;
#[cfg(target_arch = "nvptx64")]
pub(super) mod tile;

/// Warps of a CTA.
pub const WARPS: u32 = 4;

/// Rows per warp.
pub const WARP_ROWS: u32 = 32;

/// Blocks in the ring of keys and values.
const RING: u32 = 3;

/// The compile-time configuration of one kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Keys in a block.
    pub keys: u32,
    /// Head dimension of queries, keys and values.
    pub head_dim: u32,
}

impl Shape {
    /// Rows of a tile.
    #[must_use]
    pub const fn rows(&self) -> u32 {
        WARPS * WARP_ROWS
    }

    /// Threads of a CTA.
    #[must_use]
    pub const fn threads(&self) -> u32 {
        WARPS * 32
    }

    /// Bytes of a slab of queries, 64 columns.
    const fn query_slab(&self) -> u32 {
        self.rows() * 128
    }

    /// Bytes of a slab of a block, 64 columns.
    const fn block_slab(&self) -> u32 {
        self.keys * 128
    }

    const fn block_bytes(&self) -> u32 {
        self.head_dim / 64 * self.block_slab()
    }

    const fn ring_offset(&self) -> u32 {
        self.head_dim / 64 * self.query_slab()
    }

    const fn tile_offset(&self) -> u32 {
        self.ring_offset() + RING * self.block_bytes()
    }

    /// Dynamic shared memory.
    #[must_use]
    pub const fn shared_bytes(&self) -> u32 {
        self.tile_offset() + TILE_BYTES
    }
}

/// Bytes of a tile in shared memory (three vectors of four words), the next unit, and the keys that each warp's rows
/// see.
const TILE_BYTES: u32 = 64 + 16 * WARPS;

/// The kernels, one per row and 16-bit float type: `sm80_prefill_<rows>x<keys>_d<head dimension>_<element>[_cap]`.
#[doc(hidden)]
#[macro_export]
macro_rules! sm80_prefill_table {
    ($as:ident $then:ident $($arguments:tt)?) => {
        $crate::each_half! { $as $then $($arguments)? {
            // Rows × keys, head dimension, flags.
            128 x  64, 128, [];
            128 x  64, 128, [cap];
            128 x 128,  64, [];
            128 x 128,  64, [cap];
        }}
    };
}

#[cfg(not(target_arch = "nvptx64"))]
mod rows {
    use super::Shape;
    use crate::{
        has,
        registry::{Arch, Element, Family, KernelInfo, Loads, Op, registers},
    };

    macro_rules! rows {
        ($half:ident $element:literal { $($rows:literal x $keys:literal, $dim:literal, [$($flag:ident),*];)* }) => {
            &[$(KernelInfo {
                element: Element::$half,
                cap: has(&[$(stringify!($flag)),*], "cap"),
                ..row(
                    concat!("sm80_prefill_", $rows, "x", $keys, "_d", $dim, "_", $element $(, "_", stringify!($flag))*),
                    $rows,
                    Shape { keys: $keys, head_dim: $dim },
                )
            }),*]
        };
    }

    /// See the macro `sm80_prefill_table`.
    pub const ROWS: &[&[KernelInfo]] = crate::sm80_prefill_table!(list rows);

    const fn row(name: &'static str, rows: u32, shape: Shape) -> KernelInfo {
        assert!(rows == shape.rows(), "all have tiles of so many rows");
        KernelInfo {
            loads: Loads::Rows,
            rows,
            keys: shape.keys,
            head_dim: shape.head_dim,
            value_dim: shape.head_dim,
            threads: shape.threads(),
            registers: registers(shape.threads(), 2),
            shared_bytes: shape.shared_bytes(),
            ..KernelInfo::new(name, Family::Sm80Prefill, Arch::Sm80, Op::Prefill)
        }
    }
}
#[cfg(not(target_arch = "nvptx64"))]
pub use rows::ROWS;

/// The kernel of a shape. The const parameters must match it: a thread's logits (`S`) and outputs (`O`).
///
/// # Safety
/// All threads of a CTA of the shape come here; the parameters describe memory as
/// [`GatherPrefillParams`](crate::abi::GatherPrefillParams) says.
#[cfg(target_arch = "nvptx64")]
#[doc(hidden)]
#[inline(always)]
pub unsafe fn run<
    T: crate::common::half::Half,
    V: crate::common::variant::Variant,
    const S: usize,
    const O: usize,
>(
    p: &crate::abi::GatherPrefillParams,
    variant: &V,
    shape: Shape,
) {
    let base = cuda_std::shared::dynamic_shared_address();
    // SAFETY: the caller's promise.
    unsafe { mainloop::work::<T, V, S, O>(p, variant, tile::Shared { base, shape }) };
}

#[cfg(all(target_arch = "nvptx64", feature = "sm80_prefill"))]
mod entries {
    use cuda_std::prelude::*;

    use super::Shape;
    use crate::{
        abi::GatherPrefillParams,
        common::{half, variant::Standard},
        has,
    };

    macro_rules! entries {
        ($half:ident $element:literal { $($rows:literal x $keys:literal, $dim:literal, [$($flag:ident),*];)* }) => { $( const _: () = {
            const SHAPE: Shape = Shape { keys: $keys, head_dim: $dim };
            const CAP: bool = has(&[$(stringify!($flag)),*], "cap");

            /// See the module's documentation.
            ///
            /// # Safety
            /// The parameters describe memory as [`GatherPrefillParams`] says; the grid has at most as many CTAs as
            /// units.
            #[kernel(
                name = ["sm80_prefill_", $rows, "x", $keys, "_d", $dim, "_", $element $(, "_", $flag)*],
                max_threads = SHAPE.threads(),
                min_blocks = 2
            )]
            pub unsafe fn entry(p: GatherPrefillParams) {
                let variant = Standard::<CAP>(p.attention.variant);
                // SAFETY: the caller's promise.
                unsafe { super::run::<half::$half, _, { $keys / 2 }, { $dim / 2 }>(&p, &variant, SHAPE) };
            }
        }; )* };
    }

    crate::sm80_prefill_table!(items entries);
}
