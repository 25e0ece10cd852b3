//! Softmax where each block has references of its own.

use cuda_std::{
    convert::f32x2_to_e4m3x2,
    math::{ex2, fma},
    prelude::*,
};

use crate::common::softmax::{Rows, maxima_of_rows};

const WARP: u32 = warp::FULL_MASK;

/// The largest weight of a row and block is 2⁸: e4m3 ends at 448. Below it are 17 binades, of which the last three have
/// fewer bits.
const LARGEST_LOG2: f32 = 8.0;

/// How much larger than a row's reference, in base 2, a block's maximum may be. What is accumulated is f32, which has
/// room for it, so hardly a row is rescaled after its first block.
const SLACK: f32 = 40.0;

/// What a thread knows of its two rows: as [`Rows`], but for weights that do not depend on the reference.
#[derive(Clone, Copy)]
pub(super) struct State {
    reference: [f32; 2],
    sums: [f32; 2],
}

/// What the weights of a block are relative to: the maxima of their rows.
pub(super) struct Reference {
    /// What is added to logits in base 2, so that the largest becomes [`LARGEST_LOG2`].
    offset: [f32; 2],
    /// What their product with values is multiplied by.
    pub(super) factor: [f32; 2],
    /// What was accumulated so far is multiplied by these first.
    pub(super) rescale: Option<[f32; 2]>,
}

impl State {
    /// No key was seen.
    pub(super) const EMPTY: Self = Self {
        reference: [f32::NEG_INFINITY; 2],
        sums: [0.0; 2],
    };

    /// The end of a tile.
    #[inline(always)]
    pub(super) fn rows(&self) -> Rows {
        Rows::new(self.reference, self.sums)
    }

    /// Takes note of a block's maxima, which its weights are relative to.
    ///
    /// # Safety
    /// All lanes of the warp come here.
    #[inline(always)]
    pub(super) unsafe fn refer<const S: usize>(
        &mut self,
        s: &[f32; S],
        scale: [f32; 2],
    ) -> Reference {
        // SAFETY: the caller's promise.
        let maximum = unsafe { maxima_of_rows(s) };
        let above = |h: usize, reference: f32| (maximum[h] - reference) * scale[h];
        // −∞ − (−∞) is NaN, which is not more.
        let grew = |h: usize, reference: f32| above(h, reference) > SLACK;
        // SAFETY: the caller's promise.
        let any = unsafe {
            warp::warp_vote_any(
                WARP,
                grew(0, self.reference[0]) | grew(1, self.reference[1]),
            )
        };
        let mut rescale = None;
        if any {
            let mut factors = [1.0; 2];
            let mut h = 0;
            while h < 2 {
                if grew(h, self.reference[h]) {
                    factors[h] = ex2(-above(h, self.reference[h]));
                    self.reference[h] = maximum[h];
                    self.sums[h] *= factors[h];
                }
                h += 1;
            }
            rescale = Some(factors);
        }
        let (mut offset, mut factor) = ([0.0; 2], [0.0; 2]);
        let mut h = 0;
        while h < 2 {
            // Nothing of the block is seen: its logits are −∞, and its product is nothing.
            if maximum[h] > f32::NEG_INFINITY {
                offset[h] = fma(-maximum[h], scale[h], LARGEST_LOG2);
                factor[h] = ex2(above(h, self.reference[h]) - LARGEST_LOG2);
            }
            h += 1;
        }
        Reference {
            offset,
            factor,
            rescale,
        }
    }

    /// Turns logits into weights, packed as the A operand of the second product, and adds them up.
    #[inline(always)]
    pub(super) fn weigh<const S: usize, const P: usize>(
        &mut self,
        s: &[f32; S],
        scale: [f32; 2],
        to: &Reference,
        weights: &mut [u32; P],
    ) {
        let sums = exponentials(s, scale, to.offset, weights);
        let mut h = 0;
        while h < 2 {
            self.sums[h] = fma(sums[h] + sums[h + 2], to.factor[h], self.sums[h]);
            h += 1;
        }
    }
}

/// Of 32 keys a thread has four pairs of each row. Two pairs are a word of the fragment, in the order in which the
/// [values](super::pages) have their keys.
#[inline(always)]
fn exponentials<const S: usize, const P: usize>(
    s: &[f32; S],
    scale: [f32; 2],
    offset: [f32; 2],
    weights: &mut [u32; P],
) -> [f32; 4] {
    let mut sums = [0.0; 4];
    let mut i = 0;
    while i < P {
        let h = i % 2;
        let first = i / 2 * 8 + 2 * h;
        let weight = |at: usize| ex2(fma(s[at], scale[h], offset[h]));
        let [a, b, c, d] = [
            weight(first),
            weight(first + 1),
            weight(first + 4),
            weight(first + 5),
        ];
        // The first are no sums: an addition for each of four.
        let (even, odd) = (a + c, b + d);
        sums[h] = if i < 2 { even } else { sums[h] + even };
        sums[h + 2] = if i < 2 { odd } else { sums[h + 2] + odd };
        let [low, high] = [f32x2_to_e4m3x2(a, b), f32x2_to_e4m3x2(c, d)];
        weights[i] = u32::from(low) | u32::from(high) << 16;
        i += 1;
    }
    sums
}
