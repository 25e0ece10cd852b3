//! Heads of 512 on Hopper: decodes, and prompts as decodes of many rows.
//!
//! Units are items × KV heads; a row is a query token and a query head of the KV head's group. The output of 64 rows
//! takes half of an SM's registers, so a CTA has the SM alone, and no warpgroup has room for logits beside its outputs.
//! One **weighs** (Q·Kᵀ, softmax), two **add** (P·V, half of the columns each), and one **produces**: a warp claims
//! units, one brings keys, one values.
//!
//! ```text
//! weighs   Q·K₁ ─────────────── Q·K₂ ─────────────── Q·K₃ …
//!          │ weights 0 ─┐       │ weights 1 ─┐
//! adds                  └ P₀·V₀ ─────────────└ P₁·V₁ ─────────────
//! ```
//!
//! The first half of a block's Q·Kᵀ runs while the block before is weighed, so the tensor cores always have something
//! of both products. Weights are relative to a reference that changes seldom; the warpgroup that weighs leaves the
//! factors for the outputs beside the weights.
//!
//! | shared memory | bytes |
//! |---|---|
//! | queries: 5 slabs of 64 columns, 64 rows each; 3 are in registers | 40,960 |
//! | keys: 6 pieces of 64 keys × 128 columns | 98,304 |
//! | values: 4 pieces of 16 keys × 512 columns | 65,536 |
//! | weights of two blocks | 16,384 |
//! | rows of two units, factors, barriers | 3,472 |

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
/// Blocks of a unit's keys that have not been asked for when the next unit is claimed. A CTA that claims early may take
/// what another CTA could have begun; one that claims late waits for ticket, item and queries.
const PREFETCH_DISTANCE: u32 = 3;

#[cfg(all(target_arch = "nvptx64", feature = "decode_wgmma"))]
mod entries {
    use cuda_std::{barrier, griddep, prelude::*, setmaxnreg, shared, thread, tma};

    use super::{
        add::add,
        config::{REGISTERS, THREADS, table},
        load::{claim, load_keys, load_values},
        shared::Shared,
        weigh::weigh,
    };
    use crate::{
        abi::DecodeParams,
        common::{half, variant::Standard},
    };

    macro_rules! entries {
        ($half:ident $element:literal { $(
            $rows:literal x $keys:literal, $dim:literal;
        )* }) => { $( const _: () = {
            /// See the module.
            ///
            /// # Safety
            /// The parameters describe memory as [`DecodeParams`] says.
            #[kernel(
                name = ["decode_", $rows, "x", $keys, "_d", $dim, "_", $element],
                max_threads = THREADS,
                min_blocks = 1,
                tensor_maps = maps
            )]
            pub unsafe fn entry(p: DecodeParams) {
                let variant = Standard::<false>(p.attention.variant);
                let s = Shared { base: shared::dynamic_shared_address() };
                let thread = thread::thread_idx_x();
                // SAFETY: the launch vouches for the parameters; warps and warpgroups have their roles as a whole.
                unsafe {
                    if thread < 2 {
                        tma::prefetch_tensor_map(maps.add(thread as usize));
                    }
                    s.init();
                    barrier::bar_sync(0, THREADS);
                    // The merging kernel may wait on SMs that this one has left.
                    griddep::launch_dependents();
                    match thread / 128 {
                        0 => {
                            setmaxnreg::decrease::<{ REGISTERS[0] }>();
                            match thread / 32 {
                                0 => load_keys(&p, maps, s),
                                1 => load_values(&p, maps.add(1), s),
                                2 => claim(&p, s),
                                _ => {}
                            }
                        }
                        1 => {
                            setmaxnreg::increase::<{ REGISTERS[1] }>();
                            weigh::<half::$half, _>(&p, &variant, s);
                        }
                        2 => {
                            setmaxnreg::increase::<{ REGISTERS[2] }>();
                            add::<half::$half, 0>(&p, s);
                            // A grid that waits for the end of this one relies on the end of the one before it, too.
                            griddep::wait();
                        }
                        _ => {
                            setmaxnreg::increase::<{ REGISTERS[2] }>();
                            add::<half::$half, 1>(&p, s);
                            griddep::wait();
                        }
                    }
                }
            }
        }; )* };
    }

    table!(items entries);
}
