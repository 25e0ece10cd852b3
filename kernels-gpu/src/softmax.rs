//! Online softmax on the accumulators of tensor cores: what one thread holds of a warp's 16 rows.
//!
//! Of the accumulator of a wgmma, or of `m16n8`s side by side, a thread holds two rows, `lane / 4` and 8
//! further down in its warp's 16, and in each the columns `8 j + 2 (lane % 4)` and the one after. Element
//! `4 j + 2 h + e` of the array is row `h`, column `8 j + 2 (lane % 4) + e`. Four neighbouring lanes share
//! a row.

use cuda_std::{
    math::{ex2, fma},
    prelude::*,
};

use crate::variant::{Pair, Variant};

const WARP: u32 = !0;

/// By how much (in powers of two) a row's maximum may grow before the row is scaled anew. The weights
/// of a block stay below 2⁸ then, harmless in f32 sums and in bf16 and f16 products.
const SLACK: f32 = 8.0;

/// Maximum and sum of a thread's two rows. The sums are the thread's own, four lanes' make a row's; two
/// of each, so that one addition need not wait for the other.
#[derive(Clone, Copy)]
pub struct Rows {
    /// The logit that weights are relative to: at most `SLACK` below the row's maximum, in the unit
    /// of the accumulator; −∞ before the first visible key.
    pub reference: [f32; 2],
    sums: [f32; 4],
}

/// Which keys of a block a thread's two rows see: `first[h] ..= last[h]`.
#[derive(Clone, Copy)]
pub struct Visible {
    pub first: [i32; 2],
    pub last: [i32; 2],
}

impl Rows {
    pub const EMPTY: Self = Self {
        reference: [f32::NEG_INFINITY; 2],
        sums: [0.0; 4],
    };

    /// Takes note of a block's maxima. Returns whether any row of the warp got a new reference, and with
    /// it the factors that what was accumulated so far must be multiplied by.
    ///
    /// # Safety
    /// - All lanes of the warp come here.
    #[inline(always)]
    pub unsafe fn rescale<const S: usize>(&mut self, s: &[f32; S], scale: f32) -> (bool, [f32; 2]) {
        let mut of = [s[0], s[1], s[2], s[3]];
        let mut i = 4;
        while i < S {
            let mut k = 0;
            while k < 4 {
                of[k] = of[k].max(s[i + k]);
                k += 1;
            }
            i += 4;
        }
        let mut maximum = [of[0].max(of[1]), of[2].max(of[3])];
        let grew = |row: f32, reference: f32| (row - reference) * scale > SLACK;
        let mut factors = [1.0; 2];
        // SAFETY: the caller's promise.
        let any = unsafe {
            warp::warp_vote_any(
                WARP,
                grew(maximum[0], self.reference[0]) | grew(maximum[1], self.reference[1]),
            )
        };
        if any {
            // Only now do the four lanes of a row have to agree.
            // SAFETY: the vote is the same in all lanes.
            unsafe {
                maximum = maximum.map(|m| m.max(warp::warp_shuffle_xor(WARP, m, 1, 32)));
                maximum = maximum.map(|m| m.max(warp::warp_shuffle_xor(WARP, m, 2, 32)));
            }
            let mut h = 0;
            while h < 2 {
                if grew(maximum[h], self.reference[h]) {
                    factors[h] = ex2((self.reference[h] - maximum[h]) * scale);
                    self.reference[h] = maximum[h];
                    self.sums[h] *= factors[h];
                    self.sums[h + 2] *= factors[h];
                }
                h += 1;
            }
        }
        (any, factors)
    }

    /// Turns logits into weights, packed in pairs as the A operand of the second product, and adds
    /// them up.
    #[inline(always)]
    pub fn weigh<const S: usize, const P: usize>(
        &mut self,
        s: &[f32; S],
        scale: f32,
        weights: &mut [u32; P],
        pack: impl Fn(f32, f32) -> u32,
    ) {
        let offset = self.reference.map(|reference| {
            // A row that has seen no key yet: −∞ − (−∞) must not become NaN.
            if reference == f32::NEG_INFINITY {
                0.0
            } else {
                -reference * scale
            }
        });
        let mut i = 0;
        while i < P {
            let h = i % 2;
            let even = ex2(fma(s[2 * i], scale, offset[h]));
            let odd = ex2(fma(s[2 * i + 1], scale, offset[h]));
            self.sums[h] += even;
            self.sums[h + 2] += odd;
            weights[i] = pack(even, odd);
            i += 1;
        }
    }

    /// The sums of whole rows.
    ///
    /// # Safety
    /// - All lanes of the warp come here.
    #[inline(always)]
    pub unsafe fn totals(&self) -> [f32; 2] {
        let totals = [self.sums[0] + self.sums[2], self.sums[1] + self.sums[3]];
        // SAFETY: the caller's promise.
        unsafe {
            let totals = totals.map(|t| t + warp::warp_shuffle_xor(WARP, t, 1, 32));
            totals.map(|t| t + warp::warp_shuffle_xor(WARP, t, 2, 32))
        }
    }
}

/// Sets what a row does not see to −∞; `begin` is the position of the block's first key, `at` tells of
/// each row whose it is (its `key` is filled in here).
#[inline(always)]
pub fn mask<V: Variant, const S: usize>(
    s: &mut [f32; S],
    variant: &V,
    visible: &Visible,
    begin: i32,
    at: [Pair; 2],
) {
    let column = begin + (2 * (warp::lane_id() % 4)) as i32;
    let mut h = 0;
    while h < 2 {
        let (first, last) = (visible.first[h] - column, visible.last[h] - column);
        let mut j = 0;
        while j < S / 4 {
            let mut e = 0;
            while e < 2 {
                let key = (8 * j + e) as i32;
                let mut hidden = (key < first) | (key > last);
                if V::MASKS {
                    let pair = Pair {
                        key: (column + key) as u32,
                        ..at[h]
                    };
                    hidden |= !variant.visible(pair);
                }
                if hidden {
                    s[4 * j + 2 * h + e] = f32::NEG_INFINITY;
                }
                e += 1;
            }
            j += 1;
        }
        h += 1;
    }
}

/// Applies the variant's own logits.
#[inline(always)]
pub fn transform<V: Variant, const S: usize>(
    s: &mut [f32; S],
    variant: &V,
    begin: i32,
    at: [Pair; 2],
) {
    let column = begin + (2 * (warp::lane_id() % 4)) as i32;
    let mut i = 0;
    while i < S {
        let pair = Pair {
            key: (column + (8 * (i / 4) + i % 2) as i32) as u32,
            ..at[i / 2 % 2]
        };
        s[i] = variant.logit(s[i], pair);
        i += 1;
    }
}
