//! What computes a step: the model's weights, its page pools, and everything between tokens in and tokens out.

mod attention;
mod cpu;
#[cfg(feature = "cuda")]
mod gpu;
mod layers;

use tandem_attn::{kv::PageCopy, step::Draw};
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
}

/// Computes steps.
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

    /// Computes a step and draws a token for each of its rows.
    ///
    /// # Errors
    /// Where the step is more than the backend was made for, or the machine fails. Pages that the step writes hold
    /// nothing of value then.
    fn compute(&mut self, work: &Work<'_>, tokens: &mut Vec<u32>) -> Result<(), Error>;

    /// Logits of the rows of the last step, `[rows, vocabulary]`.
    ///
    /// # Errors
    /// Where the machine fails.
    fn logits(&mut self) -> Result<Vec<f32>, Error>;
}
