//! `tandem bench`: speed relative to the limits of the hardware, and exactness.

mod energy;
mod measure;
#[cfg(feature = "cuda")]
mod ranks;
mod report;
pub mod results;
pub(crate) mod serving;
mod stats;

use std::{path::PathBuf, time::Duration};

use indicatif::{ProgressBar, ProgressStyle};
use tandem_attn::{
    plan::{MergeMode, PackRule, PlanOptions, Planner, Rules, SplitMode, Tile, pod::PodMode},
    problem::Dtype,
};
use tandem_papers::{flashinfer, pat};

pub use energy::Energy;
#[cfg(feature = "emulator")]
pub(crate) use measure::Work;
pub use report::render;
pub use results::{CaseResult, ResultFile};
pub use stats::Stats;

#[cfg(not(feature = "cuda"))]
use crate::failure::built_without;
use crate::{
    Failure,
    backend::{Backend, Choice, MODULES_VARIABLE, Place},
    deal::Dealing,
    output::{self, Files, Force},
    table::counted,
    workload::{self, Case, Suite},
};

const EXAMPLES: &str = "\
Examples:
  tandem bench
  tandem bench --suite decode --json decode.json
  tandem bench my-workload.json --case hybrid --seconds 2
  tandem bench --suite pat --packing pat-paper   # what PAT's own packing rule costs
  tandem bench --suite pod --pod serial          # what running side by side saves
  tandem bench --suite decode --kv-dtype f8e4m3  # what 8-bit keys and values save
  tandem bench --suite prefill --kv-dtype f8e4m3 --compute f8
  tandem bench --suite mla --energy              # joules of a run
  tandem bench --suite ranks --gpus 2            # what a second GPU brings
  tandem bench --serve --trace arxiv.csv --load 0.9 --start 700 --window 25";

/// Measure workloads: time, bandwidth, throughput, fraction of the hardware's limits, exactness.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// A workload file (docs/guide/workloads.md), or a file with the cases of a paper
    #[arg(value_name = "WORKLOAD.json", conflicts_with = "suite")]
    workload: Option<PathBuf>,
    /// A suite of workloads that is part of the command
    #[arg(long, value_enum, default_value = "quick")]
    suite: Suite,
    /// Only cases whose name contains this text
    #[arg(long, value_name = "TEXT")]
    case: Option<String>,
    /// Use this type for keys and values instead of the workload's: bf16, f16, f8e4m3, …
    #[arg(long, value_name = "DTYPE", value_parser = workload::dtype_of)]
    kv_dtype: Option<Dtype>,
    /// Data type in which prefills compute; f8 needs keys and values in f8e4m3
    #[arg(long, value_enum, default_value = "f16")]
    compute: workload::Compute,
    /// 8-bit keys and values with a scale for each token and KV head
    #[arg(long)]
    token_scales: bool,
    #[command(flatten)]
    place: Place,
    /// Write results as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Seconds for each case and each kind of measurement; at least 7 runs are made, however long they take
    #[arg(long, default_value_t = 0.5, value_parser = seconds)]
    seconds: f64,
    /// Skip cases whose tensors need more than this [default, and maximum: three quarters of the free memory; on a GPU at most a third of the host's, too]
    #[arg(long, value_name = "GB", value_parser = gigabytes)]
    max_memory: Option<f64>,
    /// Query tokens to compare with attention in f64; 0 for none [default: 16]
    #[arg(long, value_name = "TOKENS")]
    check: Option<u32>,
    /// Measure the energy of a run on an NVIDIA GPU, through NVML: at least a second of repeated runs for each case
    #[arg(long)]
    energy: bool,
    #[command(flatten)]
    planning: Planning,
    #[command(flatten)]
    dealing: Dealing,
    #[command(flatten)]
    serving: serving::Args,
    #[command(flatten)]
    force: Force,
}

/// Number of query tokens compared by default.
const CHECKED: u32 = 16;

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.0..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("give a number of seconds from 0 to 3600".to_owned()),
    }
}

fn gigabytes(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(gb) if gb > 0.0 => Ok(gb),
        _ => Err("give a positive number of gigabytes".to_owned()),
    }
}

/// Options of the planner, for ablations.
#[derive(Clone, Copy, Debug, clap::Args)]
#[command(next_help_heading = "Planning")]
pub struct Planning {
    /// How decodes that share prefixes are packed
    #[arg(long, value_enum, default_value = "fastest")]
    packing: Packing,
    /// How keys are split into items: makespan, flashinfer, off, or a number of keys
    #[arg(long, default_value = "makespan", value_parser = split)]
    split: Split,
    /// One tile for all decodes instead of the best ones: rows and keys
    #[arg(long, value_name = "ROWSxKEYS", value_parser = tile)]
    decode_tile: Option<Tile>,
    /// Where partial states are merged
    #[arg(long, value_enum, default_value = "auto")]
    merge: Merge,
    /// How the prefills and the decodes of a hybrid batch run
    #[arg(long, value_enum, default_value = "auto")]
    pod: Pod,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Packing {
    /// The lowest predicted time
    Fastest,
    /// The fewest bytes read
    Exact,
    /// The rule of the PAT paper
    PatPaper,
    /// The rule of PAT's published code
    PatPublished,
    /// Each request separately
    Off,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Merge {
    /// The faster of the two
    Auto,
    /// In a kernel after the others
    Kernel,
    /// In the last CTA that arrives at a merge
    Fused,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Pod {
    /// The way that the planner predicts to be fastest
    Auto,
    /// One after the other
    Serial,
    /// On two streams, with the kernels that run alone
    Streams,
    /// Side by side on every SM; on two streams if the device has no kernels for it
    Fused,
    /// In one kernel, whose CTAs take prefill or decode work by a ticket of their SM; on two streams if the device has no such kernel
    Tickets,
}

/// How keys are split into items.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Split {
    Planner(SplitMode),
    FlashInfer,
}

fn split(text: &str) -> Result<Split, String> {
    match text {
        "makespan" => Ok(Split::Planner(SplitMode::Makespan)),
        "flashinfer" => Ok(Split::FlashInfer),
        "off" => Ok(Split::Planner(SplitMode::Off)),
        _ => match text.parse() {
            Ok(tokens) if tokens > 0 => Ok(Split::Planner(SplitMode::Fixed { tokens })),
            _ => Err("give makespan, flashinfer, off, or a number of keys such as 512".to_owned()),
        },
    }
}

fn tile(text: &str) -> Result<Tile, String> {
    let parsed = text
        .split_once('x')
        .and_then(|(m, n)| Some((m.parse().ok()?, n.parse().ok()?)));
    match parsed {
        Some((m, n)) if m > 0 && n > 0 => Ok(Tile { m, n }),
        _ => Err("give rows and keys such as 16x128".to_owned()),
    }
}

impl Planning {
    /// The plan options.
    #[must_use]
    pub fn options(&self) -> PlanOptions {
        PlanOptions::default()
            .with_packing(match self.packing {
                Packing::Fastest | Packing::PatPaper | Packing::PatPublished => PackRule::Fastest,
                Packing::Exact => PackRule::Exact,
                Packing::Off => PackRule::Off,
            })
            .with_split(match self.split {
                Split::Planner(mode) => mode,
                Split::FlashInfer => SplitMode::Makespan,
            })
            .with_decode_tile(self.decode_tile)
            .with_merge_mode(match self.merge {
                Merge::Auto => MergeMode::Auto,
                Merge::Kernel => MergeMode::Kernel,
                Merge::Fused => MergeMode::Fused,
            })
            .with_pod(match self.pod {
                Pod::Auto => PodMode::Auto,
                Pod::Serial => PodMode::Serial,
                Pod::Streams => PodMode::Streams,
                Pod::Fused => PodMode::Fused,
                Pod::Tickets => PodMode::Tickets,
            })
    }

    /// Rules of papers that replace decisions of the planner.
    #[must_use]
    pub fn rules(&self) -> Rules {
        Rules {
            join: match self.packing {
                Packing::PatPaper => pat::PAPER.join,
                Packing::PatPublished => pat::PUBLISHED.join,
                _ => None,
            },
            chunk: match self.split {
                Split::FlashInfer => flashinfer::SPLIT.chunk,
                Split::Planner(_) => None,
            },
            ..Rules::default()
        }
    }

    /// A planner with these rules.
    #[must_use]
    pub fn planner(&self) -> Planner {
        Planner::with_rules(self.rules())
    }

    /// The options that differ from the default, as flags.
    #[must_use]
    pub fn flags(&self) -> Vec<String> {
        let default = PlanOptions::default();
        let options = self.options();
        let mut flags = Vec::new();
        if self.packing != Packing::Fastest {
            flags.extend(flag("packing", self.packing));
        }
        match self.split {
            Split::FlashInfer => flags.push("--split flashinfer".to_owned()),
            Split::Planner(SplitMode::Off) => flags.push("--split off".to_owned()),
            Split::Planner(SplitMode::Fixed { tokens }) => {
                flags.push(format!("--split {tokens}"));
            }
            _ => {}
        }
        if let Some(Tile { m, n }) = options.decode_tile {
            flags.push(format!("--decode-tile {m}x{n}"));
        }
        if options.merge_mode != default.merge_mode {
            flags.extend(flag("merge", self.merge));
        }
        if options.pod != default.pod {
            flags.extend(flag("pod", self.pod));
        }
        flags
    }
}

/// The flag with its value.
fn flag(name: &str, value: impl clap::ValueEnum) -> Option<String> {
    let value = value.to_possible_value()?;
    Some(format!("--{name} {}", value.get_name()))
}

/// How long to measure a case and how closely to check it.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Time for each kind of measurement.
    pub time: Duration,
    /// Number of query tokens to compare.
    pub check: u32,
    /// Plan options.
    pub options: PlanOptions,
    /// Rules that replace decisions of the planner.
    pub rules: Rules,
    /// Maximum bytes of tensors.
    pub memory_bytes: u64,
    /// Whether each token and KV head of the cache has a scale.
    pub token_scales: bool,
    /// Whether the energy of runs is measured.
    pub energy: bool,
}

/// Measures cases and the limits of the hardware. Benchmarks share this with the command.
///
/// # Errors
/// If a case is wrong or a run fails.
pub fn measure(
    backend: &mut dyn Backend,
    cases: &[Case],
    settings: &Settings,
    mut progress: impl FnMut(&Case),
) -> Result<ResultFile, Failure> {
    let date = humantime::format_rfc3339_seconds(std::time::SystemTime::now()).to_string();
    let mut meter = settings.energy.then(|| backend.meter()).transpose()?;
    let ceilings = backend.ceilings()?;
    let results: Result<Vec<CaseResult>, Failure> = cases
        .iter()
        .map(|case| {
            progress(case);
            measure::case(backend, case, settings, meter.as_deref_mut())
        })
        .collect();
    Ok(ResultFile {
        format: results::FORMAT.to_owned(),
        program: format!("tandem {}", env!("CARGO_PKG_VERSION")),
        date,
        machine: backend.machine(),
        ceilings,
        options: Vec::new(),
        results: results?,
    })
}

/// Runs the subcommand.
///
/// # Errors
/// Wrong input, a missing backend, or [`Failure::Wrong`] if results are not exact.
pub fn run(args: &Args) -> Result<(), Failure> {
    if args.serving.is_asked_for() {
        return serving::run(&args.serving, args.place, args.json.as_ref(), args.force);
    }
    let files = Files::new().reads(&args.workload).writes(&args.json);
    files.check(args.force)?;
    let cases = chosen(args)?;
    if args.dealing.gpus > 1 {
        let refused = [
            (args.token_scales, "--token-scales"),
            (args.kv_dtype.is_some(), "--kv-dtype"),
            (args.compute != workload::Compute::F16, "--compute"),
            // With several GPUs, results are compared with those of one GPU.
            (args.check.is_some(), "--check"),
            (args.max_memory.is_some(), "--max-memory"),
            (args.energy, "--energy"),
            (args.place.number.is_some(), "--gpu"),
        ];
        if let Some((_, flag)) = refused.iter().find(|(given, _)| *given) {
            return Err(Failure::Input(format!(
                "{flag} is for one GPU: leave it out, or --gpus"
            )));
        }
        if !matches!(args.place.backend, Choice::Auto | Choice::Gpu) {
            return Err(Failure::Input(
                "--gpus is for GPUs: leave --backend out, or give --backend gpu".to_owned(),
            ));
        }
        args.dealing.check_groups().map_err(Failure::Input)?;
        return on_several(args, &cases);
    }
    if !args.dealing.deal.is_empty() {
        return Err(Failure::Input(
            "--deal is for several GPUs: give --gpus too".to_owned(),
        ));
    }
    let mut backend = args.place.open()?;
    let free = backend.memory_bytes();
    let settings = Settings {
        time: Duration::from_secs_f64(args.seconds),
        check: args.check.unwrap_or(CHECKED),
        options: args.planning.options(),
        rules: args.planning.rules(),
        token_scales: args.token_scales,
        energy: args.energy,
        // A flag cannot exceed the free memory, because allocations would fail.
        memory_bytes: args
            .max_memory
            .map_or(free, |gb| ((gb * 1e9) as u64).min(free)),
    };
    let bar = progress_bar(cases.len() as u64);
    bar.set_message("the limits of this machine");
    let measured = measure(&mut *backend, &cases, &settings, |case| {
        bar.set_message(case.name.clone());
        bar.inc(1);
    });
    bar.finish_and_clear();
    let mut file = measured?;
    file.options = args.planning.flags();
    if let Some(dtype) = args.kv_dtype {
        let name = workload::dtype_name(dtype);
        file.options.push(format!("--kv-dtype {name}"));
    }
    if args.compute != workload::Compute::F16 {
        file.options.extend(flag("compute", args.compute));
    }
    if args.token_scales {
        file.options.push("--token-scales".to_owned());
    }
    if args.place.compile_ptx {
        file.options.push("--compile-ptx".to_owned());
    }
    let replaced = std::env::var(MODULES_VARIABLE).ok();
    if let Some(folder) = replaced.filter(|_| file.machine.backend == "gpu") {
        file.options.push(format!("{MODULES_VARIABLE}={folder}"));
    }
    if let Some(path) = &args.json {
        output::write_file(path, file.to_json().as_bytes())?;
    }
    output::print(&render(&file));
    let inexact = file
        .results
        .iter()
        .filter(|result| result.errors.is_some_and(|errors| !errors.are_small()))
        .count();
    if file.results.iter().all(|result| result.times().is_none()) {
        let first = file
            .results
            .iter()
            .find_map(|result| result.skipped.as_deref());
        return Err(Failure::Input(format!(
            "nothing was measured: {} left out; the first: {}",
            counted(file.results.len(), "case"),
            first.unwrap_or("not run")
        )));
    }
    match inexact {
        0 => Ok(()),
        count => Err(Failure::Wrong(format!(
            "{count} of {} results are not exact: see the last column (more than 1 is too much)",
            file.results.len()
        ))),
    }
}

#[cfg(feature = "cuda")]
fn on_several(args: &Args, cases: &[Case]) -> Result<(), Failure> {
    ranks::run(args, cases)
}

#[cfg(not(feature = "cuda"))]
fn on_several(_: &Args, _: &[Case]) -> Result<(), Failure> {
    Err(built_without(
        "support for GPUs",
        "cuda",
        ", or see `tandem plan --gpus`",
    ))
}

fn chosen(args: &Args) -> Result<Vec<Case>, Failure> {
    let cases = match &args.workload {
        Some(path) => workload::load(path)?,
        None => args.suite.cases(),
    };
    let mut cases = workload::matching(cases, args.case.as_deref())?;
    for case in &mut cases {
        case.use_kv_dtype(args.kv_dtype)?;
        case.spec.compute = args.compute.into();
    }
    let has = |dtypes: &[Dtype]| {
        cases
            .iter()
            .any(|case| dtypes.contains(&case.spec.kv_dtype))
    };
    let eight_bits = [Dtype::F8E4M3, Dtype::F8E5M2];
    for (given, dtypes, flag) in [
        (args.token_scales, &eight_bits[..], "--token-scales"),
        (
            args.compute == workload::Compute::F8,
            &eight_bits[..1],
            "--compute f8",
        ),
    ] {
        if given && !has(dtypes) {
            let names: Vec<_> = dtypes
                .iter()
                .map(|&dtype| workload::dtype_name(dtype))
                .collect();
            return Err(Failure::Input(format!(
                "{flag} is for keys and values in {}, and no case has any: leave it out, or give --kv-dtype f8e4m3",
                names.join(" or ")
            )));
        }
    }
    Ok(cases)
}

fn progress_bar(cases: u64) -> ProgressBar {
    // Drawn on standard error, and only if that is a terminal.
    let style = ProgressStyle::with_template("{bar:20} {pos}/{len} {wide_msg} {elapsed}");
    ProgressBar::new(cases).with_style(style.expect("the template is sound"))
}
