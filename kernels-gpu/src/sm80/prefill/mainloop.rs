//! The main loop: claims tiles by ticket, and walks a tile's blocks from the last to the first.

use cuda_std::{async_copy, barrier, prelude::*};

use super::{
    epilogue::finish,
    factors::{load_factors, scales_of_rows, store_factors},
    load,
    products::{Lane, queries_keys, weights_values},
    tile::{Shared, describe},
};
use crate::{
    abi::GatherPrefillParams,
    common::{
        half::Half,
        logits::{hide_after, hide_before, hide_masked, mask, transform},
        prefill_tile::Tile,
        softmax::Rows,
        variant::{Hook, Variant},
    },
};

const WARP: u32 = warp::FULL_MASK;

/// Works until no unit is left.
///
/// # Safety
/// All threads of the CTA come here; the parameters describe memory as [`GatherPrefillParams`] says.
#[inline(always)]
pub(super) unsafe fn work<
    T: Half,
    V: Variant,
    const S: usize,
    const O: usize,
    const HALVES: usize,
    const GENERAL: bool,
>(
    p: &GatherPrefillParams,
    variant: &V,
    s: Shared,
) {
    let a = &p.attention;
    // SAFETY: one thread claims the next unit; the others read it after a barrier.
    unsafe {
        let set_next = |unit| {
            if thread::thread_idx_x() == 0 {
                shared::store_u32(s.next(), unit);
            }
        };
        set_next(thread::block_idx_x());
        loop {
            thread::sync_threads();
            let unit = shared::load_u32(s.next());
            if unit >= a.units {
                break;
            }
            attend_as::<T, V, S, O, HALVES, GENERAL>(p, variant, s, unit, || {
                if thread::thread_idx_x() == 0 {
                    shared::store_u32(s.next(), thread::grid_dim_x() + a.ticket());
                }
            });
        }
    }
}

/// The keys that a warp's rows see. Kept in shared memory: it is read only once per block.
struct Seen {
    /// The first and the last key that any row sees, and that every row sees.
    any: (i32, i32),
    every: (i32, i32),
}

impl Seen {
    #[inline(always)]
    fn new<V: Variant>(
        p: &GatherPrefillParams,
        variant: &V,
        tile: &Tile,
        [first_row, last_row]: [u32; 2],
    ) -> Self {
        // Positions grow with the row, and the visible range with the position.
        let low = tile.sees(&p.pack, variant, first_row);
        // SAFETY: one of the launch's tokens.
        let limit = unsafe { p.attention.limit_of_tokens(tile.token, tile.position) };
        let high = tile.sees(&p.pack, variant, last_row);
        Self {
            any: (
                low.0,
                if first_row < tile.rows {
                    high.1
                } else {
                    i32::MIN
                },
            ),
            every: (high.0, p.attention.seen_by_all(low.1, limit)),
        }
    }

    #[inline(always)]
    unsafe fn store(&self, at: u32) {
        let words = [self.any.0, self.any.1, self.every.0, self.every.1];
        // SAFETY: only this warp accesses it.
        unsafe { shared::store_u32x4(at, words.map(|word| word as u32)) };
    }

    #[inline(always)]
    unsafe fn load(at: u32) -> Self {
        // SAFETY: it was stored.
        let [a, b, c, d] = unsafe { shared::load_u32x4(at) }.map(|word| word as i32);
        Self {
            any: (a, b),
            every: (c, d),
        }
    }
}

/// Computes one unit in a kernel that is not general, with 32 rows per warp; `meanwhile` runs while its first keys are being
/// copied.
///
/// # Safety
/// As [`attend_as`].
#[inline(always)]
pub(in super::super) unsafe fn attend<T: Half, V: Variant, const S: usize, const O: usize>(
    p: &GatherPrefillParams,
    variant: &V,
    s: Shared,
    unit: u32,
    meanwhile: impl FnOnce(),
) {
    // SAFETY: the caller's promise.
    unsafe { attend_as::<T, V, S, O, 2, false>(p, variant, s, unit, meanwhile) }
}

/// Computes one unit; `meanwhile` runs while its first keys are being copied.
///
/// # Safety
/// All threads of the CTA come here, and no others use its shared memory. The unit is one of the launch's.
#[inline(always)]
unsafe fn attend_as<
    T: Half,
    V: Variant,
    const S: usize,
    const O: usize,
    const HALVES: usize,
    const GENERAL: bool,
>(
    p: &GatherPrefillParams,
    variant: &V,
    s: Shared,
    unit: u32,
    meanwhile: impl FnOnce(),
) {
    let lane = Lane::new();
    let keys = s.shape.keys as i32;
    let scale = if V::TRANSFORMS_LOGITS && !V::KEEPS_UNIT {
        1.0
    } else {
        variant.unit().plain()
    };
    let two_blocks = s.shape.ring() == 2;
    let mut o = [[0.0; O]; HALVES];
    let mut rows = [Rows::begin::<V>(); HALVES];
    // SAFETY: whole warps; addresses are the plan's. Before a block is read, this thread's copies are waited for, and
    // at a barrier those of the other warps. Before it is overwritten, all warps have read it.
    unsafe {
        let tile = describe(p, variant, s.shape, unit);
        let (_, warp) = load::here();
        if thread::thread_idx_x() == 0 {
            tile.store(s.tile());
        }
        if GENERAL {
            store_factors::<V>(p, s, &tile, scale);
        }
        thread::sync_threads();
        let first_row = warp * s.shape.warp_rows();
        let of_warp = [first_row, first_row + s.shape.warp_rows() - 1];
        Seen::new(p, variant, &tile, of_warp).store(s.seen(warp));
        let mut begin = tile.end as i32 - keys;
        let mut left = tile.blocks;
        // The current block's keys, its values, and the free block. With two blocks there is no free one.
        let mut ring = [s.ring(0), s.ring(1), s.ring(2 % s.shape.ring())];
        let mut found = load::look_up(p, s, begin);
        load::queries(p, s, &tile);
        if left > 0 {
            load::block::<false, GENERAL>(p, s, found, begin, ring[0]);
            if !two_blocks {
                async_copy::commit_group();
                load::block::<true, GENERAL>(p, s, found, begin, ring[1]);
            }
        }
        async_copy::commit_group();
        if !two_blocks {
            found = load::look_up(p, s, begin - keys);
        }
        meanwhile();

        while left > 0 {
            let more = left > 1;
            if two_blocks {
                async_copy::wait_group::<0>();
                thread::sync_threads();
                load::block::<true, GENERAL>(p, s, found, begin, ring[1]);
                found = load::look_up(p, s, begin - keys);
            } else {
                async_copy::wait_group::<1>();
                thread::sync_threads();
                if more {
                    load::block::<false, GENERAL>(p, s, found, begin - keys, ring[2]);
                }
            }
            async_copy::commit_group();
            macro_rules! next_values {
                () => {
                    if two_blocks {
                        async_copy::wait_group::<0>();
                    } else {
                        async_copy::wait_group::<1>();
                    }
                    // Warps reach this barrier at two places in the code, which the aligned form does not allow.
                    barrier::barrier_sync(0, s.shape.threads());
                    if two_blocks {
                        if more {
                            load::block::<false, GENERAL>(p, s, found, begin - keys, ring[0]);
                        }
                    } else if more {
                        load::block::<true, GENERAL>(p, s, found, begin - keys, ring[0]);
                        found = load::look_up(p, s, begin - 2 * keys);
                    }
                    async_copy::commit_group();
                };
            }
            let seen = Seen::load(s.seen(warp));
            let last = begin + keys - 1;
            if warp::warp_vote_any(WARP, begin <= seen.any.1 && last >= seen.any.0) {
                let mut logits = [[0.0; S]; HALVES];
                queries_keys::<T, S, HALVES>(&mut logits, s, lane, ring[0]);
                if V::TRANSFORMS_LOGITS
                    || V::MASKS
                    || warp::warp_vote_any(WARP, last > seen.every.1 || begin < seen.every.0)
                {
                    // What the rows see is recomputed instead of kept in registers.
                    finish_logits::<V, S, HALVES, GENERAL>(p, variant, s, &mut logits, begin);
                }
                let scales = scales_of_rows::<V, HALVES, GENERAL>(s, scale);
                let mut half = 0;
                while half < HALVES {
                    let (grew, factors) = rows[half].rescale::<V, S>(&logits[half], scales[half]);
                    if grew {
                        let mut i = 0;
                        while i < O {
                            o[half][i] *= factors[i / 2 % 2];
                            i += 1;
                        }
                    }
                    half += 1;
                }
                next_values!();
                // Read again for each 16 keys: there are no registers to keep them.
                let scales = || scales_of_rows::<V, HALVES, GENERAL>(s, scale);
                weights_values::<T, V, S, O, HALVES>(
                    &mut o, &logits, &mut rows, scales, s, lane, ring[1],
                );
            } else {
                next_values!();
            }
            if !two_blocks {
                ring = [ring[2], ring[0], ring[1]];
            }
            begin -= keys;
            left -= 1;
        }
        async_copy::wait_all();
        finish::<T, V, O, HALVES, GENERAL>(p, s, &o, &rows, scale);
    }
}

/// Turns accumulators into logits: applies the variant and the mask.
#[inline(always)]
unsafe fn finish_logits<V: Variant, const S: usize, const HALVES: usize, const GENERAL: bool>(
    p: &GatherPrefillParams,
    variant: &V,
    s: Shared,
    logits: &mut [[f32; S]; HALVES],
    begin: i32,
) {
    // SAFETY: the tile's description stays while the tile is computed.
    let tile = unsafe { Tile::load(s.tile()) };
    let (lane, warp) = load::here();
    let first = warp * s.shape.warp_rows() + lane / 4;
    if GENERAL && V::TRANSFORMS_LOGITS {
        // SAFETY: the factors stay while the tile is computed.
        let factors = unsafe { load_factors::<HALVES>(s) };
        let mut half = 0;
        while half < HALVES {
            let mut i = 0;
            while i < S {
                logits[half][i] *= factors[half][i / 2 % 2];
                i += 1;
            }
            half += 1;
        }
    }
    let mut half = 0;
    while half < HALVES {
        let of = [0, 8].map(|further| first + 16 * half as u32 + further);
        let at = of.map(|row| tile.query(&p.pack, variant, row));
        if V::TRANSFORMS_LOGITS {
            transform(&mut logits[half], variant, begin, at);
        }
        let seen = of.map(|row| tile.sees(&p.pack, variant, row));
        if V::MASKS {
            mask(&mut logits[half], variant, begin, at);
        }
        hide_before(&mut logits[half], begin, [seen[0].0, seen[1].0]);
        hide_after(&mut logits[half], begin, [seen[0].1, seen[1].1]);
        // Opaque, here and below: otherwise derived values occupy registers all the time.
        let masks = p.attention.key_masks();
        if masks.any_here() {
            // Rows past the end count as the last token's.
            let last = p.pack.div(tile.rows - 1);
            let begin = misc::opaque(begin as u32) as i32;
            let row = |h: usize| {
                let token = p.pack.div(misc::opaque(of[h])).min(last);
                // SAFETY: a token of the launch.
                let mask = unsafe { masks.of(tile.token + token) };
                (tile.position + token as i32, mask)
            };
            // SAFETY: whole warps.
            unsafe { hide_masked(&mut logits[half], begin, row, true) };
        }
        half += 1;
    }
}
