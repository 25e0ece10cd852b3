//! Prefill on Hopper: contiguous queries against paged keys, at tensor-core speed.
//!
//! The kernel is persistent and warp-specialised. A tile is the rows of an item for one query head, or for `pack` query
//! heads of one KV head (pack_gqa). One warpgroup produces; each consumer warpgroup computes 64 rows:
//!
//! - the **scheduler** (one thread) claims tiles from an atomic ticket and loads their queries. In the last rounds it
//!   claims the next tile only when the current one is nearly done;
//! - two **loaders** (a warp each) load keys and values. Each lane issues one TMA box and reads its page id before the
//!   stage is free. Where no tensor map describes the pool, the loaders copy rows (`load_rows`);
//! - the **store warp** copies whole finished tiles from shared memory to the output by TMA;
//! - the **consumers** walk a tile's blocks from the last visible key to the first. They issue Q·Kᵀ of a block together
//!   with P·V of the previous block, so the tensor cores stay busy during the softmax. A tile's last P·V overlaps with
//!   reading the next tile's description, and its epilogue with the first Q·Kᵀ of the next tile.
//!
//! 8-bit keys and values are first converted to 16-bit pages: by each consumer warp before its first product, and by
//! the store warp while it has no output to write.
//!
//! `docs/notes/prefill.md` has the roofline and the experiments.

mod config;
#[cfg(target_arch = "nvptx64")]
mod convert;
#[cfg(target_arch = "nvptx64")]
mod epilogue;
pub mod f8;
#[cfg(target_arch = "nvptx64")]
mod load;
#[cfg(target_arch = "nvptx64")]
mod load_rows;
#[cfg(target_arch = "nvptx64")]
mod mainloop;
#[cfg(target_arch = "nvptx64")]
mod roles;
#[cfg(target_arch = "nvptx64")]
mod scheduler;
#[cfg(target_arch = "nvptx64")]
mod shared;
#[cfg(target_arch = "nvptx64")]
mod turn;
#[cfg(target_arch = "nvptx64")]
mod work;

#[cfg(not(target_arch = "nvptx64"))]
pub use config::ROWS;
pub use config::Shape;

#[cfg(target_arch = "nvptx64")]
#[doc(hidden)]
pub use roles::run;

#[cfg(all(target_arch = "nvptx64", feature = "prefill"))]
mod entries {
    use cuda_std::prelude::*;

    use super::{Shape, config::shape};
    use crate::{
        abi::PrefillParams,
        common::{half, variant::Standard},
        has,
    };

    macro_rules! entries {
        ($half:ident $element:literal { $(
            $rows:literal x $keys:literal, $dim:literal / $value_dim:literal, [$($flag:ident),*], $stages:expr;
        )* }) => { $( const _: () = {
            const SHAPE: Shape = shape!($rows $keys $dim $value_dim [$($flag)*] $stages);
            const CAP: bool = has(&[$(stringify!($flag)),*], "cap");
            const EXTRAS: bool = has(&[$(stringify!($flag)),*], "extras");
            // Scales exist only where 8-bit pages are converted.
            const SCALED: bool = EXTRAS && !SHAPE.is_cut() || SHAPE.co_resident;

            /// See the module's documentation.
            ///
            /// # Safety
            /// The parameters describe memory as [`PrefillParams`] says.
            #[kernel(
                name = ["prefill_", $rows, "x", $keys, "_d", $dim, "_", $element $(, "_", $flag)*],
                max_threads = SHAPE.threads(),
                max_registers = SHAPE.registers()[0],
                tensor_maps = maps
            )]
            pub unsafe fn entry(p: PrefillParams) {
                let variant = Standard::<CAP>(p.attention.variant);
                // SAFETY: the caller's promise.
                unsafe {
                    super::run::<
                        half::$half, _, EXTRAS, SCALED,
                        { SHAPE.registers()[1] }, { SHAPE.registers()[2] },
                        { SHAPE.stages }, { SHAPE.value_stages },
                        { $keys / 2 }, { $keys / 4 }, { $value_dim / 2 },
                    >(&p, maps, &variant, SHAPE);
                }
            }
        }; )* };
    }

    crate::prefill_table!(items entries);
}
