//! Latent attention (MLA) for tiles of 16 rows on Hopper, over 656-byte keys: e.g. a GPU's 16 of 128 heads, with the
//! heads split over eight GPUs. It uses `mma.m16n8k16`, not wgmma.
//!
//! Keys stay unconverted in shared memory; the consumer warps convert the 8-bit numbers to f16 in registers. The eight
//! warps of a **team** share a block of 64 keys: for the logits each warp takes 8 keys, for P·V 64 columns of all keys.
//! Two warps form a **pair**: each multiplies half of the columns of the pair's 16 keys and hands its partner the
//! partial logits of the partner's 8 keys. So a fragment of the queries is read once for 16 keys. A team synchronises
//! once per block, for the weights. The 64 columns that only keys have (RoPE) are multiplied in bf16.
//!
//! Numbers are multiplied without their scales. Each key has one scale per group of 128 columns. It multiplies that
//! group's part of the logit, and the weight for that group's values: so a row has four weights per key.
//!
//! ```text
//! warp   keys → f16, Q·Kᵀ ─┬─ scale, softmax of 8 keys ─ load values ─┬─ (renew references) ─┬─ values → f16, P·V
//!                    pair barrier                          team barrier, overflow?     team barrier
//! ```
//!
//! Two teams take the blocks of a unit in turn; while one waits at its barrier, the other has work. Each team has a
//! partial state of its own; at the end of a unit they exchange halves of the rows and merge. In the producer warpgroup
//! one warp claims units, and three load 32 keys each in turn.
//!
//! | shared memory | bytes |
//! |---|---|
//! | keys: 8 places for 32, 656 bytes each | 167,936 |
//! | queries: 36 fragments of 16 rows × 16 columns | 18,432 |
//! | weights: 2 teams × 2 blocks × 4 groups of columns × 16 rows of 144 bytes | 36,864 |
//! | per warp and row of 2 teams: tops of 4 groups, largest logit, whether weights overflow; later sums | 6,144 |
//! | per row of 2 teams: shift and top of each group, state; per row: power of two | 1,600 |
//! | rows of two units, units, bits of existing keys | 640 |
//! | barriers | 152 |
//!
//! | mbarrier | arrivals | meaning |
//! |---|---|---|
//! | unit full (2) | 32 | the unit's description is written |
//! | unit free (2) | 608 | loaders and teams have finished with the unit |
//! | rows full (2) | 32 | the unit's rows are written |
//! | near end | 1 | the next unit may be claimed |
//! | full (8) | 32 + bytes | a loader's 32 keys, and the bits of those that exist, have arrived |
//! | free (4) | 256 | the lanes of a team have read a block (two places) |
//!
//! | named barrier | threads | |
//! |---|---|---|
//! | 1, 2 | 256 | when references are renewed: all warps of a team have stored their row maxima |
//! | 3, 4 | 256 | a team's weights are stored, with a vote whether to renew references; again after a renewal |
//! | 5 | 512 | both teams: queries; sums; halves of the rows |
//! | 6 to 13 | 64 | a pair's partial logits are stored |

mod config;
#[cfg(target_arch = "nvptx64")]
mod epilogue;
#[cfg(target_arch = "nvptx64")]
mod mainloop;
#[cfg(target_arch = "nvptx64")]
mod places;
#[cfg(target_arch = "nvptx64")]
mod queries;
#[cfg(target_arch = "nvptx64")]
mod renew;
#[cfg(target_arch = "nvptx64")]
mod shared;
#[cfg(target_arch = "nvptx64")]
mod weigh;

#[cfg(not(target_arch = "nvptx64"))]
pub use config::ROWS;

#[cfg(target_arch = "nvptx64")]
mod entries {
    use cuda_std::tma::TensorMap;

    use super::{
        config::{REGISTERS, THREADS, table},
        mainloop::consume,
        shared::Shared,
    };
    use crate::{
        abi::LatentParams,
        common::decode::produce::Header,
        sm90::mla::{keys_656::entries, load},
    };

    /// Queries are loaded without a tensor map.
    #[inline(always)]
    unsafe fn prefetch(_: *const TensorMap) {}

    /// See [`load::claim`]. The consumers load the queries themselves.
    #[inline(always)]
    unsafe fn claim<const STAGES: u32>(
        p: &LatentParams,
        _: *const TensorMap,
        s: Shared<STAGES>,
        first: Header,
    ) {
        // SAFETY: the caller's promise.
        unsafe { load::claim(p, s, first, |_, _| {}) };
    }

    table!(entries);
}
