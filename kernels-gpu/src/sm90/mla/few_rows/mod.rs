//! Latent attention (MLA) on Hopper over 16-bit keys, for tiles of few rows, with the operands A and B of wgmma swapped.
//!
//! Keys are the A operand, so no instruction is padded to 64 rows: Sᵀ = K·Qᵀ has one row per key, and Oᵀ = Vᵀ·Pᵀ one
//! row per column of the values. Queries and weights are the B operand. All operands are in shared memory.
//!
//! Two **consumer** warpgroups own blocks of 64 keys alternately for the logits; each computes 256 columns of the
//! outputs. Both run the same code:
//!
//! ```text
//! consumer 0   K₀·Q ─ weights 0 ─ V₀·P₀ left ─────────────────── V₁·P₁ left ─ K₂·Q ─ weights 2 ─ V₂·P₂ left …
//!                          └──────────┐                       ┌───────┘                  └──────────┐
//! consumer 1                     V₀·P₀ right ─ K₁·Q ─ weights 1 ─ V₁·P₁ right ───────────────── V₂·P₂ right …
//! ```
//!
//! Weights are relative to references that both consumers share (`swapped.rs`).
//!
//! A block is loaded as three parts of 192 columns. Each has a stage of its own, and the logits begin with the first
//! part that arrives. In the producer warpgroup one warp claims units and loads queries, and one loads keys by TMA. For
//! pages that no tensor map describes, a second kernel has three loaders; each copies one part of every block key by
//! key. Of 16 rows a third and a fourth merge pieces of the same rows from registers (`pieces.rs`).
//!
//! | shared memory | bytes, 16 rows | 32 rows |
//! |---|---|---|
//! | keys: 8 stages (7 with 32 rows) for 64 keys × 192 columns | 196,608 | 172,032 |
//! | queries: 9 slabs of 64 columns × all rows | 18,432 | 36,864 |
//! | weights of 3 blocks | 6,144 | 12,288 |
//! | `QueryRow`, visible keys and reference of each row of two units | 896 | 1,792 |
//! | factors, maxima and sums of each row | 1,152 | 2,304 |
//! | units, whether references grew | 128 | 128 |
//! | barriers | 200 | 184 |
//!
//! | mbarrier | arrivals | meaning |
//! |---|---|---|
//! | unit full (2) | 32 | the unit's description is written |
//! | unit free (2) | 288; 352 if keys are copied one by one | loaders and consumers have finished with the unit |
//! | rows full (2) | 32 | the unit's rows are written |
//! | queries full | 32 + bytes | the queries have arrived; visible keys and references are stored |
//! | queries free | 8 | the last K·Qᵀ of both consumers is done |
//! | near end | 1 | the next unit may be claimed |
//! | full (8 or 7) | 1 + bytes; 256 if keys are copied one by one | a part has arrived |
//! | free (8 or 7) | 8 | the warps of both consumers have multiplied a block's values |
//!
//! | named barrier | threads | |
//! |---|---|---|
//! | 1, 2 | 256 | weights of consumer 0, 1 are stored: the owner arrives, the other waits |
//! | 3, 4 | 128 | the warps of a consumer: weights stored, with a vote whether one is too large; maxima; references |
//! | 5 | 256 | both consumers: sums are stored |

mod config;
#[cfg(target_arch = "nvptx64")]
mod epilogue;
#[cfg(target_arch = "nvptx64")]
mod mainloop;
#[cfg(target_arch = "nvptx64")]
mod pieces;
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
    use super::{
        config::{THREADS, table},
        mainloop::consume,
        queries::claim_rows,
        shared::Shared,
    };
    use crate::{
        abi::LatentParams,
        sm90::mla::{
            keys_16::{Keys, entries},
            load::{Share, load, load_rows},
        },
    };

    type SharedOf<const ROWS: u32, const KEYS: u32, const STAGES: u32> = Shared<ROWS, STAGES>;

    /// The warp that claims units.
    const SCHEDULER: u32 = 0;

    #[inline(always)]
    const fn maps_of(p: &LatentParams) -> u32 {
        2 + 2 * p.apart
    }

    macro_rules! produce {
        ($warp:expr, $loads:expr, $keys:literal; $p:ident, $variant:ident, $maps:ident, $s:ident, $first:ident) => {
            match ($warp, $loads) {
                (SCHEDULER, _) => claim_rows(&$p, &$variant, $maps, $s, $first),
                (1, Keys::Pages) => load(&$p, $maps, $s),
                (_, Keys::Pages) => {}
                // Each of three warps copies one part of every block.
                (warp, Keys::Rows) => load_rows(&$p, Share::new($s, warp - 1, [0, $keys])),
            }
        };
    }

    table!(items entries);
}
