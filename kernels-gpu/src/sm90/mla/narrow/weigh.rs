//! Softmax weights, separate for each group of columns.
//!
//! A value is an 8-bit number times the scale of its group. The scale is folded into the weight, so a row has four f16
//! weights per key. Weights are relative to the row's **reference**, a power of two, chosen so that the largest weight
//! times scale is about 2⁶. All warps of the team [renew](super::renew) it when a weight no longer fits f16, which is rare
//! after the first block. A group whose weights would lie far below the other groups' has a **shift**, an extra power of
//! two. Rows with shifts always compute their weights in [`Rows::renew`].

use cuda_std::{barrier, math::fma, shared, warp};

use super::{
    config::{ROWS_OF_TILE, WARPS, WEIGHTS_BYTES},
    places::Place,
    shared::{PAIR, Products, Shared},
};
use crate::{
    common::{
        half::{F16, Half},
        math::exp2,
    },
    sm90::mla::keys_656::{BLOCK, GROUPS, ROW_BYTES},
};

const WARP: u32 = warp::FULL_MASK;

/// The sum from which references are renewed.
const LARGEST_SUM: f32 = (1_u128 << 100) as f32;
/// The largest f16 is 65,504.
const LARGEST: f32 = 65_504.0;
/// The reference of a row that has seen no key, and, in registers, of a row with shifts: it makes weights infinite,
/// which triggers [`Rows::renew`].
pub(super) const NONE: f32 = -1e38;

/// A lane's two rows: the online softmax over the team's blocks.
pub(super) struct Rows {
    /// Base-2 logs; those of rows with shifts are in shared memory only.
    pub(super) references: [f32; 2],
    /// Sums of this lane's weights, without scales.
    pub sums: [f32; 2],
    /// Factors from products of scaled columns to base-2 logits.
    pub factors: [f32; 2],
    /// The first block of which both rows see all keys, and the number of such blocks.
    whole: [u32; 2],
}

/// A block, for a lane that computes the weights of two of its keys.
#[derive(Clone, Copy)]
pub(super) struct Block {
    /// Number over all units; keys are numbered in the same way.
    pub number: u32,
    /// Bits of the existing keys, of the half block that holds this lane's keys.
    pub there: u32,
    /// Address of the scales of the lane's first key.
    pub scales: u32,
    /// The softmax scale for products of the RoPE columns, which have no scales.
    pub rope_factor: f32,
}

/// Logits of two rows and two keys.
pub(super) type Logits = [[f32; 2]; 2];

impl Rows {
    /// Rows that see the keys of `seen`, first and last, numbered over all units' blocks.
    ///
    /// # Safety
    /// A whole warp; no warp of the team accesses the rows' states meanwhile.
    #[inline(always)]
    pub unsafe fn new<const STAGES: u32>(
        s: Shared<STAGES>,
        place: Place,
        seen: [[i32; 2]; 2],
    ) -> Self {
        let Place { team, warp, lane } = place;
        const SHIFT: u32 = BLOCK.trailing_zeros();
        let (mut begin, mut end) = (i32::MIN, i32::MAX);
        let mut h = 0;
        while h < 2 {
            let row = place.row() + 8 * h as u32;
            let [first, last] = seen[h];
            if warp == 0 {
                let at = lane % 4 * 4;
                // SAFETY: the caller's promise.
                unsafe {
                    shared::store_f32(s.shifts(team, row) + at, 0.0);
                    shared::store_f32(s.tops(team, row) + at, f32::NEG_INFINITY);
                    if at == 0 {
                        let known = [NONE.to_bits(), 0, first as u32, last as u32];
                        shared::store_u32x4(s.state(team, row), known);
                    }
                }
            }
            begin = begin.max((first + (BLOCK as i32 - 1)) >> SHIFT);
            end = end.min((last + 1) >> SHIFT);
            h += 1;
        }
        Self {
            references: [NONE; 2],
            sums: [0.0; 2],
            factors: [0.0; 2],
            whole: [begin as u32, (end - begin).max(0) as u32],
        }
    }

    /// The logits; −∞ for keys that a row does not see. `of` holds the products of half of the columns with this warp's
    /// keys and with its partner's. The two warps exchange the partner's part, where the partner will later store its
    /// weights.
    ///
    /// # Safety
    /// Both warps of a pair come here; the block has arrived, and no warp reads its weights yet.
    #[inline(always)]
    pub unsafe fn logits<const STAGES: u32>(
        &self,
        s: Shared<STAGES>,
        block: Block,
        of: &[Products; 2],
        place: Place,
    ) -> Logits {
        // SAFETY: the caller's promise.
        unsafe {
            let scales = block.scales + place.half() * 8;
            let theirs = self.part(block, &of[1], scales.wrapping_add(place.to_partner()));
            let parts = s.parts(place, block.number);
            shared::store_f32x4(parts + (place.warp ^ 1) * 16, theirs);
            let own = self.part(block, &of[0], scales);
            barrier::bar_sync(PAIR + place.team * (WARPS / 2) + place.warp / 2, 64);
            let other = shared::load_f32x4(parts + place.warp * 16);
            // The weights will overwrite this.
            warp::sync_warp(WARP);
            let mut logits = [0, 2].map(|i| [own[i] + other[i], own[i + 1] + other[i + 1]]);
            let [begin, blocks] = self.whole;
            if block.there != u32::MAX || block.number.wrapping_sub(begin) >= blocks {
                Self::hide(s, block, place, &mut logits);
            }
            logits
        }
    }

    /// The part of the logits that half of the columns contributes, for two rows and two keys with their scales at
    /// `scales`.
    #[inline(always)]
    unsafe fn part(&self, block: Block, of: &Products, scales: u32) -> [f32; 4] {
        // SAFETY: the block has arrived.
        let scales = [0, 1].map(|e| unsafe { shared::load_f32x2(scales + e * ROW_BYTES) });
        [0, 1, 2, 3].map(|i| {
            let [first, second] = scales[i % 2];
            let columns = fma(of.columns[1][i], second, of.columns[0][i] * first);
            fma(columns, self.factors[i / 2], of.rope[i] * block.rope_factor)
        })
    }

    /// Sets logits of keys that a row does not see to −∞.
    #[inline(always)]
    unsafe fn hide<const STAGES: u32>(
        s: Shared<STAGES>,
        block: Block,
        place: Place,
        logits: &mut Logits,
    ) {
        let mut h = 0;
        while h < 2 {
            let state = s.state(place.team, place.row() + 8 * h as u32);
            // SAFETY: `new` stored them.
            let [first, last] = unsafe { shared::load_u32x2(state + 8) };
            let mut e = 0;
            while e < 2 {
                let at = place.key() + e as u32;
                let key = (block.number * BLOCK + at) as i32;
                let is_there = block.there >> (at % 32) & 1 != 0;
                if !(is_there && first as i32 <= key && key <= last as i32) {
                    logits[h][e] = f32::NEG_INFINITY;
                }
                e += 1;
            }
            h += 1;
        }
    }

    /// Stores the weights of two keys. Returns the sums including them, and whether references must be renewed.
    ///
    /// # Safety
    /// The block has arrived; no warp reads the weights at `target` meanwhile.
    #[inline(always)]
    pub unsafe fn weigh(
        &self,
        block: Block,
        logits: &Logits,
        target: u32,
    ) -> ([f32; 2], [bool; 2]) {
        let mut sums = self.sums;
        let mut over = [false; 2];
        // SAFETY: the caller's promise.
        unsafe {
            let scales = block.scales();
            let mut h = 0;
            while h < 2 {
                let weights = logits[h].map(|logit| exp2(logit - self.references[h]));
                sums[h] += weights[0] + weights[1];
                let mut largest = 0.0_f32;
                let mut group = 0;
                while group < GROUPS as usize {
                    let of = [0, 1].map(|e| weights[e] * scales[e][group]);
                    largest = largest.max(of[0].abs()).max(of[1].abs());
                    store_weights(target, h, group as u32, of);
                    group += 1;
                }
                // Negated, so that NaN counts as too large.
                over[h] = !(largest < LARGEST && sums[h] < LARGEST_SUM);
                h += 1;
            }
        }
        (sums, over)
    }
}

impl Block {
    /// The scales of a lane's two keys.
    ///
    /// # Safety
    /// The block has arrived.
    #[inline(always)]
    pub(super) unsafe fn scales(self) -> [[f32; GROUPS as usize]; 2] {
        // SAFETY: the caller's promise.
        [0, 1].map(|e| unsafe { shared::load_f32x4(self.scales + e * ROW_BYTES) })
    }
}

/// Stores a row's weights of two keys for a group; row `h` is `8 · h` rows further.
#[inline(always)]
pub(super) unsafe fn store_weights(target: u32, h: usize, group: u32, weights: [f32; 2]) {
    let at = target + (group * ROWS_OF_TILE + 8 * h as u32) * WEIGHTS_BYTES;
    // SAFETY: the caller's promise.
    unsafe { shared::store_u32(at, F16::pack(weights[0], weights[1])) }
}

/// Combines the values of a row's four lanes.
#[inline(always)]
pub(super) unsafe fn of_four(x: f32, combine: impl Fn(f32, f32) -> f32) -> f32 {
    // SAFETY: a whole warp.
    unsafe {
        let x = combine(x, warp::warp_shuffle_xor(WARP, x, 1, 32));
        combine(x, warp::warp_shuffle_xor(WARP, x, 2, 32))
    }
}

const _: () = assert!(
    WARPS == 2 * GROUPS && GROUPS == 4,
    "two warps have the columns of a scale"
);
