//! Prefill with products of 8 bits: twice the rate of the tensor cores, half the bytes.
//!
//! Warps, barriers and tiles are those of the [kernel of 16 bits](super). What differs:
//! - **Pieces** are not widened but laid out: keys as they are, values with their keys in rows, since products of 8
//!   bits contract along what is contiguous in memory (`pages.rs`). They lie as shared memory has them, swizzled, and
//!   come by plain copies.
//! - **Queries** become 8 bits where they lie, a power of two for each row (`queries.rs`).
//! - **Weights** of a block are relative to the block's own maxima, so that all bits that 8 have are used for each
//!   block. Its P·V comes into registers of its own and is added in f32 with the factor that the reference takes:
//!   tensor cores keep 13 bits behind the largest term of a sum of 8-bit products (`mainloop.rs`).

mod config;
#[cfg(target_arch = "nvptx64")]
mod load;
#[cfg(target_arch = "nvptx64")]
mod mainloop;
#[cfg(target_arch = "nvptx64")]
mod pages;
#[cfg(target_arch = "nvptx64")]
mod products;
#[cfg(target_arch = "nvptx64")]
mod queries;
#[cfg(target_arch = "nvptx64")]
mod roles;
#[cfg(target_arch = "nvptx64")]
mod weights;

#[cfg(not(target_arch = "nvptx64"))]
pub use config::ROWS;
#[cfg(target_arch = "nvptx64")]
pub(super) use pages::lay_out;

#[cfg(all(target_arch = "nvptx64", feature = "prefill_f8"))]
mod entries {
    use cuda_std::prelude::*;

    use super::super::Shape;
    use crate::{
        abi::PrefillParams,
        common::{half, variant::Standard},
        has,
    };

    macro_rules! entries {
        ($half:ident $element:literal { $(
            $rows:literal x $keys:literal, $dim:literal, [$($flag:ident),*], $part:literal, $stages:expr;
        )* }) => { $( const _: () = {
            const SHAPE: Shape = Shape::of_8_bits($rows, $keys, $dim, $stages);
            const CAP: bool = has(&[$(stringify!($flag)),*], "cap");

            /// See the module.
            ///
            /// # Safety
            /// The parameters describe memory as [`PrefillParams`] says.
            #[kernel(
                name = ["prefill_", $rows, "x", $keys, "_d", $dim, "_", $element, "_f8" $(, "_", $flag)*],
                max_threads = SHAPE.threads(),
                max_registers = SHAPE.registers()[0],
                tensor_maps = maps
            )]
            pub unsafe fn entry(p: PrefillParams) {
                let variant = Standard::<CAP>(p.attention.variant);
                // SAFETY: the caller's promise.
                unsafe {
                    super::roles::run::<
                        half::$half, _,
                        { SHAPE.registers()[1] }, { SHAPE.registers()[2] },
                        { SHAPE.stages }, { SHAPE.value_stages },
                        { $keys / 2 }, { $keys / 8 }, { $dim / 2 }, { $part / 2 }, { $dim / 32 },
                    >(&p, maps, &variant, SHAPE);
                }
            }
        }; )* };
    }

    crate::prefill_f8_table!(items entries);
}
