//! Decode of many rows on Hopper: a shared prefix is read once for 64 or 128 rows.
//!
//! A unit is an item × a KV head; a row is a query token and a query head of the KV head's group. This many rows fill
//! the 64-wide M side of `wgmma`. The kernel is persistent and warp-specialised:
//!
//! - two **query loaders** (a warp each) load the queries of a unit, which may lie anywhere in `q`. The first is also
//!   the **scheduler warp**: it claims units from the tile counter, shortly before the previous unit is done;
//! - two **loaders** (a warp each) load keys and values, one TMA box per lane, or one by one;
//! - for 8-bit keys, **converting** warps (a warpgroup) write each block to shared memory again, in f16;
//! - **consumers** (a warpgroup per 64 rows) work as in [`prefill`](crate::sm90::prefill): Q·Kᵀ of a block is issued
//!   together with P·V of the previous block, also across units.
//!
//! The keys of a unit are *runs*: one page table for all rows or, in a [joint](crate::abi::WorkItem::JOINT) item,
//! several tables, each for some of the rows. Blocks are filled with the pieces (TMA boxes, or 8 keys) of all runs in order, and
//! masked per row. This wastes products, but tensor cores have spare time: 64 rows are only 64 FLOPs per byte. It
//! avoids partial states, which cost memory traffic.

#[cfg(target_arch = "nvptx64")]
mod by_rows;
mod config;
#[cfg(target_arch = "nvptx64")]
mod convert;
#[cfg(target_arch = "nvptx64")]
mod epilogue;
#[cfg(target_arch = "nvptx64")]
mod load;
#[cfg(target_arch = "nvptx64")]
mod mainloop;
#[cfg(target_arch = "nvptx64")]
mod mainloop_8;
#[cfg(target_arch = "nvptx64")]
mod masks;
#[cfg(target_arch = "nvptx64")]
mod roles;
#[cfg(target_arch = "nvptx64")]
mod runs;
#[cfg(target_arch = "nvptx64")]
mod scales;
#[cfg(target_arch = "nvptx64")]
mod shared;

#[cfg(not(target_arch = "nvptx64"))]
pub use config::{ROWS, ROWS_8_BIT};
#[cfg(target_arch = "nvptx64")]
#[doc(hidden)]
pub use {
    config::{Shape, of_flags},
    roles::run,
};

#[cfg(target_arch = "nvptx64")]
/// Blocks of a unit's keys still to be loaded when the next unit is claimed. A CTA that claims too early may take a
/// unit that another CTA could have started sooner; one that claims too late waits for ticket, item, runs and queries.
const PREFETCH_DISTANCE: u32 = 8;

#[cfg(all(target_arch = "nvptx64", feature = "decode_wgmma"))]
mod entries {
    use cuda_std::prelude::*;

    use super::{Shape, of_flags, run};
    use crate::{
        abi::DecodeParams,
        common::{
            cache::{BITS16, Stored},
            half::{self, Half},
            variant::Standard,
        },
        has,
    };

    macro_rules! entries {
        ($half:ident $element:literal { $(
            $rows:literal x $keys:literal, $dim:literal, [$($flag:ident),*], $stages:literal, $ctas:literal;
        )* }) => { $( const _: () = {
            const CACHE: u32 = of_flags(&[$(stringify!($flag)),*]);
            const SHAPE: Shape = Shape {
                fits: <half::$half as Half>::WIDE && CACHE != BITS16,
                ..Shape::of(CACHE, $rows, $keys, $dim, $stages, $ctas)
            };
            const CAP: bool = has(&[$(stringify!($flag)),*], "cap");

            /// See the module's documentation.
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
                        Stored<half::$half, CACHE>, _, { SHAPE.registers()[0] }, { SHAPE.registers()[1] },
                        { SHAPE.registers()[2] }, { SHAPE.stages }, $dim,
                        { $dim / 32 }, { $keys / 2 }, { $keys / 4 }, { $dim / 2 },
                    >(&p, maps, &variant, SHAPE);
                }
            }
        }; )* };
    }

    crate::decode_wide_table!(items entries);
    crate::decode_wide_8_bit_table!(items entries);
}
