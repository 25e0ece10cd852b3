//! Decode with Ampere instructions: keys and values in pages of any size, gathered row by row.
//!
//! Each warp works like a CTA of its own: it fills (`cp.async`) and reads a private ring of blocks in shared memory, so
//! it needs warp barriers only. A lane looks up the page of one key of a chunk, one chunk ahead, and passes the address
//! to the eight lanes that copy the key's row.
//!
//! With few units, the warps of a CTA form a *team*: they take the chunks of a unit in turn, and their partial states
//! are merged in shared memory. With many units, each warp has units of its own.
//!
//! Tiles have 16 rows; an item with more rows is cut into several tiles, whose keys then hit in L2.

mod config;
#[cfg(target_arch = "nvptx64")]
mod epilogue;
#[cfg(target_arch = "nvptx64")]
mod load;
#[cfg(target_arch = "nvptx64")]
pub(super) mod mainloop;
#[cfg(target_arch = "nvptx64")]
mod shared;
#[cfg(target_arch = "nvptx64")]
pub(super) mod unit;

pub use config::Shape;
#[cfg(not(target_arch = "nvptx64"))]
pub use config::TABLE;
#[cfg(target_arch = "nvptx64")]
pub(super) use shared::Shared;

#[cfg(target_arch = "nvptx64")]
use crate::common::cache;

/// The kernel of a shape. The const parameters must match it: its cache, fragments of a row, elements of it that a lane
/// writes, blocks of the ring.
///
/// # Safety
/// All threads of a CTA of the shape come here; the parameters describe memory as
/// [`GatherDecodeParams`](crate::abi::GatherDecodeParams) says.
#[cfg(target_arch = "nvptx64")]
#[doc(hidden)]
#[inline(always)]
pub unsafe fn run<
    T: crate::common::half::Half,
    V: crate::common::variant::Variant,
    const CACHE: u32,
    const DIM_BLOCKS: usize,
    const PER_LANE: usize,
    const RING: usize,
>(
    p: &crate::abi::GatherDecodeParams,
    variant: &V,
    shape: Shape,
) where
    cache::Stored<T, CACHE>: cache::Cache,
{
    let s = Shared {
        base: cuda_std::shared::dynamic_shared_address(),
        shape,
        warp: cuda_std::thread::thread_idx_x() / 32,
    };
    // SAFETY: the caller's promise.
    unsafe { mainloop::work::<T, V, CACHE, DIM_BLOCKS, PER_LANE, RING>(p, variant, s) };
}

#[cfg(all(target_arch = "nvptx64", feature = "sm80_decode"))]
mod entries {
    use cuda_std::prelude::*;

    use super::{Shape, config::of_flags};
    use crate::{
        abi::GatherDecodeParams,
        common::{half, variant::Standard},
        has,
    };

    macro_rules! entries {
        ($half:ident $element:literal { $($rows:literal x $keys:literal, $dim:literal, [$($flag:ident),*];)* }) => { $( const _: () = {
            const CACHE: u32 = of_flags(&[$(stringify!($flag)),*]);
            const SHAPE: Shape = Shape {
                head_dim: $dim,
                cache: CACHE,
                one_warp: has(&[$(stringify!($flag)),*], "one"),
            };
            const CAP: bool = has(&[$(stringify!($flag)),*], "cap");

            /// See the module's documentation.
            ///
            /// # Safety
            /// The parameters describe memory as [`GatherDecodeParams`] says.
            #[kernel(
                name = ["sm80_decode_", $rows, "x", $keys, "_d", $dim, "_", $element $(, "_", $flag)*],
                max_threads = SHAPE.threads(),
                min_blocks = 2
            )]
            pub unsafe fn entry(p: GatherDecodeParams) {
                let variant = Standard::<CAP>(p.attention.variant);
                // SAFETY: the caller's promise.
                unsafe {
                    super::run::<
                        half::$half, _, CACHE, { $dim / 16 }, { $dim / 32 }, { SHAPE.ring() as usize },
                    >(&p, &variant, SHAPE);
                }
            }
        }; )* };
    }

    crate::sm80_decode_table!(items entries);
}
