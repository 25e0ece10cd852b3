//! Latent attention of few rows on Hopper: 16 of them, as one GPU has of a model's 128 heads when eight share it.
//!
//! Keys of 656 bytes stay as they are in shared memory. Their numbers are converted to f16 in the registers of the warps
//! that multiply. The eight warps of a **team** share a block of 64 keys: for the logits each has 8 keys, for P·V 64 columns of
//! all keys. Two warps are a **pair**: each multiplies half of the columns of both's 16 keys and hands over what belongs to
//! the other's, so that a fragment of the queries is read once for 16 keys. A team meets once a block, for the weights. The 64
//! columns that only keys have are multiplied in bf16.
//!
//! Numbers are multiplied without their scales. 128 columns have one scale in each key; it multiplies their part of the
//! logit, and the weight that the values are multiplied by. So a row has four weights of a key.
//!
//! ```text
//! warp   16 keys → f16, Q·Kᵀ of half of the columns ─┬─ times scales, weigh 8 keys ─ read values ─┬─ (renew references) ─┬─ values → f16, P·V of 64 columns
//!                                              parts of logits                weights ready, do they fit?      weights are made anew
//! ```
//!
//! Two teams take the blocks of a unit in turn; what one waits for at its barrier the other fills. Each has a state of
//! its own, and at the end of a unit they exchange halves of the rows. A warpgroup **feeds**: a warp claims units, three
//! bring keys, 32 each.
//!
//! | shared memory | bytes |
//! |---|---|
//! | keys: 8 places for 32, 656 bytes each | 167,936 |
//! | queries: 36 fragments of 16 rows × 16 columns | 18,432 |
//! | weights: of 2 teams and 2 blocks, of 4 groups of columns 16 rows of 144 bytes | 36,864 |
//! | what 8 warps say of 2 teams' rows: tops of 4 groups, the largest logit, whether weights fit; sums | 6,144 |
//! | of 2 teams' rows: shifts and tops of each group; states; of rows: powers of two | 1,600 |
//! | rows of two units, units, keys that are there | 640 |
//! | barriers | 152 |
//!
//! | mbarrier | arrivals | says |
//! |---|---|---|
//! | unit full (2) | 32 | what the unit is |
//! | unit free (2) | 608 | loaders and teams are done with it |
//! | rows full (2) | 32 | who its rows are |
//! | ends soon | 1 | the next unit may be claimed |
//! | full (8) | 32 | the lanes of a loader; keys have come, and which are there |
//! | free (4) | 256 | the lanes of a team have read a block, which is two places |
//!
//! | named barrier | threads | |
//! |---|---|---|
//! | 1, 2 | 256 | it is known what all warps of a team say of its rows, where references are renewed |
//! | 3, 4 | 256 | weights are there, and whether references are to be renewed; weights that were made anew |
//! | 5 | 512 | both teams: queries; states; halves |
//! | 6 to 13 | 64 | a pair's parts of logits are there |

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
        sm90::mla::{keys_656::entries, load},
    };

    /// Queries come without a tensor map.
    #[inline(always)]
    unsafe fn prefetch(_: *const TensorMap) {}

    /// See [`load::claim`]; who computes brings the queries.
    #[inline(always)]
    unsafe fn claim<const STAGES: u32>(p: &LatentParams, _: *const TensorMap, s: Shared<STAGES>) {
        // SAFETY: the caller's promise.
        unsafe { load::claim(p, s, |_, _| {}) };
    }

    table!(entries);
}
