//! What a warpgroup that computes knows of its tile, and what becomes of its logits.

use cuda_std::misc;

use super::{super::uniform, shared::Shared};
use crate::{abi::PrefillParams, common::prefill_tile::Tile, common::variant::Variant};

/// What a consumer knows of its tile.
#[derive(Clone, Copy)]
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

/// From accumulators of `$keys` keys to logits: the variant's and the mask. `$scaled` says whether products are to be
/// multiplied by `$of_products`; `$of` says whose the thread's `$rows` are. Whole warps that compute come here, and the
/// stage holds their tile.
///
/// No function: with a call in its place, inlined or not, registers of the main loops were shared out in another way.
macro_rules! logits_of_block {
    (
        $p:ident, $variant:ident, $s:ident, $stage:expr, $work:ident, $rows:ident, $of:ident;
        $logits:ident, $keys:expr, $shift:ident, $scaled:expr, $of_products:ident
    ) => {
        let last = $work.begin + $keys as i32 - 1;
        let after = last > $work.all_see.1;
        let before = $work.begin < $work.all_see.0;
        if V::TRANSFORMS_LOGITS {
            if $scaled {
                let mut i = 0;
                while i < S {
                    $logits[i] *= $of_products[i / 2 % 2];
                    i += 1;
                }
            }
            if V::LINEAR {
                $shift = Some(lean(&mut $logits, $work.begin, $of));
            } else {
                transform(&mut $logits, $variant, $work.begin, $of);
            }
        }
        if V::MASKS || after || before {
            // Seldom: what the rows see is computed again rather than kept in registers.
            let tile = Tile::load($s.tile($stage));
            let seen = $rows.map(|row| tile.sees(&$p.pack, $variant, row));
            if V::MASKS {
                mask(&mut $logits, $variant, $work.begin, $of);
            }
            if after {
                hide_after(&mut $logits, $work.begin, [seen[0].1, seen[1].1]);
            }
            // Opaque here and below, or what follows from them takes registers all the time.
            if EXTRAS && after && misc::opaque_u64($p.attention.ancestors) != 0 {
                // Rows that do not exist are the last token's.
                let last = $p.pack.div(tile.rows - 1);
                let begin = misc::opaque($work.begin as u32) as i32;
                hide_strangers_from(&mut $logits, begin, |h| {
                    let token = $p.pack.div(misc::opaque($rows[h])).min(last);
                    let ancestors = $p.attention.ancestors_of(tile.token + token);
                    (tile.position + token as i32, ancestors)
                });
            }
            if before {
                hide_before(&mut $logits, $work.begin, [seen[0].0, seen[1].0]);
            }
        }
    };
}
pub(super) use logits_of_block;
