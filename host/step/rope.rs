//! Rotary embedding (RoPE): the frequencies of a model, from its configuration.

use std::f64::consts::{PI, TAU};

use serde::{Deserialize, Serialize};

use super::StepError;

/// Rotary embedding (RoPE). Pair `i` of the first `dim` elements of a head is rotated by the angle
/// `position · theta^(−2i / dim)`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rope {
    /// Number of rotated elements, the first ones of each head; even.
    pub dim: u32,
    /// The base of the frequencies.
    pub theta: f64,
    /// Which elements are a pair.
    pub pairing: Pairing,
    /// How the frequencies are scaled for contexts longer than in training.
    pub scaling: RopeScaling,
}

/// Which of the rotated elements of a head form a pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Pairing {
    /// `i` and `i + dim / 2`: NeoX, and Llama as Hugging Face keeps it.
    #[default]
    HalfSplit,
    /// `2i` and `2i + 1`: GPT-J, GLM.
    Interleaved,
}

impl Pairing {
    /// The elements of a pair, if `dim` elements are rotated.
    pub(crate) const fn elements(self, pair: usize, dim: usize) -> [usize; 2] {
        match self {
            Self::HalfSplit => [pair, pair + dim / 2],
            Self::Interleaved => [2 * pair, 2 * pair + 1],
        }
    }
}

/// How frequencies are scaled. Fields are named as in Hugging Face's configuration files, except `original_positions`, which is
/// `original_max_position_embeddings` there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub enum RopeScaling {
    /// No scaling.
    #[default]
    None,
    /// All frequencies are divided by a factor.
    Linear {
        /// The factor.
        factor: f64,
    },
    /// Llama 3.1: low frequencies are divided by a factor, high ones are not, those between are interpolated.
    Llama3 {
        /// The factor of low frequencies.
        factor: f64,
        /// A frequency is low up to this number of rotations within the original context.
        low_freq_factor: f64,
        /// A frequency is high from this number of rotations on.
        high_freq_factor: f64,
        /// The context length of the training.
        original_positions: u32,
    },
    /// YaRN: as `Llama3`, with a ramp over the pairs, and a larger magnitude.
    Yarn(Yarn),
}

/// See [`RopeScaling::Yarn`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Yarn {
    /// The factor of low frequencies.
    pub factor: f64,
    /// The context length of the training.
    pub original_positions: u32,
    /// A frequency is high from this number of rotations within the original context on: at least `beta_slow`.
    pub beta_fast: f64,
    /// A frequency is low up to this number of rotations within the original context.
    pub beta_slow: f64,
    /// The magnitude, if the configuration gives it.
    pub attention_factor: Option<f64>,
    /// If `mscale` and `mscale_all_dim` are given and not 0, the magnitude is the quotient of two values computed from them.
    pub mscale: Option<f64>,
    /// See `mscale`.
    pub mscale_all_dim: Option<f64>,
    /// Whether the ends of the ramp are rounded to whole pairs.
    pub truncate: bool,
}

impl Yarn {
    /// With the paper's values for the optional fields.
    #[must_use]
    pub const fn new(factor: f64, original_positions: u32) -> Self {
        Self {
            factor,
            original_positions,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: None,
            mscale: None,
            mscale_all_dim: None,
            truncate: true,
        }
    }

    fn magnitude(&self) -> f64 {
        let of = |mscale: f64| match self.factor > 1.0 {
            true => 0.1 * mscale * self.factor.ln() + 1.0,
            false => 1.0,
        };
        match (self.attention_factor, self.mscale, self.mscale_all_dim) {
            (Some(factor), ..) => factor,
            (None, Some(one), Some(all)) if one != 0.0 && all != 0.0 => of(one) / of(all),
            _ => of(1.0),
        }
    }

    /// The pairs at which the ramp begins and ends.
    fn ramp(&self, dim: f64, theta: f64) -> [f64; 2] {
        let pair = |turns: f64| {
            let positions = f64::from(self.original_positions);
            dim * (positions / (turns * TAU)).ln() / (2.0 * theta.ln())
        };
        let (mut low, mut high) = (pair(self.beta_fast), pair(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(dim - 1.0));
        match low == high {
            true => [low, high + 0.001],
            false => [low, high],
        }
    }
}

impl Rope {
    /// With half-split pairs and unscaled frequencies.
    #[must_use]
    pub const fn new(dim: u32, theta: f64) -> Self {
        Self {
            dim,
            theta,
            pairing: Pairing::HalfSplit,
            scaling: RopeScaling::None,
        }
    }

    /// With other pairs.
    #[must_use]
    pub const fn with_pairing(mut self, pairing: Pairing) -> Self {
        self.pairing = pairing;
        self
    }

    /// With scaled frequencies.
    #[must_use]
    pub const fn with_scaling(mut self, scaling: RopeScaling) -> Self {
        self.scaling = scaling;
        self
    }

    /// The angle in radians by which each pair rotates from one position to the next.
    ///
    /// # Errors
    /// [`StepError::Rope`].
    pub fn inverse_frequencies(&self) -> Result<Vec<f64>, StepError> {
        self.check()?;
        let (pairs, dim) = (self.dim / 2, f64::from(self.dim));
        let ramp = match self.scaling {
            RopeScaling::Yarn(yarn) => yarn.ramp(dim, self.theta),
            _ => [0.0; 2],
        };
        let scaled = |pair: u32| {
            let frequency = self.theta.powf(-2.0 * f64::from(pair) / dim);
            match self.scaling {
                RopeScaling::None => frequency,
                RopeScaling::Linear { factor } => frequency / factor,
                RopeScaling::Llama3 {
                    factor,
                    low_freq_factor: low,
                    high_freq_factor: high,
                    original_positions,
                } => {
                    let turns = f64::from(original_positions) * frequency / TAU;
                    let kept = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                    frequency * (kept + (1.0 - kept) / factor)
                }
                RopeScaling::Yarn(Yarn { factor, .. }) => {
                    let [low, high] = ramp;
                    let divided = ((f64::from(pair) - low) / (high - low)).clamp(0.0, 1.0);
                    frequency * (1.0 - divided + divided / factor)
                }
            }
        };
        Ok((0..pairs).map(scaled).collect())
    }

    /// The factor of sines and cosines: YaRN's attention factor, or 1.
    #[must_use]
    pub fn magnitude(&self) -> f64 {
        match self.scaling {
            RopeScaling::Yarn(yarn) => yarn.magnitude(),
            _ => 1.0,
        }
    }

    /// The frequencies in the form that kernels use. Make the table once per model.
    ///
    /// # Errors
    /// [`StepError::Rope`].
    pub fn table(&self) -> Result<RopeTable, StepError> {
        // A full turn is 2⁶⁴: products with positions overflow exactly at full turns, which do not matter.
        let of_turn = |frequency: f64| ((frequency / TAU).fract() * 2_f64.powi(64)) as u64;
        let frequencies = self.inverse_frequencies()?;
        Ok(RopeTable {
            dim: self.dim,
            pairing: self.pairing,
            magnitude: self.magnitude() as f32,
            turns: frequencies.into_iter().map(of_turn).collect(),
        })
    }

    /// Checks the embedding for heads of this dimension.
    pub(crate) fn check_heads(&self, head_dim: u32) -> Result<(), StepError> {
        self.check()?;
        StepError::rope_dim(self.dim, head_dim)
    }

    fn check(&self) -> Result<(), StepError> {
        let rule = |what, got: f64, holds: bool, rule| match holds {
            true => Ok(()),
            false => Err(StepError::Rope { what, got, rule }),
        };
        let positive = |what, got: f64| {
            let holds = got > 0.0 && got.is_finite();
            rule(what, got, holds, "positive and finite")
        };
        let even = self.dim > 0 && self.dim.is_multiple_of(2);
        rule("the dimension", self.dim.into(), even, "even and positive")?;
        rule(
            "the base theta",
            self.theta,
            self.theta > 1.0 && self.theta.is_finite(),
            "finite and above 1",
        )?;
        match self.scaling {
            RopeScaling::None => Ok(()),
            RopeScaling::Linear { factor } => positive("the factor", factor),
            RopeScaling::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_positions,
            } => {
                positive("the factor", factor)?;
                positive("the low frequency factor", low)?;
                let above = high > low && high.is_finite();
                let what = "the high frequency factor";
                rule(what, high, above, "above the low frequency factor")?;
                positive(
                    "the number of original positions",
                    original_positions.into(),
                )
            }
            RopeScaling::Yarn(yarn) => {
                positive("the factor", yarn.factor)?;
                positive(
                    "the number of original positions",
                    yarn.original_positions.into(),
                )?;
                positive("beta_slow", yarn.beta_slow)?;
                positive("beta_fast", yarn.beta_fast)?;
                let not_below = yarn.beta_fast >= yarn.beta_slow;
                rule("beta_fast", yarn.beta_fast, not_below, "at least beta_slow")?;
                positive("the magnitude", yarn.magnitude())
            }
        }
    }
}

/// Frequencies in the form that kernels use, made by [`Rope::table`].
#[derive(Clone, Debug, PartialEq)]
pub struct RopeTable {
    dim: u32,
    pairing: Pairing,
    magnitude: f32,
    /// The rotation of each pair from one position to the next, in units of 2⁻⁶⁴ turns.
    turns: Vec<u64>,
}

impl RopeTable {
    /// Number of rotated elements of a head.
    #[must_use]
    pub const fn dim(&self) -> u32 {
        self.dim
    }

    /// Which elements are a pair.
    #[must_use]
    pub const fn pairing(&self) -> Pairing {
        self.pairing
    }

    /// Sine and cosine of each pair at a position, with the magnitude.
    pub(crate) fn sines(&self, position: i64) -> impl Iterator<Item = [f32; 2]> + '_ {
        let magnitude = f64::from(self.magnitude);
        self.turns.iter().map(move |turn| {
            let turned = turn.wrapping_mul(position.cast_unsigned()).cast_signed();
            let (sine, cosine) = (turned as f64 * (PI / 2_f64.powi(63))).sin_cos();
            [sine, cosine].map(|x| (x * magnitude) as f32)
        })
    }

    /// Rotates a head by its position.
    pub(crate) fn turn(&self, head: &mut [f32], position: i64) {
        self.turn_by(head, self.sines(position));
    }

    /// Rotates a head by the sines and cosines of its position.
    pub(super) fn turn_by(&self, head: &mut [f32], sines: impl Iterator<Item = [f32; 2]>) {
        for (pair, [sine, cosine]) in sines.enumerate() {
            let [a, b] = self.pairing.elements(pair, self.dim as usize);
            let (first, second) = (head[a], head[b]);
            head[a] = first * cosine - second * sine;
            head[b] = second * cosine + first * sine;
        }
    }

    /// The turns, and the magnitude.
    #[cfg(feature = "cuda")]
    pub(crate) fn parts(&self) -> (&[u64], f32) {
        (&self.turns, self.magnitude)
    }
}
