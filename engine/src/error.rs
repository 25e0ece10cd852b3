//! What goes wrong between a folder with a model and its first token.

use std::{io, path::PathBuf};

use tandem_schedule::{CacheType, ScheduleError};

/// Why bytes cannot be read as a file of a model: in a clone without Git LFS, the file is a pointer to what it should be.
pub(crate) fn unread(bytes: &[u8], error: &dyn std::fmt::Display) -> String {
    match bytes.starts_with(b"version https://git-lfs") {
        true => "this is a pointer of Git LFS and not the file: `git lfs pull` in the folder fetches it, and `hf download` the model"
            .to_owned(),
        false => damaged(error),
    }
}

/// Why a file of a model cannot be used as it is, and what to do.
pub(crate) fn damaged(error: &dyn std::fmt::Display) -> String {
    format!("{error}: correct the file, or download it again")
}

/// Why a model cannot be loaded or a step cannot be computed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file that does not exist or cannot be read.
    #[error(
        "cannot read {}: {error}: give the folder of a whole model, whose files this program may read", path.display()
    )]
    Read {
        /// The file.
        path: PathBuf,
        /// The reason.
        error: io::Error,
    },
    /// A file whose contents are invalid.
    #[error("{}: {reason}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// A model of an unsupported family.
    #[error("models of type {got:?} are not supported; supported: {known}")]
    Family {
        /// The type in `config.json`.
        got: String,
        /// The supported types.
        known: String,
    },
    /// A setting of a model's configuration that is not supported.
    #[error("the model has {field} = {got}; {rule}")]
    Unsupported {
        /// Field of `config.json`.
        field: &'static str,
        /// Its value.
        got: String,
        /// What is supported.
        rule: String,
    },
    /// A required field that the configuration lacks.
    #[error(
        "config.json has no {field}, and models of type {model_type:?} have no default for it: add the field"
    )]
    Missing {
        /// Name of the field.
        field: &'static str,
        /// `model_type` of the configuration.
        model_type: String,
    },
    /// A weight that no file contains.
    #[error(
        "the model's files have no tensor {name}, which a model with this config.json has: download what is missing, or \
         correct config.json"
    )]
    NoTensor {
        /// Its name.
        name: String,
    },
    /// A weight that the model does not use.
    #[error(
        "the model's files have a tensor {name}, which a model with this config.json does not use, so its text would be \
         wrong: correct model_type, num_hidden_layers or the biases in config.json"
    )]
    UnusedTensor {
        /// Its name.
        name: String,
    },
    /// A weight whose shape contradicts the configuration.
    #[error(
        "tensor {name} has the shape {got:?}, but config.json says {expected:?}: they are of different models; download both \
         again, or correct config.json"
    )]
    TensorShape {
        /// Its name.
        name: String,
        /// Its shape.
        got: Vec<usize>,
        /// The shape that follows from the configuration.
        expected: Vec<usize>,
    },
    /// A weight in an unsupported element type.
    #[error("tensor {name} is {got}: convert the model to BF16, F16 or F32")]
    TensorType {
        /// Its name.
        name: String,
        /// Its type.
        got: String,
    },
    /// Caches for which there is not enough memory.
    #[error("KV caches of {tokens} tokens cannot be allocated: ask for fewer tokens")]
    CacheMemory {
        /// Tokens asked for.
        tokens: u32,
    },
    /// A text or a token that the tokenizer rejects.
    #[error(
        "the tokenizer: {reason}: change the text, or download tokenizer.json again if it takes none"
    )]
    Tokenizer {
        /// The reason.
        reason: String,
    },
    /// A conversation for a model without a chat template.
    #[error("the model has no chat template: give a plain prompt")]
    NoChatTemplate,
    /// A conversation that the model's chat template rejects (`raise_exception`), or for which it fails.
    #[error("the chat template: {reason}: change the messages, or give a plain prompt")]
    ChatTemplate {
        /// What the template says.
        reason: String,
    },
    /// A chat template that is invalid, or calls a function, a filter or a test that there is not.
    #[error(
        "the chat template fails: {reason}: correct the template in the model's folder, or give a plain prompt"
    )]
    BrokenTemplate {
        /// The message of the template engine.
        reason: String,
    },
    /// A conversation of which the model's chat template writes too much: JSON of lists within lists is indented by the
    /// square of their depth.
    #[error(
        "the chat template writes more than {limit} bytes, which is 2 for each byte that it is given, and 256 KiB: send shorter \
         messages, or tools that are less nested"
    )]
    ChatTooLong {
        /// Bytes that it may write of what it is given.
        limit: usize,
    },
    /// A part of a conversation that the model's chat template does not write.
    #[error(
        "the model's chat template does not write {what}: leave it out, or give a template that does"
    )]
    NotInTemplate {
        /// The part.
        what: String,
    },
    /// A token id outside of the model's vocabulary.
    #[error(
        "token {got} is outside the model's vocabulary of {vocabulary} tokens: give ids below that, from the model's own \
         tokenizer"
    )]
    Token {
        /// The id.
        got: u32,
        /// Size of the vocabulary.
        vocabulary: usize,
    },
    /// A request with more tokens than the model has positions.
    #[error(
        "{got} tokens of prompt and answer are more than the {limit} positions of the model: use a shorter prompt \
         or answer"
    )]
    TooLong {
        /// Tokens of the prompt and of the answer.
        got: u64,
        /// Positions of the model.
        limit: u32,
    },
    /// An answer that must be longer than it may be.
    #[error(
        "at least {min} new tokens are asked for, and at most {max}: ask for fewer at least, or more at most"
    )]
    MinTokens {
        /// The smallest number.
        min: u32,
        /// The largest number.
        max: u32,
    },
    /// Work that needs the engine without other requests, while there are some.
    #[error(
        "this needs {needed} free pages and no running request, but {free} are free: wait until the requests \
         have finished"
    )]
    Busy {
        /// Pages that the work needs.
        needed: u64,
        /// Pages that are free.
        free: u32,
    },
    /// Limits with pages on the host, although no backend copies pages there.
    #[error(
        "Limits::host_pages is {got}, but the engine does not copy pages to the host: set it to 0; requests that \
         lose their pages are computed again"
    )]
    HostPages {
        /// Pages on the host.
        got: u32,
    },
    /// A type of KV caches for which the device has no kernels.
    #[error(
        "{device} cannot serve this model with caches of type {cache_type}: {reason}. Use caches of type auto; on Hopper, 8-bit \
         caches need heads of 64, 128 or 256 with up to 64 query heads for each KV head, on other GPUs up to 16 of them"
    )]
    CacheType {
        /// The type.
        cache_type: CacheType,
        /// The device.
        device: String,
        /// What is missing.
        reason: String,
    },
    /// A library that is opened at run time and cannot be found.
    #[error(
        "cuBLASLt was not found: install the CUDA toolkit's package for it (libcublas-13-x or libcublas-12-x, in \
         pip nvidia-cublas), and name its folder in LD_LIBRARY_PATH"
    )]
    NoCublasLt,
    /// A call of cuBLASLt that failed.
    #[error(
        "{call} of cuBLASLt failed for a product of {m} × {k} by {k} × {n}: {status}: check that the GPU has free memory, and \
         that the library is not newer than the driver (`tandem doctor`)"
    )]
    CublasLt {
        /// The call.
        call: &'static str,
        /// Rows of the result.
        m: usize,
        /// Its columns.
        n: usize,
        /// Length of the sums.
        k: usize,
        /// The library's status.
        status: String,
    },
    /// A call of the driver that failed.
    #[error(
        "{call} failed: {status}: earlier work on the GPU may be the cause, so load the model again; if it fails again, \
         compute-sanitizer names that work"
    )]
    Cuda {
        /// The call.
        call: &'static str,
        /// The driver's status.
        status: String,
    },
    /// A step that exceeds the backend's limits.
    #[error(
        "the step has {tokens} tokens and {rows} rows of logits, but this backend was made for at most \
         {most_tokens} and {most_rows}"
    )]
    StepTooLarge {
        /// Tokens of the step.
        tokens: usize,
        /// Rows of logits.
        rows: usize,
        /// Maximum number of tokens.
        most_tokens: u32,
        /// Maximum number of rows.
        most_rows: u32,
    },
    /// A step that begins while the maximum number of steps is under way, or new plan options while any step is.
    #[error("steps are under way: finish them first")]
    TooManySteps,
    /// A step after plan options for which the device lacked memory, which it then also lacked for those before.
    #[error(
        "there was no memory for new plan options, nor for those before: free memory of the device, and set plan options again"
    )]
    NoPlans,
    /// A wait for a step when none is under way.
    #[error("no step is under way: begin one first")]
    NoStep,
    /// Attention, or the steps around it.
    #[error(transparent)]
    Attention(#[from] tandem_attn::Error),
    /// A request that the scheduler rejects.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
}

impl From<tandem_attn::plan::PlanError> for Error {
    fn from(error: tandem_attn::plan::PlanError) -> Self {
        Self::Attention(error.into())
    }
}
