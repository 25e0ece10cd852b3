//! Softmax with a reference for each block, for e4m3 weights.

use cuda_std::{
    convert::{f32x2_to_e4m3x2, join_u16x2},
    math::{ex2, fma},
    prelude::*,
};

use crate::common::softmax::{Rows, of_row};

const WARP: u32 = warp::FULL_MASK;

/// The largest weight of a row in a block is 2⁸, as e4m3's maximum is 448. Below it e4m3 has 17 binades; the last three
/// are subnormal and have fewer bits.
const LARGEST_LOG2: f32 = 8.0;

/// By how much, in base 2, a block's maximum may exceed the row's reference before the row is rescaled. The f32
/// accumulator has room for it, so few rows are rescaled after their first block.
const SLACK: f32 = 40.0;

/// Reference and sum of a thread's two rows: as [`Rows`], but each block's weights are relative to its own maxima.
#[derive(Clone, Copy)]
pub(super) struct State {
    reference: [f32; 2],
    sums: [f32; 2],
}

/// The reference of a block's weights: the maxima of its rows.
pub(super) struct Reference {
    /// Added to base-2 logits, so that the largest becomes [`LARGEST_LOG2`].
    offset: [f32; 2],
    /// Factor of the block's P·V, to the row's reference.
    pub(super) factor: [f32; 2],
    /// Factors of the previous outputs, where a row is rescaled.
    pub(super) rescale: Option<[f32; 2]>,
}

impl State {
    /// Before the first key.
    pub(super) const EMPTY: Self = Self {
        reference: [f32::NEG_INFINITY; 2],
        sums: [0.0; 2],
    };

    /// References and sums, for the epilogue.
    #[inline(always)]
    pub(super) fn rows(&self) -> Rows {
        Rows::new(self.reference, self.sums)
    }

    /// Computes a block's maxima, given those of each thread, and, if one exceeds the row's reference by more than
    /// [`SLACK`], the row's new reference.
    ///
    /// # Safety
    /// All lanes of the warp come here.
    #[inline(always)]
    pub(super) unsafe fn refer(&mut self, of_thread: [f32; 2], scale: [f32; 2]) -> Reference {
        // SAFETY: the caller's promise.
        let maximum = of_thread.map(|of_thread| unsafe { of_row(of_thread) });
        let above = |h: usize, reference: f32| (maximum[h] - reference) * scale[h];
        // −∞ − (−∞) is NaN, for which `>` is false.
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
            // Otherwise the row sees no key of the block: its logits are −∞, and its factor stays 0.
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

    /// Turns the logits of both halves of a block into weights, packed as the A operand of the second product, and adds
    /// them up.
    #[inline(always)]
    pub(super) fn weigh<const S: usize, const P: usize>(
        &mut self,
        halves: [&[f32; S]; 2],
        scale: [f32; 2],
        to: &Reference,
        weights: &mut [u32; P],
    ) {
        let sums = exponentials(halves, scale, to.offset, weights);
        let mut h = 0;
        while h < 2 {
            self.sums[h] = fma(sums[h] + sums[h + 2], to.factor[h], self.sums[h]);
            h += 1;
        }
    }
}

/// Computes the weights of both halves and their sums. Of 32 keys a thread has four pairs per row. Two pairs make a word of
/// the A fragment, in the key order of the [values](super::pages).
#[inline(always)]
fn exponentials<const S: usize, const P: usize>(
    halves: [&[f32; S]; 2],
    scale: [f32; 2],
    offset: [f32; 2],
    weights: &mut [u32; P],
) -> [f32; 4] {
    let mut sums = [0.0; 4];
    let mut i = 0;
    while i < P {
        let (s, word) = (halves[i / (P / 2)], i % (P / 2));
        let h = word % 2;
        let first = word / 2 * 8 + 2 * h;
        let weight = |at: usize| ex2(fma(s[at], scale[h], offset[h]));
        let [a, b, c, d] = [
            weight(first),
            weight(first + 1),
            weight(first + 4),
            weight(first + 5),
        ];
        // The first values are assigned, not added: that saves an addition for each of the four sums.
        let (even, odd) = (a + c, b + d);
        sums[h] = if i < 2 { even } else { sums[h] + even };
        sums[h + 2] = if i < 2 { odd } else { sums[h + 2] + odd };
        weights[i] = join_u16x2(f32x2_to_e4m3x2(a, b), f32x2_to_e4m3x2(c, d));
        i += 1;
    }
    sums
}
