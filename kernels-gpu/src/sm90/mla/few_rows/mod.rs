//! Latent attention (MLA) on Hopper over 16-bit keys, for tiles of few rows, with the operands A and B of wgmma swapped.
//!
//! Keys are the A operand, so no instruction is padded to 64 rows: Sᵀ = K·Qᵀ has one row per key, and Oᵀ = Vᵀ·Pᵀ one
//! row per column of the values. Queries and weights are the B operand. Everything is multiplied from shared memory,
//! and the kernel is limited by the memory that keys are read from.

mod config;
#[cfg(target_arch = "nvptx64")]
mod epilogue;
#[cfg(target_arch = "nvptx64")]
mod mainloop;
#[cfg(target_arch = "nvptx64")]
mod products;
#[cfg(target_arch = "nvptx64")]
mod queries;
#[cfg(target_arch = "nvptx64")]
mod shared;
#[cfg(target_arch = "nvptx64")]
mod weigh;

#[cfg(not(target_arch = "nvptx64"))]
pub use config::ROWS;

#[cfg(target_arch = "nvptx64")]
mod entries {
    use cuda_std::{barrier, griddep, prelude::*, shared, thread, tma};

    use super::{
        config::{FEEDERS, THREADS, table},
        mainloop::consume,
        queries::claim_rows,
        shared::Shared,
    };
    use crate::{
        abi::LatentParams,
        common::{half, variant::Standard},
        sm90::mla::{
            config::Keys,
            load::{load, load_rows},
        },
    };

    macro_rules! entries {
        ($half:ident $element:literal {
            $($kind:literal $rows:literal x $keys:literal in $stages:literal $loads:ident;)*
        }) => { $( const _: () = {
            /// Logits per thread and block, and rows per thread.
            const N: usize = $rows / 2;
            const H: usize = N / 2;
            const KEYS: Keys = Keys::$loads;
            /// See the module's documentation.
            ///
            /// # Safety
            /// The parameters describe memory as [`LatentParams`] says.
            #[kernel(
                name = ["mla_", $kind, $rows, "x", $keys, "_", $element],
                max_threads = THREADS,
                min_blocks = 1,
                tensor_maps = maps
            )]
            pub unsafe fn entry(p: LatentParams) {
                let variant = Standard::<false>(p.attention.variant);
                let s = Shared::<$rows, $stages> { base: shared::dynamic_shared_address() };
                let thread = thread::thread_idx_x();
                // SAFETY: the launch guarantees the parameters; roles are assigned to whole warps and warpgroups.
                unsafe {
                    if thread < 2 {
                        tma::prefetch_tensor_map(maps.add(thread as usize));
                    }
                    s.init(KEYS);
                    barrier::bar_sync(0, THREADS);
                    // Dependent launch: CTAs of the merge kernel may already wait on SMs that this grid has left.
                    griddep::launch_dependents();
                    if thread < FEEDERS {
                        match (thread / 32, KEYS) {
                            (0, _) => claim_rows(&p, &variant, maps, s),
                            (1, Keys::Pages) => load(&p, maps.add(1), s),
                            (_, Keys::Pages) => {}
                            // Each of three warps copies one part of every block.
                            (warp, Keys::Rows) => load_rows(&p, s, warp - 1, [0, $keys]),
                        }
                    } else {
                        consume::<half::$half, _, _, _, N, H>(&p, &variant, s);
                        // A grid that waits for the end of this one also relies on the end of the grid before it.
                        griddep::wait();
                    }
                }
            }
        }; )* };
    }

    table!(items entries);
}
