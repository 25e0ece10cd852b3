//! Latent attention (MLA) over 656-byte keys on Hopper, for tiles of 64 rows, with the operands A and B of wgmma
//! swapped.
//!
//! Keys stay unconverted in shared memory. They are the A operand: a warp reads fragments of 8-bit numbers, converts
//! them to f16 and multiplies them by their scales in registers. Queries and weights are the B operand, in shared
//! memory. So Sᵀ = K·Qᵀ has one row per key, and Oᵀ = Vᵀ·Pᵀ one row per column of the values. No converted key is ever
//! stored.
//!
//! Two **consumer** warpgroups own blocks of 64 keys alternately for the logits; each computes 256 columns of the
//! outputs:
//!
//! ```text
//! consumer 0   K₀·Q ─ weights 0 ─ V₀·P₀ left ─ K₂·Q ─ weights 2 ─ V₁·P₁, V₂·P₂ left ─ K₄·Q …
//!                          └───────────┐         ┌───────┘   └───────────┐
//! consumer 1   K₁·Q ────────────── weights 1 ─ V₀·P₀, V₁·P₁ right ─ K₃·Q ─ weights 3 …
//! ```
//!
//! f16 lacks the range of the scales, so a key's scales are divided by a power of two (`convert.rs`), and a row's query
//! is multiplied by one. Weights are relative to references that both consumers share. A consumer that finds a weight
//! too large changes them and passes them on with the weights (`weigh.rs`), so weights are computed strictly block by
//! block. P·V is not on that critical path: a consumer delays it until it has handed over the weights of its next
//! block.
//!
//! In the producer warpgroup one warp claims units and loads queries, and three load 32 keys each in turn.
//!
//! | shared memory | bytes |
//! |---|---|
//! | queries: 9 slabs of 64 columns, 64 rows each | 73,728 |
//! | weights of 3 blocks | 24,576 |
//! | keys: 6 places for 32, 656 bytes each | 125,952 |
//! | scales in f16 of 3 blocks | 1,536 |
//! | per row: `QueryRow` and reference of two units; power of two, visible keys, factors, maxima and sums | 5,888 |
//! | units, whether references grew, bits of existing keys | 152 |
//! | barriers | 168 |
//!
//! | mbarrier | arrivals | meaning |
//! |---|---|---|
//! | unit full (2) | 32 | the unit's description is written |
//! | unit free (2) | 352 | loaders and consumers have finished with the unit |
//! | rows full (2) | 32 | the unit's rows are written |
//! | queries full | 1 + bytes | the queries have arrived |
//! | queries free | 256 | the last K·Qᵀ is done |
//! | near end | 1 | the next unit may be claimed |
//! | full (6) | 32 + bytes | a loader's 32 keys, and the bits of those that exist, have arrived |
//! | free (6) | 256 | the lanes of both consumers have read the keys of a place |
//!
//! | named barrier | threads | |
//! |---|---|---|
//! | 1, 2 | 256 | weights of consumer 0, 1 are stored: the owner arrives, the other waits |
//! | 3, 4 | 128 | the warps of a consumer: weights stored, with a vote whether one is too large; maxima; references |
//! | 5 | 256 | both consumers: queries are converted; sums are stored |

mod config;
#[cfg(target_arch = "nvptx64")]
mod convert;
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
    use cuda_std::{
        thread,
        tma::{self, TensorMap},
    };

    use super::{
        config::{REGISTERS, THREADS, table},
        mainloop::consume,
        shared::Shared,
    };
    use crate::sm90::mla::{keys_656::entries, load::claim_with_queries as claim};

    #[inline(always)]
    unsafe fn prefetch(maps: *const TensorMap) {
        if thread::thread_idx_x() == 0 {
            // SAFETY: the map is a parameter of the kernel.
            unsafe { tma::prefetch_tensor_map(maps) };
        }
    }

    table!(entries);
}
