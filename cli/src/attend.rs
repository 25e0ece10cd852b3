//! `tandem attend`: reads the tensors of a batch from a file, computes attention, and writes the outputs to a file.

mod heads;
mod scales;
mod tensors;

use std::path::PathBuf;

use tandem_attn::plan::{PlanOptions, Planner};

use crate::{
    Failure,
    backend::Place,
    failure::in_flags,
    input,
    output::{self, Files, Force},
    table::{WIDTH, counted, digits, scaled, shorten, wrap},
    workload,
};

const EXAMPLES: &str = "\
Example:
  tandem attend --input step.safetensors --output out.safetensors

Input tensors (the convention of FlashInfer):
  q                 [tokens, heads, d]             f16, bf16 or f32
  k_cache, v_cache  [pages, page, kv_heads, d]     layout NHD; same or 8-bit type
                    [pages, kv_heads, page, d]     layout HND
  qo_indptr         [requests + 1]                 i32, first query token of each request
  kv_indptr         [requests + 1]                 i32, first entry of each in kv_indices
  kv_indices        [...]                          i32, pages
  kv_last_page_len  [requests]                     i32
Optional tensors, in f32, f16 or bf16:
  sinks             [heads]                        logits of sinks, natural (gpt-oss)
  alibi_slopes      [heads]                        a logit loses slope x distance (ALiBi)
  k_scale, v_scale  [1] or [kv_heads]              factors of 8-bit keys and values
                    [requests, kv_heads]           those of the query's request
                    [pages, page, kv_heads]        those of each token, layout NHD
                    [pages, kv_heads, page]        those of each token, layout HND
Metadata, all optional: layout (NHD), causal (true), sm_scale (1/sqrt(d)), window_left (-1: none),
logits_soft_cap (0: none), k_scale and v_scale (1) for all heads.
Output tensors: o [tokens, heads, d] as q, and lse [tokens, heads] in f32, natural log.";

/// Maximum length of a list of tensors.
const MOST_NAMES: usize = 400;

/// Compute attention of the tensors in a safetensors file.
#[derive(Clone, Debug, clap::Args)]
#[command(after_long_help = EXAMPLES, after_help = "Example:\n  tandem attend --input step.safetensors --output out.safetensors\n\n--help lists the tensors.")]
pub struct Args {
    /// The file to read
    #[arg(long, value_name = "IN.safetensors")]
    input: PathBuf,
    /// The file to write
    #[arg(long, value_name = "OUT.safetensors")]
    output: PathBuf,
    #[command(flatten)]
    place: Place,
    /// Data type in which prefills compute; f8 needs keys and values in F8_E4M3
    #[arg(long, value_enum, default_value = "f16")]
    compute: workload::Compute,
    #[command(flatten)]
    force: Force,
}

/// Runs the subcommand.
///
/// # Errors
/// Wrong input, a missing backend, or an output that cannot be written. In these cases no file is written.
pub fn run(args: &Args) -> Result<(), Failure> {
    let files = Files::new().reads([&args.input]).writes([&args.output]);
    files.check(args.force)?;
    let bytes = input::tensors(&args.input)?;
    let mut step = tensors::read(&bytes)
        .map_err(|reason| Failure::Input(format!("{}: {reason}", args.input.display())))?;
    drop(bytes);
    step.spec.compute = args.compute.into();
    let mut backend = args.place.open()?;
    let device = backend.device();
    let plan = Planner::new()
        .plan(&step.spec, &step.batch, &device, &PlanOptions::default())
        .map_err(|error| {
            let reason = in_flags(&error.to_string());
            Failure::Input(format!("{}: {reason}", args.input.display()))
        })?;
    let mut loaded = backend.load(&plan, &step.tensors)?;
    let time = loaded.run(false)?;
    let results = loaded.results()?;
    drop(loaded);
    let file = tensors::write(&step.spec, step.batch.total_q(), &results)?;
    output::write_file(&args.output, &file)?;
    let text = format!(
        "{}: {} of {}, {} µs on {}; wrote {} ({})\n",
        args.input.display(),
        counted(step.batch.total_q() as usize, "query token"),
        counted(step.batch.requests(), "request"),
        digits(time.as_secs_f64() * 1e6),
        backend.machine().name,
        args.output.display(),
        scaled(file.len() as f64, "B"),
    );
    output::print(&wrap(&text, WIDTH, "  "));
    for (unread, what, of) in [
        (&step.unread, "tensor", "input"),
        (&step.unread_metadata, "name", "metadata"),
    ] {
        if !unread.is_empty() {
            let names = shorten(&unread.join(", "), MOST_NAMES);
            let text = format!(
                "{} of the {of} not read: {names}\n",
                counted(unread.len(), what)
            );
            output::print(&wrap(&text, WIDTH, "  "));
        }
    }
    Ok(())
}
