//! Decode of many rows on Hopper: a prefix that many queries share is read once for 64 or 128 rows of them.
//!
//! Units are items × KV heads; a row is a query token and a query head of the KV head's group. With so many
//! rows the products fill a `wgmma`, queries on its 64-wide side. A CTA stays on its SM:
//!
//! - two **gatherers** (a warp each) bring the rows of a unit, which may lie anywhere in `q`; the first of them
//!   claims units by ticket, shortly before the one before is done;
//! - two **loaders** (a warp each) bring keys and values, a lane per TMA box;
//! - **consumers** (a warpgroup for 64 rows) work as those of [`prefill`](crate::sm90::prefill) do: Q·Kᵀ of a block
//!   is issued together with P·V of the block before, across units.
//!
//! The keys of a unit are *runs*: of one table for all rows, or, in a [joint](crate::abi::WorkItem::JOINT) item, of
//! several tables for some of the rows each. Blocks are filled with the pieces (TMA boxes) of all runs, one after
//! the other, and masked by rows. That costs products that nobody needs, but tensor cores have them to spare:
//! 64 rows are 64 FLOPs a byte. It saves partial states, which cost bytes.

mod config;
#[cfg(target_arch = "nvptx64")]
mod epilogue;
#[cfg(target_arch = "nvptx64")]
mod load;
#[cfg(target_arch = "nvptx64")]
mod mainloop;
#[cfg(target_arch = "nvptx64")]
mod roles;
#[cfg(target_arch = "nvptx64")]
mod runs;
#[cfg(target_arch = "nvptx64")]
mod shared;

#[cfg(not(target_arch = "nvptx64"))]
pub use config::ROWS;
#[cfg(target_arch = "nvptx64")]
#[doc(hidden)]
pub use {config::Shape, roles::run};

#[cfg(target_arch = "nvptx64")]
/// Blocks of a unit's keys that have not been asked for when the next unit is claimed. A CTA that claims early may take
/// what another CTA could have begun; one that claims late waits for ticket, item, runs and queries.
const PREFETCH_DISTANCE: u32 = 8;

#[cfg(all(target_arch = "nvptx64", feature = "decode_wgmma"))]
mod entries {
    use cuda_std::prelude::*;

    use super::{Shape, run};
    use crate::{
        abi::DecodeParams,
        common::{half, variant::Standard},
        has,
    };

    macro_rules! entries {
        ($half:ident $element:literal { $(
            $rows:literal x $keys:literal, $dim:literal, [$($flag:ident),*], $stages:literal, $ctas:literal;
        )* }) => { $( const _: () = {
            const SHAPE: Shape = Shape::new($rows, $keys, $dim, $stages, $ctas);
            const CAP: bool = has(&[$(stringify!($flag)),*], "cap");

            /// See the module.
            ///
            /// # Safety
            /// The parameters describe memory as [`DecodeParams`] says.
            #[kernel(
                name = ["decode_", $rows, "x", $keys, "_d", $dim, "_", $element $(, "_", $flag)*],
                max_threads = SHAPE.threads(),
                min_blocks = SHAPE.ctas_per_sm,
                tensor_maps = maps
            )]
            pub unsafe fn entry(p: DecodeParams) {
                let variant = Standard::<CAP>(p.attention.variant);
                // SAFETY: the caller's promise.
                unsafe {
                    run::<
                        half::$half, _, { SHAPE.registers().0 }, { SHAPE.registers().1 }, { SHAPE.stages }, $dim,
                        { $dim / 32 }, { $keys / 2 }, { $keys / 4 }, { $dim / 2 },
                    >(&p, maps, &variant, SHAPE);
                }
            }
        }; )* };
    }

    crate::decode_wide_table!(items entries);
}
