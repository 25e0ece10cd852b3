//! The step around attention: what a model computes between its matrix products.
//!
//! After the projection to queries, keys and values, one call ([`cpu::qkv`]) normalises heads, applies the rotary embedding, and
//! appends keys and values to their pages. The rest of a step is [`cpu::rms_norm`] with its
//! residual, [`cpu::gate`], [`cpu::embed`] and [`cpu::sample`]. Around the last, [`cpu::adjust`] applies biases and penalties,
//! [`cpu::restore`] takes them back, and [`cpu::log_probs`] computes log-probabilities. `gpu::Gpu` (feature `cuda`) has a launch for
//! each of them, on the caller's stream, which a CUDA graph can capture.
//!
//! The parameters of a model are data: [`Rope`], [`RmsNorm`], [`Activation`], [`Sampling`]. Everything is computed in
//! single precision and rounded once, when it is written.
//!
//! ```
//! use tandem_attn::step::{Rope, RopeScaling, Sampling};
//!
//! // Llama 3.1: once for a model.
//! let scaling = RopeScaling::Llama3 {
//!     factor: 8.0,
//!     low_freq_factor: 1.0,
//!     high_freq_factor: 4.0,
//!     original_positions: 8192,
//! };
//! let table = Rope::new(128, 500_000.0).with_scaling(scaling).table()?;
//! assert_eq!(table.dim(), 128);
//!
//! // The eighth token of a request. It does not depend on the rest of the batch.
//! let sampling = Sampling { temperature: 0.7, top_p: 0.9, seed: 42, ..Sampling::GREEDY };
//! let draw = sampling.draw(7)?;
//! # Ok::<(), tandem_attn::step::StepError>(())
//! ```

pub mod cpu;
mod error;
mod penalties;
mod rope;
mod sampling;

pub use error::StepError;
pub use kernels_gpu::{
    abi::{AdjustRow, AdjustToken, LogProb, LogProbRow, NO_TOKEN},
    step::sample::{LOG_PROBS, MOST_TOP},
};
pub use penalties::Penalties;
pub use rope::{Pairing, Rope, RopeScaling, RopeTable, Yarn};
pub use sampling::{Draw, Sampling};

use serde::{Deserialize, Serialize};

/// Divides by the root of the mean square and multiplies by `offset + weight`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RmsNorm {
    /// Number added to the mean square.
    pub eps: f32,
    /// Number added to the weights: 1 for models that store the weight minus 1, such as Gemma; otherwise 0.
    pub offset: f32,
}

impl RmsNorm {
    /// With nothing added to the weights.
    #[must_use]
    pub const fn new(eps: f32) -> Self {
        Self { eps, offset: 0.0 }
    }

    /// With 1 added to the weights.
    #[must_use]
    pub const fn gemma(eps: f32) -> Self {
        Self { eps, offset: 1.0 }
    }
}

/// The activation function of a gated feed-forward layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Activation {
    /// `x · σ(x)`.
    Silu,
    /// GELU by its approximation with the hyperbolic tangent (`gelu_pytorch_tanh`).
    GeluTanh,
}

impl Activation {
    fn of(self, x: f32) -> f32 {
        match self {
            Self::Silu => kernels_gpu::step::gate::silu(x),
            Self::GeluTanh => kernels_gpu::step::gate::gelu_tanh(x),
        }
    }
}
