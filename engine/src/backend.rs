//! What computes a step: the model's weights, its page pools, and everything between tokens in and tokens out.

mod attention;
mod cpu;
#[cfg(feature = "cuda")]
mod gpu;
mod layers;

use tandem_attn::{kv::PageCopy, plan::PlanOptions, step::Draw};
use tandem_schedule::StepInputs;

pub use cpu::CpuBackend;
#[cfg(feature = "cuda")]
pub use gpu::{GpuBackend, GpuOptions};

use crate::{Architecture, Error};

/// One step, ready to be computed.
#[derive(Clone, Copy, Debug)]
pub struct Work<'a> {
    /// The batch, and what goes with each of its tokens.
    pub inputs: &'a StepInputs,
    /// Pages to be copied before anything is written.
    pub copies: &'a [PageCopy],
    /// Tokens of the batch whose logits are wanted.
    pub rows: &'a [u32],
    /// For each of them how its next token is drawn.
    pub draws: &'a [Draw],
    /// Tokens of the batch that are drawn by the step before: which, and by which of its rows. Their ids in `inputs`
    /// mean nothing.
    pub drawn: &'a [(u32, u32)],
}

/// How long a step took.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepTime {
    /// From its first kernel to its last.
    pub seconds: f64,
    /// From the end of the step before to its first kernel; none for the first.
    pub gap_s: Option<f64>,
    /// For each [`Part`] in its order; empty unless the backend is to [take parts apart](Backend::take_apart).
    pub parts_s: Vec<f64>,
}

/// What a step spends its time on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// The embedding, and norms with their residuals.
    Norms,
    /// The product for queries, keys and values.
    Qkv,
    /// Rotary embedding, norms of heads, and keys and values into their pages.
    Append,
    /// Attention.
    Attention,
    /// The product behind attention.
    Out,
    /// The product for the gate and what it multiplies.
    GateUp,
    /// The gate.
    Gate,
    /// The product behind the gate.
    Down,
    /// The logits.
    Head,
    /// Drawing tokens.
    Sample,
}

impl Part {
    /// All, in their order.
    pub const ALL: [Self; 10] = [
        Self::Norms,
        Self::Qkv,
        Self::Append,
        Self::Attention,
        Self::Out,
        Self::GateUp,
        Self::Gate,
        Self::Down,
        Self::Head,
        Self::Sample,
    ];

    /// For people.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Norms => "embedding and norms",
            Self::Qkv => "product: queries, keys, values",
            Self::Append => "rotary embedding, append",
            Self::Attention => "attention",
            Self::Out => "product: out of attention",
            Self::GateUp => "product: gate and up",
            Self::Gate => "gate",
            Self::Down => "product: down",
            Self::Head => "product: logits",
            Self::Sample => "sampling",
        }
    }

    /// Whether it is a product within a layer.
    #[must_use]
    pub const fn is_linear(self) -> bool {
        matches!(self, Self::Qkv | Self::Out | Self::GateUp | Self::Down)
    }
}

/// Computes steps.
///
/// Steps are begun and finished in the same order; [`MOST_UNDER_WAY`] may be begun and not finished.
pub trait Backend: Send {
    /// What it runs on, for people.
    fn name(&self) -> String;

    /// The model.
    fn architecture(&self) -> &Architecture;

    /// Pages of its pools.
    fn pages(&self) -> u32;

    /// Tokens in a page.
    fn page_size(&self) -> u32;

    /// Most tokens that a step may have.
    fn step_tokens(&self) -> u32;

    /// Most requests that a step may have.
    fn step_requests(&self) -> u32;

    /// Whether a step is computed while the host does something else.
    fn is_asynchronous(&self) -> bool;

    /// Puts a step on its way, behind those that were begun before.
    ///
    /// # Errors
    /// Where the step is more than the backend was made for, too many are under way, or the machine fails. Pages that the
    /// step writes hold nothing of value then.
    fn begin(&mut self, work: &Work<'_>) -> Result<(), Error>;

    /// Waits for the oldest step under way, and gives the token that was drawn for each of its rows.
    ///
    /// # Errors
    /// [`Error::NoStep`] where none is under way, or where the machine fails.
    fn finish(&mut self, tokens: &mut Vec<u32>) -> Result<StepTime, Error>;

    /// Logits of the rows of the last step, `[rows, vocabulary]`.
    ///
    /// # Errors
    /// Where the machine fails.
    fn logits(&mut self) -> Result<Vec<f32>, Error>;

    /// Plans attention with other options from the next step on; a bound in them does not count.
    ///
    /// # Errors
    /// Where the machine has no memory for it. No step may be under way.
    fn plan_with(&mut self, options: PlanOptions) -> Result<(), Error>;

    /// Whether the parts of a step are timed one by one. That takes time itself.
    fn take_apart(&mut self, on: bool);
}

/// Steps of a backend that may be begun and not finished.
pub const MOST_UNDER_WAY: usize = 2;
