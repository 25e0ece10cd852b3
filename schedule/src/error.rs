//! Errors of requests, descriptions and traces.

use thiserror::Error;

use super::CacheType;

/// Why a request was refused, or a description or trace not read. Nothing was changed.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum ScheduleError {
    /// A prompt without tokens.
    #[error("the prompt is empty: a request needs at least one token to start from")]
    EmptyPrompt,
    /// A request for 0 tokens.
    #[error("0 new tokens are asked for: ask for at least 1")]
    NoNewTokens,
    /// A request above the limit per request.
    #[error(
        "{prompt} prompt tokens and {new} new ones are more than the {limit} a request may have: shorten the \
         prompt, ask for fewer tokens, or raise Limits::request_tokens"
    )]
    RequestTooLong {
        /// Tokens of the prompt.
        prompt: u32,
        /// Requested tokens.
        new: u32,
        /// The limit.
        limit: u32,
    },
    /// A request that does not fit the pool even alone.
    #[error(
        "the request needs {wanted} pages and the pool has {total}, so it would never finish: use a shorter request \
         or a larger pool"
    )]
    PoolTooSmall {
        /// Pages that the whole request needs.
        wanted: u32,
        /// Pages of the pool.
        total: u32,
    },
    /// A block whose tokens would have the ids of another block's.
    #[error(
        "block {id} is in a prompt of blocks of {block} tokens: number the blocks from 0 to {most}"
    )]
    BlockId {
        /// The block.
        id: u32,
        /// Tokens in a block.
        block: u32,
        /// The largest id.
        most: u32,
    },
    /// Too many requests wait.
    #[error(
        "{waiting} requests wait already, as many as may: try again later, or raise Limits::waiting"
    )]
    QueueFull {
        /// Requests that wait.
        waiting: usize,
    },
    /// Composing ahead of sampled tokens in a pipeline, where it is not supported.
    #[error("composing ahead supports one pipeline stage, not {stages}: use one stage")]
    Ahead {
        /// Number of stages.
        stages: u32,
    },
    /// A limit that no request can meet.
    #[error("{name} is {got}: give at least {least}")]
    Limit {
        /// The limit.
        name: &'static str,
        /// Its value.
        got: u64,
        /// The smallest valid value.
        least: u64,
    },
    /// An unknown model, machine or policy. Models and machines can also be read from JSON.
    #[error("there is no {kind} named {got:?}; known: {known}")]
    Unknown {
        /// Model, hardware or policy.
        kind: &'static str,
        /// The name given.
        got: String,
        /// The known names.
        known: String,
    },
    /// A description that cannot be read or is invalid.
    #[error("the {kind} description is wrong: {reason}")]
    Description {
        /// Model, hardware or correction.
        kind: &'static str,
        /// What is wrong.
        reason: String,
    },
    /// Heads that cannot be divided among the GPUs of a layer.
    #[error(
        "{q_heads} query heads cannot be divided among {got} GPUs (tensor): give a divisor of {q_heads}"
    )]
    Tensor {
        /// GPUs that share each layer.
        got: u32,
        /// Query heads of the model.
        q_heads: u32,
    },
    /// KV heads that can neither be divided among the GPUs of a layer nor be copied to them evenly.
    #[error(
        "{kv_heads} KV heads can be neither divided among {got} GPUs (tensor) nor copied to them evenly: give a divisor or a \
         multiple of {kv_heads}"
    )]
    TensorOfKvHeads {
        /// GPUs that share each layer.
        got: u32,
        /// KV heads of the model.
        kv_heads: u32,
    },
    /// More pipeline stages than layers, or none.
    #[error("{layers} layers cannot be divided among {got} stages (pipeline): give 1 to {layers}")]
    Pipeline {
        /// Pipeline stages.
        got: u32,
        /// Layers of the model.
        layers: u32,
    },
    /// The model does not fit the machine.
    #[error(
        "{model} needs {wanted_gb:.1} GB a GPU and {hardware} has {usable_gb:.1} GB to use: raise the tensor or \
         pipeline parallel degree"
    )]
    DoesNotFit {
        /// The model.
        model: String,
        /// The hardware.
        hardware: String,
        /// Gigabytes of weights for each GPU.
        wanted_gb: f64,
        /// Usable gigabytes.
        usable_gb: f64,
    },
    /// A type of KV caches for which the machine has no kernels.
    #[error(
        "{hardware} cannot serve this model on KV caches of type {cache_type} ({reason}): use the cache type auto"
    )]
    CacheType {
        /// The type.
        cache_type: CacheType,
        /// The hardware.
        hardware: String,
        /// What is missing.
        reason: String,
    },
    /// A correction that was measured with KV caches of another type.
    #[error(
        "the correction was measured with KV caches of type {measured}, and this is for caches of type {cache_type}: give \
         the cache type {measured}, or measure again"
    )]
    OtherCacheType {
        /// The type of the measurement.
        measured: CacheType,
        /// The type of the cost model.
        cache_type: CacheType,
    },
    /// A correction that was measured with another model, machine or parallelism.
    #[error(
        "the correction was measured with {what} {measured}, and this is for {what} {given}: give what it was measured with, \
         or measure again"
    )]
    OtherOrigin {
        /// `model`, `device`, `tensor` or `pipeline`.
        what: &'static str,
        /// That of the measurement.
        measured: String,
        /// That of the cost model.
        given: String,
    },
    /// A range of lengths that is empty or too wide to draw from.
    #[error("lengths from {min} to {max}: give at least 1 and at most {most} lengths")]
    Lengths {
        /// The smallest length.
        min: u32,
        /// The largest length.
        max: u32,
        /// Maximum number of lengths.
        most: u32,
    },
    /// An exponent of Zipf's law that is not finite.
    #[error("theta is {got}: give a finite number")]
    Theta {
        /// The exponent.
        got: f64,
    },
    /// A request that never arrives, or so late that times in nanoseconds are inexact.
    #[error("arrivals[{index}] is at {at_s:e} s: give a time of at most {most_s:e} s")]
    Arrival {
        /// The request.
        index: usize,
        /// Its arrival time in seconds.
        at_s: f64,
        /// The latest time, before and after 0.
        most_s: f64,
    },
    /// Pages that no table can have.
    #[error(transparent)]
    Problem(#[from] tandem_attn::problem::ProblemError),
    /// A batch that could not be planned.
    #[error(transparent)]
    Plan(#[from] tandem_attn::plan::PlanError),
    /// A trace that cannot be read.
    #[error("{path}, line {line}: {reason}")]
    Trace {
        /// The file.
        path: String,
        /// The line, from 1; 0 if the error concerns the whole file.
        line: usize,
        /// What is wrong.
        reason: String,
    },
}

/// The embedded description of that name.
pub(super) fn embedded(
    kind: &'static str,
    all: &[(&'static str, &'static str)],
    name: &str,
) -> Result<&'static str, ScheduleError> {
    let known = all.iter().find(|(known, _)| *known == name);
    known.map(|(_, json)| *json).ok_or_else(|| {
        let names: Vec<_> = all.iter().map(|(known, _)| *known).collect();
        ScheduleError::Unknown {
            kind,
            got: name.to_owned(),
            known: names.join(", "),
        }
    })
}
