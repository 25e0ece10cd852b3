//! Softmax weights, separate for each group of columns.
//!
//! A value is an 8-bit number times the scale of its group. The scale is folded into the weight, so a row has four f16
//! weights per key. Weights are relative to the row's **reference**, a power of two, chosen so that the largest weight
//! times scale is about 2 to the power of [`TOP`]. All warps of the team renew it when a weight no longer fits f16,
//! which is rare after the first block. A group whose weights would lie far below the other groups' has a **shift**, an
//! extra power of two. Rows with shifts always compute their weights in [`Rows::renew`].

use cuda_std::{
    barrier,
    math::{fma, lg2},
    shared, warp,
};

use super::{
    config::{ROWS_OF_TILE, WARPS, WEIGHTS_BYTES},
    places::Place,
    shared::{Outputs, PAIR, Products, SAID_ALL, Shared},
};
use crate::{
    common::{
        half::{F16, Half},
        math::exp2,
    },
    sm90::mla::keys_656::{BLOCK, GROUPS, ROW_BYTES},
};

const WARP: u32 = warp::FULL_MASK;

/// Base-2 log of a row's largest weight after a renewal: 2¹⁰ below the largest f16.
const TOP: f32 = 6.0;
/// Groups whose largest weight is at most 2 to this below the row's need no shift: it is then at least 2⁻⁴, and f16
/// goes down to 2⁻²⁴.
const WINDOW: f32 = 10.0;
/// The largest shift. It keeps products of weights and scales within f32.
const LARGEST_SHIFT: f32 = 100.0;
/// The largest log of a weight without scales after a renewal. It keeps sums within f32.
const LARGEST_WEIGHT: f32 = 60.0;
/// The sum from which references are renewed.
const LARGEST_SUM: f32 = (1_u128 << 100) as f32;
/// The largest f16 is 65,504.
const LARGEST: f32 = 65_504.0;
/// The reference of a row that has seen no key, and, in registers, of a row with shifts: it makes weights infinite,
/// which triggers [`Rows::renew`].
const NONE: f32 = -1e38;

/// A lane's two rows: the online softmax over the team's blocks.
pub(super) struct Rows {
    /// Base-2 logs; those of rows with shifts are in shared memory only.
    references: [f32; 2],
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
type Logits = [[f32; 2]; 2];

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

    /// Renews references and recomputes the weights of a block. A row gets a new reference if any warp has weights
    /// `over` the limit; its outputs are rescaled. All warps compute the same references; warp 0 stores them.
    ///
    /// # Safety
    /// All warps of the team come here, and meet at a barrier afterwards. When they come, no warp reads weights or the
    /// [`SAID`](super::config::SAID) words any more.
    #[inline(always)]
    #[expect(clippy::too_many_arguments, reason = "it is one part of a loop")]
    pub unsafe fn renew<const STAGES: u32>(
        &mut self,
        s: Shared<STAGES>,
        block: Block,
        logits: &Logits,
        thread: u32,
        over: [bool; 2],
        o: &mut Outputs,
        target: u32,
    ) {
        let place = Place::of(thread);
        let Place { team, warp, lane } = place;
        // Each of a row's four lanes handles one group.
        let (mine, first) = (lane % 4, lane & !3);
        let (mut before, mut tops, mut shifts) = ([0.0; 2], [0.0; 2], [0.0; 2]);
        // SAFETY: the caller's promise.
        unsafe {
            let mut h = 0;
            while h < 2 {
                let row = place.row() + 8 * h as u32;
                before[h] = shared::load_f32(s.state(team, row));
                tops[h] = shared::load_f32(s.tops(team, row) + mine * 4);
                shifts[h] = shared::load_f32(s.shifts(team, row) + mine * 4);
                let largest = of_four(logits[h][0].max(logits[h][1]), f32::max);
                let over = of_four(over[h] as u8 as f32, f32::max);
                let scales = block.scales();
                let mut top = f32::NEG_INFINITY;
                let mut group = 0;
                while group < GROUPS as usize {
                    let of = [0, 1].map(|e| logits[h][e] + lg2(scales[e][group].abs()));
                    let of = of_four(of[0].max(of[1]), f32::max);
                    if group as u32 == mine {
                        top = of;
                    }
                    group += 1;
                }
                let at = s.said(team, row, 0) + warp * 4;
                shared::store_f32(at + mine * (WARPS * 4), top);
                if mine < 2 {
                    let what = if mine == 0 { largest } else { over };
                    shared::store_f32(at + (GROUPS + mine) * (WARPS * 4), what);
                }
                h += 1;
            }
            barrier::bar_sync(SAID_ALL + team, WARPS * 32);
            h = 0;
            while h < 2 {
                let row = place.row() + 8 * h as u32;
                let said = |what: u32| largest_of(s.said(team, row, what));
                let top = tops[h].max(said(mine));
                let (largest, over) = (said(GROUPS), said(GROUPS + 1) != 0.0);
                let highest = of_four(top, f32::max);
                let (mut reference, mut shift) = (before[h], shifts[h]);
                if over {
                    reference =
                        integer((highest - TOP).max(largest - LARGEST_WEIGHT)).max(before[h]);
                    // A group without weights yet has top −∞ and gets the largest shift, until its first weight: rows
                    // with shifts are renewed at every block.
                    shift = integer((reference + TOP - top).min(LARGEST_SHIFT));
                    if !(shift > WINDOW) {
                        shift = 0.0;
                    }
                }
                let has_shift = of_four(shift, f32::max) > 0.0;
                if over {
                    self.references[h] = if has_shift { NONE } else { reference };
                    self.sums[h] *= exp2(before[h] - reference);
                }
                if warp == 0 {
                    shared::store_f32(s.shifts(team, row) + mine * 4, shift);
                    if over {
                        shared::store_f32(s.tops(team, row) + mine * 4, top);
                        if mine == 0 {
                            shared::store_f32(s.state(team, row), reference);
                        }
                    }
                }
                let factor = exp2(before[h] - reference + (shift - shifts[h]));
                let factor = warp::warp_shuffle_idx(WARP, factor, first + place.group(), 32);
                let mut i = 0;
                while i < 8 {
                    o[i][2 * h] *= factor;
                    o[i][2 * h + 1] *= factor;
                    i += 1;
                }
                let weights = logits[h].map(|logit| exp2(logit - reference));
                self.sums[h] += weights[0] + weights[1];
                let scales = block.scales();
                let mut group = 0;
                while group < GROUPS {
                    let shift = exp2(warp::warp_shuffle_idx(WARP, shift, first + group, 32));
                    let of = [0, 1].map(|e| weights[e] * scales[e][group as usize] * shift);
                    store_weights(target, h, group, of);
                    group += 1;
                }
                h += 1;
            }
        }
    }
}

impl Block {
    /// The scales of a lane's two keys.
    ///
    /// # Safety
    /// The block has arrived.
    #[inline(always)]
    unsafe fn scales(self) -> [[f32; GROUPS as usize]; 2] {
        // SAFETY: the caller's promise.
        [0, 1].map(|e| unsafe { shared::load_f32x4(self.scales + e * ROW_BYTES) })
    }
}

/// Rounds to the nearest integer; exact for |x| below 2²².
#[inline(always)]
fn integer(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0;
    (x + ROUND) - ROUND
}

/// Stores a row's weights of two keys for a group; row `h` is `8 · h` rows further.
#[inline(always)]
unsafe fn store_weights(target: u32, h: usize, group: u32, weights: [f32; 2]) {
    let at = target + (group * ROWS_OF_TILE + 8 * h as u32) * WEIGHTS_BYTES;
    // SAFETY: the caller's promise.
    unsafe { shared::store_u32(at, F16::pack(weights[0], weights[1])) }
}

/// The maximum over the warps of a team.
#[inline(always)]
unsafe fn largest_of(at: u32) -> f32 {
    // SAFETY: all warps have stored theirs, before a barrier.
    let [a, b] = unsafe { [shared::load_f32x4(at), shared::load_f32x4(at + 16)] };
    let four = [0, 1, 2, 3].map(|i| a[i].max(b[i]));
    four[0].max(four[1]).max(four[2].max(four[3]))
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
