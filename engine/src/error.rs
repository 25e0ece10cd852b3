//! What goes wrong between a folder with a model and its first token.

use std::{io, path::PathBuf};

use tandem_schedule::ScheduleError;

/// Why a model cannot be loaded, or a step not be computed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file that is not there or cannot be read.
    #[error("cannot read {}: {error}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// A file that is not what its name says.
    #[error("{}: {reason}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// A model of a family that is not known here.
    #[error("models of type {got:?} are not known here; there are {known}")]
    Family {
        /// The type in `config.json`.
        got: String,
        /// The types that are known.
        known: String,
    },
    /// Something that a model's configuration asks for, and that is not computed here.
    #[error("the model has {field} = {got}; {rule}")]
    Unsupported {
        /// Field of `config.json`.
        field: &'static str,
        /// Its value.
        got: String,
        /// What would do.
        rule: String,
    },
    /// A field that the configuration must have.
    #[error(
        "config.json has no {field}, and models of type {model_type:?} have no usual value of it"
    )]
    Missing {
        /// The field.
        field: &'static str,
        /// Type of the model.
        model_type: String,
    },
    /// A weight that no file has.
    #[error("the model's files have no tensor {name}")]
    NoTensor {
        /// Its name.
        name: String,
    },
    /// A weight of a shape that the configuration contradicts.
    #[error("tensor {name} is {got:?}, and config.json says {expected:?}")]
    TensorShape {
        /// Its name.
        name: String,
        /// Its shape.
        got: Vec<usize>,
        /// The shape that follows from the configuration.
        expected: Vec<usize>,
    },
    /// A weight of a type that is not read here.
    #[error("tensor {name} is {got}: convert the model to BF16, F16 or F32")]
    TensorType {
        /// Its name.
        name: String,
        /// Its type.
        got: String,
    },
    /// A text that the tokenizer does not take.
    #[error("the tokenizer: {reason}")]
    Tokenizer {
        /// Why.
        reason: String,
    },
    /// A conversation for a model without a chat template.
    #[error("the model has no chat template: give a plain prompt")]
    NoChatTemplate,
    /// A conversation that the model's chat template refuses, or a template that is none.
    #[error("the chat template: {reason}")]
    ChatTemplate {
        /// What it says.
        reason: String,
    },
    /// A token id that the model does not have.
    #[error("token {got} is not among the {vocabulary} of the model")]
    Token {
        /// The id.
        got: u32,
        /// Tokens of the model.
        vocabulary: usize,
    },
    /// A request longer than the model's positions.
    #[error("{got} tokens of prompt and answer are more than the {limit} positions of the model")]
    TooLong {
        /// Tokens of the prompt and of the answer.
        got: u64,
        /// Positions.
        limit: u32,
    },
    /// Work that takes the engine for itself, while others use it.
    #[error("{needed} free pages are needed, there are {free}, and no request may be under way")]
    Busy {
        /// Pages.
        needed: u64,
        /// Pages that nobody holds.
        free: u32,
    },
    /// Limits with pages on the host, to which no backend copies.
    #[error(
        "Limits::host_pages is {got}, and the engine swaps nothing out: set it to 0, requests that lose their pages are \
         computed again"
    )]
    HostPages {
        /// Pages on the host.
        got: u32,
    },
    /// A library that is opened at run time and is not there.
    #[error(
        "cuBLASLt is not there: install the CUDA toolkit's package for it (libcublas-13-x or libcublas-12-x, in pip \
         nvidia-cublas), and name its folder in LD_LIBRARY_PATH"
    )]
    NoCublasLt,
    /// A call of cuBLASLt that failed.
    #[error("{call} of cuBLASLt for a product of {m} × {k} by {k} × {n}: {status}")]
    CublasLt {
        /// The call.
        call: &'static str,
        /// Rows of the result.
        m: usize,
        /// Its columns.
        n: usize,
        /// What is summed over.
        k: usize,
        /// The library's status.
        status: String,
    },
    /// A call of the driver that failed.
    #[error("{call}: {status}")]
    Cuda {
        /// The call.
        call: &'static str,
        /// What the driver says.
        status: String,
    },
    /// A step that is more than the backend was made for.
    #[error(
        "a step of {tokens} tokens and {rows} rows of logits, and this backend was made for {most_tokens} and {most_rows}"
    )]
    StepTooLarge {
        /// Tokens of the step.
        tokens: usize,
        /// Rows whose logits are wanted.
        rows: usize,
        /// Most tokens.
        most_tokens: u32,
        /// Most rows.
        most_rows: u32,
    },
    /// A step that is to be begun while as many as a backend takes are under way, or other options of planning while
    /// any is.
    #[error("steps are under way: finish them first")]
    TooManySteps,
    /// A step that is waited for and was not begun.
    #[error("no step is under way")]
    NoStep,
    /// Attention, or the steps around it.
    #[error(transparent)]
    Attention(#[from] tandem_attn::Error),
    /// A request that the scheduler does not take.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
}

impl From<tandem_attn::plan::PlanError> for Error {
    fn from(error: tandem_attn::plan::PlanError) -> Self {
        Self::Attention(error.into())
    }
}
