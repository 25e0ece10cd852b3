//! Values of 512 elements on Hopper, with keys of 512 or 64: decodes, and prompts as decodes of many rows.
//!
//! A unit is an item × a KV head; a row is a query token and a query head of the KV head's group. The f32 output of 64
//! rows takes half of an SM's registers: one CTA runs per SM, and no warpgroup has room for logits next to its outputs.
//! So one warpgroup computes Q·Kᵀ and the softmax (*weighs*), two compute P·V for half of the columns each (*add*), and
//! one is the producer: a warp claims units, one loads keys, one loads values.
//!
//! ```text
//! weighs   Q·K₁ ─────────────── Q·K₂ ─────────────── Q·K₃ …
//!          │ weights 0 ─┐       │ weights 1 ─┐
//! adds                  └ P₀·V₀ ─────────────└ P₁·V₁ ─────────────
//! ```
//!
//! The first half of a block's Q·Kᵀ overlaps with the softmax of the previous block, so the tensor cores always have
//! work from both products. Weights are relative to a reference that changes rarely; the softmax warpgroup stores the
//! rescale factors for the outputs next to the weights.
//!
//! Keys of 64 elements are one piece: all of a block's Q·Kᵀ overlaps with the softmax of the previous block.
//!
//! | shared memory | bytes, keys of 512 | bytes, keys of 64 |
//! |---|---|---|
//! | queries: 5 slabs of 64 columns, 64 rows each, and 3 in registers; or all, 1 slab, in registers | 40,960 | 0 |
//! | keys: 6 pieces of 64 keys × 128 columns, or 4 of 64 keys × 64 columns | 98,304 | 32,768 |
//! | values: 4 or 8 pieces of 16 keys × 512 columns | 65,536 | 131,072 |
//! | weights of two blocks | 16,384 | 16,384 |
//! | rows of two units, factors, barriers | 3,472 | 3,504 |

mod config;

#[cfg(target_arch = "nvptx64")]
mod add;
#[cfg(target_arch = "nvptx64")]
mod load;
#[cfg(target_arch = "nvptx64")]
mod queries;
#[cfg(target_arch = "nvptx64")]
mod shared;
#[cfg(target_arch = "nvptx64")]
mod weigh;

#[cfg(not(target_arch = "nvptx64"))]
pub use config::ROWS;

#[cfg(target_arch = "nvptx64")]
/// Blocks of a unit's keys still to be loaded when the next unit is claimed. A CTA that claims too early may take a
/// unit that another CTA could have started sooner; one that claims too late waits for ticket, item and queries.
const PREFETCH_DISTANCE: u32 = 3;

#[cfg(all(target_arch = "nvptx64", feature = "decode_wgmma"))]
mod entries {
    use cuda_std::{barrier, griddep, prelude::*, setmaxnreg, shared, thread, tma};

    use super::{
        super::super::follow,
        add::add,
        config::{Keys, REGISTERS, THREADS, table},
        load::{claim, load_keys, load_values},
        shared::Shared,
        weigh::weigh,
    };
    use crate::{
        abi::DecodeParams,
        common::{half, variant::Standard},
        sm90::uniform,
    };

    macro_rules! entries {
        ($half:ident $element:literal { $(
            $rows:literal x $keys:literal, $dim:literal, $values:literal;
        )* }) => { $( const _: () = {
            const STAGES: u32 = Keys::<$dim>::STAGES;
            const HELD: usize = 16 * Keys::<$dim>::HELD_SLABS as usize;

            /// See the module's documentation.
            ///
            /// # Safety
            /// The parameters describe memory as [`DecodeParams`] says.
            #[kernel(
                name = ["decode_", $rows, "x", $keys, "_d", $dim, $values, "_", $element],
                max_threads = THREADS,
                min_blocks = 1,
                tensor_maps = maps
            )]
            pub unsafe fn entry(p: DecodeParams) {
                let variant = Standard::<false>(p.attention.variant);
                let s = Shared::<$dim> { base: shared::dynamic_shared_address() };
                let thread = thread::thread_idx_x();
                // SAFETY: the launch guarantees the parameters; roles are assigned to whole warps and warpgroups.
                unsafe {
                    if thread < 2 {
                        tma::prefetch_tensor_map(maps.add(thread as usize));
                    }
                    s.init();
                    barrier::bar_sync(0, THREADS);
                    follow(p.early);
                    // Dependent launch: CTAs of the merge kernel may already wait on SMs that this grid has left.
                    griddep::launch_dependents();
                    match thread / 128 {
                        0 => {
                            setmaxnreg::decrease::<{ REGISTERS[0] }>();
                            match thread / 32 {
                                0 => load_keys::<$dim, STAGES>(&p, maps, s),
                                1 => load_values(&p, maps.add(1), s),
                                2 => claim(&p, s),
                                _ => {}
                            }
                        }
                        1 => {
                            setmaxnreg::increase::<{ REGISTERS[1] }>();
                            weigh::<half::$half, _, $dim, STAGES, HELD>(&p, &variant, s);
                        }
                        _ => {
                            setmaxnreg::increase::<{ REGISTERS[2] }>();
                            add::<half::$half, $dim>(&p, s, uniform(thread / 128 - 2));
                            // A grid that waits for the end of this one also relies on the end of the grid before it.
                            griddep::wait();
                        }
                    }
                }
            }
        }; )* };
    }

    table!(items entries);
}
