//! What a warpgroup that computes knows of its tile, and what becomes of its logits.

use cuda_std::{misc, prelude::*};

use super::{super::uniform, shared::Shared};
use crate::{
    abi::PrefillParams,
    common::prefill_tile::Tile,
    common::softmax::{Shift, hide_after, hide_before, hide_strangers_from, lean, mask, transform},
    common::variant::{Pair, Variant},
};

/// What a consumer knows of its tile.
pub(super) struct Work {
    /// Shared address of its 64 rows of queries.
    pub(super) queries: u32,
    /// First key of the block at hand, blocks left (this one included), blocks it need not look at.
    pub(super) begin: i32,
    pub(super) left: u32,
    pub(super) skipped: u32,
    /// The first and the last key that all 64 rows see.
    pub(super) all_see: (i32, i32),
}

impl Work {
    #[inline(always)]
    pub(super) unsafe fn open<V: Variant, const EXTRAS: bool>(
        p: &PrefillParams,
        variant: &V,
        s: Shared,
        stage: u32,
        consumer: u32,
    ) -> Self {
        // SAFETY: the tile's barrier completed; whole warps.
        let tile = unsafe { Tile::load(s.tile(stage)) };
        // Opaque: or what rows have to do with tokens takes registers in the main loop.
        let first = misc::opaque(64 * consumer);
        // Positions grow with the row, and what is seen with the position.
        let (_, mut least) = tile.sees(&p.pack, variant, first);
        if EXTRAS {
            least = p.attention.seen_by_all(least);
        }
        let (most_first, most) = tile.sees(&p.pack, variant, first + 63);
        let keys = s.shape.keys as i32;
        let mut begin = tile.end as i32 - keys;
        let mut left = tile.blocks;
        let mut skipped = 0;
        while left > 1 && begin > most {
            begin -= keys;
            left -= 1;
            skipped += 1;
        }
        // SAFETY: whole warps; all 64 rows agree on these.
        unsafe {
            Self {
                queries: s.queries(stage) + consumer * 64 * 128,
                begin: uniform(begin as u32) as i32,
                left: uniform(left),
                skipped: uniform(skipped),
                all_see: (
                    uniform(most_first as u32) as i32,
                    uniform(least as u32) as i32,
                ),
            }
        }
    }
}

/// The rows of a thread in its tile.
#[inline(always)]
pub(super) fn rows_of_thread() -> [u32; 2] {
    let first = (thread::thread_idx_x() - 128) / 32 * 16 + warp::lane_id() / 4;
    [first, first + 8]
}

/// From accumulators of a block to logits: the variant's and the mask. `of` says whose the thread's rows are,
/// `of_products` what their products are multiplied by, if
/// that is not 1.
///
/// # Safety
/// A whole warp that computes comes here; the stage holds its tile.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
pub(super) unsafe fn finish_logits<V: Variant, const EXTRAS: bool, const S: usize>(
    p: &PrefillParams,
    variant: &V,
    s: Shared,
    stage: u32,
    work: &Work,
    logits: &mut [f32; S],
    of: [Pair; 2],
    of_products: Option<[f32; 2]>,
) -> Shift {
    let last = work.begin + s.shape.keys as i32 - 1;
    let after = last > work.all_see.1;
    let before = work.begin < work.all_see.0;
    let mut shift = None;
    if V::TRANSFORMS_LOGITS {
        if let Some(of_products) = of_products {
            let mut i = 0;
            while i < S {
                logits[i] *= of_products[i / 2 % 2];
                i += 1;
            }
        }
        if V::LINEAR {
            shift = Some(lean(logits, work.begin, of));
        } else {
            transform(logits, variant, work.begin, of);
        }
    }
    if V::MASKS || after || before {
        // Seldom: what the rows see is computed again rather than kept in registers.
        // SAFETY: the caller's promise.
        let tile = unsafe { Tile::load(s.tile(stage)) };
        let rows = rows_of_thread();
        let seen = rows.map(|row| tile.sees(&p.pack, variant, row));
        if V::MASKS {
            mask(logits, variant, work.begin, of);
        }
        if after {
            hide_after(logits, work.begin, [seen[0].1, seen[1].1]);
        }
        // Opaque here and below, or what follows from them takes registers all the time.
        if EXTRAS && after && misc::opaque_u64(p.attention.ancestors) != 0 {
            // Rows that do not exist are the last token's.
            let last = p.pack.div(tile.rows - 1);
            let begin = misc::opaque(work.begin as u32) as i32;
            hide_strangers_from(logits, begin, |h| {
                let token = p.pack.div(misc::opaque(rows[h])).min(last);
                // SAFETY: the launch has them for each of its tokens.
                let ancestors = unsafe { p.attention.ancestors_of(tile.token + token) };
                (tile.position + token as i32, ancestors)
            });
        }
        if before {
            hide_before(logits, work.begin, [seen[0].0, seen[1].0]);
        }
    }
    shift
}
