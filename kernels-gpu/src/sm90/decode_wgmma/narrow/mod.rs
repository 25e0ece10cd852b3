//! Decode of few rows in what a prefill leaves of an SM: little shared memory, 64 registers a thread.
//!
//! Both products are transposed, so that keys and elements of the head stand on the 64-wide side of `wgmma`
//! and the few rows on the other, which goes down to 8: Sᵀ = K·Qᵀ and Oᵀ += Vᵀ·Pᵀ. Keys and values are read
//! from shared memory by the tensor cores themselves, and a thread holds 12 accumulators for 8 rows. So one
//! warpgroup keeps up with the memory while the prefill's products take most of the tensor cores' time.
//!
//! Units, rows, keys and values come much as they do for [`wide`](super::wide) tiles, but all rows of a unit see
//! one table: there are neither the registers nor the shared memory for more.

mod config;
#[cfg(target_arch = "nvptx64")]
mod epilogue;
#[cfg(target_arch = "nvptx64")]
mod load;
#[cfg(target_arch = "nvptx64")]
mod mainloop;
#[cfg(target_arch = "nvptx64")]
mod products;
#[cfg(target_arch = "nvptx64")]
mod shared;
#[cfg(target_arch = "nvptx64")]
mod softmax;

#[cfg(not(target_arch = "nvptx64"))]
pub use config::ROWS;

#[cfg(target_arch = "nvptx64")]
/// Blocks of a unit's keys that have not been asked for when the next unit is claimed. A CTA that claims early may take
/// what another CTA could have begun; one that claims late waits for ticket, item and queries, and memory is busy here.
const PREFETCH_DISTANCE: u32 = 8;

#[cfg(all(target_arch = "nvptx64", feature = "decode_wgmma"))]
mod entries {
    use cuda_std::{barrier, griddep, prelude::*, setmaxnreg, shared, thread};

    use super::{
        config::{Config, REGISTERS, Shape, table},
        load::{gather, help_gather, load},
        mainloop::consume,
        shared::Shared,
    };
    use crate::{
        abi::DecodeParams,
        common::{half, variant::Standard},
    };

    macro_rules! entries {
        ($half:ident $element:literal { $(
            $rows:literal x $keys:literal, $dim:literal, [$($flag:ident),*], $stages:literal;
        )* }) => { $( const _: () = {
            const SHAPE: Shape = Shape::new($rows, $keys, $dim, $stages);
            struct This;
            impl Config for This {
                type Half = half::$half;
                const SHAPE: Shape = SHAPE;
            }

            /// See the module.
            ///
            /// # Safety
            /// The parameters describe memory as [`DecodeParams`] says.
            #[kernel(
                name = ["decode_", $rows, "x", $keys, "_d", $dim, "_", $element $(, "_", $flag)*],
                max_threads = SHAPE.threads(),
                max_registers = REGISTERS[0],
                tensor_maps = maps
            )]
            pub unsafe fn entry(p: DecodeParams) {
                let variant = Standard::<false>(p.attention.variant);
                let s = Shared { base: shared::dynamic_shared_address(), shape: SHAPE };
                let thread = thread::thread_idx_x();
                // SAFETY: the caller's promise; every warp has one role, begun once the barriers are initialised.
                unsafe {
                    s.init();
                    barrier::bar_sync(0, SHAPE.threads());
                    // The merging kernel may wait on SMs that this one has left.
                    griddep::launch_dependents();
                    if thread < 128 {
                        setmaxnreg::decrease::<{ REGISTERS[1] }>();
                        match thread / 32 {
                            0 => load::<false, { SHAPE.stages }>(&p, maps, s),
                            1 => load::<true, { SHAPE.value_stages }>(&p, maps.add(1), s),
                            2 => gather(&p, s),
                            _ => help_gather(&p, s),
                        }
                    } else {
                        setmaxnreg::increase::<{ REGISTERS[2] }>();
                        consume::<This, _, { SHAPE.stages }, { SHAPE.value_stages }, { $keys / 64 }, { $dim / 64 }>(
                            &p, &variant, s,
                        );
                    }
                }
            }
        }; )* };
    }

    table!(items entries);
}
