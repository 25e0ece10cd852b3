//! Arguments of `tandem bench --serve`.

use std::path::PathBuf;

use crate::{
    Failure,
    backend::Place,
    cache_type,
    output::Force,
    serve_sim::{at_least_1, at_most, hardware, models, page_tokens, positive},
};

/// Serves a trace with a model of random weights and compares the times with a simulation.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Serving")]
// The group, and not only `serve`, excludes them: clap does not insist on a required `serve` beside an argument that excludes it.
#[group(
    id = "serving",
    conflicts_with_all = [
        "workload", "suite", "case", "kv_dtype", "compute", "token_scales", "seconds", "max_memory", "check", "energy", "packing", "split",
        "decode_tile", "merge", "pod", "gpus", "deal",
    ]
)]
pub struct Args {
    /// Instead, serve a trace with random weights and compare measured times with simulated ones
    #[arg(long)]
    serve: bool,
    #[arg(
        long, value_name = "NAME|FILE|FOLDER", default_value = "llama-3-8b", requires = "serve",
        help = models() + ", or a folder with config.json"
    )]
    pub model: String,
    #[arg(
        long, value_name = "NAME|FILE", default_value = "h200", requires = "serve",
        help = hardware() + "; the simulation corrects it with measurements"
    )]
    pub device: String,
    /// Requests: Mooncake's JSON lines, Azure's CSV, or a CSV of prompt and generated lengths
    #[arg(long, value_name = "FILE", requires = "serve")]
    pub trace: Option<PathBuf>,
    /// Number of requests: the first of the trace, or equal ones without a trace [default: all of the trace, or 64]
    #[arg(long, value_name = "N", value_parser = at_least_1, requires = "serve")]
    pub requests: Option<u32>,
    /// Prompt tokens of a request, without a trace
    #[arg(
        long, value_name = "TOKENS", default_value_t = 2000, value_parser = at_least_1, conflicts_with = "trace",
        requires = "serve"
    )]
    pub prompt: u32,
    /// Tokens generated for a request, without a trace
    #[arg(
        long, value_name = "TOKENS", default_value_t = 200, value_parser = at_least_1, conflicts_with = "trace",
        requires = "serve"
    )]
    pub generated: u32,
    /// Number of tokens that all prompts share at the beginning, a multiple of 16, without a trace
    #[arg(
        long, value_name = "TOKENS", value_parser = at_least_1, conflicts_with = "trace", requires = "serve"
    )]
    pub prefix: Option<u32>,
    /// Poisson arrivals at this rate instead of the trace's own
    #[arg(long, value_name = "PER SECOND", value_parser = positive, group = "poisson", requires = "serve")]
    pub rate: Option<f64>,
    /// Poisson arrivals at this fraction of the rate that sarathi-serve can sustain on the whole trace, as simulated
    /// after calibration
    #[arg(
        long, value_name = "PART", value_parser = positive, group = "poisson",
        conflicts_with = "rate", requires = "serve"
    )]
    pub load: Option<f64>,
    /// Begin with the state of sarathi-serve after this time, as simulated: requests under way continue from there,
    /// whatever the caches hold
    #[arg(long, value_name = "SECONDS", value_parser = positive, requires = "serve")]
    pub start: Option<f64>,
    /// Stop after this time
    #[arg(long, value_name = "SECONDS", value_parser = positive, requires = "serve")]
    pub window: Option<f64>,
    /// Seed of the Poisson arrivals [default: 1]
    #[arg(long, requires_all = ["serve", "poisson"])]
    pub seed: Option<u64>,
    /// Policies to compare; +pod: prefill and decode attention may share the GPU; +unpacked: each request reads its
    /// shared prefix separately
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "prefill-first,sarathi-serve,sarathi-serve+pod",
        requires = "serve"
    )]
    pub policy: Vec<String>,
    /// Maximum tokens in a step; policies that compute whole prompts get room for the longest
    #[arg(long, value_name = "TOKENS", default_value_t = 1024, value_parser = at_least_1, requires = "serve")]
    pub budget: u32,
    /// Chunk of the policy sarathi, including its decodes; 0: adapt to the finished requests [default: 512]
    #[arg(long, value_name = "TOKENS", value_parser = at_most, requires = "serve")]
    pub chunk: Option<u32>,
    /// Target time between tokens of the policy decode-priority [default: 50]
    #[arg(long, value_name = "MS", value_parser = positive, requires = "serve")]
    pub target_ms: Option<f64>,
    /// Compute every prompt from its first token, without a prefix cache
    #[arg(long, requires = "serve")]
    pub no_prefix_cache: bool,
    /// Maximum number of requests that hold pages
    #[arg(long, value_name = "REQUESTS", default_value_t = 128, value_parser = at_least_1, requires = "serve")]
    pub batch: u32,
    /// Capacity of the KV cache in tokens [default: on a GPU 9/10 of the memory that is free after the weights, as
    /// far as the requests of a step can use it; on the CPU 65536]
    #[arg(long, value_name = "TOKENS", value_parser = at_least_1, requires = "serve")]
    pub cache: Option<u32>,
    /// How KV caches store keys and values
    #[arg(
        long,
        visible_alias = "kv-cache-dtype",
        value_enum,
        default_value = "auto",
        requires = "serve"
    )]
    pub cache_type: cache_type::Choice,
    /// Tokens in a page
    #[arg(long, value_name = "TOKENS", default_value_t = 16, value_parser = page_tokens, requires = "serve")]
    pub page_size: u32,
    /// Wait for the tokens of each step before composing the next one, on a GPU
    #[arg(long, requires = "serve")]
    pub wait: bool,
    /// Correction of the simulation from a file that --calibration wrote, instead of measuring it
    #[arg(
        long, value_name = "FILE", conflicts_with_all = ["calibration", "parts"], requires = "serve"
    )]
    pub correction: Option<PathBuf>,
    /// Write the correction of the simulation, for `tandem serve-sim --correction`
    #[arg(long, value_name = "FILE", requires = "serve")]
    pub calibration: Option<PathBuf>,
    /// Draw TTFT and TBT, and the steps with their stalls
    #[arg(long, value_name = "FILE", requires = "serve")]
    pub svg: Option<PathBuf>,
    /// Draw how the time of steps is divided among their parts
    #[arg(long, value_name = "FILE", requires = "serve")]
    pub parts: Option<PathBuf>,
}

impl Args {
    pub(super) const fn is_asked_for(&self) -> bool {
        self.serve
    }
}

/// Runs the subcommand.
#[cfg(feature = "engine")]
pub(super) fn run(
    args: &Args,
    place: Place,
    json: Option<&PathBuf>,
    force: Force,
) -> Result<(), Failure> {
    crate::engine::replay::run(args, place, json, force)
}

#[cfg(not(feature = "engine"))]
pub(super) fn run(_: &Args, _: Place, _: Option<&PathBuf>, _: Force) -> Result<(), Failure> {
    Err(crate::failure::built_without(
        "`tandem bench --serve`",
        crate::failure::OF_MODELS,
        "",
    ))
}
