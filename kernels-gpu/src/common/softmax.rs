//! Online softmax on tensor-core accumulators: one thread's share of its warp's 16 rows. The rescaling is lazy: see `growth`,
//! also for how other kernels do it.
//!
//! In the accumulator of a wgmma, or of adjacent `m16n8` products, a thread holds parts of two rows: `lane / 4` and
//! `lane / 4 + 8` of its warp's 16. Element `4 j + 2 h + e` of its array is row `h`, column `8 j + 2 (lane % 4) + e`.
//! Four neighbouring lanes share a row.

use cuda_std::{
    math::{ex2, fma, rcp},
    warp,
};

use crate::common::{half::Half, variant::Variant};

mod growth;

use growth::{LONGEST_STEP, margin, most_growth};
pub use growth::{SLACK, largest_sum};

const WARP: u32 = warp::FULL_MASK;

/// A number still to be added to all logits of a block, for each of a lane's two rows.
pub type Shift = Option<[f32; 2]>;

/// The online softmax of a thread's two rows. Sums cover only the thread's own columns; a row's sum is that of its four
/// lanes. Each sum is kept as two partial sums, which halves the chain of dependent additions.
#[derive(Clone, Copy)]
pub struct Rows {
    /// The logit that weights are relative to, in the unit of the accumulator; −∞ before the first visible key. Later
    /// logits may exceed it by what the caller's rescale rule allows.
    pub reference: [f32; 2],
    sums: [f32; 4],
}

impl Rows {
    /// Before the first key.
    pub const EMPTY: Self = Self {
        reference: [f32::NEG_INFINITY; 2],
        sums: [0.0; 4],
    };

    /// The state before the first key. Without a softmax outputs are plain sums: the reference stays 0, and the sum of
    /// each of the four lanes stays 1/4, so the denominator is 1.
    #[inline(always)]
    pub const fn begin<V: Variant>() -> Self {
        if V::SOFTMAX {
            Self::EMPTY
        } else {
            Self::new([0.0; 2], [0.25; 2])
        }
    }

    /// From references and sums that the caller kept.
    #[inline(always)]
    pub const fn new(reference: [f32; 2], sums: [f32; 2]) -> Self {
        Self {
            reference,
            sums: [sums[0], sums[1], 0.0, 0.0],
        }
    }

    /// Computes a block's maxima and new references where needed, before [`Self::weigh`]. Returns whether any row of
    /// the warp got a new reference, and the factors for the outputs accumulated so far.
    ///
    /// # Safety
    /// - All lanes of the warp come here.
    #[inline(always)]
    pub unsafe fn rescale<V: Variant, const S: usize>(
        &mut self,
        s: &[f32; S],
        scale: [f32; 2],
    ) -> (bool, [f32; 2]) {
        if !V::SOFTMAX {
            return (false, [1.0; 2]);
        }
        let maximum = maxima(s);
        let grew = |h: usize, row: f32, reference: f32| (row - reference) * scale[h] > SLACK;
        let mut factors = [1.0; 2];
        // SAFETY: the caller's promise.
        let any = unsafe {
            warp::warp_vote_any(
                WARP,
                grew(0, maximum[0], self.reference[0]) | grew(1, maximum[1], self.reference[1]),
            )
        };
        if any {
            let mut h = 0;
            while h < 2 {
                // Only here is the maximum of a row's four lanes needed: where no row grew, there is no shuffle.
                // SAFETY: the vote is the same in all lanes.
                let maximum = unsafe { of_row(maximum[h]) };
                if grew(h, maximum, self.reference[h]) {
                    factors[h] = self.refer_to(h, maximum, scale[h]);
                }
                h += 1;
            }
        }
        (any, factors)
    }

    /// Sets a new reference for a row; returns the factor for the accumulated outputs.
    #[inline(always)]
    fn refer_to(&mut self, h: usize, reference: f32, scale: f32) -> f32 {
        let factor = ex2((self.reference[h] - reference) * scale);
        self.reference[h] = reference;
        self.sums[h] *= factor;
        self.sums[h + 2] *= factor;
        factor
    }

    /// Sets a row's reference to one that the caller chose; `factor` rescales its sums.
    #[inline(always)]
    pub fn adopt(&mut self, h: usize, reference: f32, factor: f32) {
        self.reference[h] = reference;
        self.sums[h] *= factor;
        self.sums[h + 2] *= factor;
    }

    /// Turns logits into weights relative to the current references, packed in pairs as the A operand of P·V. Returns
    /// their sums: even columns of the first and second row, then odd columns of both.
    ///
    /// Maxima are not computed. If [`Self::needs_rescale`] holds for the sums, weights may have overflowed: the caller
    /// drops them and calls [`Self::rescale_late`] and [`Self::weigh_seen`].
    #[inline(always)]
    pub fn weigh_with_stale_max<const S: usize, const P: usize>(
        &self,
        s: &[f32; S],
        shift: Shift,
        scale: [f32; 2],
        weights: &mut [u32; P],
        pack: impl Fn(f32, f32) -> u32,
    ) -> [f32; 4] {
        // +∞ for a row without a reference: its sum then triggers a rescale.
        let offset = [0, 1].map(|h| self.addend(h, shift) * scale[h]);
        exponentials(s, scale, offset, weights, pack)
    }

    /// As [`Self::weigh_with_stale_max`], for rows whose references are large enough, or that have seen no key yet.
    #[inline(always)]
    pub fn weigh_seen<const S: usize, const P: usize>(
        &self,
        s: &[f32; S],
        shift: Shift,
        scale: [f32; 2],
        weights: &mut [u32; P],
        pack: impl Fn(f32, f32) -> u32,
    ) -> [f32; 4] {
        let offset = |h: usize| {
            // −∞ − (−∞) must not become NaN.
            if self.reference[h] == f32::NEG_INFINITY {
                0.0
            } else {
                self.addend(h, shift) * scale[h]
            }
        };
        let offset = [offset(0), offset(1)];
        exponentials(s, scale, offset, weights, pack)
    }

    /// [`Self::weigh_seen`] and [`Self::add`]; without a softmax [`weights_as_they_are`].
    #[inline(always)]
    pub fn weigh<V: Variant, const S: usize, const P: usize>(
        &mut self,
        s: &[f32; S],
        scale: [f32; 2],
        weights: &mut [u32; P],
        pack: impl Fn(f32, f32) -> u32,
    ) {
        if !V::SOFTMAX {
            return weights_as_they_are(s, weights, pack);
        }
        let sums = self.weigh_seen(s, None, scale, weights, pack);
        self.add(&sums);
    }

    /// [`Self::weigh`] for base-2 logits of keys whose values have scales, which the logits include as logarithms. Weights
    /// then have them as factors, and sums do not: `inverses` gives the inverses for the two columns of a group of 8.
    #[inline(always)]
    pub fn weigh_scaled<const S: usize, const P: usize>(
        &mut self,
        s: &[f32; S],
        weights: &mut [u32; P],
        inverses: impl Fn(usize) -> [f32; 2],
        pack: impl Fn(f32, f32) -> u32,
    ) {
        // −∞ − (−∞) must not become NaN.
        let reference = self.reference.map(|reference| reference.max(f32::MIN));
        let mut i = 0;
        while i < P {
            let h = i % 2;
            let [of_even, of_odd] = inverses(i / 2);
            let even = ex2(s[2 * i] - reference[h]);
            let odd = ex2(s[2 * i + 1] - reference[h]);
            self.sums[h] = fma(even, of_even, self.sums[h]);
            self.sums[h + 2] = fma(odd, of_odd, self.sums[h + 2]);
            weights[i] = pack(even, odd);
            i += 1;
        }
    }

    /// Added to a logit, makes it relative to its row's reference; in the unit of the accumulator.
    #[inline(always)]
    fn addend(&self, h: usize, shift: Shift) -> f32 {
        match shift {
            Some(shift) => shift[h] - self.reference[h],
            None => -self.reference[h],
        }
    }

    /// Whether weights with these sums may be too large; `largest` is the type's [`largest_sum`].
    #[inline(always)]
    pub fn needs_rescale(sums: &[f32; 4], largest: f32) -> bool {
        // Negated, so that NaN counts as too large.
        !(sums[0] + sums[2] <= largest && sums[1] + sums[3] <= largest)
    }

    /// Adds what [`Self::weigh_with_stale_max`] or [`Self::weigh_seen`] returned.
    #[inline(always)]
    pub fn add(&mut self, sums: &[f32; 4]) {
        let mut i = 0;
        while i < 4 {
            self.sums[i] += sums[i];
            i += 1;
        }
    }

    /// Sets new references for rows that have none, or have a logit that is too large for theirs. Returns the factors
    /// for the outputs accumulated so far, and whether any are needed: whether a row that changed had a reference
    /// before.
    ///
    /// Only a row's own logits decide, even if another row caused the call: so a row's bits do not depend on its
    /// neighbours.
    ///
    /// # Safety
    /// - All lanes of the warp come here.
    #[inline(always)]
    pub unsafe fn rescale_late<T: Half, const S: usize>(
        &mut self,
        s: &[f32; S],
        shift: Shift,
        scale: [f32; 2],
    ) -> ([f32; 2], bool) {
        let mut maximum = maxima(s);
        if let Some(shift) = shift {
            maximum = [maximum[0] + shift[0], maximum[1] + shift[1]];
        }
        // Both rows at once and without branches: a shuffle takes about 24 cycles, in which the first weights are
        // computed.
        // SAFETY: the caller's promise.
        let maximum = maximum.map(|of_thread| unsafe { of_row(of_thread) });
        let mut factors = [1.0; 2];
        let mut needs_rescale = false;
        let mut h = 0;
        while h < 2 {
            let old = self.reference[h];
            let grew = (maximum[h] - old) * scale[h] > const { most_growth::<T>() };
            let had_one = old > f32::NEG_INFINITY;
            let mut reference = maximum[h];
            if const { margin::<T>() > 0.0 } {
                // Clamped: the reciprocal of a tiny scale is infinite.
                let unit = rcp(scale[h]);
                let logits = |log2: f32| (log2 * unit).min(f32::MAX);
                let above = maximum[h] + logits(const { margin::<T>() });
                let reach = old + logits(LONGEST_STEP);
                reference = above
                    .min(if had_one { reach } else { above })
                    .max(maximum[h]);
            }
            let reference = if grew { reference } else { old };
            let factor = ex2((old - reference) * scale[h]);
            let factor = if grew { factor } else { 1.0 };
            self.adopt(h, reference, factor);
            factors[h] = factor;
            needs_rescale |= grew & had_one;
            h += 1;
        }
        (factors, needs_rescale)
    }

    /// The sums of whole rows, over their four lanes.
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

/// The maxima of a thread's own columns, for its two rows.
#[inline(always)]
pub fn maxima<const S: usize>(s: &[f32; S]) -> [f32; 2] {
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
    [of[0].max(of[1]), of[2].max(of[3])]
}

/// The maximum over the four lanes of a row.
///
/// # Safety
/// - All lanes of the warp come here.
#[inline(always)]
pub unsafe fn of_row(x: f32) -> f32 {
    // SAFETY: the caller's promise.
    unsafe {
        let x = x.max(warp::warp_shuffle_xor(WARP, x, 1, 32));
        x.max(warp::warp_shuffle_xor(WARP, x, 2, 32))
    }
}

/// Computes `2^(s · scale + offset)` of each logit, packed in pairs. Returns sums as [`Rows::weigh_with_stale_max`]
/// does.
#[inline(always)]
fn exponentials<const S: usize, const P: usize>(
    s: &[f32; S],
    scale: [f32; 2],
    offset: [f32; 2],
    weights: &mut [u32; P],
    pack: impl Fn(f32, f32) -> u32,
) -> [f32; 4] {
    let mut sums = [0.0; 4];
    let mut i = 0;
    while i < P {
        let h = i % 2;
        let even = ex2(fma(s[2 * i], scale[h], offset[h]));
        let odd = ex2(fma(s[2 * i + 1], scale[h], offset[h]));
        sums[h] += even;
        sums[h + 2] += odd;
        weights[i] = pack(even, odd);
        i += 1;
    }
    sums
}

/// Packs weights of a variant without a softmax, in pairs as the A operand of P·V. Hidden keys get weight 0.
#[inline(always)]
pub fn weights_as_they_are<const S: usize, const P: usize>(
    s: &[f32; S],
    weights: &mut [u32; P],
    pack: impl Fn(f32, f32) -> u32,
) {
    let seen = |s: f32| if s == f32::NEG_INFINITY { 0.0 } else { s };
    let mut i = 0;
    while i < P {
        weights[i] = pack(seen(s[2 * i]), seen(s[2 * i + 1]));
        i += 1;
    }
}
