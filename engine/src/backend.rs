//! What computes a step: the model's weights, its page pools, and the computation from input tokens to drawn tokens.

mod attention;
mod cpu;
#[cfg(feature = "cuda")]
mod gpu;
mod layers;

use tandem_attn::{
    kv::PageCopy,
    plan::PlanOptions,
    problem::PageTable,
    step::{Draw, LogProb},
};
use tandem_schedule::{CacheType, StepInputs};

pub use cpu::{CpuBackend, CpuOptions};
#[cfg(feature = "cuda")]
pub use gpu::{GpuBackend, GpuOptions, cublas_lt_names};

use crate::{Architecture, Error, LogitWork};

/// One step, ready to be computed.
#[derive(Clone, Copy, Debug)]
pub struct Work<'a> {
    /// The batch, and the inputs of each of its tokens.
    pub inputs: &'a StepInputs,
    /// Pages to copy before the step writes to any page.
    pub copies: &'a [PageCopy],
    /// Tokens of the batch whose logits are needed.
    pub rows: &'a [u32],
    /// For each of these rows, how its next token is drawn.
    pub draws: &'a [Draw],
    /// Tokens of the batch that the previous step draws: the token's index, and the row of the previous step that draws
    /// it. The ids of these tokens in `inputs` are placeholders.
    pub drawn: &'a [(u32, u32)],
    /// Adjustments of logits, and log-probabilities.
    pub logits: LogitWork<'a>,
}

/// How long a step took.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepTime {
    /// Time from its first kernel to its last.
    pub seconds: f64,
    /// Time from the end of the previous step to the first kernel of this one; none for the first step.
    pub gap_s: Option<f64>,
    /// Time of each [`Part`], in order. Empty unless the backend [times parts](Backend::take_apart).
    pub parts_s: Vec<f64>,
}

/// Part of a step, for timing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// The embedding, and norms together with their residual additions.
    Norms,
    /// The matrix product for queries, keys and values.
    Qkv,
    /// Rotary embedding, norms of heads, and the writes of keys and values to their pages.
    Append,
    /// Attention.
    Attention,
    /// The matrix product after attention.
    Out,
    /// The matrix product for the gate and the values that it multiplies.
    GateUp,
    /// The activation of the gate and its multiplication.
    Gate,
    /// The matrix product after the gate.
    Down,
    /// The matrix product for the logits.
    Head,
    /// Sampling.
    Sample,
}

impl Part {
    /// All parts, in order.
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

    /// Name for display.
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

    /// Whether it is a matrix product within a layer.
    #[must_use]
    pub const fn is_linear(self) -> bool {
        matches!(self, Self::Qkv | Self::Out | Self::GateUp | Self::Down)
    }
}

/// Computes steps.
///
/// Steps finish in the order in which they began. At most [`MOST_UNDER_WAY`] steps may have begun and not finished.
pub trait Backend: Send {
    /// Name of the device, for display.
    fn name(&self) -> String;

    /// The model.
    fn architecture(&self) -> &Architecture;

    /// Number of pages in each of its pools.
    fn pages(&self) -> u32;

    /// Tokens in a page.
    fn page_size(&self) -> u32;

    /// How its pools store keys and values.
    fn cache_type(&self) -> CacheType;

    /// Maximum number of tokens of a step.
    fn step_tokens(&self) -> u32;

    /// Maximum number of requests of a step.
    fn step_requests(&self) -> u32;

    /// Maximum number of keys of all prompt chunks of a step together; a step with one chunk may have more.
    fn chunk_keys(&self) -> u32 {
        u32::MAX
    }

    /// Whether the host is free for other work while a step is computed.
    fn is_asynchronous(&self) -> bool;

    /// Starts a step. It is computed after the steps that began before it.
    ///
    /// # Errors
    /// If the step exceeds what the backend was made for, if too many steps are under way, or if the device fails. The
    /// pages that the step writes then have no valid contents.
    fn begin(&mut self, work: &Work<'_>) -> Result<(), Error>;

    /// Waits for the oldest step under way. `tokens` receives one drawn token for each of its rows, and `log_probs`
    /// [`LOG_PROBS`](tandem_attn::step::LOG_PROBS) results for each row that asked for them.
    ///
    /// # Errors
    /// [`Error::NoStep`] if none is under way, or an error of the device.
    fn finish(
        &mut self,
        tokens: &mut Vec<u32>,
        log_probs: &mut Vec<LogProb>,
    ) -> Result<StepTime, Error>;

    /// Logits of the rows of the last step, `[rows, vocabulary]`.
    ///
    /// # Errors
    /// If the device fails.
    fn logits(&mut self) -> Result<Vec<f32>, Error>;

    /// Uses other plan options from the next step on. A bound in the options is ignored.
    ///
    /// With [fixed splits](tandem_attn::plan::SplitMode::Fixed), nothing else in a step depends on the number of its rows either, so
    /// that a request has the same bits alone and in any batch, as long as its prompt is computed in the same chunks.
    ///
    /// # Errors
    /// If steps are under way, or if the device lacks memory for the options. The options before still hold then; if there is
    /// no memory for them any more, steps fail with [`Error::NoPlans`] until other options succeed.
    fn plan_with(&mut self, options: PlanOptions) -> Result<(), Error>;

    /// Sets whether each part of a step is timed. The timing itself slows the step down.
    fn take_apart(&mut self, on: bool);

    /// What made steps slower and did not end them, since this was last called: lines for a user.
    fn warnings(&mut self) -> Vec<String> {
        Vec::new()
    }
}

/// Refuses sizes of pages that no batch can have, before memory is allocated.
fn check_page_size(page_size: u32) -> Result<(), Error> {
    PageTable::try_new(page_size, 1).map_err(tandem_attn::Error::from)?;
    Ok(())
}

/// Maximum number of steps of a backend that have begun and not finished.
pub const MOST_UNDER_WAY: usize = 2;
