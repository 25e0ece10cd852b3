//! Latent attention (MLA) on Hopper: one KV head of dimension 576, whose values are the first 512 columns of the keys.
//!
//! A unit is an item × a tile of 64 rows; a row is a query token and a query head. The f32 output of 64 rows takes half
//! of an SM's registers. So one CTA runs per SM, and its two **consumer** warpgroups split the output by columns. They
//! own blocks of 32 or 48 keys alternately. The owner of a block computes its weights and multiplies them with its own
//! half of the values; the other consumer reads the weights from shared memory for the other half.
//!
//! ```text
//! consumer 0   Q·K₀ ─ weights 0 ─ P₀·V₀ left ────── Q·K₂ ─ P₁·V₁ left, weights 2 ─ P₂·V₂ left …
//!                          └──────────┐                      ┌──┘
//! consumer 1          Q·K₁ ── P₀·V₀ right, weights 1 ─ P₁·V₁ right ── Q·K₃ …
//! ```
//!
//! Weights are relative to a reference that both consumers share. It changes rarely; the consumer that changes it
//! passes the new reference on with the weights. In the producer warpgroup, the scheduler warp claims units and loads
//! queries, and two loader warps load the left and the right half of the keys, each half as soon as its stage is free.
//!
//! | shared memory | bytes |
//! |---|---|
//! | queries: 9 slabs of 64 columns, 64 rows each | 73,728 |
//! | keys: 4 blocks of 32, 4 slabs (left) and 5 (right) each | 147,456 |
//! | with blocks of 48: queries, 7 slabs | 57,344 |
//! | keys: 3 blocks of 48 | 165,888 |
//! | rows of two units, references, factors, sums, barriers | 4,424 |
//!
//! The weights of a block overwrite its last slab, which is part of the keys but not of the values. In the pool this slab
//! follows the values, or it has a pool of its own (`apart` in the parameters). Only loaders see the difference.
//!
//! Pages of a multiple of 8 tokens are loaded by TMA; for others a second kernel copies key by key with `cp.async`.
//! Where a launch has rows of two items, each with a part of their keys, kernels stand in that merge these from registers: `pieces.rs`.
//! Tiles of up to 32 rows have kernels of their own: [`few_rows`]; their entries are made as those here, in `keys_16.rs`.
//! So do keys of 656 bytes (8-bit numbers with scales): [`swap_ab`], and [`narrow`] for few rows, with shared parts in
//! `keys_656.rs`. What [`few_rows`] and [`swap_ab`] share is in `swapped.rs`.

mod config;
#[cfg(target_arch = "nvptx64")]
mod epilogue;
pub mod few_rows;
mod keys_16;
mod keys_656;
#[cfg(target_arch = "nvptx64")]
mod load;
#[cfg(target_arch = "nvptx64")]
mod mainloop;
pub mod narrow;
#[cfg(target_arch = "nvptx64")]
mod pieces;
#[cfg(target_arch = "nvptx64")]
mod products;
#[cfg(target_arch = "nvptx64")]
mod shared;
pub mod swap_ab;
#[cfg(target_arch = "nvptx64")]
mod swapped;
#[cfg(target_arch = "nvptx64")]
mod visible;

#[cfg(not(target_arch = "nvptx64"))]
pub use config::ROWS;

#[cfg(target_arch = "nvptx64")]
/// Blocks of a unit's keys still to be loaded when the next unit is claimed. A CTA that claims too early may take a
/// unit that another CTA could have started sooner; one that claims too late waits for ticket, item and rows.
const PREFETCH_DISTANCE: u32 = 6;

#[cfg(target_arch = "nvptx64")]
mod entries {
    use cuda_std::setmaxnreg;

    use super::{
        config::{REGISTERS, THREADS, table},
        keys_16::{Keys, entries},
        load::{Share, claim_with_queries, load, load_rows, load_rows_of_two},
        mainloop::consume,
        shared::{Half, Shared},
    };
    use crate::abi::LatentParams;

    type SharedOf<const ROWS: u32, const KEYS: u32, const STAGES: u32> = Shared<KEYS, STAGES>;

    /// The warp that claims units.
    const SCHEDULER: u32 = 2;

    #[inline(always)]
    const fn maps_of(p: &LatentParams) -> u32 {
        3 + p.apart
    }

    /// Keys of a block whose left half one warp copies, in groups of 8: three quarters of 4 slabs.
    const fn left(keys: u32) -> u32 {
        keys * 3 / 4 / 8 * 8
    }

    /// The same of the right half: two thirds of 5 slabs. Its last slab may be copied in a second pass, whose copies arrive with
    /// every other 8 keys.
    const fn right(keys: u32) -> u32 {
        let first = keys * 2 / 3 / 8 * 8;
        assert!(first.is_multiple_of(16) && keys.is_multiple_of(16));
        first
    }

    macro_rules! produce {
        ($warp:expr, $loads:expr, $keys:literal; $p:ident, $variant:ident, $maps:ident, $s:ident, $first:ident) => {
            setmaxnreg::decrease::<{ REGISTERS[0] }>();
            match ($warp, $loads) {
                (SCHEDULER, _) => claim_with_queries(&$p, $maps, $s, $first),
                (0, Keys::Pages) => load(&$p, $maps, Half::<false, _, _>($s)),
                (1, Keys::Pages) => load(&$p, $maps, Half::<true, _, _>($s)),
                // Three warps: two have the most of one half, the third has what is left of both.
                (0, Keys::Rows) => load_rows(
                    &$p,
                    Share::new(Half::<false, _, _>($s), 0, [0, left($keys)]),
                ),
                (1, Keys::Rows) => load_rows(
                    &$p,
                    Share::new(Half::<true, _, _>($s), 0, [0, const { right($keys) }]),
                ),
                (3, Keys::Rows) => load_rows_of_two(
                    &$p,
                    Share::new(Half::<false, _, _>($s), 0, [left($keys), $keys]),
                    Share::new(Half::<true, _, _>($s), 0, [const { right($keys) }, $keys]),
                ),
                _ => {}
            }
        };
    }

    table!(items entries);
}
