//! Masks: which keys of a block belong to the item, and which of these a row sees.

use cuda_std::{misc, shared};

use super::{
    config::SLABS,
    shared::{Shared, Unit, Units},
};
use crate::{
    abi::LatentParams,
    common::{
        logits::{hide_after, hide_before},
        variant::Variant,
    },
};

/// Zeroes the values of keys outside the item: they may be anything, and 0 · NaN is NaN.
#[inline(always)]
pub(super) unsafe fn clear<const KEYS: u32, const STAGES: u32>(
    s: Shared<KEYS, STAGES>,
    stage: u32,
    thread: u32,
    first: u32,
    past: u32,
) {
    let vector = thread % 64;
    let (half, in_half) = (vector / 32, vector % 32);
    let group = if half == 0 { SLABS[0] } else { SLABS[1] } * 1024;
    let column = s.half(stage, half) + in_half / 8 * 1024 + in_half % 8 * 16;
    // Opaque: otherwise the compiler narrows the loop counter to 16 bits.
    let mut key = misc::opaque(thread / 64);
    while key < KEYS {
        if key < first || key >= past {
            // SAFETY: only this consumer writes the block. The swizzle only permutes chunks of a zeroed row.
            unsafe { shared::store_u32x4(column + key / 8 * group + key % 8 * 128, [0; 4]) };
        }
        key += 2;
    }
}

/// The first and the last key of a unit that a query token at `position` sees.
#[inline(always)]
pub(super) fn seen<V: Variant>(variant: &V, unit: &Unit, position: i32) -> [i32; 2] {
    let (first, last) = variant.visible_keys(position);
    [
        first.max(unit.kv_begin as i32),
        last.min(unit.kv_end as i32 - 1),
    ]
}

/// Sets the logits of keys that rows do not see to −∞, in the block that begins at `begin`.
#[inline(always)]
pub(super) unsafe fn hide<V: Variant, const KEYS: u32, const STAGES: u32, const S: usize>(
    p: &LatentParams,
    variant: &V,
    s: Shared<KEYS, STAGES>,
    slot: u32,
    unit: &Unit,
    logits: &mut [f32; S],
    begin: u32,
    first_row: u32,
) {
    let seen = |h: u32| {
        let (token, _) = p.heads.div_rem(first_row + h * 8);
        // SAFETY: the unit has the token, and its barrier completed.
        let row = unsafe { s.load_row(slot, token.min(unit.tokens - 1)) };
        seen(variant, unit, row.position)
    };
    let [upper, lower] = [seen(0), seen(1)];
    hide_after(logits, begin as i32, [upper[1], lower[1]]);
    hide_before(logits, begin as i32, [upper[0], lower[0]]);
}

/// Whether all rows of a unit see all `keys` keys from `begin` on.
#[inline(always)]
pub(super) fn is_whole<V: Variant>(variant: &V, unit: &Unit, begin: i32, keys: i32) -> bool {
    let (_, last) = variant.visible_keys(unit.position);
    // Only the smallest position is known: with a window, no key is sure to be seen by all rows.
    let has_window = variant.params().window_left != i32::MAX;
    !has_window
        && begin >= unit.kv_begin as i32
        && begin + keys <= (unit.kv_end as i32).min(last.saturating_add(1))
}
