//! Prefill with 8-bit (e4m3) products: twice the tensor-core rate, half the bytes.
//!
//! Warps, mbarriers and tiles are those of the [16-bit kernel](super). The differences:
//! - **Pieces** are not widened but laid out for wgmma. Keys keep their layout. Values are transposed, since 8-bit
//!   operands must be K-major: contiguous along the contracted dimension (`pages.rs`). A piece is stored exactly as
//!   shared memory holds it, swizzle included, so one bulk copy loads it.
//! - **Queries** are quantised in place in shared memory, with a power of two as each row's scale (`queries.rs`).
//! - **Weights** of a block are relative to the block's own maxima, so each block uses the full range of e4m3. Its P·V
//!   goes to separate registers and is added to the outputs in f32, with the factor to the row's reference: the tensor
//!   cores keep only 13 bits below the largest term of a sum of 8-bit products (`mainloop.rs`). With heads of 256 registers
//!   do not suffice for all columns at once.
//! - **Blocks** have twice as many keys as a stage: fewer steps. None is skipped, so both consumers take equal turns.

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
            $rows:literal x $keys:literal, $dim:literal, [$($flag:ident),*], [$a:literal, $b:literal, $c:literal], $stages:expr;
        )* }) => { $( const _: () = {
            const SHAPE: Shape = Shape::of_8_bits($rows, $keys, $dim, $stages);
            const CAP: bool = has(&[$(stringify!($flag)),*], "cap");

            /// See the module's documentation.
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
                        { $keys / 4 }, { $keys / 8 }, { $dim / 2 }, { $a / 2 }, { $b / 2 }, { $c / 2 }, { $dim / 32 },
                    >(&p, maps, &variant, SHAPE);
                }
            }
        }; )* };
    }

    crate::prefill_f8_table!(items entries);
}
