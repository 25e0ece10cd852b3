//! New references for rows whose weights no longer fit f16.

use cuda_std::{barrier, math::lg2, shared, warp};

use super::{
    config::WARPS,
    places::Place,
    shared::{Outputs, SAID_ALL, Shared},
    weigh::{Block, Logits, NONE, Rows, of_four, store_weights},
};
use crate::{common::math::exp2, sm90::mla::keys_656::GROUPS};

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

impl Rows {
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

/// Rounds to the nearest integer; exact for |x| below 2²².
#[inline(always)]
fn integer(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0;
    (x + ROUND) - ROUND
}

/// The maximum over the warps of a team.
#[inline(always)]
unsafe fn largest_of(at: u32) -> f32 {
    // SAFETY: all warps have stored theirs, before a barrier.
    let [a, b] = unsafe { [shared::load_f32x4(at), shared::load_f32x4(at + 16)] };
    let four = [0, 1, 2, 3].map(|i| a[i].max(b[i]));
    four[0].max(four[1]).max(four[2].max(four[3]))
}
