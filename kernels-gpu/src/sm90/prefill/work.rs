//! A consumer warpgroup's view of its tile, and the transforms and masks of its logits.

use cuda_std::{misc, shared};

use super::{super::uniform, shared::Shared};
use crate::{abi::PrefillParams, common::prefill_tile::Tile, common::variant::Variant};

/// A consumer warpgroup's view of its tile.
#[derive(Clone, Copy)]
pub(super) struct Work {
    /// Shared address of its 64 rows of queries.
    pub(super) queries: u32,
    /// First key of the current block; blocks left, this one included; leading blocks whose keys its rows do not see.
    pub(super) begin: i32,
    pub(super) left: u32,
    pub(super) skipped: u32,
    /// The first and the last key that all 64 rows see; blocks within need no mask.
    pub(super) all_see: (i32, i32),
}

impl Work {
    /// `SKIPS`: whether blocks that none of its rows sees are left out at the beginning.
    #[inline(always)]
    pub(super) unsafe fn open<V: Variant, const EXTRAS: bool, const SKIPS: bool>(
        p: &PrefillParams,
        variant: &V,
        s: Shared,
        stage: u32,
        consumer: u32,
    ) -> Self {
        // SAFETY: the tile's barrier completed; whole warps.
        let tile = unsafe { Tile::load(s.tile(stage)) };
        // Opaque: otherwise the mapping of rows to tokens occupies registers in the main loop.
        let first = misc::opaque(64 * consumer);
        // Positions grow with the row, and the visible range with the position.
        let (_, mut least) = tile.sees(&p.pack, variant, first);
        if EXTRAS {
            // SAFETY: the tile's barrier completed.
            let limit = unsafe { shared::load_u32(s.limit(stage)) } as i32;
            least = p.attention.seen_by_all(least, limit);
        }
        let (most_first, most) = tile.sees(&p.pack, variant, first + 63);
        let keys = s.shape.keys as i32;
        let mut begin = tile.end as i32 - keys;
        let mut left = tile.blocks;
        let mut skipped = 0;
        while SKIPS && left > 1 && begin > most {
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

/// Turns accumulators of `$keys` keys into logits: applies the variant and the mask. `$scaled` says whether products
/// are multiplied by `$of_products` first; `$of` holds the queries of the thread's `$rows`. `$mixes` says whether the
/// variant transforms four keys together, `$multiplied` whether the products have added a linear bias. Whole consumer warps come
/// here, and the stage holds their tile.
///
/// A macro and not a function: a call, even an inlined one, changed the register allocation of the main loops.
macro_rules! logits_of_block {
    (
        $p:ident, $variant:ident, $s:ident, $stage:expr, $work:ident, $rows:ident, $of:ident;
        $logits:ident, $keys:expr, $shift:ident, $scaled:expr, $of_products:ident $(, mixes $mixes:expr, multiplied $multiplied:expr)?
    ) => {
        let last = $work.begin + $keys as i32 - 1;
        let after = last > $work.all_see.1;
        let before = $work.begin < $work.all_see.0;
        macro_rules! hide {
            () => {
                // Rare: what the rows see is recomputed instead of kept in registers.
                let tile = Tile::load($s.tile($stage));
                let seen = $rows.map(|row| tile.sees(&$p.pack, $variant, row));
                if V::MASKS {
                    mask(&mut $logits, $variant, $work.begin, $of);
                }
                if after {
                    hide_after(&mut $logits, $work.begin, [seen[0].1, seen[1].1]);
                }
                // Opaque, here and below: otherwise derived values occupy registers all the time.
                if EXTRAS && after && $p.attention.key_masks().any_here() {
                    let masks = $p.attention.key_masks();
                    // Rows past the end count as the last token's.
                    let last = $p.pack.div(tile.rows - 1);
                    let begin = misc::opaque($work.begin as u32) as i32;
                    let row = |h: usize| {
                        let token = $p.pack.div(misc::opaque($rows[h])).min(last);
                        let mask = masks.of(tile.token + token);
                        (tile.position + token as i32, mask)
                    };
                    // With other transforms skipping takes registers that tiles of 192 rows do not have.
                    hide_masked(&mut $logits, begin, row, !V::TRANSFORMS_LOGITS || V::LINEAR);
                }
                if before {
                    hide_before(&mut $logits, $work.begin, [seen[0].0, seen[1].0]);
                }
            };
        }
        if V::TRANSFORMS_LOGITS {
            if $scaled {
                let mut i = 0;
                while i < S {
                    $logits[i] *= $of_products[i / 2 % 2];
                    i += 1;
                }
            }
            if V::LINEAR && (false $(|| $multiplied)?) {
                $shift = Some(bias_of_first($work.begin, &$of));
            } else if V::LINEAR {
                $shift = Some(lean(&mut $logits, $work.begin, $of));
            } $(else if $mixes {
                // Hidden keys may be NaN: they must not reach those that share work with them.
                if V::MASKS || after || before {
                    hide!();
                }
                transform_fours(&mut $logits, $variant, $work.begin, $of);
            })? else {
                transform(&mut $logits, $variant, $work.begin, $of);
            }
        }
        if V::MASKS || after || before {
            hide!();
        }
    };
}
pub(super) use logits_of_block;
