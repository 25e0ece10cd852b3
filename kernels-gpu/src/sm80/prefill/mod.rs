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
//! With head dimension 256 the outputs of 32 rows do not fit a thread's registers. There a CTA has eight warps of 16 rows,
//! and is alone on its SM. Beside its queries, 64 KiB, the 99 KiB of Ada hold two blocks of 32 keys: one of keys, which are
//! refilled during the product with values, and one of values, which are refilled during the product with keys.
//!
//! *General* kernels also read heads that are padded, and apply the scales of 8-bit keys and values that a launch before
//! them widened. A tile can have tokens of several requests, so each row has its own scales; those of keys are in shared
//! memory. The other kernels have no registers for this. With head dimension 256 all kernels are general.
//!
//! `docs/notes/prefill.md` has the roofline and the experiments.

#[cfg(target_arch = "nvptx64")]
mod epilogue;
#[cfg(target_arch = "nvptx64")]
mod factors;
#[cfg(target_arch = "nvptx64")]
mod load;
#[cfg(target_arch = "nvptx64")]
pub(super) mod mainloop;
#[cfg(target_arch = "nvptx64")]
mod products;
#[cfg(target_arch = "nvptx64")]
pub(super) mod tile;

use crate::has;

/// Rows of a tile.
pub const ROWS_OF_TILE: u32 = 128;

/// The compile-time configuration of one kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Keys in a block.
    pub keys: u32,
    /// Head dimension of queries, keys and values.
    pub head_dim: u32,
}

impl Shape {
    /// Blocks of 16 rows that a warp computes. The const parameter `HALVES` of functions is the same number.
    #[must_use]
    pub const fn halves(&self) -> u32 {
        if self.head_dim > 128 { 1 } else { 2 }
    }

    /// Rows per warp.
    #[must_use]
    pub const fn warp_rows(&self) -> u32 {
        16 * self.halves()
    }

    /// Rows of a tile.
    #[must_use]
    pub const fn rows(&self) -> u32 {
        ROWS_OF_TILE
    }

    /// Warps of a CTA.
    #[must_use]
    pub const fn warps(&self) -> u32 {
        self.rows() / self.warp_rows()
    }

    /// Threads of a CTA.
    #[must_use]
    pub const fn threads(&self) -> u32 {
        self.warps() * 32
    }

    /// CTAs that share an SM.
    #[must_use]
    pub const fn ctas_per_sm(&self) -> u32 {
        self.halves()
    }

    /// Blocks in the ring of keys and values.
    #[must_use]
    pub const fn ring(&self) -> u32 {
        if self.head_dim > 128 { 2 } else { 3 }
    }

    /// Rows of a block that the warps copy at a time: four each.
    #[must_use]
    pub const fn rows_at_once(&self) -> u32 {
        4 * self.warps()
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
        self.ring_offset() + self.ring() * self.block_bytes()
    }

    /// Bytes of a tile in shared memory (three vectors of four words), the next unit, and the keys that each warp's rows
    /// see.
    const fn tile_bytes(&self) -> u32 {
        64 + 16 * self.warps()
    }

    /// Dynamic shared memory of a kernel that is not general. A general kernel has the factors of its rows behind it.
    #[must_use]
    pub const fn shared_bytes(&self) -> u32 {
        self.tile_offset() + self.tile_bytes()
    }

    /// Dynamic shared memory of a general kernel.
    #[must_use]
    pub const fn general_bytes(&self) -> u32 {
        self.shared_bytes() + 4 * self.rows()
    }
}

/// The kernels, one per row and 16-bit float type: `sm80_prefill_<rows>x<keys>_d<head dimension>_<element>[_<flag>]`.
///
/// Flags: `cap`, a soft cap; `general`, see the module's documentation; `cap_general`, both.
#[doc(hidden)]
#[macro_export]
macro_rules! sm80_prefill_table {
    ($as:ident $then:ident $($arguments:tt)?) => {
        $crate::each_half! { $as $then $($arguments)? {
            // Rows × keys, head dimension, flag.
            128 x  64, 128, [];
            128 x  64, 128, [cap];
            128 x  64, 128, [general];
            128 x  64, 128, [cap_general];
            128 x 128,  64, [];
            128 x 128,  64, [cap];
            128 x 128,  64, [general];
            128 x 128,  64, [cap_general];
            128 x  32, 256, [];
            128 x  32, 256, [cap];
        }}
    };
}

#[cfg(not(target_arch = "nvptx64"))]
mod rows {
    use super::{Shape, is_capped, is_general};
    use crate::registry::{Arch, Element, Family, KernelInfo, Loads, Op, registers};

    macro_rules! rows {
        ($half:ident $element:literal { $($rows:literal x $keys:literal, $dim:literal, [$($flag:ident),*];)* }) => {
            &[$(KernelInfo {
                element: Element::$half,
                ..row(
                    concat!("sm80_prefill_", $rows, "x", $keys, "_d", $dim, "_", $element $(, "_", stringify!($flag))*),
                    $rows,
                    Shape { keys: $keys, head_dim: $dim },
                    &[$(stringify!($flag)),*],
                )
            }),*]
        };
    }

    /// See the macro `sm80_prefill_table`.
    pub const ROWS: &[&[KernelInfo]] = crate::sm80_prefill_table!(list rows);

    const fn row(
        name: &'static str,
        rows: u32,
        shape: Shape,
        flags: &'static [&'static str],
    ) -> KernelInfo {
        assert!(rows == shape.rows(), "all have tiles of so many rows");
        let general = is_general(&shape, flags);
        KernelInfo {
            loads: Loads::Rows,
            cap: is_capped(flags),
            general,
            // Those that have no other of their heads are planned.
            stands_in: general && shape.head_dim <= 128,
            rows,
            keys: shape.keys,
            head_dim: shape.head_dim,
            value_dim: shape.head_dim,
            threads: shape.threads(),
            registers: registers(shape.threads(), shape.ctas_per_sm()),
            shared_bytes: if general {
                shape.general_bytes()
            } else {
                shape.shared_bytes()
            },
            ..KernelInfo::new(name, Family::Sm80Prefill, Arch::Sm80, Op::Prefill)
        }
    }
}
#[cfg(not(target_arch = "nvptx64"))]
pub use rows::ROWS;

/// Whether a row's flags mean a soft cap.
pub const fn is_capped(flags: &[&str]) -> bool {
    has(flags, "cap") || has(flags, "cap_general")
}

/// Whether a row's kernel is general.
pub const fn is_general(shape: &Shape, flags: &[&str]) -> bool {
    shape.head_dim > 128 || has(flags, "general") || has(flags, "cap_general")
}

/// The kernel of a shape. The const parameters must match it: a thread's logits (`S`) and outputs (`O`) of 16 rows, and how
/// often it has them (`HALVES`).
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
    const HALVES: usize,
    const GENERAL: bool,
>(
    p: &crate::abi::GatherPrefillParams,
    variant: &V,
    shape: Shape,
) {
    let base = cuda_std::shared::dynamic_shared_address();
    // SAFETY: the caller's promise.
    unsafe {
        mainloop::work::<T, V, S, O, HALVES, GENERAL>(p, variant, tile::Shared { base, shape })
    };
}

#[cfg(all(target_arch = "nvptx64", feature = "sm80_prefill"))]
mod entries {
    use cuda_std::prelude::*;

    use super::{Shape, is_capped, is_general};
    use crate::{
        abi::GatherPrefillParams,
        common::{half, variant::Standard},
    };

    macro_rules! entries {
        ($half:ident $element:literal { $($rows:literal x $keys:literal, $dim:literal, [$($flag:ident),*];)* }) => { $( const _: () = {
            const SHAPE: Shape = Shape { keys: $keys, head_dim: $dim };
            const CAP: bool = is_capped(&[$(stringify!($flag)),*]);
            const GENERAL: bool = is_general(&SHAPE, &[$(stringify!($flag)),*]);

            /// See the module's documentation.
            ///
            /// # Safety
            /// The parameters describe memory as [`GatherPrefillParams`] says; the grid has at most as many CTAs as
            /// units.
            #[kernel(
                name = ["sm80_prefill_", $rows, "x", $keys, "_d", $dim, "_", $element $(, "_", $flag)*],
                max_threads = SHAPE.threads(),
                min_blocks = SHAPE.ctas_per_sm()
            )]
            pub unsafe fn entry(p: GatherPrefillParams) {
                let variant = Standard::<CAP>(p.attention.variant);
                // SAFETY: the caller's promise.
                unsafe {
                    super::run::<
                        half::$half, _, { $keys / 2 }, { $dim / 2 }, { SHAPE.halves() as usize }, GENERAL,
                    >(&p, &variant, SHAPE);
                };
            }
        }; )* };
    }

    crate::sm80_prefill_table!(items entries);
}
