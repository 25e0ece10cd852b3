//! Online softmax on transposed accumulators, whose columns are the rows of the tile.

use cuda_std::{barrier, shared, warp};

use super::{
    products::{Tile, at, row_of},
    shared::{CONSUMERS, Shared, THREADS, Unit},
};
use crate::{
    abi::DecodeParams,
    common::{half::Half, math::exp2, softmax::SLACK, variant::Variant},
};

const WARP: u32 = warp::FULL_MASK;

/// The state of a thread's columns.
pub(super) struct Softmax<const COLUMNS: usize> {
    /// The reference of the weights, in base 2; −∞ while no key was visible.
    pub reference: [f32; COLUMNS],
    /// Sums of the weights of this thread's keys.
    pub sum: [f32; COLUMNS],
}

impl<const COLUMNS: usize> Softmax<COLUMNS> {
    /// Before the first key.
    pub const EMPTY: Self = Self {
        reference: [f32::NEG_INFINITY; COLUMNS],
        sum: [0.0; COLUMNS],
    };

    /// The reference, or 0 while no key was visible: always finite.
    #[inline(always)]
    pub fn offset(&self, column: usize) -> f32 {
        if self.reference[column] == f32::NEG_INFINITY {
            0.0
        } else {
            self.reference[column]
        }
    }

    /// Stores the weights of the logits at `target`; returns the sums of all columns. Weights are multiplied by the scales
    /// of values already, and their sums by the inverses of these, for each of a thread's two keys.
    ///
    /// # Safety
    /// `target` is the place of this thread's keys among the weights of a block, which no thread reads meanwhile.
    #[inline(always)]
    pub unsafe fn weigh<T: Half, const KEYS: usize, const N: usize>(
        &self,
        logits: &[Tile<N>; KEYS],
        inverses: &[[f32; 2]; KEYS],
        target: u32,
    ) -> [f32; COLUMNS] {
        let mut sums = [0.0; COLUMNS];
        let mut group = 0;
        while group < COLUMNS / 2 {
            let offset = [self.offset(2 * group), self.offset(2 * group + 1)];
            let mut tile = 0;
            while tile < KEYS {
                let w = [
                    exp2(logits[tile][4 * group] - offset[0]),
                    exp2(logits[tile][4 * group + 1] - offset[1]),
                    exp2(logits[tile][4 * group + 2] - offset[0]),
                    exp2(logits[tile][4 * group + 3] - offset[1]),
                ];
                let target = target + (group * KEYS + tile) as u32 * 1024;
                // SAFETY: keys of this thread, 8 apart.
                unsafe {
                    shared::store_u32(target, T::pack(w[0], w[1]));
                    shared::store_u32(target + 128, T::pack(w[2], w[3]));
                }
                let [first, second] = inverses[tile];
                let of_tile = [w[0] * first + w[2] * second, w[1] * first + w[3] * second];
                let mut i = 0;
                while i < 2 {
                    let sum = &mut sums[2 * group + i];
                    *sum = if tile == 0 {
                        of_tile[i]
                    } else {
                        *sum + of_tile[i]
                    };
                    i += 1;
                }
                tile += 1;
            }
            group += 1;
        }
        sums
    }
}

/// The largest logits of all columns.
#[inline(always)]
pub(super) const fn largest<const KEYS: usize, const N: usize, const COLUMNS: usize>(
    logits: &[Tile<N>; KEYS],
) -> [f32; COLUMNS] {
    let mut most = [0.0; COLUMNS];
    let mut i = 0;
    while i < 2 * KEYS {
        let mut column = 0;
        while column < COLUMNS {
            let other = logits[i / 2][at(i % 2, column)];
            most[column] = if i == 0 || other > most[column] {
                other
            } else {
                most[column]
            };
            column += 1;
        }
        i += 1;
    }
    most
}

/// Sets the logits of keys that rows do not see to −∞; `begin` is the block's first key.
///
/// # Safety
/// `unit` is the unit in the slot.
#[inline(always)]
pub(super) unsafe fn hide<V: Variant, const KEYS: usize, const N: usize>(
    p: &DecodeParams,
    variant: &V,
    s: Shared,
    slot: u32,
    unit: &Unit,
    logits: &mut [Tile<N>; KEYS],
    begin: i32,
    lane: u32,
    warp: u32,
) {
    let mut column = 0;
    while column < N / 2 {
        let (token, _) = p.group.div_rem(row_of(lane, column));
        // SAFETY: the unit's rows are written; rows past the end take the last token.
        let row = unsafe { s.load_row(slot, token.min(unit.tokens - 1)) };
        let position = row.position;
        let (first, last) = variant.visible_keys(position);
        let (first, last) = (
            first.max(unit.kv_begin as i32),
            last.min(unit.kv_end as i32 - 1),
        );
        let masks = p.attention.key_masks();
        let mut tile = 0;
        while tile < KEYS {
            let key = begin + ((tile * 64) as u32 + warp * 16 + lane / 4) as i32;
            // Bit 0 is the second key of the tile, which is 8 after the first.
            let mut seen = u64::MAX;
            if masks.any() {
                // SAFETY: the token is one of the launch's.
                seen = unsafe { masks.of(row.token).bits(position - (key + 8)) };
            }
            let mut half = 0;
            while half < 2 {
                let key = key + 8 * half as i32;
                if key < first || key > last || seen >> (8 * (1 - half)) & 1 == 0 {
                    logits[tile][at(half, column)] = f32::NEG_INFINITY;
                }
                half += 1;
            }
            tile += 1;
        }
        column += 1;
    }
}

/// Makes the block's maxima the new references of rows that they exceed by more than [`SLACK`], and rescales sums and
/// outputs.
///
/// # Safety
/// All consumers come here; their products are done.
#[inline(always)]
pub(super) unsafe fn rescale<const SLABS: usize, const N: usize, const COLUMNS: usize>(
    s: Shared,
    softmax: &mut Softmax<COLUMNS>,
    o: &mut [Tile<N>; SLABS],
    most: [f32; COLUMNS],
    lane: u32,
    warp: u32,
) {
    let mut column = 0;
    // SAFETY: all consumers come here; each warp has words of its own.
    unsafe {
        while column < COLUMNS {
            let mut max = most[column];
            // Lanes with the same columns are 4 apart.
            let mut stride = 4;
            while stride < 32 {
                let other = warp::warp_shuffle_xor(WARP, max, stride, 32);
                max = if other > max { other } else { max };
                stride *= 2;
            }
            if lane < 4 {
                shared::store_f32(s.exchange(warp, row_of(lane, column)), max);
            }
            column += 1;
        }
        barrier::bar_sync(CONSUMERS, THREADS);
        column = 0;
        while column < COLUMNS {
            let mut max = softmax.reference[column];
            let mut of = 0;
            while of < 4 {
                let other = shared::load_f32(s.exchange(of, row_of(lane, column)));
                max = if other > max { other } else { max };
                of += 1;
            }
            // Decided per column, so that a row's result does not depend on its neighbours.
            if max > softmax.reference[column] + SLACK {
                let factor = exp2(softmax.reference[column] - max);
                softmax.reference[column] = max;
                softmax.sum[column] *= factor;
                let mut slab = 0;
                while slab < SLABS {
                    o[slab][at(0, column)] *= factor;
                    o[slab][at(1, column)] *= factor;
                    slab += 1;
                }
            }
            column += 1;
        }
    }
}
