//! Latent attention of few rows on Hopper: 16 of them, as one GPU has of a model's 128 heads when eight share it.
//!
//! Keys of 656 bytes stay as they are in shared memory. Each key is converted once, in the registers of the warps that multiply:
//! a warp has 64 of its 512 columns and 8 of those 64 that only keys have, and takes the same registers for Q·Kᵀ and,
//! transposed by `movmatrix`, for P·V. So the eight warps of a **team** each have a part of every logit, and all of
//! their columns' output.
//!
//! ```text
//! warp      keys → bf16, Q·Kᵀ of its columns ┐            ┌ Kᵀ    ┐             ┌ P·V of its columns
//! team                                       └ sum, weigh ┴ store ┴ rescale ────┘
//!                                       logits ready          weights ready
//! ```
//!
//! Two teams take the blocks of a unit in turn; what one waits for at its barriers the other fills. Each has a state of
//! its own, and at the end of a unit they exchange halves of the rows. A warpgroup **feeds**: a warp claims units, three
//! bring keys, a block each.
//!
//! | shared memory | bytes |
//! |---|---|
//! | keys: 8 blocks of 32, 656 bytes each | 167,936 |
//! | logits: of 2 teams and 8 warps, 16 × 32 in f32 | 32,768 |
//! | weights: of 2 teams, 16 rows of 80 bytes | 2,560 |
//! | factors, states, rows of two units, units, keys that are there | 1,024 |
//! | barriers | 184 |
//!
//! | mbarrier | arrivals | says |
//! |---|---|---|
//! | unit full (2) | 32 | what the unit is |
//! | unit free (2) | 608 | loaders and teams are done with it |
//! | rows full (2) | 32 | who its rows are |
//! | ends soon | 1 | the next unit may be claimed |
//! | full (8) | 129 | a loader's lanes' copies, 8 keys at a time, and which keys are there |
//! | free (8) | 256 | the lanes of a team have the keys in registers |
//!
//! | named barrier | threads | |
//! |---|---|---|
//! | 1, 2 | 256 | all parts of a team's logits are there |
//! | 3, 4 | 256 | its weights and factors are there |
//! | 5 | 512 | both teams: states; halves; halves are read |

mod config;
#[cfg(target_arch = "nvptx64")]
mod epilogue;
#[cfg(target_arch = "nvptx64")]
mod load;
#[cfg(target_arch = "nvptx64")]
mod mainloop;
#[cfg(target_arch = "nvptx64")]
mod shared;

#[cfg(not(target_arch = "nvptx64"))]
pub use config::ROWS;

#[cfg(target_arch = "nvptx64")]
mod entries {
    use cuda_std::{barrier, griddep, prelude::*, setmaxnreg, shared, thread};

    use super::{
        config::{FEEDERS, REGISTERS, THREADS, table},
        load::load,
        mainloop::consume,
        shared::Shared,
    };
    use crate::{abi::LatentParams, common::variant::Standard, sm90::mla::load::claim};

    macro_rules! entries {
        ($half:ident $element:literal {
            $($kind:literal $rows:literal x $keys:literal in $stages:literal;)*
        }) => { $( const _: () = {
            /// See the module.
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
                let _ = maps;
                let variant = Standard::<false>(p.attention.variant);
                let s = Shared::<$stages> { base: shared::dynamic_shared_address() };
                let warp = thread::thread_idx_x() / 32;
                // SAFETY: the launch vouches for the parameters; warps and warpgroups have their roles as a whole.
                unsafe {
                    s.init();
                    barrier::bar_sync(0, THREADS);
                    // The merging kernel may wait on SMs that this one has left.
                    griddep::launch_dependents();
                    if warp < FEEDERS / 32 {
                        setmaxnreg::decrease::<{ REGISTERS[0] }>();
                        match warp {
                            0 => claim(&p, s, |_, _| {}),
                            _ => load(&p, s, warp - 1),
                        }
                    } else {
                        setmaxnreg::increase::<{ REGISTERS[1] }>();
                        consume(&p, &variant, s);
                        // Whoever waits for this group waits for the one before it, too.
                        griddep::wait();
                    }
                }
            }
        }; )* };
    }

    table!(entries);
}
