//! Sampling of tokens: the rules, and the random numbers.

use kernels_gpu::{abi::DrawParams, step::sample::ONE};
use serde::{Deserialize, Serialize};

use super::StepError;

/// How a token is chosen from logits.
///
/// Logits are divided by the temperature and become probabilities. Three filters are applied in turn: the `top_k` largest; of these,
/// the fewest whose sum is at least `top_p` of the sum of all of them; of these, those that are at least `min_p` of the largest.
/// Tokens with equal logits are kept or dropped together. One of the remaining tokens is drawn. NaN is below
/// −∞.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    /// 0: the token with the largest logit; the first one if several are equal.
    pub temperature: f32,
    /// 0: no limit.
    pub top_k: u32,
    /// 1: no limit.
    pub top_p: f32,
    /// 0: no limit.
    pub min_p: f32,
    /// Seed of the random numbers.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self::GREEDY
    }
}

impl Sampling {
    /// The token with the largest logit.
    pub const GREEDY: Self = Self {
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        seed: 0,
    };

    /// The smallest temperature that is not 0.
    pub const COLDEST: f32 = 1e-4;

    /// The parameters for drawing one token of a request. `position` is the number of tokens of the request before it.
    /// The same seed, position and logits give the same token.
    ///
    /// # Errors
    /// [`StepError::Sampling`].
    pub fn draw(&self, position: u64) -> Result<Draw, StepError> {
        let Self {
            temperature,
            top_k,
            top_p,
            min_p,
            seed,
        } = *self;
        let rule = StepError::sampling;
        rule(
            "the temperature",
            temperature,
            temperature == 0.0 || temperature >= Self::COLDEST && temperature.is_finite(),
            "0 (greedy), or finite and at least 0.0001",
        )?;
        let probability = 0.0..=1.0;
        let above_0 = top_p > 0.0 && probability.contains(&top_p);
        rule("top_p", top_p, above_0, "above 0 and at most 1")?;
        rule(
            "min_p",
            min_p,
            probability.contains(&min_p),
            "between 0 and 1",
        )?;
        // Beyond this all finite logits have equal weights anyway; below, products with random exponents are finite.
        let temperature = temperature.min(1e36);
        Ok(Draw(DrawParams {
            scale: match temperature {
                0.0 => 0.0,
                temperature => std::f32::consts::LOG2_E / temperature,
            },
            top_k,
            top_p: match top_p {
                1.0 => 0,
                top_p => ((f64::from(top_p) * 2_f64.powi(32)) as u32).max(1),
            },
            min_weight: (f64::from(min_p) * f64::from(ONE)).ceil() as u32,
            random: random(seed, position),
            inverse_scale: temperature * std::f32::consts::LN_2,
            reserved: 0,
        }))
    }
}

/// The parameters for drawing one token, made by [`Sampling::draw`].
#[derive(Clone, Copy, Debug, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub struct Draw(pub(super) DrawParams);

/// Number `position` of a seed: SplitMix64, which can start at any position.
fn random(seed: u64, position: u64) -> u64 {
    const GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;
    let mix = |mut z: u64| {
        z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    };
    // Mixed, so that neighbouring seeds do not give the same numbers at shifted positions.
    let start = mix(seed.wrapping_add(GAMMA));
    mix(start.wrapping_add(GAMMA.wrapping_mul(position.wrapping_add(1))))
}
