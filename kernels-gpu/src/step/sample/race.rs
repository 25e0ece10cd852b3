//! The random part of a draw: the Gumbel-max trick, on groups of eight neighbouring tokens.
//!
//! Group g has the tokens 8g to 8g + 7. Let m be its largest logit, s the sum of 2^((l − m) · scale) over its kept
//! tokens, and E an exponential random number, which depends on the row's random number and on g. The group's *score* is
//!
//! m + (log₂ s − log₂ E) / scale.
//!
//! The group with the largest score is drawn, and of its tokens one by weight. This is a draw with the probabilities of the
//! softmax: of exponential numbers divided by weights, the smallest is that of a weight w with a probability proportional to w.
//! It needs no largest logit of the row and no sum over it. A score is a logit plus at most 37 / scale, so it does not
//! overflow at low temperatures. It is computed from the tokens of one group alone, in a fixed order, so it is the same
//! however a row is distributed.
//!
//! 1 ≤ s ≤ 8, and log₂ E has cheap bounds. So the powers of a group need to be computed only if the upper bound of its
//! score reaches the best lower bound known ([`Race::bounds`]).

use core::f32::consts::LN_2;

use super::key;
use crate::{
    abi::DrawParams,
    common::{
        math::{Real, exp2},
        state::log2,
    },
    step::VECTOR,
};

/// What the scores of a row depend on besides its logits.
#[derive(Clone, Copy, Debug)]
pub struct Race {
    scale: f32,
    inverse_scale: f32,
    /// The row's random number; the first half with half of the first round of [`bits`](Self::bits) done.
    random: [u32; 2],
}

/// The score of a group, and which of its tokens is drawn if it is the largest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Scored {
    /// The [key] of the score.
    pub key: u32,
    /// Decides between equal scores: the larger one wins, below 2¹³. Scores are equal if the logits are so large, or the
    /// temperature is so low, that the random number is lost in rounding. It is (log₂ s − log₂ E) in steps of 1 / 128.
    pub tie: u32,
    /// The token's place in the group.
    pub place: u32,
}

/// Above all other [`Scored::tie`].
const MOST_TIE: u32 = (1 << TIE_BITS) - 1;

/// Bits of [`Scored::tie`] and of a token.
const TIE_BITS: u32 = 13;
const TOKEN_BITS: u32 = 32 - TIE_BITS;
const TOKENS: u32 = 1 << TOKEN_BITS;
const _: () = assert!(super::MOST <= TOKENS);

/// At least the last group.
const MOST_GROUP: u32 = (1 << 16) - 1;
const _: () = assert!(super::MOST / VECTOR <= MOST_GROUP);

impl Race {
    /// The race of a row.
    #[inline(always)]
    #[must_use]
    pub const fn new(draw: &DrawParams) -> Self {
        let [low, high] = [draw.random as u32, (draw.random >> 32) as u32];
        Self {
            scale: draw.scale,
            inverse_scale: draw.inverse_scale,
            random: [low ^ low >> 16, high],
        }
    }

    /// 32 random bits for each group, and others for its tokens, with 16 bits of ones above the group: a multiplicative
    /// hash, with half of the row's random number in each of its rounds.
    #[inline(always)]
    fn bits(&self, x: u32) -> u32 {
        // The first round: bits are mixed with those 16 places above. A group has none there.
        let x = (x ^ self.random[0]).wrapping_mul(0x7FEB_352D);
        let x = (x ^ x >> 15 ^ self.random[1]).wrapping_mul(0x846C_A68B);
        x ^ x >> 16
    }

    /// Bounds of log₂ s − log₂ E of a group. They depend on no logit.
    #[inline(always)]
    #[must_use]
    pub fn bounds(&self, group: u32) -> [f32; 2] {
        // E = −ln(1 − u) is at least u, and log₂ (E / u) is convex in u: 0 at 0, and 4.52 at 1 − 2⁻³³.
        let u = uniform(self.bits(group));
        let above = -log2(u);
        [Real::mul_add(u, -4.55, above - 0.001), above + 3.001]
    }

    /// The score of a group with this largest logit, or a bound of it, from log₂ s − log₂ E, or a bound of it.
    /// Monotonic: bounds stay bounds when they are rounded.
    #[inline(always)]
    #[must_use]
    pub fn score(&self, largest: f32, exponent: f32) -> f32 {
        Real::mul_add(exponent, self.inverse_scale, largest)
    }

    /// The weights of a group's tokens relative to its largest logit; 0 for NaN, and for all if that logit is infinite.
    /// All exponentials come first, so that several are in flight.
    #[inline(always)]
    #[must_use]
    pub fn weights(&self, x: &[f32; VECTOR as usize], largest: f32) -> [f32; VECTOR as usize] {
        x.map(|logit| opaque(exp2((logit - largest) * self.scale)))
            .map(|weight| weight.max(0.0))
    }

    /// The score of a group, given its logits, their weights (0 for tokens that are dropped), and the largest logit,
    /// which is not dropped.
    #[inline(always)]
    #[must_use]
    pub fn scored(
        &self,
        group: u32,
        x: &[f32; VECTOR as usize],
        weights: &[f32; VECTOR as usize],
        largest: f32,
    ) -> Scored {
        // Sums over the first tokens: few additions, and few after each other. They do not fall, and a token without weight
        // adds nothing.
        let [a, b, c, d, e, f, g, h] = *weights;
        let (ab, cd, ef, gh) = (a + b, c + d, e + f, g + h);
        let [abcd, efgh] = [ab + cd, ef + gh];
        let up_to = [a, ab, ab + c, abcd, abcd + e, abcd + ef, abcd + (ef + g)];
        let sum = abcd + efgh;
        let exponent = log2(sum) - log2(exponential(self.bits(group)));
        // 24 bits: below the sum in spite of rounding.
        let falls = (self.bits(group | !MOST_GROUP) >> 8) as f32 * (sum / (1 << 24) as f32);
        let mut scored = Scored {
            key: key(self.score(largest, exponent)),
            tie: tie(exponent),
            place: place(&up_to, falls),
        };
        if largest.is_infinite() {
            // The first of them.
            let mut i = x.len();
            while i > 0 {
                i -= 1;
                scored.place = if x[i] == largest {
                    i as u32
                } else {
                    scored.place
                };
            }
            scored.key = key(largest);
            // Scores of finite logits may overflow at the highest temperatures. They stay between the infinite ones.
            scored.tie = if largest > 0.0 { MOST_TIE } else { 0 };
        }
        scored
    }
}

/// The number of sums that a number reaches. The sums do not fall.
#[inline(always)]
fn place(up_to: &[f32; VECTOR as usize - 1], falls: f32) -> u32 {
    let four = falls >= up_to[3];
    let two = falls >= if four { up_to[5] } else { up_to[1] };
    let early = if two { up_to[2] } else { up_to[0] };
    let late = if two { up_to[6] } else { up_to[4] };
    let one = falls >= if four { late } else { early };
    u32::from(four) << 2 | u32::from(two) << 1 | u32::from(one)
}

/// A token and its [score](Scored), as one number, which is the larger the better the token is. Of equal tokens the first
/// is the best. With the key of NaN, 0, it stands for no token.
#[inline(always)]
#[must_use]
pub const fn number(key: u32, tie: u32, token: u32) -> u64 {
    (key as u64) << 32 | (tie << TOKEN_BITS | !token & (TOKENS - 1)) as u64
}

/// The token of a [`number`]; 0 if it has the key of NaN.
#[inline(always)]
#[must_use]
pub const fn token_of(number: u64) -> u32 {
    if number >> 32 == 0 {
        return 0;
    }
    !number as u32 & (TOKENS - 1)
}

/// [`Scored::tie`] from log₂ s − log₂ E, which is between −5 and 37.
#[inline(always)]
fn tie(exponent: f32) -> u32 {
    // Adding 2²³ rounds to an integer in the low bits.
    (Real::mul_add(exponent, 128.0, 8_388_608.0 + 768.0)).to_bits() & MOST_TIE
}

/// A uniform random number above 0 and at most 1: (`bits` + ½) / 2³².
#[inline(always)]
fn uniform(bits: u32) -> f32 {
    const ULP: f32 = 1.0 / (1_u64 << 32) as f32;
    Real::mul_add(bits as f32, ULP, 0.5 * ULP)
}

/// −ln (1 − u), where u is the [`uniform`] random number of the same bits. Its relative error is below 1e-5, also for small
/// u, on which large scores depend.
#[inline(always)]
fn exponential(bits: u32) -> f32 {
    let u = uniform(bits);
    let log = -LN_2 * log2(uniform(!bits));
    let series = Real::mul_add(
        u,
        Real::mul_add(u, Real::mul_add(u, 0.25, 1.0 / 3.0), 0.5),
        1.0,
    ) * u;
    if u < 1.0 / 16.0 { series } else { log }
}

/// Keeps the compiler from moving code of one token past the exponential of the next.
#[inline(always)]
fn opaque(x: f32) -> f32 {
    #[cfg(target_arch = "nvptx64")]
    return f32::from_bits(cuda_std::misc::opaque(x.to_bits()));
    #[cfg(not(target_arch = "nvptx64"))]
    x
}

#[cfg(test)]
mod tests {
    use super::*;

    fn race(temperature: f32, random: u64) -> Race {
        Race::new(&DrawParams {
            scale: core::f32::consts::LOG2_E / temperature,
            top_k: 0,
            top_p: 0,
            min_weight: 0,
            random,
            inverse_scale: temperature * LN_2,
            reserved: 0,
        })
    }

    fn some_bits() -> impl Iterator<Item = u32> {
        let all = (0..32).flat_map(|shift| (0..2000_u32).map(move |i| i << shift));
        all.flat_map(|bits| [bits, !bits])
    }

    #[test]
    fn exponential_numbers_are_precise() {
        for bits in some_bits() {
            let u = (f64::from(bits) + 0.5) / 2_f64.powi(32);
            let (got, right) = (f64::from(exponential(bits)), -(-u).ln_1p());
            assert!((got / right - 1.0).abs() < 1e-5, "{got} instead of {right}");
        }
    }

    #[test]
    fn bounds_hold_and_are_tight_where_scores_are_large() {
        let race = race(1.0, 3);
        // `bits` is a bijection; this tests bounds by their formula.
        for group in 0..200_000 {
            let bits = race.bits(group);
            let [least, most] = race.bounds(group);
            let exponent = -log2(exponential(bits));
            assert!(least < exponent, "{least} above {exponent} of {bits}");
            assert!(most > exponent + 3.0, "{most} below {exponent} of {bits}");
            if exponent > 5.0 {
                assert!(most - least < 3.2, "{least} to {most}");
            }
        }
    }

    #[test]
    fn a_score_lies_within_its_bounds() {
        let x = [0.5, -3.0, f32::NAN, 0.5, f32::NEG_INFINITY, 0.25, 0.0, 0.5];
        for temperature in [1e-4, 0.1, 1.0, 50.0, 1e30] {
            for shift in [0.0, 20.0, -1e4, 1e30] {
                let race = race(temperature, 5);
                let x = x.map(|logit: f32| logit + shift);
                let largest = x[0];
                for group in 0..5000 {
                    let scored = race.scored(group, &x, &race.weights(&x, largest), largest);
                    let [least, most] = race
                        .bounds(group)
                        .map(|exponent| key(race.score(largest, exponent)));
                    assert!((least..=most).contains(&scored.key), "group {group}");
                    assert!(scored.tie < MOST_TIE && scored.place < 8);
                }
            }
        }
    }

    #[test]
    fn random_bits_are_uniform_and_differ_between_rows() {
        let rows: Vec<Race> = [0, 1, 1 << 32, u64::MAX]
            .map(|random| race(1.0, random))
            .into();
        for row in &rows {
            let mut counts = [0_u32; 256];
            for group in 0..25_600 {
                counts[(row.bits(group) >> 24) as usize] += 1;
            }
            // χ² of 255 degrees: mean 255, deviation 22.6.
            let chi: f64 = counts
                .iter()
                .map(|&n| (f64::from(n) - 100.0).powi(2) / 100.0)
                .sum();
            assert!((140.0..390.0).contains(&chi), "χ² = {chi}");
        }
        for other in &rows[1..] {
            let flipped: u32 = (0..1000)
                .map(|group| (rows[0].bits(group) ^ other.bits(group)).count_ones())
                .sum();
            assert!((15_000..17_000).contains(&flipped), "{flipped} of 32,000");
        }
    }

    #[test]
    fn numbers_are_ordered_by_key_then_tie_then_token() {
        let ordered = [
            number(5, 0, TOKENS - 1),
            number(5, 0, 0),
            number(5, 1, 9),
            number(5, 1, 8),
            number(5, MOST_TIE, 3),
            number(6, 0, 100),
        ];
        assert!(ordered.is_sorted(), "{ordered:x?}");
        assert_eq!(ordered.map(token_of), [TOKENS - 1, 0, 9, 8, 3, 100]);
        assert_eq!(token_of(number(0, 7, 7)), 0);
        assert_eq!(token_of(0), 0);
    }

    #[test]
    fn infinite_logits_and_nan() {
        let (race, none, all) = (race(0.5, 1), f32::NEG_INFINITY, f32::INFINITY);
        let of = |x: [f32; 8], largest| race.scored(4, &x, &race.weights(&x, largest), largest);
        let nan = f32::NAN;
        let got = of([nan, 1.0, all, 3.0, all, nan, none, 0.0], all);
        assert_eq!(
            got,
            Scored {
                key: key(all),
                tie: MOST_TIE,
                place: 2
            }
        );
        let got = of([nan, nan, nan, none, none, nan, none, nan], none);
        assert_eq!(
            got,
            Scored {
                key: key(none),
                tie: 0,
                place: 3
            }
        );
        for group in 0..1000 {
            let x = [nan, none, 1.0, nan, none, 2.0, nan, none];
            let got = race.scored(group, &x, &race.weights(&x, 2.0), 2.0);
            assert!([2, 5].contains(&got.place));
        }
    }
}
