//! Prefill with the instructions of Ampere: contiguous queries against keys in pages of any size.
//!
//! A CTA works through tiles: 128 rows of an item for one query head (or for `pack` heads that share keys).
//! Each of its four warps computes 32 rows, so that what it reads of keys and values from shared memory
//! serves two products. Two CTAs share an SM: one's products run beneath the other's exponentials, waits
//! and tile ends.
//!
//! Keys and values come through a ring of three blocks, in the order in which they are used: the block that
//! was used last is filled with what is needed two steps later. All warps copy (`cp.async`, 16 bytes a
//! thread), each lane having looked up the page of one row a block ahead.
//!
//! `docs/prefill.md` has the roofline and what was tried.

#[cfg(target_arch = "nvptx64")]
pub(super) mod attend;
#[cfg(target_arch = "nvptx64")]
mod finish;
#[cfg(target_arch = "nvptx64")]
mod gather;
#[cfg(target_arch = "nvptx64")]
mod products;
#[cfg(target_arch = "nvptx64")]
pub(super) mod tile;

/// Warps of a CTA.
pub const WARPS: u32 = 4;

/// Rows that a warp computes.
pub const WARP_ROWS: u32 = 32;

/// Blocks in the ring of keys and values.
const RING: u32 = 3;

/// What one instance of the kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Keys in a block.
    pub keys: u32,
    /// Head dimension of queries, keys and values.
    pub head_dim: u32,
}

impl Shape {
    /// Every instance; the entry is `prefill_mma_128x<keys>_d<head_dim>_<dtype>[_cap]`.
    pub const ALL: [Self; 2] = [Self::D64, Self::D128];
    /// 128 rows × 64 keys.
    pub const D128: Self = Self {
        keys: 64,
        head_dim: 128,
    };
    /// 128 rows × 128 keys.
    pub const D64: Self = Self {
        keys: 128,
        head_dim: 64,
    };

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

    /// Bytes of 64 columns of the queries.
    const fn query_slab(&self) -> u32 {
        self.rows() * 128
    }

    /// Bytes of 64 columns of a block.
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

/// A tile in shared memory (three vectors of four words), the unit that comes after it, and what the rows
/// of each warp see.
const TILE_BYTES: u32 = 64 + 16 * WARPS;

#[cfg(target_arch = "nvptx64")]
mod entries {
    use cuda_std::prelude::*;

    use super::{Shape, tile::Shared};
    use crate::{
        abi::GatherPrefillParams,
        decode::half::{Bf16, F16},
        variant::Standard,
    };

    macro_rules! entries {
        ($($name:ident: $shape:ident, $dtype:ty, $cap:literal, [$s:literal, $o:literal];)*) => {$(
            /// See the module; all sizes are the shape's.
            ///
            /// # Safety
            /// The parameters describe memory as [`GatherPrefillParams`] says; the grid has at most as many
            /// CTAs as there are units.
            #[kernel(max_threads = Shape::$shape.threads(), min_blocks = 2)]
            pub unsafe fn $name(p: GatherPrefillParams) {
                const SHAPE: Shape = Shape::$shape;
                const { assert!($s == SHAPE.keys / 2 && $o == SHAPE.head_dim / 2) };
                let variant = Standard::<$cap>(p.attention.variant);
                let s = Shared { base: shared::dynamic_shared_address(), shape: SHAPE };
                // SAFETY: all threads; the launch vouches for the parameters.
                unsafe { super::attend::work::<$dtype, _, $s, $o>(&p, &variant, s) };
            }
        )*};
    }

    entries! {
        prefill_mma_128x64_d128_bf16: D128, Bf16, false, [32, 64];
        prefill_mma_128x64_d128_bf16_cap: D128, Bf16, true, [32, 64];
        prefill_mma_128x64_d128_f16: D128, F16, false, [32, 64];
        prefill_mma_128x64_d128_f16_cap: D128, F16, true, [32, 64];
        prefill_mma_128x128_d64_bf16: D64, Bf16, false, [64, 32];
        prefill_mma_128x128_d64_bf16_cap: D64, Bf16, true, [64, 32];
        prefill_mma_128x128_d64_f16: D64, F16, false, [64, 32];
        prefill_mma_128x128_d64_f16_cap: D64, F16, true, [64, 32];
    }
}
