//! Latent attention over keys of 656 bytes on Hopper, 64 rows: with A and B of the products swapped.
//!
//! Keys stay as they are in shared memory. They are the A operand: a warp reads fragments of numbers, converts them to f16 and
//! multiplies them by their scales in registers. Queries and weights are B, in shared memory. So Sᵀ = K·Qᵀ has a row for each
//! key, and Oᵀ = Vᵀ·Pᵀ one for each column of the values; nothing converted is ever stored.
//!
//! Two **consumers**, a warpgroup each, take blocks of 64 keys in turn for the logits, and have 256 columns of the values each:
//!
//! ```text
//! consumer 0   K₀·Q ─ weights 0 ─ V₀·P₀ left ─ K₂·Q ─ weights 2 ─ V₁·P₁, V₂·P₂ left ─ K₄·Q …
//!                          └───────────┐         ┌───────┘   └───────────┐
//! consumer 1   K₁·Q ────────────── weights 1 ─ V₀·P₀, V₁·P₁ right ─ K₃·Q ─ weights 3 …
//! ```
//!
//! f16 has not the range of scales, so a key's are divided by a power of two (`convert.rs`), and a row's query is multiplied
//! by one. Weights are relative to references that both consumers know; who finds a weight that is too large changes them
//! and says so to the other with the weights (`weigh.rs`). So weights are made one block after the other. Products with
//! values are not part of that chain: they wait until the weights of a consumer's next block have been handed over.
//!
//! A warpgroup **feeds**: a warp claims units and brings queries, three bring keys, 32 each.
//!
//! | shared memory | bytes |
//! |---|---|
//! | queries: 9 slabs of 64 columns, 64 rows each | 73,728 |
//! | weights of 3 blocks | 24,576 |
//! | keys: 6 places for 32, 656 bytes each | 125,952 |
//! | scales in f16 of 3 blocks | 1,536 |
//! | of rows: of two units who they are and references; powers of two, which keys they see, factors, what warps say | 5,888 |
//! | units, whether references grew, keys that are there | 152 |
//! | barriers | 168 |
//!
//! | mbarrier | arrivals | says |
//! |---|---|---|
//! | unit full (2) | 32 | what the unit is |
//! | unit free (2) | 352 | loaders and consumers are done with it |
//! | rows full (2) | 32 | who its rows are |
//! | queries full | 1 + bytes | queries are there |
//! | queries free | 256 | the last K·Qᵀ is done |
//! | ends soon | 1 | the next unit may be claimed |
//! | full (6) | 32 + bytes | the lanes of a loader; keys have come, and which are there |
//! | free (6) | 256 | the lanes of both consumers have read the keys of a place |
//!
//! | named barrier | threads | |
//! |---|---|---|
//! | 1, 2 | 256 | weights of consumer 0, 1 are there: the owner arrives, the other waits |
//! | 3, 4 | 128 | weights of a consumer's warps are there, and whether one is too large; where references change, what warps say |
//! | 5 to 8 | 256 | both consumers: queries; sums |

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
