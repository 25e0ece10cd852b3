//! Prefill on Hopper: contiguous queries against paged keys, at tensor-core speed.
//!
//! A CTA stays on its SM and works through tiles: the rows of an item for one query head (or for `pack`
//! heads that share keys). One warpgroup moves data, the others compute 64 rows each:
//!
//! - the **scheduler** (one thread) claims tiles by ticket, the last ones shortly before the one before is
//!   done, and loads their queries;
//! - two **loaders** (a warp each) bring keys and values, a lane per TMA box, page ids looked up before
//!   the stage is free;
//! - the **writer** (a warp) brings finished tiles from shared memory to the output;
//! - the **consumers** go from the last visible keys to the first. They issue Q·Kᵀ of a block together
//!   with P·V of the block before, so that the tensor cores have work while weights are computed. A tile's
//!   last P·V runs while they look up the next one, and its end is done beneath the first Q·Kᵀ of that.
//!
//! 8-bit keys and values become pages of 16-bit ones first: the writer converts them while it has nothing to
//! write.
//!
//! `docs/notes/prefill.md` has the roofline and what was tried.

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
            // Only what is converted from 8 bits has scales.
            const SCALED: bool = EXTRAS && !SHAPE.is_cut() || SHAPE.co_resident;

            /// See the module.
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
